"""Qwen21Schedule: SIGMAS for custom sampling, and the MODEL with that canvas's shift for KSampler."""

import comfy.model_sampling
import comfy.sample
import torch
from comfy_api.latest import io

from ..qwen21.config import ModelIndex, ScheduleConfig
from ..qwen21.errors import Qwen21Error
from ..qwen21.schedule import SCHEDULES, mu, resolve, sigmas
from .bridge_model import QwenImage21
from .common import CATEGORY, LATENT_CHANNELS, say


def schedule_of(model) -> tuple[ScheduleConfig, ModelIndex]:
    """What a MODEL's checkpoint says about sigmas; the published values for a Qwen-Image 2.1 of ComfyUI's own loader, which does not keep them.

    Raises Qwen21Error if the MODEL is of another family.
    """
    if isinstance(model.model, QwenImage21):
        return model.model.model_config.schedule, model.model.model_config.index
    if type(model.model).__name__ == QwenImage21.__name__:
        return ScheduleConfig(), ModelIndex()
    raise Qwen21Error(f"the MODEL is a {type(model.model).__name__}, expected Qwen-Image 2.1: connect the MODEL output of the Qwen-Image 2.1 Loader")


def say_if_unknown(model, kind: str, node_id: str | None) -> None:
    """A MODEL of ComfyUI's own loader does not tell whether it is Turbo."""
    if kind == "auto" and not isinstance(model.model, QwenImage21):
        say("this MODEL does not tell whether it is a Turbo checkpoint: it is sampled as one that is not; for Turbo choose schedule turbo", node_id)


def prepared_latent(model, latent: dict) -> torch.Tensor:
    """The LATENT's samples (batch, 64, rows, columns), an empty one of another model's shape converted as ComfyUI's samplers do."""
    samples = comfy.sample.fix_empty_latent_channels(model, latent["samples"], latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal"))
    if samples.ndim != 4 or samples.shape[1] != LATENT_CHANNELS:
        raise Qwen21Error(
            f"the LATENT has shape {tuple(samples.shape)}, Qwen-Image 2.1 needs (batch, {LATENT_CHANNELS}, rows, columns): encode the picture with the "
            "VAE of the Qwen-Image 2.1 Loader"
        )
    return samples


def sigmas_for(model, samples: torch.Tensor, steps: int, kind: str) -> torch.Tensor:
    """float32 (steps + 1,) for `samples` (batch, 64, rows, columns); `steps` 0 leaves them to the checkpoint."""
    config, index = schedule_of(model)
    return sigmas(kind, steps or None, samples.shape[2] * samples.shape[3], config, index.sample_sigmas)


class Qwen21Schedule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Qwen21Schedule",
            display_name="Qwen-Image 2.1 Schedule",
            category=CATEGORY,
            description="The sigmas of Qwen-Image 2.1 for this canvas, for SamplerCustomAdvanced; and the model with this canvas's shift, for KSampler.",
            search_aliases=["qwen image 2.1", "sigmas", "scheduler", "shift", "turbo", "ModelSamplingFlux"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of the Qwen-Image 2.1 Loader: its checkpoint decides the schedule."),
                io.Latent.Input("latent", tooltip="The canvas: its size decides the shift."),
                io.Int.Input("steps", default=0, min=0, max=1000, tooltip="0: 40, or as many as the checkpoint's own sigmas."),
                io.Combo.Input(
                    "schedule",
                    options=list(SCHEDULES),
                    default="auto",
                    tooltip="auto follows the checkpoint: Turbo's own 8 sigmas, else shifted by the canvas's size.",
                ),
            ],
            outputs=[
                io.Sigmas.Output("sigmas", display_name="sigmas"),
                io.Model.Output(
                    "model",
                    display_name="model",
                    tooltip="With this canvas's shift, for KSampler. Its scheduler 'simple' then still lacks the stretch that ends at 0.02, and Turbo's own "
                    "sigmas.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model, latent: dict, steps: int, schedule: str) -> io.NodeOutput:
        config, index = schedule_of(model)  # refuses another family before anything else
        samples = prepared_latent(model, latent)

        class Sampling(comfy.model_sampling.ModelSamplingFlux, comfy.model_sampling.CONST):
            pass

        sampling = Sampling(model.model.model_config)
        sampling.set_parameters(shift=mu(resolve(schedule, config, index.sample_sigmas)[0], samples.shape[2] * samples.shape[3]))
        shifted = model.clone()
        shifted.add_object_patch("model_sampling", sampling)
        say_if_unknown(model, schedule, cls.hidden.unique_id)
        return io.NodeOutput(sigmas_for(model, samples, steps, schedule), shifted)
