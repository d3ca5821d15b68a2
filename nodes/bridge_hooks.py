"""ComfyUI's block and attention patches, and ControlNet residuals, on the target's tokens. The prefix stays cached under them.

They get what ComfyUI's own model hands out once its prefix is cached: the target's rows alone, `prefix_len` 0. A hook that must see the
prefix too sets PREFIX_OPTION in its model's transformer_options; for its runs nothing is cached, and it sees prefix and target in turn.
"""

from collections.abc import Callable

import torch

from ..qwen21.transformer import Hooks

PREFIX_OPTION = "qwen21_hooks_see_prefix"


class HostHooks(Hooks):
    """`options` are a call's transformer_options, `latents` (rows, 64, height, width) what is denoised, `control` ControlNet's residuals for these rows.

    `prefix_len` tells hooks how many of the rows they see belong to the prefix: none, or in a prefill all.
    """

    def __init__(self, options: dict, latents: torch.Tensor | None, residuals: list[torch.Tensor | None], layers: int, is_prefix: bool = False):
        self.options, self.latents, self.residuals, self.is_prefix = options, latents, residuals, is_prefix
        self.patches = options.get("patches", {})
        self.replacements = options.get("patches_replace", {}).get("dit", {})
        options["total_blocks"], options["block_type"] = layers, "single"

    def embedded(self, x: torch.Tensor) -> torch.Tensor:
        for patch in self.patches.get("post_input", []):
            x = patch({"img": x, "pe": None, "transformer_options": self.options})["img"]
        return x

    @property
    def sees_attention(self) -> bool:
        return bool(self.patches.get("attn1_patch"))

    def attention(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = q.shape[2]
        extra = {**self.options, "block_index": layer, "img_slice": [tokens if self.is_prefix else 0, tokens]}
        for patch in self.patches["attn1_patch"]:
            out = patch(q, k, v, pe=None, attn_mask=None, extra_options=extra)
            q, k, v = out.get("q", q), out.get("k", k), out.get("v", v)
        return q, k, v

    def block(self, layer: int, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        self.options["block_index"] = layer
        replacement = self.replacements.get(("single_block", layer))
        if replacement is None:
            x = run(x)
        else:
            arguments = {"img": x, "vec": None, "pe": None, "mod": None, "attn_fn": None, "prefix_len": x.shape[1] if self.is_prefix else 0}
            original = {"original_block": lambda given: {"img": run(given["img"])}}
            x = replacement(arguments | {"transformer_options": self.options}, original)["img"]
        if layer < len(self.residuals) and self.residuals[layer] is not None:
            residual = self.residuals[layer].to(x.dtype)
            x = torch.cat([x[:, : residual.shape[1]] + residual, x[:, residual.shape[1] :]], dim=1)
        for patch in self.patches.get("single_block", []):
            x = patch({"img": x, "x": self.latents, "block_index": layer, "transformer_options": self.options})["img"]
        return x


def rows_of(batch: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These `rows` of `batch`, in rising order. A list as an index would be copied to the GPU, for which the host waits."""
    return batch if len(rows) == batch.shape[0] else torch.stack([batch[row] for row in rows])


def residuals_of(control: dict | None, rows: list[int]) -> list[torch.Tensor | None]:
    """ControlNet's residuals, one (rows, tokens, dim) a block, for these `rows` of the batch."""
    if control is None:
        return []
    return [one if one is None or one.shape[0] == 1 else rows_of(one, rows) for one in control.get("input", [])]
