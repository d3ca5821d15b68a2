"""Qwen21ReferenceLatents: the VAE's latents of the pictures that Encode prepared, and the canvas to paint on."""

import comfy.model_management
import torch
from comfy_api.latest import io
from PIL import Image

from ..qwen21.errors import Qwen21Error, UsageError
from ..qwen21.pictures import MULTIPLE
from ..qwen21.recent import Recent
from ..qwen21.references import Prepared, near_copy_warning
from ..qwen21.text_encoder import picture_digest
from .bridge_clip import to_image
from .common import CATEGORY, LATENT_CHANNELS, LATENT_RATIO, say

LAST, FIRST, EXPLICIT = CANVASES = ("last reference", "first reference", "width and height")
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
                io.Combo.Input(
                    "canvas", options=list(CANVASES), default=LAST, tooltip="Size of the picture to paint. Without references, width and height are used."
                ),
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
        positive, negative = (_with_latents(conditioning, vae) for conditioning in (positive, negative))

        latent: dict = {"downscale_ratio_spacial": LATENT_RATIO}
        if canvas != EXPLICIT and prepared:
            model = prepared[0 if canvas == FIRST else -1]
            width, height = model.picture.size
            if model.size != model.picture.size:
                latent["qwen21_crop"] = model.size  # Decode cuts the mirrored padding off again
        warning = near_copy_warning((width, height), [one.picture.size for one in prepared])
        if warning:
            say(f"{warning}; size policy auto avoids it", cls.hidden.unique_id)
        latent["samples"] = torch.zeros(
            batch_size, LATENT_CHANNELS, height // LATENT_RATIO, width // LATENT_RATIO, device=comfy.model_management.intermediate_device()
        )
        return io.NodeOutput(positive, negative, latent)


def reference_latents(vae, picture: Image.Image) -> torch.Tensor:
    """(1, 64, height / 16, width / 16), not normalised. Remembered on the VAE by the picture's content, so that a changed prompt costs nothing here."""
    remembered: Recent[torch.Tensor] = vae.__dict__.setdefault("qwen21_references", Recent(REMEMBERED))
    return remembered.get(picture_digest(picture), lambda: vae.encode(to_image(picture)))


def check_channels(vae) -> None:
    """Raises Qwen21Error if the VAE is another family's."""
    if vae.latent_channels != LATENT_CHANNELS or vae.output_channels != 4:
        raise Qwen21Error(
            f"the VAE has {vae.latent_channels} latent and {vae.output_channels} picture channels, Qwen-Image 2.1 needs {LATENT_CHANNELS} and 4: connect"
            " the VAE of the Qwen-Image 2.1 Loader"
        )


def _with_latents(conditioning, vae) -> list:
    """The conditioning with each entry's own pictures as `reference_latents`. Raises UsageError if slots and pictures differ in number."""
    entries = []
    for states, extra in conditioning:
        prepared, slots = extra.get("qwen21_references", []), len(extra.get("image_slots") or [])
        if slots != len(prepared):
            raise UsageError(f"the prompt has {slots} image slots but {len(prepared)} pictures came with it: take the conditioning from Qwen-Image 2.1 Encode")
        latents = {"reference_latents": [reference_latents(vae, one.picture) for one in prepared]} if prepared else {}
        entries.append([states, extra | latents])
    return entries
