"""What may change the model or where it lies: LoRA, hooks, wrappers, unloading, and the Prefix Cache node."""

import comfy.ldm.modules.attention
import comfy.model_base
import comfy.model_management
import comfy.patcher_extension
import folder_paths
import torch
from graph import (
    call,
    close,
    core,
    core_encoder,
    core_noise,
    core_paint,
    core_sigmas,
    core_transformer,
    core_vae,
    core_velocity,
    counted,
    differs,
    encode,
    equal,
    folder,
    loaded,
    picture,
    prefills,
    prepared,
    references,
    replaced,
    sample,
    samples,
)
from safetensors.torch import save_file

LAYERS = (
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.1.attn.to_out.0",
    "transformer_blocks.2.img_mlp.gate_layer",
    "transformer_blocks.3.img_mlp.out",
    "img_in",
)
LAYOUTS = {
    "peft": ("transformer.{}.lora_A.weight", "transformer.{}.lora_B.weight"),
    "comfyui": ("diffusion_model.{}.lora_A.weight", "diffusion_model.{}.lora_B.weight"),
    "down and up": ("diffusion_model.{}.lora_down.weight", "diffusion_model.{}.lora_up.weight"),
    "bare": ("{}.lora_A.weight", "{}.lora_B.weight"),
    "kohya": ("lora_unet_{}.lora_down.weight", "lora_unet_{}.lora_up.weight"),
}


