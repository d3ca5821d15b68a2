"""The denoiser's speed against the reference's and against what the card can do.

    python tests/bench/denoiser.py [--size small|full] [--device cpu|cuda] [--workload t2i-1024] [--way ours] [--only steps] [--repeats 5] [--json]

Random weights, the same for all: "small" is a toy of the same architecture in float32, "full" the published size in bfloat16 (14 GB). The floor
of a step is its matrix products at the rate the card sustains, measured here, plus its attention at that of PyTorch's; element-wise work
is not in it. Measures: "ceilings" of the card, "kernels" (each against the card's memory), "steps" (a decode step of every way, in turn),
"prefill" (text and references; the reference's first step is in its figure), "run" (from conditioning to latents), "error" (of the velocity against
float32), "profile", "memory".
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from unittest import mock

import torch
import torch.nn.functional as F
from diffusers.models import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from measuring import arguments, device_ms, in_turn, peak_gib, profile_rows, relative_error, sustained_ms, take
from reference import reference_transformer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from qwen21 import attention, kernels
from qwen21.checkpoint import meta_parameters
from qwen21.config import ScheduleConfig, TransformerConfig
from qwen21.fp8 import quantize_linears
from qwen21.prefix import PrefixKV
from qwen21.random_model import TRANSFORMER
from qwen21.rope import rotary_table
from qwen21.sampling import euler
from qwen21.schedule import sigmas
from qwen21.transformer import QwenImage21Transformer
from qwen21.workspace import InlineCopies, Workspace

HEAD, GAP, TEXT = 4, 3, 300  # text tokens: before the first reference, between two, in all
STEPS = 3  # a timed call
SIGMA = 0.7
KERNELS = ("norm_scale", "residual", "residual_norm_scale", "swiglu", "place", "attention", "widen", "quantize_rows")


@dataclass(frozen=True)
class Workload:
    """Sides in latent positions of the target and of each of the references, whose areas are about 1024 x 1024 pixels."""

    target: int
    references: int

    def sides(self, small: bool) -> tuple[int, int]:
        return (self.target // 16, 4) if small else (self.target, 64)


WORKLOADS = {
    "t2i-1024": Workload(64, 0),
    "edit-1024-1": Workload(64, 1),
    "edit-1024-2": Workload(64, 2),
    "edit-1024-4": Workload(64, 4),
    "t2i-2048": Workload(128, 0),
    "edit-2048-5": Workload(128, 5),
}


class Inputs:
    """Random text and latents of a workload, as ours and the reference take them."""

    def __init__(self, workload: Workload, config: TransformerConfig, small: bool, device: torch.device, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.side, reference = workload.sides(small)
        text = TEXT // 10 if small else TEXT
        self.context = random(1, text, config.context_in_dim)
        self.slots = [HEAD + GAP * i for i in range(workload.references)]
        self.references = [random(1, config.in_channels, reference, reference) for _ in range(workload.references)]
        self.target = random(1, config.in_channels, self.side, self.side)
        self.tokens, self.prefix_tokens = self.side**2, text + workload.references * reference**2

    def reference_arguments(self, sigma: float) -> dict:
        """Each slot of the reference's mask stands for 2 x 2 latent tokens; what stands in a picture's place is overwritten."""
        pieces, mask, start = [], [], 0
        for slot, latents in zip([*self.slots, self.context.shape[1]], [*self.references, None]):
            pieces.append(self.context[:, start:slot])
            mask += [False] * (slot - start)
            if latents is not None:
                pieces.append(self.context.new_zeros(1, latents[0, 0].numel() // 4, self.context.shape[2]))
                mask += [True] * (latents[0, 0].numel() // 4)
            start = slot
        pictures = [*self.references, self.target]
        return {
            "hidden_states": torch.cat([latents.flatten(2).transpose(1, 2) for latents in pictures], dim=1),
            "encoder_hidden_states": torch.cat(pieces, dim=1),
            "timestep": (torch.full((1,), 1000 * sigma).to(self.target) / 1000),
            "img_shapes": [[(1, *latents.shape[2:]) for latents in pictures]],
            "img_mask": torch.tensor([mask + [True] * (self.tokens // 4)], device=self.target.device),
            "return_dict": False,
        }


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options, self.device = options, torch.device(options.device)
        self.small = options.size == "small"
        self.dtype = torch.float32 if self.small else torch.bfloat16
        self.config = TRANSFORMER if self.small else TransformerConfig()
        with meta_parameters():
            self.model = QwenImage21Transformer(self.config)
        self.model.to_empty(device=self.device).to(self.dtype).eval().requires_grad_(False)
        torch.manual_seed(0)
        for name, weight in self.model.named_parameters():
            one = name.endswith(("norm_q.weight", "norm_k.weight"))
            nn.init.normal_(weight, mean=float(one), std=0.1 if weight.ndim == 1 else weight.shape[1] ** -0.5)
        self._ceilings: dict[str, float] = {}

    @cached_property
    def reference(self) -> QwenImage21Transformer2DModel:
        """The reference's model over the same weights."""
        return reference_transformer(self.model)

    @cached_property
    def fp8(self) -> QwenImage21Transformer:
        model = copy.deepcopy(self.model)
        quantize_linears(model)
        return model

    def inputs(self, name: str) -> Inputs:
        return Inputs(WORKLOADS[name], self.config, self.small, self.device, self.dtype)

    def ceiling(self, name: str, flops: float, function: Callable[[], object]) -> float:
        """FLOP/s of `function`, sustained; measured once."""
        if name not in self._ceilings:
            self._ceilings[name] = flops / sustained_ms(function, self.device, 0.05 if self.small else 1.0) * 1000
        return self._ceilings[name]

    def matmul_rate(self, fp8: bool = False) -> float:
        rows, dim = (64 if self.small else 4096), self.config.dim
        x, weight = (torch.randn(n, dim, device=self.device).to(self.dtype) for n in (rows, 3 * dim))
        flops = 2 * rows * dim * 3 * dim
        if not fp8:
            return self.ceiling(f"matmul {self.dtype}", flops, lambda: F.linear(x, weight))
        if self.device.type != "cuda":
            return float("nan")
        (a, a_scales, _), (b, b_scales, _) = kernels.quantize_rows(x), kernels.quantize_rows(weight)
        return self.ceiling(
            "matmul fp8",
            flops,
            lambda: torch._scaled_mm(a, b.t(), scale_a=a_scales[:, None], scale_b=b_scales[None], out_dtype=torch.bfloat16, use_fast_accum=True),
        )

    def split_rates(self) -> None:
        """Of products that share an input, one by one and as one: queries, keys and values; the two of the MLP."""
        rows, dim = (64 if self.small else 4096), self.config.dim
        x = torch.randn(rows, dim, device=self.device).to(self.dtype)
        for parts, columns in ((3, dim), (2, dim * self.config.mlp_ratio)):
            weight = torch.randn(parts * columns, dim, device=self.device).to(self.dtype)
            flops, pieces = 2 * rows * weight.numel(), weight.split(columns)
            self.ceiling(f"matmul, {parts} of {columns} columns", flops, lambda pieces=pieces: [F.linear(x, piece) for piece in pieces])
            self.ceiling(f"matmul, one of {parts * columns} columns", flops, lambda weight=weight: F.linear(x, weight))

    def attention_rate(
        self, queries: int, keys: int, q_tokens_first: bool = False, kv_tokens_first: bool = False, attention=F.scaled_dot_product_attention
    ) -> float:
        """Of PyTorch's choice or another, sustained; heads before tokens in memory unless told otherwise."""
        heads, dim = self.config.num_attention_heads, self.config.attention_head_dim

        def random(tokens: int, tokens_first: bool) -> torch.Tensor:
            x = torch.randn(1, tokens, heads, dim, device=self.device).to(self.dtype).transpose(1, 2)
            return x if tokens_first else x.contiguous()

        q, k, v = random(queries, q_tokens_first), random(keys, kv_tokens_first), random(keys, kv_tokens_first)
        owner = "" if attention is F.scaled_dot_product_attention else ", ours"
        name = f"attention {queries} x {keys}, queries {'BSHD' if q_tokens_first else 'BHSD'}, keys {'BSHD' if kv_tokens_first else 'BHSD'}{owner}"
        return self.ceiling(name, 4 * queries * keys * heads * dim, lambda: attention(q, k, v))

    def memory_rate(self) -> float:
        """Bytes read and written a second by a device copy."""
        x = torch.randn((1 << 16) if self.small else (1 << 28), device=self.device)
        y = torch.empty_like(x)
        return self.ceiling("copy", 2 * x.nbytes, lambda: y.copy_(x))

    def step_flops(self, queries: int, keys: int) -> tuple[float, float]:
        """Of the blocks' matrix products, and of attention."""
        c = self.config
        return 2 * queries * (4 + 3 * c.mlp_ratio) * c.dim**2 * c.num_layers, 4 * queries * keys * c.dim * c.num_layers

    def floor_ms(self, inputs: Inputs, fp8: bool = False) -> float:
        """Of a decode step."""
        queries, keys = inputs.tokens, inputs.prefix_tokens + inputs.tokens
        linear, attention = self.step_flops(queries, keys)
        return 1000 * (linear / self.matmul_rate(fp8) + attention / self.attention_rate(queries, keys))

    def prefill_floor_ms(self, inputs: Inputs) -> float:
        """Of text and references, picture by picture; the last block needs keys and values only. Text attention counts as its pictures'."""
        linear, _ = self.step_flops(inputs.prefix_tokens, 1)
        c, total, start = self.config, 0.0, 0
        for slot, latents in zip([*inputs.slots, inputs.context.shape[1]], [*inputs.references, None]):
            size = latents[0, 0].numel() if latents is not None else 0
            start += size
            keys = start + slot
            if size:
                total += 4 * size * keys * c.dim * (c.num_layers - 1) / self.attention_rate(size, keys)
        linear *= (c.num_layers - 1 + 2 / (4 + 3 * c.mlp_ratio)) / c.num_layers
        return 1000 * (linear / self.matmul_rate() + total)

    def _captured(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """STEPS replays of `step` as one CUDA graph."""
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, stream=stream):
            out = step()

        def steps() -> torch.Tensor:
            for _ in range(STEPS):
                graph.replay()
            return out

        return steps

    def prefill(self, inputs: Inputs, model: QwenImage21Transformer | None = None) -> PrefixKV:
        return (self.model if model is None else model).prefill(inputs.context, inputs.slots, inputs.references)

    def reference_step(self, inputs: Inputs, cache: QwenImage21KVCache, mode: str, model=None) -> torch.Tensor:
        out = (self.reference if model is None else model)(**inputs.reference_arguments(SIGMA), kv_cache=cache, kv_cache_mode=mode)[0]
        return out[:, -inputs.tokens :].transpose(1, 2).unflatten(2, inputs.target.shape[2:])

    def way(self, name: str, inputs: Inputs) -> Callable[[], torch.Tensor]:
        """STEPS decode steps of `name`, one of WAYS; the last velocity is returned."""
        if name.startswith("reference"):
            model = self.reference
            cache = QwenImage21KVCache(self.config.num_layers)
            self.reference_step(inputs, cache, "extract")
            if "compiled" in name:
                model = with_compiled_blocks(model)
            return lambda: [self.reference_step(inputs, cache, "cached", model) for _ in range(STEPS)][-1]
        model = self.fp8 if "fp8" in name else self.model
        prefix = self.prefill(inputs, model)
        workspace = (
            Workspace(lambda device: InlineCopies(), _never) if "not copied ahead" in name else Workspace(ample=_never if "every step" in name else None)
        )
        context = WAYS[name]
        if "compiled" in name:
            model = with_compiled_blocks(model)
        if "graph" in name:
            sigma = torch.tensor(SIGMA, device=self.device)
            return self._captured(lambda: model.denoise(inputs.target, sigma, prefix, workspace=workspace))

        def steps() -> torch.Tensor:
            with context():
                return [model.denoise(inputs.target, SIGMA, prefix, workspace=workspace) for _ in range(STEPS)][-1]

        return steps


