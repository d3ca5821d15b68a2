"""The nodes, one file a stage of the graph."""

from comfy_api.latest import ComfyExtension, io


class Qwen21Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return []
