"""comfy-kitchen's kernels, which ComfyUI brings along, for where Triton does not run (on Windows it usually does not). Imported only where it is.

They are slower than Triton's, which also write to the place that attention reads, and faster than plain PyTorch.
"""

import comfy_kitchen
import torch
from comfy_kitchen.registry import registry
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

_matrices = WeakTensorKeyDictionary()  # of the rotary tables in use, which layers and steps share


def works() -> bool:
    """Whether it has compiled kernels here: its plain PyTorch is slower than ours, and its Triton's need what ours do."""
    return all(registry.get_capable_backend(name) in ("cuda", "hip") for name in ("rms_rope1_", "apply_rope1_"))


def rotate_(x: torch.Tensor, norm: nn.RMSNorm | None, table: torch.Tensor) -> torch.Tensor:
    """`x` (batch, heads, tokens, head_dim), float16 or bfloat16, through `norm` if given, then rotated by `table` (tokens, head_dim / 2), in place."""
    matrices = _matrices.get(table)
    if matrices is None:
        columns = table.conj()[..., None] * table.new_tensor([1, 1j])
        matrices = torch.view_as_real(columns)[None, None]  # (1, 1, tokens, head_dim / 2, 2, 2), each ((cos, -sin), (sin, cos))
        _matrices[table] = matrices
    if norm is None:
        return comfy_kitchen.apply_rope1_(x, matrices)
    return comfy_kitchen.rms_rope1_(x, matrices, norm.weight.detach().to(x.dtype), norm.eps)