def with_compiled_blocks(model: nn.Module) -> nn.Module:
    """`model` over the same weights with its blocks compiled, each by itself: as a whole the reference takes minutes."""
    model = copy.copy(model)
    model._modules = dict(model._modules, transformer_blocks=nn.ModuleList(map(copy.copy, model.transformer_blocks)))
    for block in model.transformer_blocks:
        block.compile(dynamic=False)
    return model


def without_triton() -> AbstractContextManager:
    return mock.patch.object(kernels, "fusible", lambda x: False)


@contextmanager
def plain(names: Sequence[str] = KERNELS) -> Iterator[None]:
    """Kernels `names` by plain PyTorch."""

    def unfused(function):
        def run(*args, **options):
            with without_triton(), mock.patch.object(kernels, "kitchen_fits", lambda x: False):
                return function(*args, **options)

        return run

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(kernels, name, unfused(getattr(kernels, name))))
        yield


@contextmanager
def queries_tokens_first() -> Iterator[None]:
    """Queries, and so what attention returns, with a token's heads together in memory, as the layer after it wants them."""
    place = kernels.place

    def run(x, norm, table, out=None):
        return place(x, norm, table, x.new_empty(x.shape).transpose(1, 2) if out is None else out)

    with mock.patch.object(kernels, "place", run):
        yield