def write_lora(layout: str, rank: int = 2) -> tuple[str, dict[str, torch.Tensor]]:
    """A LoRA file among ComfyUI's, and what it adds to each weight."""
    generator, state, deltas = torch.manual_seed(3), {}, {}
    for layer in LAYERS:
        weight = core_transformer().get_submodule(layer).weight
        a = torch.randn(rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
        b = torch.randn(weight.shape[0], rank, generator=generator) * 0.3
        name = layer.replace(".", "_") if layout == "kohya" else layer
        state |= {key.format(name): value for key, value in zip(LAYOUTS[layout], (a, b))}
        deltas[layer] = b @ a
    file = f"{layout.replace(' ', '-')}.safetensors"
    save_file(state, f"{folder_paths.get_folder_paths('loras')[0]}/{file}")
    return file, deltas


def with_lora(layout: str = "peft", strength: float = 1.0):
    return call("LoraLoaderModelOnly", model=loaded()[0], lora_name=write_lora(layout)[0], strength_model=strength)[0]


def core_with_lora(deltas: dict, strength: float = 1.0):
    """The core's transformer with the LoRA added to its weights by hand."""
    model = core("qwen21.checkpoint").Checkpoint(folder()).transformer(torch.device("cpu"), torch.float32)
    for layer, delta in deltas.items():
        model.get_submodule(layer).weight.data += strength * delta
    return model


def check_lora_of_every_layout_and_without_it_again():
    parts = prepared(pictures=1)
    plain = samples(loaded()[0], *parts)
    for layout in LAYOUTS:
        file, deltas = write_lora(layout)
        model = call("LoraLoaderModelOnly", model=loaded()[0], lora_name=file, strength_model=0.7)[0]
        found = samples(model, *parts)
        close(found, core_paint(core_velocity(parts[0], core_with_lora(deltas, 0.7)), parts[2]), what=layout)
        differs(found, plain, what=layout)
        equal(samples(loaded()[0], *parts), plain, f"after {layout} was taken away")


def write_encoder_lora() -> str:
    """For the text encoder, in the names ComfyUI gives its weights."""
    generator, state = torch.manual_seed(4), {}
    weight = core_encoder().model.get_submodule("language_model.layers.0.self_attn.q_proj").weight
    for name, shape in (("lora_A", (2, weight.shape[1])), ("lora_B", (weight.shape[0], 2))):
        state[f"text_encoders.model.language_model.layers.0.self_attn.q_proj.{name}.weight"] = torch.randn(shape, generator=generator)
    save_file(state, f"{folder_paths.get_folder_paths('loras')[0]}/encoder.safetensors")
    return "encoder.safetensors"


def check_lora_of_the_text_encoder():
    file, clip = write_encoder_lora(), loaded()[1]
    plain = encode("a red star")[0][0][0]
    changed = call("LoraLoader", model=loaded()[0], clip=clip, lora_name=file, strength_model=1.0, strength_clip=1.0)[1]
    found = encode("a red star", clip=changed)[0][0][0]
    differs(found, plain)
    equal(call("CLIPTextEncode", clip=changed, text="a red star")[0][0][0], found, "Encode and CLIPTextEncode")
    equal(encode("a red star")[0][0][0], plain, "without the LoRA")
    hooks = call("CreateHookLora", lora_name=file, strength_model=0.0, strength_clip=1.0)[0]
    hooked = call("SetClipHooks", clip=clip, apply_to_conds=True, schedule_clip=False, hooks=hooks)[0]
    close(encode("a red star", clip=hooked)[0][0][0], found, 1e-5, "as a hook")
    equal(encode("a red star")[0][0][0], plain, "without the hook")


def check_strength_zero_is_no_lora():
    parts = prepared(pictures=1)
    equal(samples(with_lora(strength=0), *parts), samples(loaded()[0], *parts))


def check_lora_hook_is_computed_anew():
    """A hook's weights come and go between the calls of a step: keys and values must never be those of other weights."""
    positive, negative, latent = prepared("a red star", "blurry, dark", 1)
    file, deltas = write_lora("peft")
    hooks = call("CreateHookLora", lora_name=file, strength_model=1.0, strength_clip=0.0)[0]
    hooked = call("ConditioningSetProperties", cond_NEW=positive, strength=1.0, set_cond_area="default", hooks=hooks)[0]
    model = loaded()[0]
    plain = samples(model, positive, negative, latent)
    with_hook = samples(model, hooked, negative, latent)
    close(with_hook, samples(with_lora(), positive, negative, latent), what="hooked as a loaded LoRA")
    differs(with_hook, plain)
    guided, changed = core("qwen21.sampling").guided, core_velocity(positive, core_with_lora(deltas))
    expected = core_paint(guided(changed, core_velocity(negative), 3.0), latent)
    close(samples(model, hooked, negative, latent, cfg=3.0), expected, what="hook on the positive only")
    expected = core_paint(guided(changed, core_velocity(positive), 3.0), latent)
    close(samples(model, hooked, positive, latent, cfg=3.0), expected, what="the same prompt with and without the hook")
    equal(samples(model, positive, negative, latent), plain, "after the hook")


def check_hook_set_on_the_clip():
    file, _ = write_lora("peft")
    hooks = call("CreateHookLora", lora_name=file, strength_model=1.0, strength_clip=0.0)[0]
    clip = call("SetClipHooks", clip=loaded()[1], apply_to_conds=True, schedule_clip=False, hooks=hooks)[0]
    images = {"image_1": picture()}
    parts = references(*encode("a red star", "", images, clip=clip))
    close(samples(loaded()[0], *parts), samples(with_lora(), *references(*encode("a red star", "", images))))


def check_wrapper_that_changes_the_context_each_step():
    positive, negative, latent = prepared(pictures=1)
    model, step = loaded()[0].clone(), []

    def turn(executor, x, timesteps, context, *args, **kwargs):
        step.append(1)
        return executor(x, timesteps, context.roll(len(step), dims=1), *args, **kwargs)

    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "test", turn)
    found = samples(model, positive, negative, latent)
    x, sigmas = core_noise(latent), core_sigmas(6, 4)
    for i in range(3):
        velocity = core_velocity([[positive[0][0].roll(i + 1, dims=1), positive[0][1]]])
        x = core("qwen21.sampling").euler(x, sigmas[i : i + 2], velocity)
    close(found, core_vae().denormalize(x))
    differs(found, samples(loaded()[0], positive, negative, latent))


def check_context_overwritten_in_place():
    """A wrapper may reuse one buffer for what it hands in."""
    positive, negative, latent = prepared()
    model, buffer = loaded()[0].clone(), positive[0][0].clone()

    def turn(executor, x, timesteps, context, *args, **kwargs):
        buffer.copy_(buffer.roll(1, dims=1))
        return executor(x, timesteps, buffer, *args, **kwargs)

    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "test", turn)
    with prefills(model) as calls:
        samples(model, positive, negative, latent)
    assert len(calls) == 3


