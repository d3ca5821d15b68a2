"""ComfyUI entry point of the Qwen-Image 2.1 node pack."""

WEB_DIRECTORY = "./web"  # docs/NODE_ID.md in it are the nodes' help pages


async def comfy_entrypoint():
    """Called by ComfyUI: the pack's nodes. Everything that needs ComfyUI is imported here, so that importing this file needs nothing."""
    from .nodes import Qwen21Extension

    return Qwen21Extension()
