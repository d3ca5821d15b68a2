"""ComfyUI entry point of the Qwen-Image 2.1 node pack."""


async def comfy_entrypoint():
    """Called by ComfyUI: the pack's nodes. Everything that needs ComfyUI is imported here, so that importing this file needs nothing."""
    from .nodes import Qwen21Extension

    return Qwen21Extension()
