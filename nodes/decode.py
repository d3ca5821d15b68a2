"""Qwen21Decode: latents to RGB, mask and RGBA."""

import re

import torch
from comfy_api.latest import io

from ..qwen21.alpha import composite, snap
from ..qwen21.errors import Qwen21Error, UsageError
from ..qwen21.pictures import MULTIPLE
from .common import CATEGORY, LATENT_CHANNELS
from .references import check_channels

SNAP, AS_DECODED, OVER = ALPHAS = ("snap", "as decoded", "over colour")


class Qwen21Decode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Qwen21Decode",
            display_name="Qwen-Image 2.1 RGBA Decode",
            category=CATEGORY,
            description="Decodes to a picture with transparency. Uses tiles by itself when memory is short; they leave no seams.",
            search_aliases=["qwen image 2.1", "vae decode", "alpha", "transparent", "rgba", "sticker"],
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE of the Qwen-Image 2.1 Loader."),
                io.Latent.Input("latent", tooltip="From the sampler."),
                io.Combo.Input(
                    "alpha",
                    options=list(ALPHAS),
                    default=SNAP,
                    tooltip="snap: nearly opaque becomes opaque, nearly clear becomes clear, and no colour fringes. as decoded: untouched. over colour: opaque,"
                    " over the colour below.",
                ),
                io.String.Input("colour", default="#ffffff", tooltip="Background for 'over colour', as #rrggbb."),
            ],
            outputs=[
                io.Image.Output("image", display_name="image", tooltip="RGB, colour not multiplied by alpha."),
                io.Mask.Output("mask", display_name="mask", tooltip="1 where transparent, as LoadImage gives it."),
                io.Image.Output("rgba", display_name="rgba", tooltip="Four channels: SaveImage writes a PNG with transparency."),
            ],
        )

    @classmethod
    def execute(cls, vae, latent: dict, alpha: str, colour: str) -> io.NodeOutput:
        samples = latent["samples"]
        _check(vae, samples)
        background = parse_colour(colour) if alpha == OVER else None
        rgba = vae.decode(samples).movedim(-1, 1)  # (batch, 4, height, width)
        width, height = latent.get("qwen21_crop", (0, 0))
        if rgba.shape[2:] == (height + -height % MULTIPLE, width + -width % MULTIPLE):  # not if the latent was scaled meanwhile
            rgba = rgba[:, :, :height, :width]
        if alpha == SNAP:
            rgba = snap(rgba)
        elif alpha == OVER:
            rgb = composite(rgba, background)
            rgba = torch.cat([rgb, torch.ones_like(rgb[:, :1])], dim=1)
        rgba = rgba.movedim(1, -1).contiguous()
        return io.NodeOutput(rgba[..., :3].contiguous(), 1 - rgba[..., 3], rgba)


def parse_colour(text: str) -> tuple[float, float, float]:
    """#rrggbb to three numbers in [0, 1]."""
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", text.strip()):
        raise UsageError(f"the colour is {text!r}, expected # and six hexadecimal digits, such as #ffffff")
    return tuple(int(text.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _check(vae, samples: torch.Tensor) -> None:
    if vae is None:
        raise Qwen21Error("no VAE is connected: connect the VAE output of the Qwen-Image 2.1 Loader")
    check_channels(vae)
    if samples.ndim != 4 or samples.shape[1] != LATENT_CHANNELS:
        raise Qwen21Error(
            f"the LATENT has shape {tuple(samples.shape)}, this VAE decodes (batch, {LATENT_CHANNELS}, rows, columns): take it from a Qwen-Image 2.1 sampler"
        )
