"""The latents of every way to sample equal the core's for the same noise, and each run prefills each prefix once."""

import re

import comfy.patcher_extension
import comfy.samplers
import torch
from graph import (
    call,
    close,
    core,
    core_noise,
    core_samples,
    core_sigmas,
    core_vae,
    core_velocity,
    differs,
    equal,
    loaded,
    picture,
    prefills,
    prepared,
    sample,
    samples,
    sentence,
)


def sampled_as_core(pictures: int, **inputs) -> None:
    """Sampler and core agree, with guidance if `cfg` is given."""
    parts = prepared("a red star", "blurry, dark", pictures)
    close(samples(loaded()[0], *parts, **inputs), core_samples(*parts, **inputs), what=f"{pictures} references, {inputs}")


def check_text_to_image_equals_core():
    sampled_as_core(0)


def check_one_reference_equals_core():
    sampled_as_core(1)


def check_two_references_with_negative_of_another_length_equal_core():
    positive, negative, _ = prepared("a red star", "blurry, dark", 2)
    assert positive[0][0].shape != negative[0][0].shape
    sampled_as_core(2, cfg=3.5)


def check_references_change_the_picture():
    one, two = prepared(pictures=1), prepared(pictures=2)
    differs(samples(loaded()[0], *one), samples(loaded()[0], *two))


def check_seed_and_odd_grids():
    parts = prepared(pictures=1, width=96, height=64)
    close(samples(loaded()[0], *parts, seed=2**63), core_samples(*parts, seed=2**63))
    latent = {"samples": torch.zeros(1, 64, 3, 5)}
    close(samples(loaded()[0], *parts[:2], latent), core_samples(*parts[:2], latent), what="3 x 5")


def batched_calls(model):
    """A clone of `model` and the list that fills with how many prompts each of its calls holds."""
    seen, model = [], model.clone()

    def note(executor, x, timesteps, context, *args, **kwargs):
        seen.append(len(args[-1]["cond_or_uncond"]))
        return executor(x, timesteps, context, *args, **kwargs)

    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "test", note)
    return model, seen


def check_prompts_of_equal_length():
    """ComfyUI batches them when nothing says that they differ: conditioning of other nodes. Encode's own carries keys, which do."""
    model, seen = batched_calls(loaded()[0])
    positive, negative, latent = prepared("a red star", "a wet road", 2, batch_size=2)
    foreign = [[[states, {key: value for key, value in extra.items() if key != "qwen21_text"}] for states, extra in c] for c in (positive, negative)]
    noise = torch.randn(2, 64, 6, 4, generator=torch.manual_seed(7))
    for conditionings, chunks in ((foreign, [2] * 3), ((positive, negative), [1] * 6)):
        seen.clear()
        found = samples(model, *conditionings, latent, cfg=3.0)
        assert seen == chunks, f"ComfyUI batched {seen}"
        for row in range(2):
            close(found[row : row + 1], core_samples(positive, negative, latent, cfg=3.0, noise=noise[row : row + 1]), what=f"row {row}")


def custom(model, guider, latent, sigmas, seed: int = 7) -> torch.Tensor:
    noise, sampler = call("RandomNoise", noise_seed=seed)[0], call("KSamplerSelect", sampler_name="euler")[0]
    return call("SamplerCustomAdvanced", noise=noise, guider=guider, sampler=sampler, sigmas=sigmas, latent_image=latent)[0]["samples"]


def check_custom_sampling_equals_core():
    positive, negative, latent = parts = prepared("a red star", "blurry, dark", 1)
    model = loaded()[0]
    sigmas, _ = call("Qwen21Schedule", model=model, latent=latent, steps=3, schedule="auto")
    equal(sigmas, core_sigmas(6, 4), "sigmas")
    guider = call("CFGGuider", model=model, positive=positive, negative=negative, cfg=3.0)[0]
    close(custom(model, guider, latent, sigmas), core_samples(*parts, cfg=3.0), what="CFGGuider")
    guider = call("BasicGuider", model=model, conditioning=positive)[0]
    close(custom(model, guider, latent, sigmas), core_samples(*parts), what="BasicGuider")


def ksampler(model, positive, negative, latent, cfg: float = 1.0, steps: int = 3, **inputs) -> torch.Tensor:
    inputs = {"seed": 7, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0} | inputs
    return call("KSampler", model=model, positive=positive, negative=negative, latent_image=latent, cfg=cfg, steps=steps, **inputs)[0]["samples"]


def simple_sigmas(model, steps: int = 3) -> torch.Tensor:
    return comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps).float()