def check_unloaded_model_runs_again():
    parts = prepared(pictures=1)
    before = samples(loaded()[0], *parts, cfg=2.0)
    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()
    equal(samples(loaded()[0], *prepared(pictures=1), cfg=2.0), before)


def check_interrupted_run_leaves_nothing_behind():
    model, parts = loaded()[0], prepared("a red star", "blurry", 1)
    before = samples(model, *parts)

    def stop(executor, *args, **kwargs):
        if model.model.diffusion_model.run.prefixes:
            raise comfy.model_management.InterruptProcessingException
        return executor(*args, **kwargs)

    broken = model.clone()
    broken.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "test", stop)
    try:
        samples(broken, *parts)
        raise AssertionError("the interrupt was swallowed")
    except comfy.model_management.InterruptProcessingException:
        pass
    assert not model.model.diffusion_model.run.prefixes
    equal(samples(model, *parts), before)


def cached(device: str = "auto", precision: str = "default", budget_mb: int = 0):
    return call("Qwen21PrefixCache", model=loaded()[0], budget_mb=budget_mb, device=device, precision=precision)[0]


def check_cache_devices():
    parts = prepared("a red star", "blurry, dark", 1)
    expected = samples(loaded()[0], *parts, cfg=2.0)
    for device, expected_calls in (("auto", 2), ("gpu", 2), ("cpu", 2), ("off", 6)):
        model = cached(device)
        with prefills(model) as calls:
            out, report = sample(model, *parts, cfg=2.0)
        close(out["samples"], expected, what=device)
        assert len(calls) == expected_calls, f"{device}: {len(calls)} prefills"
        assert (device == "off") == ("K/V 0.0 MiB" in report), report


def check_cache_precisions():
    parts = prepared("a red star", "blurry, dark", 1)
    expected = samples(loaded()[0], *parts)
    sizes = {}
    for precision in ("default", "fp8_v", "fp8_kv"):
        model = cached("cpu", precision)
        cache = model.model.diffusion_model.cache
        cache.tree.clear()
        found = samples(model, *parts)
        if precision != "default":
            close(found, expected, 0.3, precision)
            differs(found, expected, 1e-5, precision)
        sizes[precision] = cache.tree.nbytes()
    assert sizes["fp8_kv"] < sizes["fp8_v"] < sizes["default"], sizes
    assert sizes["default"] / sizes["fp8_kv"] > 3.5, sizes  # float32 to 8 bits and a scale


def check_cache_budget():
    """Beyond a run only so much is kept, over all prompts."""
    model = cached(budget_mb=1)
    cache = model.model.diffusion_model.cache
    cache.tree.clear()
    for prompt in ("a red star " * 8, "a wet road " * 8, "a blue moon " * 8):
        samples(model, *prepared(prompt, "", 2))
        assert 0 < cache.tree.nbytes() <= 2**20, cache.tree.nbytes()
    samples(loaded()[0], *prepared("a red star " * 8, "", 2))
    assert cache.tree.nbytes() > 2**20


def check_cache_serves_later_runs():
    """Another seed, another instruction, another last picture: only what is new is computed, and the picture is the same as without a cache."""
    model = loaded()[0]
    denoiser, off = model.model.diffusion_model, cached("off")
    denoiser.cache.tree.clear()

    def computed(parts, **inputs):
        before = denoiser.cache.statistics.computed_tokens
        close(samples(model, *parts, **inputs), samples(off, *parts, **inputs))
        return denoiser.cache.statistics.computed_tokens - before

    text = [prepared(prompt, "", 2)[0][0][0].shape[1] for prompt in ("a red star", "a red sun")]
    tokens = sum(latents.shape[2] * latents.shape[3] for latents in prepared("", "", 2)[0][0][1]["reference_latents"])
    assert computed(prepared("a red star", "", 2)) == text[0] + tokens
    assert computed(prepared("a red star", "", 2), seed=99) == 0
    assert computed(prepared("a red sun", "", 2)) < text[1] - 20
    assert computed(prepared("a red star", "blurry", 2), cfg=2.0) < 30


