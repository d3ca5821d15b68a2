"""Conditioning: states, slots and references equal the core's, and whatever comes in is read or refused."""

import torch
from graph import (
    call,
    close,
    core,
    core_encoder,
    core_samples,
    core_vae,
    counted,
    differs,
    encode,
    equal,
    loaded,
    opened,
    picture,
    prepared,
    references,
    replaced,
    samples,
    sentence,
)
from PIL import Image


def pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image[0] * 255).round().to(torch.uint8).numpy()).convert("RGBA")


def check_states_equal_core():
    images = {"image_1": picture(64, 64, 0), "image_2": picture(96, 64, 1, channels=3)}
    found = encode("a red star", "blurry", images)
    sized = [core("qwen21.references").prepare(pil(image), "official", 64).picture for image in images.values()]
    for conditioning, expected in zip(found, core_encoder().encode(["a red star", "blurry"], sized)):
        states, extra = conditioning[0]
        close(states, expected.states, 1e-5)
        assert extra["image_slots"] == list(expected.image_slots) and extra["qwen21_token_ids"] == list(expected.token_ids)


def check_vision_tower_runs_once():
    visual = loaded()[1].cond_stage_model.model.visual
    with counted(visual, "forward") as calls:
        encode("a red star", "blurry", {"image_1": picture(seed=0), "image_2": picture(seed=1)})
    assert len(calls) == 1


def check_clip_text_encode_is_encode_without_pictures():
    plain = call("CLIPTextEncode", clip=loaded()[1], text="a red star")[0]
    ours, _ = encode("a red star")
    close(plain[0][0], ours[0][0])
    assert plain[0][1]["image_slots"] == [] and plain[0][1].get("pooled_output") is None


def check_prompt_is_taken_as_it_is():
    """No prompt weights, no embeddings, braces and colons kept, empty text allowed, other scripts too."""
    for prompt in ("(a red star:1.4) {x|y} embedding:foo", "", "   ", "ein roter Stern, 一颗红星 ⭐", "a" * 700):
        positive, _ = encode(prompt)
        expected = core_encoder().encode([prompt])[0]
        close(positive[0][0], expected.states, 1e-5, prompt[:20])


def check_every_layer_is_comfyuis():
    """Else part of the encoder would stay behind when ComfyUI offloads or quantises it."""
    model = loaded()[1].cond_stage_model.model
    strangers = {
        type(module).__name__ for module in model.modules() if list(module.parameters(recurse=False)) and not getattr(module, "comfy_cast_weights", False)
    }
    assert not strangers, strangers


def check_forced_casts_give_the_same_states():
    """ComfyUI casts weights on use when they are offloaded in part."""
    images = {"image_1": picture()}
    expected, _ = encode("a red star", "", images)
    layers = [module for module in loaded()[1].cond_stage_model.model.modules() if hasattr(module, "comfy_cast_weights")]
    before = [layer.comfy_cast_weights for layer in layers]
    for layer in layers:
        layer.comfy_cast_weights = True
    try:
        found, _ = encode("a red star", "", images)
    finally:
        for layer, value in zip(layers, before):
            layer.comfy_cast_weights = value
    equal(found[0][0], expected[0][0])


def check_weights_of_another_precision_are_cast():
    """bfloat16 weights, float32 computation: ComfyUI's cast on use."""
    clip = core("nodes.bridge_clip").load_clip(opened(), torch.bfloat16)
    encoder = clip.cond_stage_model
    assert {parameter.dtype for parameter in encoder.model.parameters()} == {torch.bfloat16}
    found, _ = encode("a red star", "", {"image_1": picture()}, clip=clip)
    expected, _ = encode("a red star", "", {"image_1": picture()})
    close(found[0][0], expected[0][0], 0.1)
    differs(found[0][0], expected[0][0], 1e-6)


def check_frames_gaps_and_order():
    """Every frame of a batch counts, pictures come in the order of their numbers, and a gap closes."""
    frames = torch.cat([picture(seed=0), picture(seed=1)])
    inputs = {"image_10": picture(seed=3), "image_4": picture(seed=2), "image_2": frames}
    positive, _ = encode(images=inputs)
    assert len(positive[0][1]["image_slots"]) == 4
    for seed, one in enumerate(positive[0][1]["qwen21_references"]):
        assert one.picture.tobytes() == pil(picture(seed=seed)).tobytes(), seed


def check_ten_pictures_and_eleven():
    frames = torch.cat([picture(32, 32, seed) for seed in range(11)])
    positive, _ = encode(images={"image_1": frames[:10]}, resolution=32)
    assert len(positive[0][1]["image_slots"]) == 10
    text = sentence(encode, images={"image_1": frames})
    assert "11 reference pictures" in text and "at most 10" in text


