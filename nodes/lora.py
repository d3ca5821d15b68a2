"""Qwen21Lora: a LoRA file of any trainer on the MODEL, whole or not at all."""

import os

import folder_paths
from comfy_api.latest import io

from ..qwen21.lora import LoraFile, places
from .bridge_lora import with_lora
from .common import CATEGORY
from .schedule import schedule_of


class Qwen21Lora(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Qwen21Lora",
            display_name="Qwen-Image 2.1 LoRA",
            category=CATEGORY,
            description="Applies a LoRA in any trainer's layout, and says how many of its layers matched; one that fits only in part is refused.",
            search_aliases=["qwen image 2.1", "lora", "dora", "lycoris", "lokr", "loha", "glora", "oft", "boft", "load lora"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of the Qwen-Image 2.1 Loader, or behind another LoRA: they add up."),
                io.Combo.Input("lora", options=folder_paths.get_filename_list("loras"), tooltip="A .safetensors file in models/loras."),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="1 is what was trained, 0 nothing at all, negative the opposite.",
                ),
            ],
            outputs=[io.Model.Output(), io.String.Output("report", display_name="report")],
        )

    @classmethod
    def fingerprint_inputs(cls, lora: str, **_) -> tuple[float, int] | None:
        """So that a file that was trained further is read again."""
        path = folder_paths.get_full_path("loras", lora)
        status = path and os.stat(path)
        return (status.st_mtime, status.st_size) if status else None

    @classmethod
    def execute(cls, model, lora: str, strength: float) -> io.NodeOutput:
        schedule_of(model)  # refuses another family before anything else
        fitted = LoraFile.read(folder_paths.get_full_path_or_raise("loras", lora)).fit(places(model.model.diffusion_model))
        if strength == 0:
            return io.NodeOutput(model, f"{fitted}; strength 0: not applied")
        model, quantized = with_lora(model, fitted, strength)
        beside = f", beside the weights of {quantized} quantised layers" if quantized else ""
        return io.NodeOutput(model, f"{fitted}; strength {strength:g}{beside}")
