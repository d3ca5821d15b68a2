"""ComfyUI entry point of the Qwen-Image 2.1 node pack."""

import re

WEB_DIRECTORY = "./nodes/web"  # docs/NODE_ID.md in it are the nodes' help pages
NEEDS_COMFYUI = "0.33.0"  # the version the pack is tested with; pyproject.toml says the same


async def comfy_entrypoint():
    """Called by ComfyUI: the pack's nodes. Everything that needs ComfyUI is imported here, so that importing this file needs nothing.

    Raises RuntimeError that names both versions if this ComfyUI is older than the pack needs.
    """
    _check_version()
    from .nodes import Qwen21Extension

    return Qwen21Extension()


def _check_version() -> None:
    try:
        from comfyui_version import __version__ as found
    except ImportError:
        found = "0"
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < tuple(map(int, NEEDS_COMFYUI.split("."))):
        raise RuntimeError(f"this is ComfyUI {found}, the Qwen-Image 2.1 nodes need {NEEDS_COMFYUI} or newer: update ComfyUI")
