"""Qwen21PrefixCache: where a run keeps the keys and values of text and references, and in which precision."""

from comfy_api.latest import io

from ..qwen21.prefix import PRECISIONS
from .bridge_model import CACHE_DEVICES, CACHE_OPTION, CacheSettings
from .common import CATEGORY
from .schedule import schedule_of


class Qwen21PrefixCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Qwen21PrefixCache",
            display_name="Qwen-Image 2.1 Prefix Cache",
            category=CATEGORY,
            description="How the keys and values of prompt and references are kept during a run: about 0.5 MiB a token at full size, 2 GiB for a 1024 x 1024 reference.",
            search_aliases=["qwen image 2.1", "kv cache", "memory", "vram", "QwenImage21Cache"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of the Qwen-Image 2.1 Loader."),
                io.Int.Input("budget_mb", default=0, min=0, max=1 << 20, step=256, tooltip="With device auto: what is larger than this goes to host memory. 0: half of the memory that is free on the device."),
                io.Combo.Input("device", options=list(CACHE_DEVICES), default="auto", tooltip="auto: the compute device up to the budget, else host memory. off: nothing is kept, every step computes the prefix again."),
                io.Combo.Input("precision", options=list(PRECISIONS), default="default", tooltip="fp8_v stores values in 8 bits (a quarter less memory), fp8_kv keys as well (half); keys are the sensitive part."),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, budget_mb: int, device: str, precision: str) -> io.NodeOutput:
        schedule_of(model)  # refuses another family
        model = model.clone()
        model.model_options["transformer_options"][CACHE_OPTION] = CacheSettings(budget_mb * 2**20, device, precision)
        return io.NodeOutput(model)