def check_cache_knows_conditioning_that_other_nodes_changed():
    """Keys of tokens count only while the states are Encode's own; what was changed is recognised by its tensors."""
    model, denoiser = loaded()[0], loaded()[0].model.diffusion_model
    positive, negative, latent = prepared("a red star", pictures=1)
    samples(model, positive, negative, latent)
    for change in (lambda states: states * 0, lambda states: states * 1.5 + 0.1, lambda states: torch.cat([states, states[:, :3]], dim=1)):
        changed = [[change(positive[0][0]), dict(positive[0][1])]]
        found = samples(model, changed, negative, latent)
        close(found, samples(cached("off"), changed, negative, latent))
        before = denoiser.cache.statistics.computed_tokens
        equal(samples(model, changed, negative, latent), found)
        assert denoiser.cache.statistics.computed_tokens == before


def check_cache_is_emptied_when_the_model_is_unloaded():
    model = loaded()[0]
    samples(model, *prepared(pictures=1))
    assert model.model.diffusion_model.cache.tree.nbytes() > 0
    comfy.model_management.unload_all_models()
    assert model.model.diffusion_model.cache.tree.nbytes() == 0


def check_cache_goes_before_weights_when_another_model_wants_room():
    """What loading a large model asks of those that are loaded."""
    model, parts = loaded()[0], prepared(pictures=1)
    expected = samples(model, *parts)
    samples(model, *prepared("something else", pictures=2))
    cache = model.model.diffusion_model.cache
    kept, weights = cache.tree.nbytes(), model.loaded_size()
    with replaced(comfy.model_management, "get_free_memory", lambda device=None, torch_free_too=False: (0, 0) if torch_free_too else 0):
        comfy.model_management.free_memory(1000, model.load_device)
    assert 0 < cache.tree.nbytes() < kept and model.loaded_size() == weights
    with replaced(comfy.model_management, "get_free_memory", lambda device=None, torch_free_too=False: (0, 0) if torch_free_too else 0):
        comfy.model_management.free_memory(1e12, model.load_device)
    assert cache.tree.nbytes() == 0
    equal(samples(model, *parts), expected)


def check_cache_gives_way_when_memory_runs_out():
    model, parts = loaded()[0], prepared(pictures=1)
    denoiser = model.model.diffusion_model
    expected = samples(model, *parts)
    samples(model, *prepared("something else", pictures=2))
    kept, real, failed = denoiser.cache.tree.nbytes(), denoiser.prefill, []

    def short_of_memory(*args, **kwargs):
        if denoiser.cache.tree.nbytes() >= kept and not failed:
            failed.append(True)
            raise torch.cuda.OutOfMemoryError
        return real(*args, **kwargs)

    with replaced(denoiser, "prefill", short_of_memory):
        samples(model, *prepared("a third prompt", pictures=1))
    assert failed and denoiser.cache.tree.nbytes() < kept
    close(samples(model, *parts), expected)


def check_text_encoder_remembers():
    """A new instruction on the same pictures runs neither the tower nor the tokens before it; a LoRA on the CLIP makes it forget."""
    _, clip, _ = loaded()
    encoder = clip.cond_stage_model.encoder
    images = {"image_1": picture()}
    encode("make it red", images=images)
    with counted(encoder, "_see") as looked, counted(encoder, "_run") as ran:
        found = encode("make it blue", images=images)
    assert not looked and all(len(args[0]) - args[1] < 30 for args, _ in ran), [len(args[0]) - args[1] for args, _ in ran]
    encoder.forget()
    close(found[0][0][0], encode("make it blue", images=images)[0][0][0])


def check_cache_node_leaves_its_input_alone():
    model = loaded()[0]
    cached("off", "fp8_kv", 512)
    assert core("nodes.bridge_model").CACHE_OPTION not in model.model_options["transformer_options"]


