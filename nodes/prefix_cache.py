"""Qwen21PrefixCache: where the keys and values of text and references are kept, how many, and in which precision."""

from comfy_api.latest import io

from ..qwen21.errors import Qwen21Error
from ..qwen21.prefix import PRECISIONS
from .bridge_model import QwenImage21
from .bridge_prefix import CACHE_DEVICES, CACHE_OPTION, CacheSettings
from .common import CATEGORY


class Qwen21PrefixCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Qwen21PrefixCache",
            display_name="Qwen-Image 2.1 Prefix Cache",
            category=CATEGORY,
            description="How the keys and values of prompts and references are kept, during a run and for the next: about 0.5 MiB a token at "
            "full size, 2 GiB for a 1024 x 1024 reference.",
            search_aliases=["qwen image 2.1", "kv cache", "memory", "vram", "QwenImage21Cache"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of the Qwen-Image 2.1 Loader."),
                io.Int.Input(
                    "budget_mb",
                    default=0,
                    min=0,
                    max=1 << 20,
                    step=256,
                    tooltip="What is kept beyond a run, over all prompts; the least recently used go first. 0: a quarter of the memory that is free.",
                ),
                io.Combo.Input(
                    "device",
                    options=list(CACHE_DEVICES),
                    default="auto",
                    tooltip="auto: the compute device while twice as much is free there, else host memory. off: nothing is kept, every step computes the prefix"
                    " again.",
                ),
                io.Combo.Input(
                    "precision",
                    options=list(PRECISIONS),
                    default="default",
                    tooltip="fp8_v stores values in 8 bits (a quarter less memory), fp8_kv keys as well (half); keys are the sensitive part.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, budget_mb: int, device: str, precision: str) -> io.NodeOutput:
        if not isinstance(model.model, QwenImage21):
            raise Qwen21Error(
                f"the MODEL is a {type(model.model).__name__} of another loader, whose cache this node cannot set: connect the MODEL output of the "
                "Qwen-Image 2.1 Loader"
            )
        model = model.clone()
        model.model_options["transformer_options"][CACHE_OPTION] = CacheSettings(budget_mb * 2**20, device, precision)
        return io.NodeOutput(model)