def masked(function: Callable) -> Callable:
    """With text that follows pictures under a mask in memory instead of PyTorch's causal bias."""

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2])._materialize(q.device))

    return mock.patch.object(attention, "causal_attention", causal)(function)


def _never(nbytes: int, device: torch.device) -> bool:
    return False


@contextmanager
def pytorchs_attention(backend: SDPBackend) -> Iterator[None]:
    with plain(["attention"]), sdpa_kernel(backend):
        yield


WAYS = {
    "reference": nullcontext,
    "reference compiled": nullcontext,
    "ours": nullcontext,
    "ours, plain PyTorch": plain,
    "ours, comfy-kitchen for Triton": without_triton,
    "ours, prefix copied every step": nullcontext,
    "ours, prefix copied every step, not copied ahead": nullcontext,
    "ours, one CUDA graph, not copied ahead": nullcontext,
    "ours, blocks compiled": nullcontext,
    **{f"ours, without {name}": lambda name=name: plain([name]) for name in KERNELS},
    "ours, queries tokens first": queries_tokens_first,
    "ours, cuDNN attention": lambda: pytorchs_attention(SDPBackend.CUDNN_ATTENTION),
    "ours, flash attention": lambda: pytorchs_attention(SDPBackend.FLASH_ATTENTION),
    "ours fp8": nullcontext,
    "ours fp8, plain PyTorch": plain,
}
DEFAULT_WAYS = ("reference", "ours", "ours, plain PyTorch", "ours fp8")


