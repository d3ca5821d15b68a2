"""What the commands of `python -m qwen21` do once their options are parsed."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from .checkpoint import TINY, Checkpoint
from .describe import describe, table
from .errors import Qwen21Error, UsageError
from .fp8 import already_quantized
from .jobs import Job, write_png
from .lora import parse
from .pipeline import Pipeline, Report, compute_dtype, notes
from .random_model import make_random as make_random_checkpoint


def generate(options: Namespace) -> None:
    """Check everything that can be checked, load, paint, and write each picture as soon as it is there."""
    names = ("prompt", "output", "negative", "seed", "batch", "cfg", "steps", "width", "height", "resolution", "schedule", "lora")
    job = Job(images=options.image, **{name: getattr(options, name) for name in names})
    outputs, request = job.outputs(), job.request()
    device = _device(options.device)
    checkpoint = _checkpoint(options)
    for note in notes(request, checkpoint.index.native_resolution):
        print(f"note: {note}", file=sys.stderr)
    summary = _paint(job, outputs, request, _pipeline(options, checkpoint, device, keep=False))
    if options.json:
        print(json.dumps(summary | {"device": str(device), "peak_memory_bytes": _peak_memory(device)}))


def batch(options: Namespace) -> None:
    """Run the jobs of a file, one line each, against one checkpoint and one cache. A job that fails is reported, and the rest go on."""
    try:
        lines = Path(options.jobs).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise Qwen21Error(f"the file {options.jobs} cannot be read ({error}): give a text file with a job in JSON on every line") from None
    for lora in options.lora:
        parse(lora)  # one that is missing is missing for every job
    device = _device(options.device)
    pipeline = _pipeline(options, _checkpoint(options), device, keep=True)
    counts = {"painted": 0, "skipped": 0, "failed": 0}
    jobs = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    for number, line in tqdm(jobs, desc="jobs", unit="job", file=sys.stderr):
        summary: dict = {"line": number}
        try:
            job = Job.from_json(line, lora=options.lora)
            outputs = {seed: path for seed, path in job.outputs().items() if not job.is_finished(seed, path, _run(pipeline))}
            if outputs:
                summary |= _paint(job, outputs, job.request(), pipeline)
            outcome = "painted" if outputs else "skipped"
        except Exception as error:  # whatever one job runs into, the others are wanted
            if options.debug:
                raise
            outcome = "failed"
            summary["error"] = str(error)
            tqdm.write(f"line {number}: {error}", file=sys.stderr)
        counts[outcome] += 1
        if options.json:
            print(json.dumps(summary | {"outcome": outcome}), flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), file=sys.stderr)
    if options.json:
        print(json.dumps({"jobs": len(jobs), **counts, "device": str(device), "peak_memory_bytes": _peak_memory(device)}))
    if counts["failed"]:
        raise Qwen21Error(f"{counts['failed']} of {len(jobs)} jobs failed: mend their lines and run the file again, finished pictures are skipped")


def make_random(options: Namespace) -> None:
    folder = make_random_checkpoint(options.folder, options.seed, options.turbo)
    print(f"wrote a small random checkpoint to {folder}: it paints noise, and is meant for trying things out")


def inspect(options: Namespace) -> None:
    """Say what a file or folder is, and fail if it cannot be used."""
    found = describe(Path(options.source))
    print(json.dumps(found) if options.json else table(found))
    if found["problems"]:
        raise Qwen21Error(f"{options.source} cannot be used as it is: {found['problems'][0]}")


def _checkpoint(options: Namespace) -> Checkpoint:
    """Of the folder and the single files that were named; the built-in one if none was."""
    own = {part: getattr(options, part) for part in ("transformer", "text_encoder", "vae")}
    missing = [part for part, source in own.items() if source is None]
    if options.model is None and 0 < len(missing) < len(own):
        raise UsageError(f"there is no {missing[0]}: give --model a folder for what is not named, or --{missing[0].replace('_', '-')} too")
    return Checkpoint(options.model or (TINY if missing else None), **own)


def _pipeline(options: Namespace, checkpoint: Checkpoint, device: torch.device, keep: bool) -> Pipeline:
    unfit = already_quantized(checkpoint.parts["transformer"]) if options.dtype == "fp8" else ""
    if unfit:
        print(f"note: {unfit}", file=sys.stderr)
    fp8 = options.dtype == "fp8" and not unfit
    return Pipeline(checkpoint, device, compute_dtype(options.dtype, device), options.kv_cache, options.kv_device, keep, fp8)


def _paint(job: Job, outputs: dict[int, Path], request, pipeline: Pipeline) -> dict:
    """Paint and write the pictures of a job; what it was and cost, as JSON takes it."""
    report = Report()
    with ExitStack() as bars:  # closes a bar that an error cuts short, so that the message gets a line of its own
        pictures = pipeline.generate(request, list(outputs), report, lambda steps: bars.enter_context(_progress_bar(steps)))
        for (seed, path), picture in zip(outputs.items(), pictures):
            write_png(path, picture, job, seed, report, _run(pipeline))
        next(pictures, None)  # let it tidy up
    values = asdict(report)
    values["seconds"] = {stage: round(seconds, 4) for stage, seconds in report.seconds.items()}
    return {"outputs": [str(path) for path in outputs.values()], **values}


def _run(pipeline: Pipeline) -> dict[str, str]:
    """What decides a picture beside its job."""
    return {"model": pipeline.checkpoint.name, "dtype": pipeline.precision}


def _device(name: str) -> torch.device:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, there in available.items() if there)
    if not available[name]:
        raise Qwen21Error(f"the device {name} is not available to this PyTorch ({torch.__version__}): use --device cpu or install a build for it")
    return torch.device(name)


def _progress_bar(steps: Iterable[int]) -> tqdm:
    return tqdm(steps, desc="painting", unit="step", file=sys.stderr, leave=None)


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
