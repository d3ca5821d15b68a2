"""ComfyUI's operations, which say of themselves what the core's kernels may take over while nothing has to be done to the weights first."""

import comfy.model_management
import comfy.ops
import torch

from ..qwen21 import kernels
from ..qwen21.fp8 import multiply
from ..qwen21.kernels import Fp8Rows


def with_kernels(operations):
    """`operations`, one of ComfyUI's sets, with an RMSNorm and, if they are for quantised weights, a Linear that say so."""

    class RMSNorm(operations.RMSNorm):
        @property
        def weight_is_ready(self) -> bool:
            """Whether the weight is used as it lies there: loaded, and with its patches applied."""
            return not (self.weight_function or _is_replaced(self))

    parts = {"RMSNorm": RMSNorm}
    if getattr(operations, "_quant_config", None) is not None:
        parts["Linear"] = _row_linear(operations)
    return type("Operations", (operations,), parts)


def _row_linear(operations):
    class Linear(operations.Linear):
        """In 8 bits with one scale a tensor, ComfyUI casts the input without a scale, once for every layer that it goes to. Here each row of it
        has its own, and layers that share it may be given rows that are in FP8 already. ComfyUI still loads, patches and hands over the weight."""

        @property
        def takes_rows(self) -> bool:
            return self._multiplies_rows and not _is_replaced(self)

        @property
        def _multiplies_rows(self) -> bool:
            return (
                getattr(self, "quant_format", None) == "float8_e4m3fn"
                and kernels.run_on(comfy.model_management.get_torch_device())
                and not (self._full_precision_mm or getattr(self, "comfy_force_cast_weights", False))
                and not (self.weight_function or self.bias_function)
                and all(getattr(self, name, None) is None for name in ("bias", "input_scale", "pre_quant_scale"))
            )

        def forward(self, input: torch.Tensor | Fp8Rows, *args, **kwargs) -> torch.Tensor:
            if not isinstance(input, Fp8Rows):
                if input.requires_grad or not self._multiplies_rows:
                    return super().forward(input, *args, **kwargs)
                input = kernels.quantize_rows(input)
            comfy.ops.run_every_op()
            as_is = {"dtype": input.dtype, "device": input.values.device, "bias_dtype": input.dtype, "compute_dtype": input.dtype, "want_requant": True}
            weight, bias, stream = comfy.ops.cast_bias_weight(self, offloadable=True, **as_is)
            try:
                return multiply(input, *weight.layout_cls.get_plain_tensors(weight))
            finally:
                comfy.ops.uncast_bias_weight(self, weight, bias, stream)

    return Linear


def _is_replaced(module: torch.nn.Module) -> bool:
    """Whether hooks or another `forward` (ComfyUI's LoRAs in bypass mode) have a say in what it computes."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
