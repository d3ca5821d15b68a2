"""The nodes, one file a stage of the graph: load, encode, references, sample, decode; LoRA, schedule and prefix cache beside them."""

from comfy_api.latest import ComfyExtension, io

from .decode import Qwen21Decode
from .encode import Qwen21Encode
from .loader import Qwen21Loader
from .lora import Qwen21Lora
from .prefix_cache import Qwen21PrefixCache
from .references import Qwen21ReferenceLatents
from .sampler import Qwen21Sampler
from .schedule import Qwen21Schedule


class Qwen21Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [Qwen21Loader, Qwen21Lora, Qwen21Encode, Qwen21ReferenceLatents, Qwen21Sampler, Qwen21Decode, Qwen21Schedule, Qwen21PrefixCache]
