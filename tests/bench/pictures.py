"""From prompt and pictures to RGBA, stage by stage, with every part at the published size.

    python tests/bench/pictures.py [--size small|full] [--device cpu|cuda] [--only "text to image"] [--way ours] [--repeats 3] [--json]

Random weights around the tiny checkpoint's tokenizer, so the pictures are noise and the work is the model's. "small" is the tiny checkpoint itself.
A prompt is new in every run, and parts stay loaded; `seconds` leaves loading out. "text to image": 1024 x 1024, 40 steps. "edit": one
reference, 8 Turbo steps, first with a new picture, then another prompt on it, then another seed. The reference is diffusers' pipeline, called as a
whole over the weights of ours, with its cache of keys and values: it has no stages and remembers nothing from one picture to the next.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property

import numpy as np
import torch
from measuring import arguments, take
from PIL import Image
from torch import nn

from qwen21.checkpoint import Checkpoint, meta_module
from qwen21.config import TransformerConfig
from qwen21.inferred import transformer_config, vae_config
from qwen21.pipeline import Pipeline, Report, Request
from qwen21.schedule import TURBO_SIGMAS

WORDS = "a red star over two blue circles beside the green square under one yellow moon".split()
WAYS = ("reference", "ours", "ours fp8")
ENCODER = {
    "text_config": {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000, "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "num_heads": 16,
        "intermediate_size": 4304,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
        "out_hidden_size": 4096,
    },
}


class Published(Checkpoint):
    """The published sizes, random weights made on `device`; tokenizer and picture processor of the tiny checkpoint."""

    def __init__(self, device: torch.device):
        super().__init__("tiny")
        self._device = device
        self.index = replace(self.index, native_resolution=1024)
        changes = {"transformer": asdict(TransformerConfig()), "vae": {"base_dim": 96, "decoder_base_dim": 144}}
        changes["text_encoder"] = {name: self.parts["text_encoder"].config[name] | values for name, values in ENCODER.items()}
        for name, part in self.parts.items():
            self.parts[name] = replace(part, config=part.config | changes[name])
        self.transformer_config, self.vae_config = transformer_config(self.parts["transformer"]), vae_config(self.parts["vae"])

    def file_bytes(self, part: str) -> int:
        return 0

    def _filled(self, name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
        module = meta_module(self.parts[name])
        torch.manual_seed(0)
        for owner in module.modules():
            for parameter, weight in owner.named_parameters(recurse=False):
                setattr(owner, parameter, nn.Parameter(random_weight(owner, parameter, weight.shape, self._device, dtype), requires_grad=False))
        return module.to(self._device).eval()


def random_weight(owner: nn.Module, name: str, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Of a size that keeps activations in range; what scales is around 1."""
    made = torch.randn(shape, device=device, dtype=dtype) * (shape[1:].numel() ** -0.5 if len(shape) > 1 else 0.1)
    return made + float(name == "gamma" or (len(shape) == 1 and name == "weight" and "Norm" in type(owner).__name__))


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options, self.device = options, torch.device(options.device)
        full = options.size == "full"
        dtype = torch.bfloat16 if full else torch.float32
        self.side = 1024 if full else 64
        checkpoint = lambda: Published(self.device) if full else Checkpoint("tiny")
        self.pipelines = {name: Pipeline(checkpoint(), self.device, dtype, keep=True, fp8="fp8" in name) for name in WAYS if name != "reference"}
        self._prompts = 0

    @cached_property
    def reference(self):
        """diffusers' pipeline over the weights of ours."""
        transformer, vae, encoder = (self.pipelines["ours"]._part(name, Report()) for name in ("transformer", "vae", "text_encoder"))
        return _diffusers().reference_pipeline(transformer, vae, encoder.model)

    def prompt(self, words: int = 60) -> str:
        """Of about so many words, with a beginning that none before it had."""
        self._prompts += 1
        return f"{self._prompts} " + " ".join(WORDS[(self._prompts * 7 + i * i) % len(WORDS)] for i in range(words))

    def picture(self, seed: int) -> Image.Image:
        levels = np.random.default_rng(seed).integers(0, 256, (self.side, self.side, 4), dtype=np.uint8)
        return Image.fromarray(levels)

    def seconds(self, way: str, seed: int = 0, **request) -> dict[str, float]:
        """Of each stage but loading; of the reference, of all of it."""
        if way == "reference":
            return {"all": self.reference_seconds(seed, **request)}
        made = Report()
        for _ in self.pipelines[way].generate(Request(resolution=self.side, **request), [seed], made):
            pass
        return {stage: seconds for stage, seconds in made.seconds.items() if stage != "load"}

    def reference_seconds(self, seed: int, prompt: str, schedule: str, steps: int = len(TURBO_SIGMAS), pictures: Sequence[Image.Image] = ()) -> float:
        """From prompt and pictures to a picture."""
        pipeline, turbo = self.reference, schedule == "turbo"
        pipeline.scheduler = _diffusers().scheduler(turbo)
        began = time.perf_counter()
        pipeline(
            prompt,
            image=list(pictures) or None,
            num_inference_steps=steps,
            sigmas=list(TURBO_SIGMAS) if turbo else None,
            generator=torch.Generator().manual_seed(seed),
            output_resolution=self.side,
        )
        return time.perf_counter() - began  # the picture is in host memory


def _diffusers():
    """Which ComfyUI's Python, that takes `Published` from here, has not."""
    import reference

    return reference


def _rows(taken: dict[str, list[dict[str, float]]]) -> list[dict]:
    """Medians of the runs after the first, which warms up; what the first took beside it."""
    rows = []
    for name, runs in taken.items():
        stages = {stage: statistics.median(run[stage] for run in runs[1:]) for stage in runs[0]}
        total = statistics.median(sum(run.values()) for run in runs[1:])
        rows.append({"what": name, "seconds": total, "first_seconds": sum(runs[0].values()), **stages})
    return rows


def text_to_image(bench: Bench) -> list[dict]:
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in bench.options.way}
    for seed in range(bench.options.repeats + 1):
        for name in bench.options.way:
            taken[name].append(bench.seconds(name, seed, prompt=bench.prompt(), schedule="dynamic", steps=bench.options.steps))
    return _rows(taken)


def edit(bench: Bench) -> list[dict]:
    taken: dict[str, list[dict[str, float]]] = {}
    for seed in range(bench.options.repeats + 1):
        for name in bench.options.way:
            pictures, first, other = [bench.picture(seed)], bench.prompt(), bench.prompt()
            for what, prompt, number in (("new picture", first, 0), ("another prompt", other, 0), ("another seed", other, 1)):
                taken.setdefault(f"{name}, {what}", []).append(bench.seconds(name, number, prompt=prompt, pictures=pictures, schedule="turbo"))
    return _rows(taken)


MEASURES = {"text to image": text_to_image, "edit": edit}


def main() -> None:
    parser = arguments("pictures", __doc__.splitlines()[0], MEASURES)
    parser.add_argument("--steps", type=int, default=40, help="of text to image")
    parser.add_argument("--way", choices=WAYS, action="append", help="all without it")
    options = parser.parse_args()
    options.way = options.way or WAYS
    take(options, Bench, MEASURES)


if __name__ == "__main__":
    main()
