"""Qwen21Sampler: the model's own schedule, any of ComfyUI's samplers, guidance for a share of the steps, and a report."""

import math
import time
from dataclasses import replace

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.utils
import latent_preview
import torch
from comfy_api.latest import io

from ..qwen21.errors import UsageError
from ..qwen21.prefix_cache import CacheStatistics
from ..qwen21.schedule import SCHEDULES
from .bridge_model import QwenImage21
from .common import CATEGORY
from .schedule import prepared_latent, say_if_unknown, schedule_of, sigmas_for


class Guider(comfy.samplers.CFGGuider):
    """Classifier-free guidance for the first `guided_steps` of `sigmas`, the positive alone after that."""

    def __init__(self, model, positive, negative, cfg: float, sigmas: torch.Tensor, guided_steps: int):
        super().__init__(model)
        self.set_conds(positive, negative)
        self.set_cfg(cfg)
        # Halfway to the next sigma: samplers also evaluate between the two, and float comparison must not decide.
        self.guided_above = float(sigmas[guided_steps - 1 : guided_steps + 1].mean()) if 0 < guided_steps < len(sigmas) - 1 else (-1.0 if guided_steps else 2.0)

    def predict_noise(self, x, timestep, model_options={}, seed=None):
        guided = self.cfg != 1 and float(timestep.max()) > self.guided_above  # in this order: the host waits for the second
        cfg = self.cfg if guided else 1.0
        negative, positive = self.conds.get("negative"), self.conds.get("positive")
        return comfy.samplers.sampling_function(self.inner_model, x, timestep, negative, positive, cfg, model_options=model_options, seed=seed)


class Qwen21Sampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Qwen21Sampler",
            display_name="Qwen-Image 2.1 Sampler",
            category=CATEGORY,
            description="Paints: text and references are computed once, then every step runs the picture's own tokens against them.",
            search_aliases=["qwen image 2.1", "ksampler", "sample", "denoise", "turbo"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of the Qwen-Image 2.1 Loader; LoRAs and the Prefix Cache node may come between."),
                io.Conditioning.Input("positive", tooltip="From Reference Latents, or from Encode when there are no references."),
                io.Conditioning.Input("negative", tooltip="Only used when cfg is not 1. May have another length than the positive."),
                io.Latent.Input("latent", tooltip="The canvas: from Reference Latents or an empty latent; or a picture's latent, with denoise below 1."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="The same seed gives the same noise as in ComfyUI's other samplers.",
                ),
                io.Int.Input("steps", default=0, min=0, max=1000, tooltip="0: 40, or as many as the checkpoint's own sigmas (Turbo: 8)."),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=30.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Guidance scale. 1 means none, as the model is meant, and takes half the time.",
                ),
                io.Combo.Input(
                    "schedule",
                    options=list(SCHEDULES),
                    default="auto",
                    tooltip="auto follows the checkpoint: Turbo's own sigmas, else shifted by the canvas's size.",
                ),
                io.Combo.Input("sampler_name", options=comfy.samplers.SAMPLER_NAMES, default="euler", tooltip="euler is what the model was released with."),
                io.Float.Input(
                    "denoise", default=1.0, min=0.0, max=1.0, step=0.01, tooltip="Below 1, starts from the latent's picture: the lower, the closer to it."
                ),
                io.Float.Input(
                    "cfg_until",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    advanced=True,
                    tooltip="Share of the steps that use cfg; the rest runs without guidance, twice as fast.",
                ),
            ],
            outputs=[io.Latent.Output("latent", display_name="latent"), io.String.Output("report", display_name="report")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model, positive, negative, latent, seed, steps, cfg, schedule, sampler_name, denoise, cfg_until) -> io.NodeOutput:
        schedule_of(model)  # refuses another family before anything else
        say_if_unknown(model, schedule, cls.hidden.unique_id)
        samples = prepared_latent(model, latent)
        sigmas = started_at(model, samples, steps, schedule, denoise)
        count = len(sigmas) - 1
        out = {key: value for key, value in latent.items() if not key.startswith("downscale_ratio_")}
        if count == 0:
            return io.NodeOutput(out | {"samples": samples}, "denoise is 0: the latent is passed on")
        guider = Guider(model, positive, negative, cfg, sigmas, math.ceil(cfg_until * count - 1e-6))
        noise = comfy.sample.prepare_noise(samples, seed, latent.get("batch_index"))
        before = replace(model.model.diffusion_model.cache.statistics) if isinstance(model.model, QwenImage21) else None
        start = time.perf_counter()
        result = guider.sample(
            noise,
            samples,
            comfy.samplers.sampler_object(sampler_name),
            sigmas,
            denoise_mask=latent.get("noise_mask"),
            callback=latent_preview.prepare_callback(model, count),
            disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
            seed=seed,
        ).to(comfy.model_management.intermediate_device())
        return io.NodeOutput(out | {"samples": result}, report(model, samples, count, start, before))


def started_at(model, samples: torch.Tensor, steps: int, kind: str, denoise: float) -> torch.Tensor:
    """The last sigmas of a schedule: all for `denoise` 1; below, `steps` of a longer one, or the last of those a checkpoint fixes."""
    if not 0 <= denoise <= 1:
        raise UsageError(f"denoise is {denoise}, expected 0 to 1")
    if denoise == 0:
        return torch.zeros(1)
    whole = sigmas_for(model, samples, steps, kind)
    if denoise == 1:
        return whole
    count = len(whole) - 1
    _, index = schedule_of(model)
    if kind == "turbo" or (kind == "auto" and index.sample_sigmas):
        return whole[-(max(1, round(count * denoise)) + 1) :]
    return sigmas_for(model, samples, int(count / denoise), kind)[-(count + 1) :]


def report(model, samples: torch.Tensor, steps: int, start: float, before: CacheStatistics | None) -> str:
    """What the run that ends now cost, in a few lines, without loading the model. `before` is the cache's count when it began (None for
    a model that has none), `start` when the sampler did."""
    batch, _, rows, columns = samples.shape
    if before is not None:
        start = model.model.diffusion_model.run.started or start
    seconds = time.perf_counter() - start
    lines = [f"{steps} steps over {rows * columns} tokens ({columns * 16} x {rows * 16}), batch {batch}: {seconds:.2f} s"]
    if before is not None:
        cache = model.model.diffusion_model.cache
        run = cache.since(before)
        lines.append(
            f"prefix: {run.computed_tokens} tokens computed in {run.seconds:.2f} s, {run.reused_tokens} reused (about {1000 * cache.saved(run):.0f} ms saved)"
        )
        lines.append(f"kept: {len(cache.tree)} pieces, K/V {cache.tree.nbytes() / 2**20:.1f} MiB")
        seconds -= run.seconds
    lines.append(f"each step: {seconds / steps:.4g} s")
    return "\n".join(lines)