def check_ksampler_with_the_canvas_shift():
    parts = prepared("a red star", "blurry, dark", 1)
    _, shifted = call("Qwen21Schedule", model=loaded()[0], latent=parts[2], steps=0, schedule="auto")
    config = core("qwen21.config").ScheduleConfig(shift_terminal=0.0)
    native, ours = (model.get_model_object("model_sampling").shift for model in (loaded()[0], shifted))
    assert (native, ours) == tuple(core("qwen21.schedule").dynamic_mu(config, tokens) for tokens in (16, 24)), (native, ours)
    sigmas = simple_sigmas(shifted)
    close(sigmas, core("qwen21.schedule").dynamic_sigmas(config, 3, 24), 2e-3, "what 'simple' makes of the shift")
    close(ksampler(shifted, *parts, cfg=2.0), core_samples(*parts, cfg=2.0, sigmas=sigmas), what="KSampler")


def check_shift_nodes_of_other_models():
    """They bring sampling objects that multiply sigma before the model sees it."""
    parts = prepared(pictures=1)
    for node, inputs in (("ModelSamplingAuraFlow", {"shift": 2.0}), ("ModelSamplingSD3", {"shift": 2.0})):
        model = call(node, model=loaded()[0], **inputs)[0]
        close(ksampler(model, *parts), core_samples(*parts, sigmas=simple_sigmas(model)), what=node)
    model = call("ModelSamplingFlux", model=loaded()[0], max_shift=1.15, base_shift=0.5, width=64, height=96)[0]
    close(ksampler(model, *parts), core_samples(*parts, sigmas=simple_sigmas(model)), what="ModelSamplingFlux")


def check_every_run_prefills_once():
    model = loaded()[0]
    positive, _, latent = parts = prepared("a red star", "blurry, dark", 1, batch_size=2)
    sigmas, _ = call("Qwen21Schedule", model=model, latent=latent, steps=3, schedule="auto")
    basic = call("BasicGuider", model=model, conditioning=positive)[0]
    runs = {
        "sampler": (lambda: samples(model, *parts), 1),
        "sampler with guidance": (lambda: samples(model, *parts, cfg=2.0), 2),
        "ksampler": (lambda: ksampler(model, *parts), 1),
        "ksampler with guidance": (lambda: ksampler(model, *parts, cfg=2.0), 2),
        "custom sampling": (lambda: custom(model, basic, latent, sigmas), 1),
        "a sampler that evaluates twice a step": (lambda: samples(model, *parts, sampler_name="heun"), 1),
    }
    for name, (run, expected) in runs.items():
        with prefills(model) as calls:
            run()
        assert len(calls) == expected, f"{name}: {len(calls)} prefills"
        assert not model.model.diffusion_model.run.prefixes, f"{name}: keys and values were kept after the run"


def check_report():
    model, parts = loaded()[0], prepared("a red star", "blurry, dark", 1, batch_size=2)
    model.model.diffusion_model.cache.tree.clear()
    _, report = sample(model, *parts, cfg=2.0)
    tokens = [conditioning[0][0].shape[1] + 16 for conditioning in parts[:2]]
    shared = int(re.search(r"(\d+) reused", report)[1])
    assert shared > 16, "the branches share everything through the picture"
    bytes_kept = 2 * 4 * 128 * 4 * (sum(tokens) - shared)  # K and V, layers, width, float32
    for piece in (
        "3 steps over 24 tokens (64 x 96), batch 2",
        f"prefix: {sum(tokens) - shared} tokens computed",
        f"K/V {bytes_kept / 2**20:.1f} MiB",
        "each step:",
    ):
        assert piece in report, report
    _, again = sample(model, *parts, cfg=2.0)
    assert f"prefix: 0 tokens computed in 0.00 s, {sum(tokens)} reused" in again, again


def check_batch_draws_noise_as_comfyui_does():
    parts = prepared(pictures=1, batch_size=3)
    found = samples(loaded()[0], *parts)
    noise = torch.randn(3, 64, 6, 4, generator=torch.manual_seed(7))
    for row in range(3):
        close(found[row : row + 1], core_samples(*parts, noise=noise[row : row + 1]), what=f"row {row}")


def check_batch_index():
    positive, negative, latent = prepared(batch_size=4)
    whole = samples(loaded()[0], positive, negative, latent)
    chosen = {"samples": latent["samples"][:2], "batch_index": [3, 1]}
    out, _ = sample(loaded()[0], positive, negative, chosen)
    close(out["samples"], whole[[3, 1]], 1e-5)
    assert out["batch_index"] == [3, 1]


