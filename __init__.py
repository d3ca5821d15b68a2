"""ComfyUI entry point of the Qwen-Image 2.1 node pack."""

WEB_DIRECTORY = "./web"  # docs/NODE_ID.md in it are the nodes' help pages
NEEDS_COMFYUI = "0.33.0"  # the version the pack is tested with; pyproject.toml says the same


async def comfy_entrypoint():
    """Called by ComfyUI: the pack's nodes. Everything that needs ComfyUI is imported here, so that importing this file needs nothing.

    Raises RuntimeError that names the version needed if this ComfyUI lacks what the nodes are built on.
    """
    try:
        from .nodes import Qwen21Extension
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"the Qwen-Image 2.1 nodes need ComfyUI {NEEDS_COMFYUI} or newer and the packages of their requirements.txt; here, {error}: update ComfyUI, "
            "and install the requirements into its Python"
        ) from error
    return Qwen21Extension()
