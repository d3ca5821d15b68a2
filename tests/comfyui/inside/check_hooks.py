"""Patches and ControlNet residuals work on the target's tokens, and the prefix stays cached under them."""

import torch
from graph import close, core, core_paint, core_transformer, core_vae, differs, equal, loaded, prefills, prepared, samples

TOKENS = 6 * 4  # of the target: 64 x 96 pixels


class Doubling:
    """A block replacement that notes what it saw and doubles what the block adds."""

    def __init__(self):
        self.seen = []

    def __call__(self, args, extra):
        self.seen.append((args["img"].shape[1], args["prefix_len"], args["transformer_options"]["block_index"]))
        out = extra["original_block"](args)["img"]
        return {"img": args["img"] + 2 * (out - args["img"])}


def core_hooked(positive, latent, hooks) -> torch.Tensor:
    """The core's latents under hooks of its own."""
    states, extra = positive[0]
    transformer = core_transformer()
    prefix = transformer.prefill(states, extra["image_slots"], [core_vae().normalize(one) for one in extra["reference_latents"]])
    return core_paint(lambda x, sigma: transformer.denoise(x, sigma, prefix, hooks=hooks), latent)


def check_block_replacement_sees_the_target_and_keeps_the_cache():
    positive, negative, latent = parts = prepared(pictures=1)
    model, double = loaded()[0].clone(), Doubling()
    model.set_model_patch_replace(double, "dit", "single_block", 1)
    with prefills(model) as calls:
        found = samples(model, *parts)
    assert len(calls) == 1 and double.seen == [(TOKENS, 0, 1)] * 3, double.seen

    class Same(core("qwen21.transformer").Hooks):
        def block(self, layer, run, x):
            return run(x) if layer != 1 else x + 2 * (run(x) - x)

    close(found, core_hooked(positive, latent, Same()))
    differs(found, samples(loaded()[0], *parts))


def check_block_and_input_patches():
    positive, negative, latent = parts = prepared(pictures=1)
    model = loaded()[0].clone()
    model.set_model_patch(lambda args: {"img": args["img"] * 1.5}, "post_input")
    model.set_model_patch(lambda args: {"img": args["img"] + 0.1 * args["block_index"]}, "single_block")
    found = samples(model, *parts)

    class Same(core("qwen21.transformer").Hooks):
        def embedded(self, x):
            return x * 1.5

        def block(self, layer, run, x):
            return run(x) + 0.1 * layer

    close(found, core_hooked(positive, latent, Same()))


def check_attention_patch():
    positive, negative, latent = parts = prepared(pictures=1)
    model = loaded()[0].clone()

    def patch(q, k, v, pe=None, attn_mask=None, extra_options=None):
        assert extra_options["img_slice"] == [0, TOKENS]
        return {"q": q * 0.5, "v": v * (1 + extra_options["block_index"])}

    model.set_model_attn1_patch(patch)
    with prefills(model) as calls:
        found = samples(model, *parts)
    assert len(calls) == 1

    class Same(core("qwen21.transformer").Hooks):
        def attention(self, layer, q, k, v):
            return q * 0.5, k, v * (1 + layer)

    close(found, core_hooked(positive, latent, Same()))


def check_residuals_of_a_controlnet():
    """As ComfyUI hands them to a model of this family: one for each block, over the target's tokens."""
    positive, negative, latent = parts = prepared(pictures=1)
    denoiser = loaded()[0].model.diffusion_model
    residual = torch.randn(1, TOKENS, 128, generator=torch.manual_seed(0)) * 0.3
    real = denoiser.forward

    def controlled(*args, control=None, **kwargs):
        return real(*args, control={"input": [residual, None, residual]}, **kwargs)

    denoiser.forward = controlled
    try:
        found = samples(loaded()[0], *parts)
    finally:
        del denoiser.forward

    class Same(core("qwen21.transformer").Hooks):
        def block(self, layer, run, x):
            return run(x) + (residual if layer in (0, 2) else 0)

    close(found, core_hooked(positive, latent, Same()))


def check_a_hook_that_needs_the_prefix_opts_out_for_its_own_run():
    parts = prepared(pictures=1)
    before = samples(loaded()[0], *parts)
    model, double = loaded()[0].clone(), Doubling()
    model.set_model_patch_replace(double, "dit", "single_block", 1)
    model.model_options["transformer_options"][core("nodes.bridge_hooks").PREFIX_OPTION] = True
    with prefills(model) as calls:
        samples(model, *parts)
    assert len(calls) == 3 and {(prefix_len > 0) for _, prefix_len, _ in double.seen} == {True, False}
    close(samples(loaded()[0], *parts), before)


def check_without_patches_nothing_changes():
    parts = prepared(pictures=1)
    model = loaded()[0].clone()
    model.set_model_patch_replace(lambda args, extra: extra["original_block"](args), "dit", "single_block", 2)
    loaded()[0].model.diffusion_model.cache.tree.clear()
    equal(samples(model, *parts), samples(loaded()[0], *parts))