def check_prompts_for_a_part_of_the_steps():
    first, negative, latent = prepared("a red star", pictures=1)
    second, _, _ = prepared("a wet road", pictures=1)
    ranges = ((first, 0.0, 0.5), (second, 0.5, 1.0))
    parts = [call("ConditioningSetTimestepRange", conditioning=conditioning, start=start, end=end)[0] for conditioning, start, end in ranges]
    model, sigmas = loaded()[0], core_sigmas(6, 4, 4)
    border = model.get_model_object("model_sampling").percent_to_sigma(0.5)
    steps = int((sigmas[:-1] > border).sum())
    assert 0 < steps < 4
    with prefills(model) as calls:
        found = samples(model, call("ConditioningCombine", conditioning_1=parts[0], conditioning_2=parts[1])[0], negative, latent, steps=4)
    assert len(calls) == 2
    euler = core("qwen21.sampling").euler
    halfway = euler(core_noise(latent), sigmas[: steps + 1], core_velocity(first))
    close(found, core_vae().denormalize(euler(halfway, sigmas[steps:], core_velocity(second))))


def check_prompts_for_a_part_of_the_picture():
    """ComfyUI puts both into one batch if they are of equal length."""
    first, negative, latent = prepared("a red star", pictures=1)
    for prompt in ("a wet road", "a road"):
        second, _, _ = prepared(prompt, pictures=1)
        left = torch.zeros(1, 6, 4)
        left[..., :2] = 1
        sides = [
            call("ConditioningSetMask", conditioning=c, mask=mask, strength=1.0, set_cond_area="default")[0] for c, mask in ((first, left), (second, 1 - left))
        ]
        found = samples(loaded()[0], call("ConditioningCombine", conditioning_1=sides[0], conditioning_2=sides[1])[0], negative, latent, steps=1)
        close(found[..., :2], core_samples(first, None, latent, steps=1)[..., :2], what="left")
        close(found[..., 2:], core_samples(second, None, latent, steps=1)[..., 2:], what="right")


def check_rows_that_have_prefixes_of_their_own():
    """ComfyUI repeats a conditioning over the batch, but a wrapper may hand every row another one."""
    positive, negative, latent = prepared("a red star", pictures=1, batch_size=3)
    other, _, _ = prepared("a wet road", pictures=1)
    model = loaded()[0].clone()

    def mix(executor, x, timesteps, context, *args, **kwargs):
        return executor(x, timesteps, torch.cat([context[:1], other[0][0], context[:1]]), *args, **kwargs)

    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "test", mix)
    with prefills(model) as calls:
        found = samples(model, positive, negative, latent)
    assert len(calls) == 2
    noise = torch.randn(3, 64, 6, 4, generator=torch.manual_seed(7))
    for row, conditioning in enumerate((positive, other, positive)):
        close(found[row : row + 1], core_samples(conditioning, None, latent, noise=noise[row : row + 1]), what=f"row {row}")


def check_cfg_until():
    positive, negative, latent = parts = prepared("a red star", "blurry, dark", 1)
    sampling, sigmas = core("qwen21.sampling"), core_sigmas(6, 4, 4)
    both = sampling.guided(core_velocity(positive), core_velocity(negative), 3.0)
    alone = core_velocity(positive)
    for share, guided_steps in ((0.5, 2), (0.0, 0), (0.25, 1), (1.0, 4)):
        left = sampling.euler(core_noise(latent), sigmas[: guided_steps + 1], both)
        expected = core_vae().denormalize(sampling.euler(left, sigmas[guided_steps:], alone))
        model, seen = batched_calls(loaded()[0])
        close(samples(model, *parts, steps=4, cfg=3.0, cfg_until=share), expected, what=f"cfg_until {share}")
        assert len(seen) == 4 + guided_steps, seen


def check_denoise():
    """Starts from the picture's latent at the last sigmas of a longer schedule."""
    positive, negative, _ = prepared(pictures=1)
    latent = call("VAEEncode", pixels=picture(64, 96, seed=5), vae=loaded()[2])[0]
    sigmas = core_sigmas(6, 4, 6)[-4:]
    noise, start = core_noise(latent), core_vae().normalize(latent["samples"])
    mixed = sigmas[0] * noise + (1 - sigmas[0]) * start
    found = samples(loaded()[0], positive, negative, latent, denoise=0.5)
    close(found, core_vae().denormalize(core("qwen21.sampling").euler(mixed, sigmas, core_velocity(positive))))
    kept, report = sample(loaded()[0], positive, negative, latent, denoise=0.0)
    equal(kept["samples"], latent["samples"], "denoise 0")
    assert "denoise is 0" in report


