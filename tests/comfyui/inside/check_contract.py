"""What is shared with the Qwen-Image 2.1 nodes of newer ComfyUI versions: keys, types and shapes."""

from types import SimpleNamespace

import torch
from graph import call, close, core, core_samples, core_transformer, core_vae, differs, encode, equal, loaded, picture, prepared, references, samples


def check_conditioning_keys_types_and_shapes():
    for conditioning in prepared("a red star", "blurry", 2)[:2]:
        (states, extra), *others = conditioning
        assert not others and states.dtype == torch.float32 and states.ndim == 3 and states.shape[0] == 1 and states.device.type == "cpu"
        latents, slots = extra["reference_latents"], extra["image_slots"]
        assert type(latents) is list and type(slots) is list and [type(slot) for slot in slots] == [int, int] and slots == sorted(slots)
        assert len(latents) == 2 and all(one.ndim == 4 and one.shape[:2] == (1, 64) and one.dtype == torch.float32 for one in latents)
        assert 0 < slots[0] < slots[1] < states.shape[1]
        assert extra["pooled_output"] is None


def check_reference_latents_are_not_normalised():
    image = picture()
    latents = references(*encode(images={"image_1": image}))[0][0][1]["reference_latents"][0]
    raw = core_vae().encode(image.movedim(-1, 1) * 2 - 1)
    close(latents, raw, 1e-5)
    differs(core_vae().normalize(raw), raw, 0.1)


def check_slots_lie_between_the_vision_marks():
    extra = encode("a red star", images={"image_1": picture(seed=0), "image_2": picture(seed=1)})[0][0][1]
    tokenizer, ids = loaded()[1].cond_stage_model.encoder.tokenizer, extra["qwen21_token_ids"]
    for slot in extra["image_slots"]:
        assert (tokenizer.id_to_token(ids[slot - 1]), tokenizer.id_to_token(ids[slot])) == ("<|vision_start|>", "<|vision_end|>")


def check_conditioning_of_the_core_nodes_is_understood():
    """Without our own keys, as TextEncodeQwenImage21 makes it."""
    ours, _, latent = prepared(pictures=2)
    theirs = [[ours[0][0], {key: ours[0][1][key] for key in ("reference_latents", "image_slots", "pooled_output")}]]
    equal(samples(loaded()[0], theirs, theirs, latent), samples(loaded()[0], ours, ours, latent))


def check_references_without_slots_follow_the_text():
    """As core's ReferenceLatent node adds them; slots beyond the pictures are dropped."""
    positive, _, latent = prepared()
    reference = {"samples": loaded()[2].encode(picture())}
    appended = call("ReferenceLatent", conditioning=positive, latent=reference)[0]
    assert len(appended[0][1]["reference_latents"]) == 1 and appended[0][1]["image_slots"] == []
    found = samples(loaded()[0], appended, appended, latent)
    last = [[positive[0][0], appended[0][1] | {"image_slots": [positive[0][0].shape[1]]}]]
    equal(found, samples(loaded()[0], last, last, latent))
    close(found, core_samples(last, None, latent))
    slots, _, _ = prepared(pictures=1)
    more = call("ReferenceLatent", conditioning=slots, latent={"samples": loaded()[2].encode(picture(96, 64, 4))})[0]
    close(samples(loaded()[0], more, more, latent), core_samples(more, None, latent), what="one in its slot, one behind")
    fewer = [[slots[0][0], {key: value for key, value in slots[0][1].items() if key != "reference_latents"}]]
    close(samples(loaded()[0], fewer, fewer, latent), core_samples(fewer, None, latent), what="slots without latents")


def check_latent_and_model():
    model, _, vae = loaded()
    _, _, latent = prepared(width=64, height=96, batch_size=2)
    assert tuple(latent["samples"].shape) == (2, 64, 6, 4) and latent["downscale_ratio_spacial"] == 16
    assert (vae.latent_channels, vae.output_channels, vae.spacial_compression_decode()) == (64, 4, 16)
    form = model.model.latent_format
    assert (form.latent_channels, form.spacial_downscale_ratio, len(form.latent_rgb_factors), len(form.latent_rgb_factors_bias)) == (64, 16, 64, 3)
    x = torch.randn(1, 64, 2, 2)
    close(form.process_in(x), core_vae().normalize(x), 1e-6)
    close(form.process_out(form.process_in(x)), x, 1e-5)
    assert type(model.model).__name__ == "QwenImage21"


def check_parameters_keep_the_checkpoints_names():
    assert set(loaded()[0].model.diffusion_model.state_dict()) == set(core_transformer().state_dict())


class QwenImage21TEModel:
    """Named as the text encoder of versions of ComfyUI that know the model."""


def check_a_clip_of_comfyuis_own_loader():
    """Its tokenizer takes the prompt and pictures over white; its encoder fills `image_slots`. Here ours does so behind the same calls."""
    asked = []

    def tokenize(prompt, images, keep_vision, prevent_empty_text):
        assert prevent_empty_text and not keep_vision and all(image.shape[0] == 1 and image.shape[3] == 3 for image in images)
        asked.append([tuple(image.shape[1:3]) for image in images])
        return loaded()[1].tokenize(prompt, images=[core("nodes.bridge_clip").to_pictures(image)[0] for image in images])

    clip = SimpleNamespace(cond_stage_model=QwenImage21TEModel(), tokenize=tokenize, encode_from_tokens_scheduled=loaded()[1].encode_from_tokens_scheduled)
    image = {"image_1": picture(96, 64)}
    for found, expected in zip(encode("a red star", "blurry", image, clip=clip, resolution=64), encode("a red star", "blurry", image, resolution=64)):
        close(found[0][0], expected[0][0])
        assert found[0][1]["image_slots"] == expected[0][1]["image_slots"] and len(found[0][1]["qwen21_references"]) == 1
    assert asked == [[(64, 64)]] * 2, asked  # an area of 64 x 64 in the picture's proportions, rounded to 32
    positive, _, latent = references(*encode("a red star", "", image, clip=clip, resolution=64))
    close(samples(loaded()[0], positive, positive, latent), samples(loaded()[0], *references(*encode("a red star", "", image, resolution=64))))
