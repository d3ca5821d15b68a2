"""What both stages of training share: one process a GPU, averaged gradients, moving averages of weights, a log of JSON lines."""

import json
import os
import time
from collections.abc import Callable
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
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
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

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """`function` as one CUDA graph: the same kernels on the same memory at every call, without Python between them. On a CPU, itself.

        It is called a few times here, so that everything is compiled and allocated. It must not look at a value, and draws random numbers on the GPU.
        """
        if not self.cuda:
            return function
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            function()
        torch.cuda.synchronize()
        return graph.replay

    def average(self, gradient: torch.Tensor) -> None:
        """Becomes its mean over the processes."""
        if self.size > 1:
            dist.all_reduce(gradient)
            gradient /= self.size

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


def flat_gradient(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Zeros, of which every parameter's gradient becomes a piece: one tensor to average and to clip."""
    sizes = [-(-p.numel() // 64) * 64 for p in parameters]  # aligned
    flat = torch.zeros(sum(sizes), device=parameters[0].device)
    for parameter, piece in zip(parameters, flat.split(sizes)):
        parameter.grad = piece[: parameter.numel()].view_as(parameter)
    return flat


@torch.no_grad()
def clip(gradient: torch.Tensor, most: float = 1.0) -> torch.Tensor:
    """In place, to a norm of `most`, or to zero if not finite. Returns the norm before."""
    norm = gradient.norm()
    gradient.copy_(torch.where(norm.isfinite(), gradient * (most / (norm + 1e-6)).clamp(max=1), 0.0))
    return norm


class MovingAverage:
    """An exponential moving average of parameters, which starts short and grows to `decay`."""

    def __init__(self, parameters: list[nn.Parameter], decay: float):
        self.parameters, self.decay = parameters, decay
        self.steps = torch.zeros((), device=parameters[0].device)
        self.values = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        change = torch._foreach_sub(self.parameters, self.values)
        torch._foreach_mul_(change, 1 - (self.steps / (self.steps + 10)).clamp(max=self.decay))
        torch._foreach_add_(self.values, change)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange averages and parameters (call again to undo)."""
        for value, parameter in zip(self.values, self.parameters):
            kept = parameter.detach().clone()
            parameter.copy_(value)
            value.copy_(kept)