def ceilings(bench: Bench) -> list[dict]:
    """What the card sustains; attention by layout in memory, for the shapes of the workloads."""
    bench.matmul_rate()
    bench.matmul_rate(fp8=True)
    bench.memory_rate()
    bench.split_rates()
    for name in bench.options.workload:
        inputs = bench.inputs(name)
        keys = inputs.prefix_tokens + inputs.tokens
        for layout in ((False, False), (True, False), (False, True), (True, True)):
            bench.attention_rate(inputs.tokens, keys, *layout)
        if bench.device.type == "cuda" and kernels.attention_runs_on(torch.empty(0, device=bench.device).device):
            bench.attention_rate(inputs.tokens, keys, attention=kernels.attention)
    rows = [{"what": name, "tera_a_second": rate / 1e12} for name, rate in bench._ceilings.items()]
    if bench.device.type == "cuda":
        there = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
        here = torch.empty_like(there, device=bench.device)
        ms = sustained_ms(lambda: here.copy_(there, non_blocking=True), bench.device)
        rows.append({"what": "copy from pinned host memory", "tera_a_second": there.nbytes / ms / 1e9})
    return rows


def kernel_rates(bench: Bench) -> list[dict]:
    """Each kernel alone at the tokens of the first workload: ms, ms a step, and the share of the card's memory rate; the same in plain PyTorch, and
    without Triton where comfy-kitchen has a kernel. At 4096 tokens a GPU may be done before the host has asked for the next: see t2i-2048 too."""
    config, inputs = bench.config, bench.inputs(bench.options.workload[0])
    tokens, dim, heads = inputs.tokens, config.dim, config.num_attention_heads

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=bench.device).to(bench.dtype)

    x, branch, gate, scale = random(1, tokens, dim), random(1, tokens, dim), random(1, 1, dim), random(1, 1, dim)
    wide = random(2, 1, tokens, dim * config.mlp_ratio)
    norm = nn.LayerNorm(dim, eps=config.eps, elementwise_affine=False)
    head_norm = bench.model.transformer_blocks[0].attn.norm_k
    split = x.unflatten(-1, (heads, -1))
    table = rotary_table(torch.arange(3 * tokens, device=bench.device).view(-1, 3) % 64, config.axes_dims_rope)
    room = random(1, heads, tokens + 300, config.attention_head_dim)[:, :, 300:]
    values, scales, _ = kernels.quantize_rows(split.transpose(1, 2).contiguous())
    size = x.nbytes
    half = size // x.element_size()
    cases = {
        "norm_scale": (2 * size, 1, lambda: kernels.norm_scale(x, norm, scale)),
        "norm_scale to fp8": (size + half, 1, lambda: kernels.norm_scale(x, norm, scale, fp8=True)),
        "residual": (3 * size, 1, lambda: kernels.residual(x, branch, gate)),
        "residual_norm_scale": (4 * size, 1, lambda: kernels.residual_norm_scale(x, branch, gate, norm, scale)),
        "swiglu": (3 * config.mlp_ratio * size, 1, lambda: kernels.swiglu(*wide)),
        "swiglu to fp8": ((2 * size + half) * config.mlp_ratio, 1, lambda: kernels.swiglu(*wide, fp8=True)),
        "place, norm and rotation": (2 * size, 2, lambda: kernels.place(split, head_norm, table, room)),
        "place": (2 * size, 1, lambda: kernels.place(split, None, None, room)),
        "widen": (size + half, 2, lambda: kernels.widen(values, scales[..., None], room)),
        "quantize_rows": (size + half, 1, lambda: kernels.quantize_rows(x)),
    }
    rows = []
    for name, (nbytes, times, function) in cases.items():
        ms = sustained_ms(function, bench.device, 0.1)
        with plain():
            slow = sustained_ms(function, bench.device, 0.1)
        with without_triton():
            kitchen = sustained_ms(function, bench.device, 0.1) if "rotation" in name and kernels.kitchen_fits(x) else None
        rate = nbytes / ms * 1000 / bench.memory_rate()
        rows.append({"what": name, "ms": ms, "ms_a_step": ms * times * config.num_layers, "of_memory_rate": rate, "plain_ms": slow, "kitchen_ms": kitchen})
    return rows


