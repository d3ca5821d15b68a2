"""A ComfyUI to test against: where it is, and the folder in which the tests let it work."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ABSENT = "no ComfyUI was found: set COMFYUI_PATH to its folder (and COMFYUI_PYTHON to its Python), or install it in ~/comfy/ComfyUI"


@dataclass(frozen=True)
class Install:
    """ComfyUI's folder and the Python that runs it."""

    folder: Path
    python: Path


def find_install() -> Install | None:
    """ComfyUI of COMFYUI_PATH, else of ~/comfy/ComfyUI; its Python of COMFYUI_PYTHON, else of the venv beside or inside it."""
    folder = Path(os.environ.get("COMFYUI_PATH") or Path.home() / "comfy/ComfyUI")
    pythons = (
        [Path(os.environ["COMFYUI_PYTHON"])]
        if os.environ.get("COMFYUI_PYTHON")
        else [home / "bin/python" for home in (folder.parent / "venv", folder / "venv", folder / ".venv")]
    )
    python = next((python for python in pythons if python.is_file()), None)
    return Install(folder, python) if python and (folder / "main.py").is_file() else None


def write_base(folder: Path, make_random: Callable) -> Path:
    """A base directory for ComfyUI: the pack as its only custom node, random checkpoints, and nothing else."""
    for name in ("custom_nodes", "models/diffusers", "models/loras", "input", "output", "temp", "user"):
        (folder / name).mkdir(parents=True)
    (folder / "custom_nodes/qwen-image-21").symlink_to(REPOSITORY, target_is_directory=True)
    make_random(folder / "models/diffusers/random", seed=0, resolution=64)
    make_random(folder / "models/diffusers/turbo", seed=1, resolution=64, turbo=True)
    return folder