def check_memory_estimate_counts_references_and_their_keys():
    model = loaded()[0].model
    plain, pictures = prepared()[0], prepared(pictures=2)[0]
    shapes = [model.extra_conds_shapes(**conditioning[0][1], cross_attn=conditioning[0][0]) for conditioning in (plain, pictures)]
    assert shapes[1]["ref_latents"] == [1, 64, sum(one.shape[2] * one.shape[3] for one in pictures[0][1]["reference_latents"])]
    for shape in shapes:
        listed = {key: [value] for key, value in shape.items()}
        kv = 2 * (4 + 2) * 128 * 4 * (shape["c_crossattn"][1] + shape.get("ref_latents", [0, 0, 0])[2])  # K and V; layers and two of scratch, width, float32
        assert model.memory_required([1, 64, 6, 4], listed) == comfy.model_base.QwenImage.memory_required(model, [1, 64, 6, 4], listed) + kv
    with counted(type(model), "memory_required") as calls:
        samples(loaded()[0], *prepared(pictures=2))
    assert any((args[2] if len(args) > 2 else kwargs.get("cond_shapes", {})).get("ref_latents") for args, kwargs in calls), (
        "ComfyUI's own estimate lacks the references"
    )


def check_attention_is_comfyuis_choice():
    """An override that a node puts into the model's options is asked for every unmasked call."""
    asked, parts = [], prepared(pictures=1)
    model = loaded()[0].clone()

    def override(function, *args, **kwargs):
        asked.append(args[0].shape)
        return function(*args, **kwargs)

    model.model_options["transformer_options"]["optimized_attention_override"] = override
    model.model.diffusion_model.cache.tree.clear()
    expected = samples(loaded()[0], *parts)
    close(samples(model, *parts), expected)
    calls = 3 + 4 * 3  # the picture in each layer but the last, and four layers a step
    assert len(asked) == calls, len(asked)
    bridge = core("nodes.bridge_model")
    with replaced(bridge, "prefers_cudnn", lambda device: True), counted(bridge, "full_attention") as direct:
        for choice, one, directly in (
            ("attention_pytorch", loaded()[0], True),
            ("attention_pytorch", model, False),
            ("attention_sub_quad", loaded()[0], False),
        ):
            with replaced(bridge, "optimized_attention", getattr(comfy.ldm.modules.attention, choice)):
                one.model.diffusion_model.cache.tree.clear()
                direct.clear()
                close(samples(one, *parts), expected)
            assert len(direct) == (calls if directly else 0), (choice, len(direct))
    assert len(asked) == 2 * calls, len(asked)


def check_model_nodes_of_comfyui():
    parts = prepared(pictures=1)
    expected = samples(loaded()[0], *parts)
    merged = call("ModelMergeSimple", model1=loaded()[0], model2=loaded("turbo")[0], ratio=1.0)[0]
    close(samples(merged, *parts), expected, what="merged with nothing of the other")
    merged = call("ModelMergeSimple", model1=loaded()[0], model2=loaded("turbo")[0], ratio=0.0)[0]
    velocity = core_velocity(parts[0], core_transformer("turbo"))
    close(samples(merged, *parts), core_paint(velocity, parts[2]), what="merged with all of the other")
    close(samples(loaded()[0], *parts), expected, what="after the merge")
    half = call("ModelComputeDtype", model=loaded()[0], dtype="bf16")[0]
    close(samples(half, *parts), expected, 0.5, "computed in bfloat16")
    differs(samples(half, *parts), expected, 1e-4, "computed in bfloat16")
    close(samples(loaded()[0], *parts), expected, what="float32 again")


def check_bfloat16_weights():
    model = call("Qwen21Loader", checkpoint="random", weight_dtype="bfloat16")[0]
    assert model.model.get_dtype() == torch.bfloat16
    parts = prepared(pictures=1)
    close(samples(model, *parts), samples(loaded()[0], *parts), 0.2)


def check_parts_of_another_checkpoint():
    _, clip, vae = call("Qwen21Loader", checkpoint="random", text_encoder="turbo", vae="turbo")
    differs(encode("a red star", clip=clip)[0][0][0], encode("a red star")[0][0][0])
    equal(encode("a red star", clip=clip)[0][0][0], encode("a red star", clip=loaded("turbo")[1])[0][0][0])
    assert not torch.equal(vae.first_stage_model.decoder.conv_in.weight, loaded()[2].first_stage_model.decoder.conv_in.weight)
