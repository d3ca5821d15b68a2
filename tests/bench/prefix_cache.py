"""What the prefix cache saves: work, memory and time, and what it costs in exactness.

    python tests/bench/prefix_cache.py [--size small|full] [--device cpu|cuda] [--resolution 1024] [--steps 8] [--json]

Random weights: "small" is a toy of the same architecture in float32, "full" the published size in bfloat16 (14 GB). Text and latents are
random, never zeros. Times are medians of runs in which the ways to do it take turns; only their ratios mean something elsewhere.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

from qwen21.checkpoint import meta_parameters
from qwen21.config import ScheduleConfig, TransformerConfig
from qwen21.prefix import PRECISIONS, PrefixKV
from qwen21.prefix_cache import PrefixCache, digest, prefix_items
from qwen21.random_model import TRANSFORMER
from qwen21.sampling import euler
from qwen21.schedule import TURBO_SIGMAS, sigmas
from qwen21.transformer import QwenImage21Transformer

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

    def sample(self, prefix: PrefixKV, seed: int) -> torch.Tensor:
        tokens = self.side**2
        schedule = (
            sigmas("turbo", None, tokens, ScheduleConfig())
            if self.options.steps == len(TURBO_SIGMAS)
            else sigmas("dynamic", self.options.steps, tokens, ScheduleConfig())
        )
        noise = torch.randn(1, 64, self.side, self.side, generator=torch.Generator().manual_seed(seed)).to(self.device)
        return euler(noise, schedule.to(self.device), lambda x, sigma: self.transformer.denoise(x.to(self.dtype), sigma, prefix))

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
        cache = PrefixCache()
        taken: dict[str, list[float]] = {}
        for repeat in range(bench.options.repeats + 1):
            for name, run in (
                ("recomputed", lambda: bench.sample(bench.prefill(first)(), repeat)),
                ("first run", lambda: _through(bench, cache, first, repeat, clear=True)),
                ("another seed", lambda: _through(bench, cache, first, repeat + 100)),
                ("another instruction", lambda: _through(bench, cache, changed, repeat)),
            ):
                if name == "another instruction":
                    _forget(cache, changed)
                seconds = bench.seconds(run)
                if repeat:  # the first round warms up
                    taken.setdefault(name, []).append(seconds)
        base = statistics.median(taken["recomputed"])
        rows += [
            {"what": f"{references} references, {name}", "seconds": statistics.median(values), "ratio": statistics.median(values) / base}
            for name, values in taken.items()
        ]
    return rows


def _through(bench: Bench, cache: PrefixCache, prompt: Prompt, seed: int, clear: bool = False) -> None:
    if clear:
        cache.tree.clear()
    with bench.use(cache, prompt) as prefix:
        bench.sample(prefix, seed)


def _forget(cache: PrefixCache, prompt: Prompt) -> None:
    """Drop the instruction of `prompt`, so that only its references are known."""
    match = cache.tree.match("weights", prompt.items)
    if match.items == len(prompt.items):
        del match.node.parent.children[match.node.item.keys[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resolution", type=int, default=128, help="pixels of references and target, a multiple of 32")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="a line of JSON a row")
    options = parser.parse_args()
    with torch.inference_mode():
        bench = Bench(options)
        for name, measure in (("exactness", exactness), ("work", work), ("memory", memory), ("times", times)):
            rows = measure(bench)
            if not options.json:
                print(f"\n{name}")
            for row in rows:
                if options.json:
                    print(
                        json.dumps(
                            {"bench": "prefix_cache", "measure": name, "size": options.size, "device": options.device, "resolution": options.resolution, **row}
                        )
                    )
                else:
                    values = "  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items() if key != "what")
                    print(f"  {row['what']:36} {values}")


if __name__ == "__main__":
    main()