def check_noise_mask_keeps_the_outside():
    positive, negative, _ = prepared(pictures=1)
    latent = call("VAEEncode", pixels=picture(64, 96, seed=5), vae=loaded()[2])[0]
    mask = torch.zeros(1, 96, 64)
    mask[:, 32:64, 16:48] = 1
    masked = call("SetLatentNoiseMask", samples=latent, mask=mask)[0]
    found = samples(loaded()[0], positive, negative, masked)
    inside = torch.zeros(6, 4, dtype=torch.bool)
    inside[2:4, 1:3] = True
    close(found[..., ~inside], latent["samples"][..., ~inside], 1e-6, "outside")
    differs(found[..., inside], latent["samples"][..., inside], 0.1, "inside")


def check_inpaint_conditioning():
    """Core's node hands over the mask and a picture that this model has no channels for."""
    positive, negative, _ = prepared(pictures=1)
    image, mask = picture(64, 96, seed=5, channels=3), torch.zeros(1, 96, 64)
    mask[:, 32:64, 16:48] = 1
    made = call("InpaintModelConditioning", positive=positive, negative=negative, pixels=image, vae=loaded()[2], mask=mask, noise_mask=True)
    masked = call("SetLatentNoiseMask", samples=call("VAEEncode", pixels=image, vae=loaded()[2])[0], mask=mask)[0]
    equal(samples(loaded()[0], *made), samples(loaded()[0], positive, negative, masked))


def check_two_stages_equal_one():
    """KSamplerAdvanced hands noisy latents from one run to the next."""
    positive, negative, latent = prepared(pictures=1)
    common = {
        "model": loaded()[0],
        "positive": positive,
        "negative": negative,
        "noise_seed": 7,
        "steps": 4,
        "cfg": 1.0,
        "sampler_name": "euler",
        "scheduler": "simple",
    }

    def stage(latent, start: int, end: int, noise: str, leftover: str) -> dict:
        return call(
            "KSamplerAdvanced", latent_image=latent, add_noise=noise, start_at_step=start, end_at_step=end, return_with_leftover_noise=leftover, **common
        )[0]

    first = stage(latent, 0, 2, "enable", "enable")
    close(stage(first, 2, 4, "disable", "disable")["samples"], stage(latent, 0, 4, "enable", "disable")["samples"])


def check_turbo_uses_its_own_sigmas():
    model, *_ = loaded("turbo")
    parts = prepared()
    sigmas, _ = call("Qwen21Schedule", model=model, latent=parts[2], steps=0, schedule="auto")
    equal(sigmas, torch.tensor([*core("qwen21.schedule").TURBO_SIGMAS, 0.0]), "sigmas")
    _, report = sample(model, *parts, steps=0)
    assert report.startswith("8 steps"), report
    _, report = sample(model, *parts, steps=0, denoise=0.5)
    assert report.startswith("4 steps"), report
    assert "8 steps" in sentence(sample, model, *parts, steps=5)


def check_empty_latent_of_another_model():
    """These nodes give 4 or 16 channels at an eighth of the size; ComfyUI converts them."""
    positive, negative, latent = prepared()
    expected = samples(loaded()[0], positive, negative, latent)
    for node in ("EmptyLatentImage", "EmptySD3LatentImage"):
        empty = call(node, width=64, height=96, batch_size=1)[0]
        out, _ = sample(loaded()[0], positive, negative, empty)
        equal(out["samples"], expected, node)
        assert not [key for key in out if key.startswith("downscale_ratio_")]
        sigmas, _ = call("Qwen21Schedule", model=loaded()[0], latent=empty, steps=3, schedule="auto")
        equal(sigmas, core_sigmas(6, 4))


def check_inputs_are_not_written_to():
    positive, negative, latent = prepared(pictures=1)
    before = positive[0][0].clone(), [one.clone() for one in positive[0][1]["reference_latents"]], set(positive[0][1]), latent["samples"].clone(), set(latent)
    sample(loaded()[0], positive, negative, latent, cfg=2.0)
    equal(positive[0][0], before[0])
    for found, expected in zip(positive[0][1]["reference_latents"], before[1]):
        equal(found, expected)
    equal(latent["samples"], before[3])
    assert (set(positive[0][1]), set(latent)) == (before[2], before[4])


def check_samplers_of_comfyui_run():
    parts = prepared()
    for name in ("euler_ancestral", "dpmpp_2m", "uni_pc", "res_multistep", "er_sde", "ddim"):
        assert samples(loaded()[0], *parts, sampler_name=name).isfinite().all(), name