def check_alpha_reaches_the_vae():
    image = picture()
    latents = references(*encode(images={"image_1": image}))[0][0][1]["reference_latents"][0]
    close(latents, core_vae().encode(image.movedim(-1, 1) * 2 - 1), 1e-5, "four channels")
    opaque = references(*encode(images={"image_1": image[..., :3]}))[0][0][1]["reference_latents"][0]
    solid = torch.cat([image[..., :3], torch.ones(1, 64, 64, 1)], dim=-1)
    close(opaque, core_vae().encode(solid.movedim(-1, 1) * 2 - 1), 1e-5, "three channels")
    differs(latents, opaque)


def check_join_image_with_alpha():
    """Core's node makes the four channels from what LoadImage gives."""
    image = picture()
    joined = call("JoinImageWithAlpha", image=image[..., :3], alpha=1 - image[..., 3])[0]
    close(joined, image, 1e-6)
    one, other = (encode(images={"image_1": it})[0][0][1]["qwen21_references"][0].picture for it in (image, joined))
    assert one.tobytes() == other.tobytes()


def check_near_copy_is_moved_and_said():
    said = []
    encode_node = core("nodes.encode")
    with replaced(encode_node, "say", lambda text, node: said.append(text)):
        positive, negative = encode(images={"image_1": picture(128, 128)}, policy="auto", resolution=1024)
    assert positive[0][1]["qwen21_references"][0].picture.size == (1056, 1056) and len(said) == 1 and "1056" in said[0]
    latents = core("nodes.references")
    said.clear()
    square = core("qwen21.references").Prepared(Image.new("RGBA", (1024, 1024)), (1024, 1024))
    positive, negative = ([[c[0][0], c[0][1] | {"qwen21_references": [square]}]] for c in (positive, negative))
    with (
        replaced(latents, "say", lambda text, node: said.append(text)),
        replaced(latents, "reference_latents", lambda vae, picture: torch.zeros(1, 64, 64, 64)),
    ):
        references(positive, negative, "last reference")
    assert len(said) == 1 and "near-copy" in said[0] and "1056" in said[0]


def check_odd_images():
    grey = torch.rand(1, 64, 64, 1)
    for image in (grey, torch.rand(1, 64, 64, 2), torch.rand(1, 64, 64, 5), torch.rand(64, 64, 3), "text", 3):
        text = sentence(encode, images={"image_3": image})
        assert "image_3" in text, text
    positive, _ = encode(images={"image_1": picture() * 3 - 1})  # out of range is clipped, as SaveImage does
    assert positive[0][0].isfinite().all()


def check_unknown_references_are_refused():
    node = {"clip": loaded()[1], "prompt": "", "negative_prompt": "", "size_policy": "auto", "resolution": 0}
    text = sentence(call, "Qwen21Encode", **node, **{"images.image_11": picture()})
    assert "images.image_11" in text and "images.image_10" in text


def check_vision_tokens_in_a_prompt_are_refused():
    assert "<|image_pad|>" in sentence(encode, "a <|image_pad|> star")
    assert "<|vision_start|>" in sentence(encode, "a star", "<|vision_start|>")
    assert "<|image_pad|>" in sentence(call, "CLIPTextEncode", clip=loaded()[1], text="<|image_pad|>")


def check_cloned_clip_works():
    """LoRA loaders and CLIPSetLastLayer hand on a plain CLIP."""
    clone = call("CLIPSetLastLayer", clip=loaded()[1], stop_at_clip_layer=-1)[0]
    equal(encode("a red star", clip=clone)[0][0][0], encode("a red star")[0][0][0])


def check_conditioning_nodes():
    """Zero out, average, concat, combine: the tensors they make are painted, and slots and references stay."""
    positive, negative, latent = prepared("a red star", "blurry, dark", 1)
    made = {
        "zero": call("ConditioningZeroOut", conditioning=positive)[0],
        "average": call("ConditioningAverage", conditioning_to=positive, conditioning_from=negative, conditioning_to_strength=0.6)[0],
        "concat": call("ConditioningConcat", conditioning_to=positive, conditioning_from=negative)[0],
    }
    assert not made["zero"][0][0].any()
    length = positive[0][0].shape[1]
    shorter = torch.nn.functional.pad(negative[0][0], (0, 0, 0, max(0, length - negative[0][0].shape[1])))[:, :length]
    close(made["average"][0][0], 0.6 * positive[0][0] + 0.4 * shorter, 1e-6)
    equal(made["concat"][0][0], torch.cat([positive[0][0], negative[0][0]], dim=1))
    plain = samples(loaded()[0], positive, negative, latent)
    for name, conditioning in made.items():
        assert conditioning[0][1]["image_slots"] == positive[0][1]["image_slots"] and len(conditioning[0][1]["reference_latents"]) == 1, name
        found = samples(loaded()[0], conditioning, negative, latent)
        close(found, core_samples(conditioning, negative, latent), what=name)
        differs(found, plain, what=name)
    both = call("ConditioningCombine", conditioning_1=positive, conditioning_2=made["concat"])[0]
    found = samples(loaded()[0], both, negative, latent, steps=1)
    close(found, (core_samples(positive, None, latent, steps=1) + core_samples(made["concat"], None, latent, steps=1)) / 2, what="combine: the mean of both")
