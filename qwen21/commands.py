"""What the commands of `python -m qwen21` do once their options are parsed."""

import json
import stat
import sys
import tempfile
import uuid
from argparse import Namespace
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tqdm import tqdm

from .checkpoint import Checkpoint
from .errors import Qwen21Error, UsageError
from .pictures import open_rgba
from .pipeline import Pipeline, Report, Request, notes
from .random_model import make_random as make_random_checkpoint

SEEDS = 2**64  # torch's generators take seeds below this
MAX_BATCH = 10000


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
    checkpoint = Checkpoint(options.model)
    for note in notes(request, checkpoint.index.native_resolution):
        print(f"note: {note}", file=sys.stderr)
    report = Report()
    with ExitStack() as bars:  # closes a bar that an error cuts short, so that the message gets a line of its own
        pipeline = Pipeline(checkpoint, device, dtype, lambda steps: bars.enter_context(_progress_bar(steps)))
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
    if not 1 <= options.batch <= MAX_BATCH:
        raise UsageError(f"batch is {options.batch}, expected 1 to {MAX_BATCH}")
    if not 0 <= options.seed <= SEEDS - options.batch:
        raise UsageError(f"seed is {options.seed}, expected 0 to {SEEDS - options.batch}")
    if not output.parent.is_dir():
        raise Qwen21Error(f"the output folder {output.parent} does not exist: create it first")
    seeds = range(options.seed, options.seed + options.batch)
    outputs = {seed: output.with_stem(f"{output.stem}-{seed}") if options.batch > 1 else output for seed in seeds}
    for path in outputs.values():
        _check_writable(path)
    return outputs


def _check_writable(path: Path) -> None:
    """Find out before the work, not after it, that `path` cannot be written."""
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(path.stat().st_mode):
                raise Qwen21Error(f"the output {path} is a folder: name a file")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from None


def _device(name: str) -> torch.device:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, there in available.items() if there)
    if not available[name]:
        raise Qwen21Error(f"the device {name} is not available to this PyTorch ({torch.__version__}): use --device cpu or install a build for it")
    return torch.device(name)


def _progress_bar(steps: Iterable[int]) -> tqdm:
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
    chunks.add_text("settings", json.dumps(settings))
    temporary = path.with_name(f".qwen21-{uuid.uuid4().hex}.png")
    try:
        try:
            picture.save(temporary, "PNG", pnginfo=chunks)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> Qwen21Error:
    return Qwen21Error(f"{path} cannot be written ({error.strerror or error}): check the name, the folder's permissions and the free space")


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