def steps(bench: Bench) -> list[dict]:
    """A decode step of every way, in turn: ms, the floor, and TFLOP/s reached."""
    rows = []
    for workload in bench.options.workload:
        inputs = bench.inputs(workload)
        linear, attention = bench.step_flops(inputs.tokens, inputs.prefix_tokens + inputs.tokens)
        measured = in_turn({name: bench.way(name, inputs) for name in bench.options.way}, bench.device, bench.options.repeats)
        base = measured[bench.options.way[0]]["ms"]
        for name, row in measured.items():
            ms, floor = row["ms"] / STEPS, bench.floor_ms(inputs, "fp8" in name)
            rates = {"floor_ms": floor, "of_floor": ms / floor, "tflops": (linear + attention) / ms / 1e9, "of_first": row["ms"] / base}
            rows.append({"what": f"{workload}, {name}", **row, "ms": ms, "host_ms": row["host_ms"] / STEPS, **rates})
    return rows


def prefill(bench: Bench) -> list[dict]:
    """Text and references; for the reference, its first step, which contains them."""
    rows = []
    for workload in bench.options.workload:
        inputs = bench.inputs(workload)
        ways = {
            "reference, prefill and first step": lambda inputs=inputs: bench.reference_step(inputs, QwenImage21KVCache(bench.config.num_layers), "extract"),
            "ours, prefill and first step": lambda inputs=inputs: bench.model.denoise(inputs.target, SIGMA, bench.prefill(inputs)),
            "ours, prefill": lambda inputs=inputs: bench.prefill(inputs),
            "ours, prefill, text under a mask": lambda inputs=inputs: masked(bench.prefill)(inputs),
            "ours fp8, prefill": lambda inputs=inputs: bench.prefill(inputs, bench.fp8),
        }
        for name, row in in_turn(ways, bench.device, bench.options.repeats).items():
            floor = {"floor_ms": bench.prefill_floor_ms(inputs)} if name.startswith("ours, prefill") and "step" not in name and inputs.references else {}
            rows.append({"what": f"{workload}, {name}", **row, **floor, **({"of_floor": row["ms"] / floor["floor_ms"]} if floor else {})})
    return rows


