"""Every kernel compiles for a GPU at the published widths, and reads and writes 16 bytes at once. Needs Triton, no GPU."""

import re

import pytest
from unit.devices import printed

pytest.importorskip("triton", reason="needs Triton")

# In a process of its own: in this one kernels are interpreted.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qwen21.kernels import fused, fused_maps


def show(name, kernel, free, warps, **arguments):
    types, constants, aligned = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        value = arguments[argument]
        if isinstance(value, str):
            types[argument] = value
            if argument not in free and value != "fp32":
                aligned[(i,)] = [["tt.divisibility", 16]]
        else:
            types[argument], constants[(i,)] = "constexpr", value
    ptx = triton.compile(ASTSource(kernel, types, constants, aligned), GPUTarget("cuda", 90, 32), {"num_warps": warps}).asm["ptx"]
    print("###", name, ptx)


half, full, fp8 = "*bf16", "*fp32", "*fp8e4nv"
limits = {"FP8_MAX": fused.FP8_MAX, "TINY": fused.TINY}
for to_fp8 in (False, True):
    out = {"FP8": to_fp8, **limits}
    h = {"h_out": fp8 if to_fp8 else half, "h_scales": full if to_fp8 else half}
    x = {"x": half, "branch": half, "gate": half, "scale": half, "x_out": half, "tokens": "i32", "eps": "fp32", "WIDTH": 4096, "BLOCK": 4096}
    for residual, norm in ((False, True), (True, True), (True, False)):
        show("residual_norm", fused._residual_norm_kernel, ("tokens",), 8, **x, **h, RESIDUAL=residual, NORM=norm, **out)
    wide = {"out": h["h_out"], "scales": h["h_scales"], "WIDTH": 12288, "BLOCK": 16384}
    show("swiglu", fused._swiglu_kernel, (), 16, gate=half, up=half, **wide, **out)
strides = dict.fromkeys(("tokens", "x_batch", "x_token", "x_head"), "i32")
tensors = {"x": half, "out": fp8, "scales": full}
for dim in (4096, 128):
    show("quantize_rows", fused._quantize_rows_kernel, ("tokens",), 8, **tensors, **strides, WIDTH=4096, DIM=dim, BLOCK=4096, **limits)
for norm, rotate in ((True, True), (False, True), (False, False)):
    strides = dict.fromkeys(("tokens", "x_batch", "x_token", "x_head", "out_batch", "out_token", "out_head"), "i32")
    tensors = {"x": half, "weight": half, "table": full, "out": half, "eps": "fp32"}
    show("place", fused._place_kernel, ("tokens",), 8, **tensors, **strides, HEADS=32, BLOCK=32, DIM=128, NORM=norm, ROTATE=rotate)
strides = dict.fromkeys(("rows", "tokens", "out_batch", "out_head", "out_token"), "i32")
show("widen", fused._widen_kernel, ("rows", "tokens"), 4, x=fp8, scales=full, out=half, **strides, ROWS=16, DIM=128)
for channels in (96, 144, 1152):
    block = triton.next_power_of_2(channels)
    norm = {"gamma": half, "out": half, "factor": "fp32", "eps": "fp32", "CHANNELS": channels, "BLOCK": block, "POSITIONS": max(4096 // block, 1)}
    show("rms_norm", fused_maps._rms_norm_kernel, ("positions",), 4, x=half, bias=half, positions="i32", **norm, BIAS=True, SILU=True)
    show("add", fused_maps._add_kernel, (), 8, x=half, bias=half, shortcut=half, elements="i64", CHANNELS=channels, BLOCK=4096, BIAS=True)
    sizes = dict.fromkeys(("positions", "rows", "columns"), "i32")
    tile = dict(zip(("BLOCK", "POSITIONS"), fused_maps._tile(channels)), CHANNELS=channels, INPUTS=channels, FRAMES=2, BIAS=True)
    show("upsampled_add", fused_maps._upsampled_add_kernel, tuple(sizes), 4, x=half, bias=half, small=half, out=half, **sizes, **tile, REPEATS=8, PHASES=True)
    show("averaged_add", fused_maps._averaged_add_kernel, tuple(sizes), 4, x=half, bias=half, large=half, **sizes, **tile, FACTOR=2, GROUP=8)
"""


def test_they_compile(tmp_path):
    shown = printed(COMPILE, TRITON_CACHE_DIR=str(tmp_path)).split("### ")[1:]
    assert len(shown) == 26
    for assembly in shown:
        name = assembly.split(maxsplit=1)[0]
        assert re.search(r"ld\.global\S*\.v4\.b32", assembly) and re.search(r"st\.global\S*\.v4\.b32", assembly), name
        assert ".local" not in assembly, f"{name} keeps values in memory"
