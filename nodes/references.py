"""Qwen21ReferenceLatents: the VAE's latents of the pictures that Encode prepared, and the canvas to paint on."""

import hashlib

import comfy.model_management
import node_helpers
import torch
from comfy_api.latest import io
from PIL import Image

from ..qwen21.errors import Qwen21Error, UsageError
from ..qwen21.pictures import MULTIPLE
from ..qwen21.references import Prepared, near_copy_warning
from .bridge_clip import to_image
from .common import CATEGORY, say

LAST, FIRST, EXPLICIT = CANVASES = ("last reference", "first reference", "width and height")
CHANNELS, RATIO = 64, 16
REMEMBERED = 32  # pictures a VAE remembers the latents of, about 1 MB each at 1024 x 1024


class Qwen21ReferenceLatents(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        side = {"min": MULTIPLE, "max": 8192, "step": MULTIPLE, "default": 1024}
        return io.Schema(
            node_id="Qwen21ReferenceLatents",
            display_name="Qwen-Image 2.1 Reference Latents",
            category=CATEGORY,
            description="Puts the VAE latents of Encode's pictures into the conditioning and gives the empty latent to paint on. Takes the pictures from the "
            "conditioning, so that text encoder and VAE see the same pixels.",
            search_aliases=["qwen image 2.1", "reference latent", "vae encode", "edit", "empty latent", "canvas"],
            inputs=[
                io.Conditioning.Input("positive", tooltip="From Qwen-Image 2.1 Encode."),
                io.Conditioning.Input("negative", tooltip="From Qwen-Image 2.1 Encode."),
                io.Vae.Input("vae", tooltip="The VAE of the Qwen-Image 2.1 Loader."),
                io.Combo.Input("canvas", options=list(CANVASES), default=LAST, tooltip="Size of the picture to paint. Without references, width and height are used."),
                io.Int.Input("width", **side, tooltip="Pixels; used with canvas 'width and height', or without references."),
                io.Int.Input("height", **side, tooltip="Pixels; used with canvas 'width and height', or without references."),
                io.Int.Input("batch_size", default=1, min=1, max=64, tooltip="Pictures painted in one run; text and references are computed once for all."),
            ],
            outputs=[
                io.Conditioning.Output("positive", display_name="positive"),
                io.Conditioning.Output("negative", display_name="negative"),
                io.Latent.Output("latent", display_name="latent"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, positive, negative, vae, canvas: str, width: int, height: int, batch_size: int) -> io.NodeOutput:
        if vae is None:
            raise Qwen21Error("no VAE is connected: without it references would mean something else; connect the VAE output of the Qwen-Image 2.1 Loader")
        check_channels(vae)
        prepared: list[Prepared] = positive[0][1].get("qwen21_references", [])
        for conditioning in (positive, negative):
            _check_slots(conditioning, prepared)
        latents = [reference_latents(vae, one.picture) for one in prepared]
        if latents:
            positive, negative = (node_helpers.conditioning_set_values(c, {"reference_latents": latents}) for c in (positive, negative))

        latent: dict = {"downscale_ratio_spacial": RATIO}
        if canvas != EXPLICIT and prepared:
            model = prepared[0 if canvas == FIRST else -1]
            width, height = model.picture.size
            if model.size != model.picture.size:
                latent["qwen21_crop"] = model.size  # Decode cuts the mirrored padding off again
        warning = near_copy_warning((width, height), [one.picture.size for one in prepared])
        if warning:
            say(warning, cls.hidden.unique_id)
        latent["samples"] = torch.zeros(batch_size, CHANNELS, height // RATIO, width // RATIO, device=comfy.model_management.intermediate_device())
        return io.NodeOutput(positive, negative, latent)


def reference_latents(vae, picture: Image.Image) -> torch.Tensor:
    """(1, 64, height / 16, width / 16), not normalised. Remembered on the VAE by the picture's content, so that a changed prompt costs nothing here."""
    remembered: dict[bytes, torch.Tensor] = vae.__dict__.setdefault("qwen21_references", {})
    key = hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).digest()
    latents = remembered.pop(key, None)
    if latents is None:
        latents = vae.encode(to_image(picture))
    remembered[key] = latents  # the most recent last
    while len(remembered) > REMEMBERED:
        del remembered[next(iter(remembered))]
    return latents


def check_channels(vae) -> None:
    """Raises Qwen21Error if the VAE is another family's."""
    if vae.latent_channels != CHANNELS or vae.output_channels != 4:
        raise Qwen21Error(
            f"the VAE has {vae.latent_channels} latent and {vae.output_channels} picture channels, Qwen-Image 2.1 needs {CHANNELS} and 4: connect the VAE of the "
            "Qwen-Image 2.1 Loader"
        )


def _check_slots(conditioning, prepared: list[Prepared]) -> None:
    for _, extra in conditioning:
        slots = len(extra.get("image_slots") or [])
        if slots != len(prepared):
            raise UsageError(f"the prompt has {slots} image slots but {len(prepared)} pictures came with it: take positive and negative from the same Qwen-Image 2.1 Encode")
