"""Qwen21Loader: a checkpoint as MODEL, CLIP and VAE."""

import torch
from comfy_api.latest import io

from ..qwen21.fp8 import already_quantized
from .bridge_clip import load_clip
from .bridge_model import load_model
from .bridge_vae import load_vae
from .common import CATEGORY, say
from .model_files import AUTO, checkpoint_folders, open_checkpoint, single_files, stamp

DTYPES = {"default": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
FP8 = "fp8"


class Qwen21Loader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        folders = list(checkpoint_folders())
        return io.Schema(
            node_id="Qwen21Loader",
            display_name="Qwen-Image 2.1 Loader",
            category=CATEGORY,
            description="Loads Qwen-Image 2.1: a checkpoint folder, single files (safetensors, quantised, GGUF), or the tiny checkpoint of the pack.",
            search_aliases=["qwen image 2.1", "load qwen", "checkpoint", "model loader", "diffusers", "gguf", "unet loader"],
            inputs=[
                io.Combo.Input(
                    "checkpoint",
                    options=[*folders, *single_files("transformer")],
                    tooltip="tiny comes with the pack and paints simple shapes at 256 pixels, at once. Others: folders in the diffusers layout, and "
                    "denoisers in single files (models/diffusion_models), which find their text encoder and VAE themselves.",
                ),
                io.Combo.Input(
                    "text_encoder",
                    options=[AUTO, *folders, *single_files("text_encoder")],
                    default=AUTO,
                    advanced=True,
                    tooltip="auto: the checkpoint folder's, or the Qwen3-VL file in models/text_encoders that fits. Or take another one.",
                ),
                io.Combo.Input(
                    "vae",
                    options=[AUTO, *folders, *single_files("vae")],
                    default=AUTO,
                    advanced=True,
                    tooltip="auto: the checkpoint folder's, or the 64-channel VAE in models/vae. Or take another one.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=[*DTYPES, FP8],
                    default="default",
                    advanced=True,
                    tooltip="Precision of the denoiser's weights, unless the file is quantised. default: what ComfyUI finds best for the device. "
                    "fp8: large layers in 8 bits (E4M3), made while loading: half the memory, for GPUs that multiply in 8 bits (Ada, Hopper and newer); pictures change a little.",
                ),
            ],
            outputs=[io.Model.Output(), io.Clip.Output(), io.Vae.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, checkpoint: str, text_encoder: str = AUTO, vae: str = AUTO, **_) -> str | None:
        """So that a file that was replaced is loaded again."""
        return stamp(checkpoint, text_encoder, vae)

    @classmethod
    def execute(cls, checkpoint: str, text_encoder: str = AUTO, vae: str = AUTO, weight_dtype: str = "default") -> io.NodeOutput:
        opened, sentence = open_checkpoint(checkpoint, text_encoder, vae)
        unfit = already_quantized(opened.parts["transformer"]) if weight_dtype == FP8 else ""
        if sentence or unfit:
            say("; ".join(filter(None, (sentence, unfit))), cls.hidden.unique_id)
        model = load_model(opened, DTYPES.get(weight_dtype), fp8=weight_dtype == FP8 and not unfit)
        return io.NodeOutput(model, load_clip(opened), load_vae(opened))
