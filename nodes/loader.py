"""Qwen21Loader: a checkpoint as MODEL, CLIP and VAE."""

import os
from pathlib import Path

import folder_paths
import torch
from comfy_api.latest import io

from ..qwen21.checkpoint import TINY, TINY_FOLDER
from ..qwen21.config import read_json
from ..qwen21.errors import Qwen21Error
from .bridge_clip import load_clip
from .bridge_model import load_model
from .bridge_vae import load_vae
from .common import CATEGORY

SAME = "same folder"
DTYPES = {"default": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
ROOTS = ("diffusers", "diffusion_models")


def checkpoint_folders() -> dict[str, str]:
    """Name in the list -> path: the built-in tiny checkpoint, then every Qwen-Image 2.1 folder under ComfyUI's model folders."""
    found = {}
    for root in ROOTS:
        for base in folder_paths.get_folder_paths(root):
            for folder, children, files in os.walk(base, followlinks=True):
                if "model_index.json" in files:
                    children.clear()
                    if _is_ours(Path(folder)):
                        name = os.path.relpath(folder, base)
                        found[f"{root}/{name}" if name in found or name == TINY else name] = folder
    return ({TINY: TINY} if (TINY_FOLDER / "model_index.json").is_file() else {}) | dict(sorted(found.items()))


def _is_ours(folder: Path) -> bool:
    try:
        return read_json(folder / "model_index.json").get("_class_name") == "QwenImage21Pipeline"
    except Qwen21Error:
        return False


def _path(name: str, folders: dict[str, str]) -> str:
    if name not in folders:
        raise Qwen21Error(
            f"the checkpoint {name!r} is not in models/diffusers or models/diffusion_models (found: {', '.join(folders) or 'none'}): put its folder "
            "there and refresh"
        )
    return folders[name]


class Qwen21Loader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        folders = list(checkpoint_folders())
        return io.Schema(
            node_id="Qwen21Loader",
            display_name="Qwen-Image 2.1 Loader",
            category=CATEGORY,
            description="Loads a Qwen-Image 2.1 checkpoint folder (diffusers layout) from models/diffusers or models/diffusion_models, or the tiny one.",
            search_aliases=["qwen image 2.1", "load qwen", "checkpoint", "model loader", "diffusers"],
            inputs=[
                io.Combo.Input(
                    "checkpoint",
                    options=folders,
                    tooltip="tiny comes with the pack and paints simple shapes at 256 pixels, at once. Others: folders with model_index.json, transformer, "
                    "text_encoder, vae, scheduler and processor.",
                ),
                io.Combo.Input(
                    "text_encoder",
                    options=[SAME, *folders],
                    default=SAME,
                    advanced=True,
                    tooltip="Take the Qwen3-VL text encoder of another checkpoint folder.",
                ),
                io.Combo.Input("vae", options=[SAME, *folders], default=SAME, advanced=True, tooltip="Take the VAE of another checkpoint folder."),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(DTYPES),
                    default="default",
                    advanced=True,
                    tooltip="Precision of the denoiser's weights. default: what ComfyUI finds best for the device.",
                ),
            ],
            outputs=[io.Model.Output(), io.Clip.Output(), io.Vae.Output()],
        )

    @classmethod
    def execute(cls, checkpoint: str, text_encoder: str = SAME, vae: str = SAME, weight_dtype: str = "default") -> io.NodeOutput:
        folders = checkpoint_folders()
        folder = _path(checkpoint, folders)
        text_encoder, vae = (folder if name == SAME else _path(name, folders) for name in (text_encoder, vae))
        return io.NodeOutput(load_model(folder, vae, DTYPES[weight_dtype]), load_clip(text_encoder), load_vae(vae))
