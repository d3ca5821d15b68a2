"""ComfyUI's operations, which say of themselves what the core's kernels may take over while nothing has to be done to the weights first."""

from contextlib import contextmanager

import comfy.ops
import torch
from comfy.quant_ops import QuantizedTensor

from ..qwen21 import kernels
from ..qwen21.fp8 import multiplies_rows, multiply_rows
from ..qwen21.kernels import Fp8Rows


def with_kernels(operations):
    """`operations`, one of ComfyUI's sets, with an RMSNorm that knows `weight_is_ready` and, if they are for quantised weights, a Linear that knows
    `takes_rows`, as QwenImage21Transformer asks of them."""

    class RMSNorm(operations.RMSNorm):
        @property
        def weight_is_ready(self) -> bool:
            """Whether the weight is used as it lies there: loaded, and with its patches applied."""
            return not self.weight_function

    parts = {"RMSNorm": RMSNorm}
    if getattr(operations, "_quant_config", None) is not None:
        parts["Linear"] = _row_linear(operations)
    return type("Operations", (operations,), parts)


def with_lending(operations):
    """`operations`, one of ComfyUI's sets, with a Conv2d that knows `lend`, as the core's autoencoder asks of it."""

    class Conv2d(operations.Conv2d):
        @contextmanager
        def lend(self, x: torch.Tensor):
            """Weight and bias as ComfyUI hands them over for `x`: loaded, patched and cast. Once given back, what it copied for the call may be overwritten."""
            comfy.ops.run_every_op()
            weight, bias, stream = comfy.ops.cast_bias_weight(self, x, offloadable=True)
            try:
                yield weight, bias if bias is self.bias else bias.clone()
            finally:
                comfy.ops.uncast_bias_weight(self, weight, bias, stream)

    return type("Operations", (operations,), {"Conv2d": Conv2d})


def _row_linear(operations):
    class Linear(operations.Linear):
        """In 8 bits with one scale a tensor, ComfyUI casts the input without a scale, once for every layer that it goes to. Here each row of it
        has its own, and layers that share it may be given rows that are in FP8 already. ComfyUI still loads, patches and hands over the weight."""

        def takes_rows(self, x: torch.Tensor) -> bool:
            """Whether `forward` takes Fp8Rows in place of `x`. Not under a LoRA beside the weight, whose hook multiplies the input itself."""
            return self._multiplies_rows(x) and kernels.untouched(self)

        def _multiplies_rows(self, x: torch.Tensor) -> bool:
            """Whether `x` is multiplied in FP8 by a weight as ComfyUI stores it. Asked for every layer of every step, and nn.Module takes long to
            say that an attribute is not there."""
            own, parameters = self.__dict__, self._parameters
            return (
                own.get("quant_format") == "float8_e4m3fn"
                and isinstance(parameters["weight"], QuantizedTensor)
                and not (self._full_precision_mm or own.get("comfy_force_cast_weights"))
                and not (self.weight_function or self.bias_function)
                and parameters["bias"] is parameters.get("input_scale") is parameters.get("pre_quant_scale") is None
                and not (x.requires_grad or torch.compiler.is_compiling())
                and _runs_on(x.device)
            )

        def forward(self, input: torch.Tensor | Fp8Rows, *args, **kwargs) -> torch.Tensor:
            """(..., inputs) to (..., outputs), in the dtype of the input."""
            if not isinstance(input, Fp8Rows):
                if not self._multiplies_rows(input):
                    return super().forward(input, *args, **kwargs)
                input = kernels.quantize_rows(input)
            comfy.ops.run_every_op()
            weight, device = self.weight, input.values.device
            stored = weight.layout_cls.get_plain_tensors(weight)
            if stored[0].device == device:  # cast_bias_weight would hand over the same, and take ten times as long
                return multiply_rows(input, *stored)
            weight, bias, stream = comfy.ops.cast_bias_weight(
                self, dtype=weight.dtype, device=device, bias_dtype=input.dtype, compute_dtype=input.dtype, want_requant=True, offloadable=True
            )
            try:
                return multiply_rows(input, *weight.layout_cls.get_plain_tensors(weight))
            finally:
                comfy.ops.uncast_bias_weight(self, weight, bias, stream)

    return Linear


def _runs_on(device: torch.device) -> bool:
    """Whether rows are made by kernels and multiplied on `device`. In plain PyTorch making them would take longer than it saves."""
    return kernels.run_on(device) and multiplies_rows(device)
