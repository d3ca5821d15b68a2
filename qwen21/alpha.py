"""What to do with the alpha that the VAE decodes: ordinary pictures come back at 248 to 255, and colour under clear pixels is arbitrary."""

import torch
import torch.nn.functional as F

OPAQUE = 248 / 255
CLEAR = 4 / 255


def snap(rgba: torch.Tensor) -> torch.Tensor:
    """Nearly opaque becomes opaque, nearly clear becomes clear, and clear pixels take the colour of what lies around them, so that
    nothing fringes when the picture is scaled or composited. `rgba` (batch, 4, height, width) in [0, 1]; same shape."""
    rgb, alpha = rgba[:, :3], rgba[:, 3:]
    alpha = torch.where(alpha >= OPAQUE, 1.0, torch.where(alpha <= CLEAR, 0.0, alpha))
    return torch.cat([bleed(rgb, (alpha > 0).to(rgb.dtype)), alpha], dim=1)


def bleed(rgb: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Fill `rgb` (batch, 3, height, width) where `known` (batch, 1, height, width) is 0 from the nearest known colours.

    Averages over ever larger squares fill what smaller ones left; known pixels keep their value. With nothing known, returns zeros.
    """
    if bool(known.all()):
        return rgb
    colour = rgb * known
    if max(known.shape[2:]) > 1:
        halves = {"kernel_size": 2, "ceil_mode": True, "count_include_pad": False}
        weight = F.avg_pool2d(known, **halves)
        smaller = bleed(F.avg_pool2d(colour, **halves) / weight.clamp_min(torch.finfo(rgb.dtype).tiny), (weight > 0).to(rgb.dtype))
        around = F.interpolate(smaller, size=known.shape[2:], mode="bilinear", align_corners=False)
        colour = torch.where(known > 0, rgb, around)
    return colour


def composite(rgba: torch.Tensor, colour: tuple[float, float, float]) -> torch.Tensor:
    """Opaque (batch, 3, height, width) of straight-alpha `rgba` (batch, 4, height, width) over a `colour` in [0, 1]."""
    rgb, alpha = rgba[:, :3], rgba[:, 3:]
    return rgb * alpha + rgb.new_tensor(colour)[:, None, None] * (1 - alpha)
