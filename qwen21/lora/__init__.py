"""LoRA: small files that change a denoiser's weights, in every trainer's layout.

`file` reads them, `places` finds the layers they name, `updates` are the changes themselves, `attach` applies them to a model at run time.
"""

from .attach import attach
from .file import LoraFile, digest, parse
from .places import Change, Lora, Place, places

__all__ = ["Change", "Lora", "LoraFile", "Place", "attach", "digest", "parse", "places"]