def run(bench: Bench) -> list[dict]:
    """Seconds from conditioning to latents, `--steps` steps, the first with its prefill."""
    rows = []
    for workload in bench.options.workload:
        inputs = bench.inputs(workload)
        schedule = sigmas("dynamic", bench.options.steps, inputs.tokens, ScheduleConfig()).to(bench.device)

        def ours(model: QwenImage21Transformer, inputs=inputs, schedule=schedule) -> torch.Tensor:
            prefix, workspace = bench.prefill(inputs, model), Workspace()
            return euler(inputs.target, schedule, lambda x, sigma: model.denoise(x.to(bench.dtype), sigma, prefix, workspace=workspace))

        def reference(inputs=inputs, schedule=schedule) -> None:
            cache = QwenImage21KVCache(bench.config.num_layers)
            for step in range(len(schedule) - 1):
                bench.reference_step(inputs, cache, "cached" if step else "extract")

        ways = {"reference": reference, "ours": lambda: ours(bench.model), "ours fp8": lambda: ours(bench.fp8)}
        first = {name: device_ms(function, bench.device)[0] / 1000 for name, function in ways.items()}
        for name, row in in_turn(ways, bench.device, max(bench.options.repeats // 2, 1)).items():
            timed = {"seconds": row["ms"] / 1000, "first_seconds": first[name], "host_seconds": row["host_ms"] / 1000, "sm_mhz": row["sm_mhz"]}
            rows.append({"what": f"{workload}, {name}, {bench.options.steps} steps", **timed})
    return rows


def error(bench: Bench) -> list[dict]:
    """Of the velocity, prefill included, against the plain computation in float32."""
    rows = []
    exact = copy.deepcopy(bench.model).float()
    for workload in bench.options.workload[:2]:
        inputs = bench.inputs(workload)
        with plain():
            prefix = exact.prefill(inputs.context.float(), inputs.slots, [latents.float() for latents in inputs.references])
            truth = exact.denoise(inputs.target.float(), SIGMA, prefix)
        for name in dict.fromkeys(("reference", "ours", "ours, plain PyTorch", "ours fp8", *bench.options.way)):
            rows.append({"what": f"{workload}, {name}", "relative_error": relative_error(bench.way(name, inputs)(), truth)})
    return rows


def profile(bench: Bench) -> list[dict]:
    """Where a decode step of each way spends the device's time: what takes most, name by name."""
    return [
        {"what": f"{workload}, {name}", **row}
        for workload in bench.options.workload[:1]
        for name in bench.options.way
        for row in profile_rows(bench.way(name, bench.inputs(workload)), bench.device, STEPS)
    ]


def memory(bench: Bench) -> list[dict]:
    """The most that is held on the device while a picture is painted: weights, keys and values, scratch, activations."""
    rows = []
    for workload in bench.options.workload:
        inputs = bench.inputs(workload)
        for name, model in (("reference", bench.reference), ("ours", bench.model), ("ours fp8", bench.fp8)):
            weights = sum(weight.nbytes for weight in model.parameters()) / 2**30
            peak = peak_gib(lambda: bench.way(name, inputs)(), bench.device)
            rows.append({"what": f"{workload}, {name}", "weights_gib": weights, "peak_gib": peak and weights + peak})
    return rows


MEASURES = {"ceilings": ceilings, "kernels": kernel_rates, "steps": steps, "prefill": prefill, "run": run, "error": error, "profile": profile, "memory": memory}


def main() -> None:
    parser = arguments("denoiser", __doc__.splitlines()[0], MEASURES)
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--way", choices=WAYS, action="append", help=f"without it: {', '.join(DEFAULT_WAYS)}")
    parser.add_argument("--steps", type=int, default=40, help="of a run")
    options = parser.parse_args()
    options.workload = options.workload or list(WORKLOADS)
    options.way = options.way or DEFAULT_WAYS
    take(options, Bench, MEASURES)


if __name__ == "__main__":
    main()
