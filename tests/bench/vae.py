"""The autoencoder's speed, memory and exactness against the reference's.

    python tests/bench/vae.py [--size small|full] [--device cpu|cuda] [--workload decode-1024] [--way ours] [--only times] [--repeats 5] [--json]

Random weights, the same for all: "small" is a toy in float32, "full" the published widths in bfloat16. The floor is the reference's
multiplications at the rate at which the card sustains matrix products. Measures: "times" (all ways in turn), "memory", "error" (against float32), "tiles" (tiled
against whole), "attention" (ways to compute the wide head in the middle), "profile".
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from unittest import mock

import torch
import torch.nn.functional as F
from diffusers.models import AutoencoderKLQwenImage21
from measuring import arguments, in_turn, peak_gib, profile_rows, relative_error, sustained_ms, take
from reference import reference_vae
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from qwen21 import kernels
from qwen21.config import VAEConfig
from qwen21.random_model import VAE
from qwen21.vae import QwenImage21VAE

WORKLOADS = ("decode-1024", "decode-2048", "encode-1024", "encode-2048")
DEFAULT_WAYS = ("reference", "ours", "ours, plain PyTorch")


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options, self.device = options, torch.device(options.device)
        self.small = options.size == "small"
        self.dtype = torch.float32 if self.small else torch.bfloat16
        self.config = VAE if self.small else VAEConfig()
        torch.manual_seed(0)
        with torch.device(self.device):
            self.vae = QwenImage21VAE(self.config, dtype=self.dtype).eval().requires_grad_(False)
        for name, weight in self.vae.named_parameters():
            if weight.ndim == 4:
                nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
            else:
                nn.init.normal_(weight, mean=float(name.endswith("gamma")), std=0.1)
        self.vae.decoder.conv_out.weight.mul_(0.6)  # keeps most of the picture away from the clamp

    @cached_property
    def reference(self) -> AutoencoderKLQwenImage21:
        """The reference's over the same weights."""
        return reference_vae(self.vae)

    @cached_property
    def channels_last(self) -> QwenImage21VAE:
        return copy.deepcopy(self.vae).to(memory_format=torch.channels_last)

    def input(self, workload: str) -> torch.Tensor:
        what, side = workload.split("-")
        side = int(side) // (16 if self.small else 1)
        shape = (1, self.config.z_dim, side // 16, side // 16) if what == "decode" else (1, self.config.in_channels, side, side)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        return (x if what == "decode" else x.clamp(-1, 1)).to(self.device, self.dtype)

    def way(self, name: str, workload: str, tile: int | None = None) -> Callable[[], torch.Tensor]:
        what, x = workload.split("-")[0], self.input(workload)
        if name == "reference":
            if what == "decode":
                return lambda: self.reference.decode(x[:, :, None], return_dict=False)[0][:, :, 0]
            return lambda: self.reference.encode(x[:, :, None], return_dict=False)[0].mode()[:, :, 0]
        model = self.channels_last if "channels last" in name else self.vae

        def run() -> torch.Tensor:
            with WAYS[name]():
                return getattr(model, what)(x, tile)

        return run

    def flops(self, workload: str) -> int:
        """Multiplications and additions of the plain network."""
        with torch.device("meta"):
            model = QwenImage21VAE(self.config)
        with FlopCounterMode(display=False) as counter:
            getattr(model, workload.split("-")[0])(self.input(workload).to("meta", torch.float32))
        return counter.get_total_flops()

    def matmul_rate(self) -> float:
        rows, dim = (64, 64) if self.small else (16384, 4096)
        x, weight = (torch.randn(n, dim, device=self.device).to(self.dtype) for n in (rows, dim))
        return 2 * rows * dim * dim / sustained_ms(lambda: F.linear(x, weight), self.device, 0.05 if self.small else 1.0) * 1000


@contextmanager
def default() -> Iterator[None]:
    yield


@contextmanager
def plain() -> Iterator[None]:
    """Without kernels, and so in PyTorch's usual memory format."""
    with mock.patch.object(kernels, "fusible", lambda x: False):
        yield


@contextmanager
def searched() -> Iterator[None]:
    """cuDNN tries its algorithms on every new shape."""
    with torch.backends.cudnn.flags(benchmark=True, deterministic=False, allow_tf32=torch.backends.cudnn.allow_tf32):
        yield


@contextmanager
def few_outputs() -> Iterator[None]:
    """The last convolution with its own four outputs."""
    with mock.patch.object(kernels.maps, "FEWEST_OUTPUTS", 0):
        yield


@contextmanager
def doubled_first() -> Iterator[None]:
    """The size is doubled before the convolution, as in the reference."""

    class Other(nn.Conv2d):
        """Not PyTorch's own, so that it is called as it is."""

    upsampled_add = kernels.maps.upsampled_add

    def run(upsample: nn.Sequential, x: torch.Tensor, shortcut: nn.Module, small: torch.Tensor) -> torch.Tensor:
        conv = upsample[1]
        conv.__class__ = Other
        try:
            return upsampled_add(upsample, x, shortcut, small)
        finally:
            conv.__class__ = nn.Conv2d

    with mock.patch.object(kernels.maps, "upsampled_add", run):
        yield


WAYS = {
    "reference": default,
    "ours": default,
    "ours, plain PyTorch": plain,
    "ours, size doubled first": doubled_first,
    "ours, four outputs at last": few_outputs,
    "ours, weights channels last": default,
    "ours, cuDNN searches": searched,
    "ours, weights channels last, cuDNN searches": searched,
}


def times(bench: Bench) -> list[dict]:
    """Every way in turn, and the floor."""
    rows, rate = [], bench.matmul_rate()
    for workload in bench.options.workload:
        flops = bench.flops(workload)
        measured = in_turn({name: bench.way(name, workload) for name in bench.options.way}, bench.device, bench.options.repeats)
        base = measured[bench.options.way[0]]["ms"]
        for name, row in measured.items():
            floor = flops / rate * 1000
            rates = {"floor_ms": floor, "of_floor": row["ms"] / floor, "tflops": flops / row["ms"] / 1e9, "of_first": row["ms"] / base}
            rows.append({"what": f"{workload}, {name}", **row, **rates})
    return rows


def memory(bench: Bench) -> list[dict]:
    """The most that is held, weights included."""
    weights = sum(weight.nbytes for weight in bench.vae.parameters()) / 2**30
    rows = []
    for workload in bench.options.workload:
        for name in bench.options.way:
            run = bench.way(name, workload)
            run()
            peak = peak_gib(run, bench.device)
            rows.append({"what": f"{workload}, {name}", "weights_gib": weights, "peak_gib": peak and weights + peak})
    return rows


def error(bench: Bench) -> list[dict]:
    """Against the plain network in float32."""
    rows = []
    exact = copy.deepcopy(bench.vae).float()
    for workload in [one for one in bench.options.workload if one.endswith("1024")]:
        with plain():
            truth = getattr(exact, workload.split("-")[0])(bench.input(workload).float())
        for name in bench.options.way:
            ours = bench.way(name, workload)()
            rows.append({"what": f"{workload}, {name}", "relative_error": relative_error(ours.clamp(-1, 1) if "decode" in workload else ours, truth)})
    return rows


def tiles(bench: Bench) -> list[dict]:
    """Ours in tiles of 512 pixels against ours whole: time, memory, difference."""
    rows = []
    for workload in bench.options.workload:
        tile = (32 if bench.small else 512) // (16 if "decode" in workload else 1)
        ways = {"whole": bench.way("ours", workload), "tiles": bench.way("ours", workload, tile)}
        difference = relative_error(ways["tiles"](), ways["whole"]())
        for name, row in in_turn(ways, bench.device, bench.options.repeats).items():
            rows.append({"what": f"{workload}, {name}", **row, "added_gib": peak_gib(ways[name], bench.device), "difference": difference})
    return rows


def attention(bench: Bench) -> list[dict]:
    """One head as wide as the decoder's middle: PyTorch's attention, and two products around a softmax in float32, by 4096 queries."""
    rows = []
    channels = bench.config.decoder_base_dim * bench.config.dim_mult[-1]
    for side in (4, 8) if bench.small else (64, 128):
        q, k, v = (torch.randn(1, 1, side**2, channels, device=bench.device).to(bench.dtype) for _ in range(3))
        ways = {"PyTorch's attention": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v)}
        if bench.device.type == "cuda":
            ways["two products"] = lambda q=q, k=k, v=v: _two_products(q[0, 0], k[0, 0], v[0, 0])[None, None]
        exact = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        for name, function in ways.items():
            ms, error = sustained_ms(function, bench.device, 0.2), relative_error(function(), exact)
            added = peak_gib(function, bench.device)
            rows.append(
                {"what": f"{side} x {side}, {name}", "ms": ms, "tflops": 4 * side**4 * channels / ms / 1e9, "added_gib": added, "relative_error": error}
            )
    return rows


def _two_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one head, each (tokens, channels)."""
    scores = (torch.mm(part, k.T, out_dtype=torch.float32) for part in (q * q.shape[1] ** -0.5).split(4096))
    return torch.cat([score.softmax(dim=-1).to(v.dtype) @ v for score in scores])


def profile(bench: Bench) -> list[dict]:
    """What takes the device's time in each way, name by name."""
    return [
        {"what": f"{workload}, {name}", **row}
        for workload in bench.options.workload
        for name in bench.options.way
        for row in profile_rows(bench.way(name, workload), bench.device)
    ]


MEASURES = {"times": times, "memory": memory, "error": error, "tiles": tiles, "attention": attention, "profile": profile}


def main() -> None:
    parser = arguments("vae", __doc__.splitlines()[0], MEASURES)
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--way", choices=WAYS, action="append", help=f"without it: {', '.join(DEFAULT_WAYS)}")
    options = parser.parse_args()
    options.workload = options.workload or list(WORKLOADS)
    options.way = options.way or DEFAULT_WAYS
    take(options, Bench, MEASURES)


if __name__ == "__main__":
    main()
