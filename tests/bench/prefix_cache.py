"""What the prefix cache saves: work, memory and time, and what it costs in exactness.

    python tests/bench/prefix_cache.py [--size small|full] [--device cpu|cuda] [--resolution 1024] [--steps 8] [--repeats 3] [--only times] [--json]

On a GPU, prefixes kept in host memory are timed too: copied layer by layer when they are wanted, and a layer ahead of computing.

Random weights: "small" is a toy of the same architecture in float32, "full" the published size in bfloat16 (14 GB). Text and latents are
random, never zeros. Times are medians of runs in which the ways to do it take turns; only their ratios mean something elsewhere.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from measuring import arguments, take
from torch import nn

from qwen21.checkpoint import meta_parameters
from qwen21.config import ScheduleConfig, TransformerConfig
from qwen21.prefix import PRECISIONS, PrefixKV
from qwen21.prefix_cache import PrefixCache, digest, prefix_items
from qwen21.random_model import TRANSFORMER
from qwen21.sampling import euler
from qwen21.schedule import TURBO_SIGMAS, sigmas
from qwen21.transformer import QwenImage21Transformer
from qwen21.workspace import InlineCopies, Workspace

REFERENCE_COUNTS = (1, 2, 4)
INSTRUCTION, HEAD, GAP = 60, 4, 3  # text tokens: after the references, before the first, between two


@dataclass
class Prompt:
    """An instruction over references: states, slots, latents and keys."""

    context: torch.Tensor
    slots: list[int]
    references: list[torch.Tensor]
    keys: list[int]

    @property
    def items(self):
        return prefix_items(self.keys, self.slots, [(*one.shape[2:], digest(one)) for one in self.references])


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options, self.device = options, torch.device(options.device)
        full = options.size == "full"
        self.dtype = torch.bfloat16 if full else torch.float32
        self.config = TransformerConfig() if full else TRANSFORMER
        self.side = options.resolution // 16
        self.transformer = self._transformer()
        table = torch.randn(1000, self.config.context_in_dim, generator=torch.Generator().manual_seed(1))
        self.table = table.to(self.device, self.dtype)

    def _transformer(self) -> QwenImage21Transformer:
        with meta_parameters():
            model = QwenImage21Transformer(self.config)
        model.to_empty(device=self.device).to(self.dtype)
        torch.manual_seed(0)
        for name, weight in model.named_parameters():
            scale = 1.0 if weight.ndim == 1 else weight.shape[1] ** -0.5
            nn.init.normal_(weight, mean=1.0 if name.endswith(("norm_q.weight", "norm_k.weight")) else 0.0, std=0.1 if weight.ndim == 1 else scale)
        return model.eval().requires_grad_(False)

    def prompt(self, references: int, instruction: int = 0) -> Prompt:
        """`instruction` chooses the words after the references."""
        head = list(range(HEAD))
        gaps = [HEAD + i for i in range(GAP * (references - 1))] if references else []
        tail = [200 + (7 * i + 31 * instruction) % 700 for i in range(INSTRUCTION)]
        keys = head + gaps + tail
        slots = [HEAD + GAP * i for i in range(references)]
        latents = [
            torch.randn(1, 64, self.side, self.side, generator=torch.Generator().manual_seed(10 + i)).to(self.device, self.dtype) for i in range(references)
        ]
        return Prompt(self.table[keys][None], slots, latents, keys)

    def prefill(self, prompt: Prompt):
        def run(past: PrefixKV = PrefixKV(), texts: int = 0, pictures: int = 0) -> PrefixKV:
            return self.transformer.prefill(prompt.context[:, texts:], [s - texts for s in prompt.slots[pictures:]], prompt.references[pictures:], past)

        return run

    def use(self, cache: PrefixCache, prompt: Prompt):
        return cache.prefix("weights", prompt.items, self.prefill(prompt))

    def computed(self, cache: PrefixCache, prompt: Prompt) -> int:
        before = cache.statistics.computed_tokens
        with self.use(cache, prompt):
            return cache.statistics.computed_tokens - before

    def sample(self, prefix: PrefixKV, seed: int, workspace: Workspace | None = None) -> torch.Tensor:
        workspace = workspace or Workspace()
        tokens = self.side**2
        schedule = (
            sigmas("turbo", None, tokens, ScheduleConfig())
            if self.options.steps == len(TURBO_SIGMAS)
            else sigmas("dynamic", self.options.steps, tokens, ScheduleConfig())
        )
        noise = torch.randn(1, 64, self.side, self.side, generator=torch.Generator().manual_seed(seed)).to(self.device)
        return euler(noise, schedule.to(self.device), lambda x, sigma: self.transformer.denoise(x.to(self.dtype), sigma, prefix, workspace=workspace))

    def seconds(self, function) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def exactness(bench: Bench) -> list[dict]:
    """Relative error of the velocity over a reused prefix against one prefilled at once."""
    rows = []
    for references in (0, *REFERENCE_COUNTS):
        cache, first, other = PrefixCache(), bench.prompt(references), bench.prompt(references, instruction=1)
        noise = torch.randn(1, 64, bench.side, bench.side, generator=torch.Generator().manual_seed(0)).to(bench.device, bench.dtype)
        with bench.use(cache, first):
            pass
        for name, prompt in (("same prompt", first), ("another instruction", other)):
            fresh = bench.transformer.denoise(noise, 0.7, bench.prefill(prompt)()).float()
            with bench.use(cache, prompt) as prefix:
                reused = bench.transformer.denoise(noise, 0.7, prefix).float()
            rows.append({"what": f"{references} references, {name}", "relative_error": float((reused - fresh).abs().max() / fresh.abs().max())})
    return rows


def work(bench: Bench) -> list[dict]:
    """Prefix tokens prefilled, against computing every prefix by itself."""
    first, negative, changed = bench.prompt(4), bench.prompt(4, instruction=2), bench.prompt(4, instruction=1)
    alone = len(first.keys) + 4 * bench.side**2
    cache = PrefixCache()
    rows = [
        ("4 references with guidance", bench.computed(cache, first) + bench.computed(cache, negative), 2 * alone),
        ("then another instruction", bench.computed(cache, changed), alone),
        ("then another seed", bench.computed(cache, changed), alone),
        ("then a batch of 4", bench.computed(cache, changed), 4 * alone),
    ]
    return [{"what": what, "tokens": tokens, "alone": separate, "ratio": tokens / separate} for what, tokens, separate in rows]


def memory(bench: Bench) -> list[dict]:
    """Bytes of keys and values held for two branches over 4 references, against two separate prefixes in the compute dtype."""
    rows, separate = [], None
    for precision in PRECISIONS:
        cache = PrefixCache(precision=precision)
        for instruction in (0, 2):
            with bench.use(cache, bench.prompt(4, instruction)) as prefix:
                tokens = prefix.tokens
        if separate is None:
            separate = 2 * tokens * cache.tree.nbytes() // sum(node.part.tokens for node in cache.tree.nodes())
        rows.append({"what": precision, "bytes": cache.tree.nbytes(), "separate_bytes": separate, "ratio": cache.tree.nbytes() / separate})
    return rows


def times(bench: Bench) -> list[dict]:
    """Seconds from conditioning to latents, and their ratio to recomputing the prefix for the run."""
    rows = []
    for references in REFERENCE_COUNTS:
        first, changed = bench.prompt(references), bench.prompt(references, instruction=1)
        cache = PrefixCache(placement="gpu")
        ways = {
            "recomputed": lambda seed: bench.sample(bench.prefill(first)(), seed),
            "first run": lambda seed: _through(bench, cache, first, seed, clear=True),
            "another seed": lambda seed: _through(bench, cache, first, seed + 100),
            "another instruction": lambda seed: _through(bench, cache, changed, seed, forget=True),
        }
        rows += _in_turn(bench, references, ways)
    return rows


def host_times(bench: Bench) -> list[dict]:
    """Seconds from a known prefix to latents, by where it is kept and how it is copied, and their ratio to keeping it on the device."""
    rows = []
    if bench.device.type == "cuda":
        for precision, references in (("default", 1), ("default", 4), ("fp8_kv", 4)):
            prompt = bench.prompt(references)
            whole = bench.prefill(prompt)()
            here = PrefixKV(tuple(part.quantized(precision) for part in whole.parts), whole.position)
            there = PrefixKV(tuple(part.to(torch.device("cpu")) for part in here.parts), whole.position)
            ways = {
                f"{precision}, on the device": lambda seed: bench.sample(here, seed),
                f"{precision}, on the device, not copied ahead": lambda seed: bench.sample(here, seed, Workspace(_inline)),
                f"{precision}, on the host": lambda seed: bench.sample(there, seed),
                f"{precision}, on the host, not copied ahead": lambda seed: bench.sample(there, seed, Workspace(_inline)),
            }
            rows += _in_turn(bench, references, ways, transferred=there.nbytes)
    return rows


def _inline(device: torch.device) -> InlineCopies:
    return InlineCopies()


def _in_turn(bench: Bench, references: int, ways: dict, **also) -> list[dict]:
    """Medians of `ways` (name -> function of a seed) that take turns; the first is what the others are compared with, in latents too if they give them."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    latents = {}
    for repeat in range(bench.options.repeats + 1):
        for name, run in ways.items():
            seconds = bench.seconds(lambda: latents.update({name: run(repeat)}))
            if repeat:  # the first round warms up
                taken[name].append(seconds)
    base, *_ = ways
    rows = []
    for name, values in taken.items():
        seconds = statistics.median(values)
        row = {"what": f"{references} references, {name}", "seconds": seconds, "ratio": seconds / statistics.median(taken[base]), **also}
        if latents[name] is not None and latents[base] is not None:
            row["difference"] = float((latents[name] - latents[base]).abs().max() / latents[base].abs().max())
        rows.append(row)
    return rows


def _through(bench: Bench, cache: PrefixCache, prompt: Prompt, seed: int, clear: bool = False, forget: bool = False) -> None:
    """A run over the cache, emptied first, or without what it knows of the instruction."""
    if clear:
        cache.tree.clear()
    if forget:
        _forget(cache, prompt)
    with bench.use(cache, prompt) as prefix:
        bench.sample(prefix, seed)


def _forget(cache: PrefixCache, prompt: Prompt) -> None:
    """Drop the instruction of `prompt`, so that only its references are known."""
    match = cache.tree.match("weights", prompt.items)
    if match.items == len(prompt.items):
        del match.node.parent.children[match.node.item.keys[0]]


MEASURES = {"exactness": exactness, "work": work, "memory": memory, "times": times, "host times": host_times}


def main() -> None:
    parser = arguments("prefix_cache", __doc__.splitlines()[0], MEASURES)
    parser.add_argument("--resolution", type=int, default=128, help="pixels of references and target, a multiple of 32")
    parser.add_argument("--steps", type=int, default=8)
    take(parser.parse_args(), Bench, MEASURES)


if __name__ == "__main__":
    main()
