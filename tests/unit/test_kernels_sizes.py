"""Another prompt length, canvas or batch compiles no kernel: the whole model, on a GPU if there is one. Elsewhere nothing is computed: Triton is
asked what it would compile for each launch."""

import pytest
import torch
from unit.devices import printed

pytest.importorskip("triton", reason="needs Triton")

from qwen21 import kernels

# In a process of its own: in this one kernels are interpreted, or compiled already.
PAINT = """
import copy
from types import SimpleNamespace

import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from qwen21 import kernels
from qwen21.config import TransformerConfig, VAEConfig
from qwen21.fp8 import quantize_linears
from qwen21.kernels import fused, fused_maps
from qwen21.prefix import PRECISIONS, PrefixKV
from qwen21.transformer import Hooks, QwenImage21Transformer
from qwen21.vae import QwenImage21VAE
from qwen21.workspace import Workspace

torch.set_num_threads(1)
device, dtype, keys, compiled = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16, set(), []
if device == "cuda":
    triton.knobs.runtime.jit_post_compile_hook = lambda repr, **_: compiled.append(repr)
else:
    backend = make_backend(GPUTarget("cuda", 90, 32))

    def run(kernel, *arguments, grid, warmup, **options):
        _, types, options = create_function_from_signature(kernel.signature, kernel.params, backend)(*arguments, **options)
        key = f"{kernel.__name__} {options} {dict(zip(kernel.arg_names, types))}"
        if key not in keys:
            keys.add(key)
            compiled.append(key)

    JITFunction.run = run
    kernels.fusible = lambda x: True
    kernels.attention_runs_on = lambda device: tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
kernels.LEAST_SCORES = 0
modules = [fused, fused_maps, *([kernels._hopper()] if kernels.attention_runs_on(torch.empty(0, device=device).device) else [])]


class Watching(Hooks):
    def attention(self, layer, q, k, v):
        return q, k, v


def random(*shape):
    return torch.randn(shape, device=device, dtype=dtype)


def filled(module):
    for parameter in module.parameters():
        parameter.data.normal_(std=0.1)
    return module.eval().requires_grad_(False)


denoiser = filled(QwenImage21Transformer(TransformerConfig(num_layers=2, num_attention_heads=2, context_in_dim=64), device=device, dtype=dtype))
fp8 = copy.deepcopy(denoiser)
quantize_linears(fp8)
host = SimpleNamespace(Conv2d=type("HostConv", (nn.Conv2d,), {}))
autoencoders = [filled(QwenImage21VAE(VAEConfig(16, 16), operations, device=device, dtype=dtype)) for operations in (nn, host)]


@torch.inference_mode()
def paint(batch, text, grids, rows, columns):
    for model in (denoiser, fp8):
        prefix = model.prefill(random(1, text, 64), range(len(grids)), [random(1, 64, *grid) for grid in grids])
        prefix = model.prefill(random(1, text, 64), past=prefix)
        for precision in PRECISIONS:
            stored = PrefixKV(tuple(part.quantized(precision) for part in prefix.parts), prefix.position)
            for hooks in (Hooks(), Watching()):
                model.denoise(random(batch, 64, rows, columns), 0.5, stored, hooks=hooks, workspace=Workspace())
    for vae in autoencoders:
        for tile in (None, 2):
            vae.decode(random(batch, 64, rows, columns), tile)
            vae.encode(random(batch, 4, 16 * rows, 16 * columns), tile and 16 * tile)


paint(1, 16, [(4, 4)], 4, 4)
known = len(compiled)
for size in ((8, 16, [(4, 4)], 4, 4), (1, 17, [(3, 5)], 3, 5), (1, 1, [(1, 1)], 1, 1), (3, 33, [], 1, 3), (1, 300, [(5, 7), (8, 2)], 8, 2), (1, 9, [], 11, 12)):
    paint(*size)
if device == "cpu":  # too large to be there
    large = torch.empty(2**28, 16, 1, 1, device="meta", dtype=dtype)
    fused_maps.add(large, large[0, :, 0, 0], large)
there = {name for module in modules for name, kernel in vars(module).items() if isinstance(kernel, JITFunction) and name.endswith("_kernel")}
print("never launched:", *sorted(name for name in there if not any(one.startswith(name) for one in compiled)))
print("compiled again:", *compiled[known:], sep="\\n")
"""


def test_another_size_compiles_nothing():
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < kernels.FP8_CAPABILITY:
        pytest.skip("needs a GPU that computes in FP8")
    assert printed(PAINT).split("\n") == ["never launched:", "compiled again:", ""]
