"""What the commands of `python -m qwen21` do once their options are parsed."""

import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tqdm import tqdm

from .checkpoint import Checkpoint
from .errors import Qwen21Error, UsageError
from .pictures import open_rgba
from .pipeline import Pipeline, Report, Request
from .random_model import make_random as make_random_checkpoint

SEEDS = 2**64  # torch's generators take seeds below this


def generate(options: Namespace) -> None:
    """Check everything that can be checked, load, paint, and write each picture as soon as it is there."""
    outputs = _outputs(options)
    request = Request(
        prompt=options.prompt,
        negative=options.negative,
        pictures=[open_rgba(path) for path in options.image],
        cfg=options.cfg,
        steps=options.steps,
        width=options.width,
        height=options.height,
        resolution=options.resolution,
        schedule=options.schedule,
        kv_cache=options.kv_cache,
    )
    device = _device(options.device)
    dtype = getattr(torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    pipeline = Pipeline(Checkpoint(options.model), device, dtype, _progress_bar)
    report = Report()
    for (seed, path), picture in zip(outputs.items(), pipeline.generate(request, list(outputs), report)):
        _write_png(path, picture, _settings(options, seed, report, dtype))
    if options.json:
        print(json.dumps({"outputs": [str(path) for path in outputs.values()], **_summary(report, device)}))


def make_random(options: Namespace) -> None:
    folder = make_random_checkpoint(options.folder, options.seed, options.turbo)
    print(f"wrote a small random checkpoint to {folder}: it paints noise, and is meant for trying things out")


def _outputs(options: Namespace) -> dict[int, Path]:
    """The file each seed goes to. One picture takes the name as given; of several, each carries its seed."""
    output = Path(options.output)
    if output.suffix.lower() != ".png":
        raise UsageError(f"the output {output} does not end in .png, the only format written here: it keeps transparency and the prompt")
    if options.batch < 1:
        raise UsageError(f"batch is {options.batch}, expected at least 1")
    if not 0 <= options.seed <= SEEDS - options.batch:
        raise UsageError(f"seed is {options.seed}, expected 0 to {SEEDS - options.batch}")
    if not output.parent.is_dir():
        raise Qwen21Error(f"the output folder {output.parent} does not exist: create it first")
    if output.is_dir():
        raise Qwen21Error(f"the output {output} is a folder: name a file")
    if options.batch == 1:
        return {options.seed: output}
    return {seed: output.with_stem(f"{output.stem}-{seed}") for seed in range(options.seed, options.seed + options.batch)}


def _device(name: str) -> torch.device:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, there in available.items() if there)
    if not available[name]:
        raise Qwen21Error(f"the device {name} is not available to this PyTorch ({torch.__version__}): use --device cpu or install a build for it")
    return torch.device(name)


def _progress_bar(steps: Iterable[int]) -> Iterable[int]:
    return tqdm(steps, desc="painting", unit="step", file=sys.stderr)


def _settings(options: Namespace, seed: int, report: Report, dtype: torch.dtype) -> dict:
    """What the PNG says about how it was made."""
    return {
        "prompt": options.prompt,
        "negative": options.negative,
        "images": [Path(path).name for path in options.image],
        "seed": seed,
        "steps": report.steps,
        "cfg": options.cfg,
        "width": report.width,
        "height": report.height,
        "resolution": options.resolution,
        "schedule": options.schedule,
        "dtype": str(dtype).removeprefix("torch."),
        "model": Path(options.model).resolve().name,
    }


def _write_png(path: Path, picture: Image.Image, settings: dict) -> None:
    """Write beside `path` first, so that `path` is either whole or as it was."""
    chunks = PngInfo()
    chunks.add_itxt("prompt", settings["prompt"])
    chunks.add_text("seed", str(settings["seed"]))
    chunks.add_itxt("settings", json.dumps(settings, ensure_ascii=False))
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".png")
        try:
            with os.fdopen(descriptor, "wb") as file:
                picture.save(file, "PNG", pnginfo=chunks)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise Qwen21Error(f"{path} cannot be written ({error.strerror or error}): check the folder's permissions and free space") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _summary(report: Report, device: torch.device) -> dict:
    values = asdict(report)
    values["seconds"] = {stage: round(seconds, 4) for stage, seconds in report.seconds.items()}
    return values | {"device": str(device), "peak_memory_bytes": _peak_memory(device)}


def _peak_memory(device: torch.device) -> int | None:
    """Of the accelerator if there is one, else of the process (None where the system does not say)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
