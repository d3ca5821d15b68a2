"""What a LoRA costs: time to read, attach and take away, time a step, memory, and whether the weights are bit for bit their own again.

    python tests/bench/lora.py [--size small|full] [--device cpu|cuda] [--resolution 1024] [--rank 32] [--steps 10]

Random weights: "small" is a toy of the same architecture in float32, "full" the published size in bfloat16 (14 GB). Only ratios mean
something elsewhere.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from qwen21.checkpoint import meta_parameters
from qwen21.config import TransformerConfig
from qwen21.lora import LoraFile, attach, places
from qwen21.random_model import TRANSFORMER
from qwen21.transformer import QwenImage21Transformer

TEXT_TOKENS = 100


def lora(out: int, columns: int, rank: int) -> dict[str, torch.Tensor]:
    return {"lora_A.weight": torch.randn(rank, columns) / columns**0.5, "lora_B.weight": torch.randn(out, rank) * 0.02}


def lokr(out: int, columns: int, rank: int) -> dict[str, torch.Tensor]:
    return {"lokr_w1": torch.randn(16, 16) * 0.1, "lokr_w2": torch.randn(out // 16, columns // 16) * 0.01}


def write(path: Path, model: nn.Module, kind: Callable, rank: int) -> Path:
    """A file for every linear layer of the blocks."""
    tensors = {}
    for name, layer in model.transformer_blocks.named_modules():
        if isinstance(layer, nn.Linear):
            made = kind(layer.out_features, layer.in_features, rank)
            tensors |= {f"transformer_blocks.{name}.{ending}": tensor.to(layer.weight.dtype) for ending, tensor in made.items()}
    save_file(tensors, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    device, dtype = torch.device(options.device), torch.bfloat16 if options.size == "full" else torch.float32
    config = TransformerConfig() if options.size == "full" else TRANSFORMER
    with meta_parameters():
        model = QwenImage21Transformer(config)
    model.to_empty(device=device).to(dtype)
    for parameter in model.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1)
    context = torch.randn(1, TEXT_TOKENS, config.context_in_dim, device=device, dtype=dtype)
    target = torch.randn(1, 64, options.resolution // 16, options.resolution // 16, device=device, dtype=dtype)

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def step() -> tuple[torch.Tensor, float]:
        """The velocity, and milliseconds a step."""
        prefix = model.prefill(context)
        out, start = model.denoise(target, 0.5, prefix), clock()
        for _ in range(options.steps):
            out = model.denoise(target, 0.5, prefix)
        return out, 1000 * (clock() - start) / options.steps

    def memory() -> str:
        return f"{torch.cuda.memory_allocated(device) / 2**30:.2f} GiB" if device.type == "cuda" else "-"

    originals = [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]
    plain, alone = step()
    print(f"{'':6} {'read':>8} {'attach':>8} {'remove':>8} {'step':>10} {'of plain':>9} {'memory':>10}  changed by  bit for bit")
    print(f"{'plain':6} {'':8} {'':8} {'':8} {alone:7.2f} ms {1:9.3f} {memory():>10}")
    with tempfile.TemporaryDirectory() as folder:
        for kind in (lora, lokr):
            path = write(Path(folder) / f"{kind.__name__}.safetensors", model, kind, options.rank)
            start = clock()
            fitted = LoraFile.read(path).fit(places(model))
            read = clock()
            with attach(model, [(fitted, 0.8)]):
                attached = clock()
                out, milliseconds = step()
                held, end = memory(), clock()
            removed = clock() - end
            same = all(torch.equal(one.cpu(), original) for one, original in zip(model.parameters(), originals)) and torch.equal(step()[0], plain)
            times = f"{read - start:6.2f} s {attached - read:6.2f} s {removed:6.2f} s {milliseconds:7.2f} ms"
            changed = ((out.float() - plain.float()).norm() / plain.float().norm()).item()
            print(f"{kind.__name__:6} {times} {milliseconds / alone:9.3f} {held:>10}  {changed:10.3f}  {same}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
