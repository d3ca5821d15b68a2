"""What both stages of training share: one process a GPU, averaged gradients, moving averages of weights, a log of JSON lines."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn


class Run:
    """One training run. Under `torchrun` every process trains on its own data and gradients are averaged; alone, nothing changes."""

    def __init__(self, stage: str, out: Path, seed: int, **settings):
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.cuda = torch.cuda.is_available()
        self.rhythm = 10 if self.cuda else 1  # steps between looks at the clock
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            torch.backends.cuda.enable_cudnn_sdp(False)  # the memory-efficient kernel is the proven one with a mask
        if self.size > 1:
            dist.init_process_group("nccl" if self.cuda else "gloo")
        self.out, self.started = Path(out), time.time()
        self.out.mkdir(parents=True, exist_ok=True)
        self.stage = stage
        self.log("start", seed=seed, processes=self.size, device=torch.cuda.get_device_name() if self.cuda else "cpu", torch=torch.__version__, **settings)

    def log(self, event: str, **values) -> None:
        if self.rank == 0:
            line = json.dumps({"stage": self.stage, "event": event, "minutes": round((time.time() - self.started) / 60, 2), **values})
            print(line[:400], flush=True)
            with open(self.out / f"{self.stage}.jsonl", "a") as file:
                file.write(line + "\n")

    def compile(self, function):
        return torch.compile(function, dynamic=False) if self.cuda else function

    def autocast(self):
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.cuda)

    def combine(self, parameters: list[nn.Parameter], most: float = 1.0) -> torch.Tensor:
        """Gradients become their mean over the processes, clipped to a norm of `most`, or zero if not finite. Returns the norm before."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        if self.size > 1:
            dist.all_reduce(flat)
            flat /= self.size
        norm = flat.norm()
        flat = torch.where(norm.isfinite(), flat * (most / (norm + 1e-6)).clamp(max=1), 0.0)
        torch._foreach_copy_(gradients, [piece.view_as(g) for piece, g in zip(flat.split([g.numel() for g in gradients]), gradients)])
        return norm

    def agree(self, value: float) -> float:
        """The first process's number, so that all stop, and slow down, at the same step."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared)

    def same_weights(self, tensors) -> None:
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.data, 0)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def gather(self, value) -> list:
        """Every process's value, for the first process."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def save(self, name: str, tensors: dict[str, torch.Tensor], most: int = 15_000_000) -> None:
        """Write `name`.safetensors, or numbered pieces of at most `most` bytes."""
        if self.rank:
            return
        pieces: list[dict[str, torch.Tensor]] = [{}]
        for key, value in tensors.items():
            if sum(v.nbytes for v in pieces[-1].values()) + value.nbytes > most:
                pieces.append({})
            pieces[-1][key] = value.detach().cpu().contiguous().clone()
        for index, piece in enumerate(pieces, start=1):
            whole = self.out / (f"{name}.safetensors" if len(pieces) == 1 else f"{name}-{index}.safetensors")
            partial = whole.with_suffix(".partial")
            save_file(piece, partial)
            partial.rename(whole)

    @staticmethod
    def load(name: str, folder: Path) -> dict[str, torch.Tensor]:
        """What `save` wrote."""
        files = [*Path(folder).glob(f"{name}.safetensors"), *sorted(Path(folder).glob(f"{name}-*.safetensors"))]
        return {key: value for file in files for key, value in load_file(file).items()}


class MovingAverage:
    """An exponential moving average of parameters, which starts short and grows to `decay`."""

    def __init__(self, parameters: list[nn.Parameter], decay: float):
        self.parameters, self.decay, self.steps = parameters, decay, 0
        self.values = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        torch._foreach_lerp_(self.values, self.parameters, 1 - min(self.decay, self.steps / (self.steps + 10)))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange averages and parameters (call again to undo)."""
        for value, parameter in zip(self.values, self.parameters):
            kept = parameter.detach().clone()
            parameter.copy_(value)
            value.copy_(kept)
