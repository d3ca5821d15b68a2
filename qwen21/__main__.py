"""python -m qwen21: paint and edit pictures from a shell.

Exit codes: 0 done, 1 it failed, 2 the request was wrong, 130 interrupted, 141 nobody reads the output any more, 143 terminated. Errors are
one line on stderr.
"""

import argparse
import os
import signal
import sys
import traceback
from typing import NoReturn

from .errors import Qwen21Error, UsageError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m qwen21", description="Qwen-Image 2.1 without a user interface.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    runs = _Parser(add_help=False)
    runs.add_argument("--model", metavar="FOLDER", help="checkpoint folder in the diffusers layout; default: tiny, the built-in one")
    for part, files in (("transformer", "safetensors or GGUF file"), ("text-encoder", "safetensors file"), ("vae", "safetensors file")):
        runs.add_argument(f"--{part}", metavar="FILE", help=f"{files}, or folder, to use for the {part} instead; with all three, --model is not needed")
    runs.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "fp8"),
        help="default: bfloat16 on cuda and mps, float32 on cpu; fp8: as the default, with the denoiser's large layers brought to 8 bits at load: half "
        "the memory, for GPUs that multiply in 8 bits (Ada, Hopper and newer); pictures change a little",
    )
    runs.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="default: auto, the fastest there is")
    runs.add_argument(
        "--kv-cache",
        choices=("off", "run", "default", "fp8_v", "fp8_kv"),
        default="default",
        help="keys and values of text and references: off computes them at every step, run keeps them for one picture's run, default (the default) "
        "between runs too, fp8_v and fp8_kv likewise with values, or keys and values, in 8 bits",
    )
    runs.add_argument(
        "--kv-device", choices=("auto", "gpu", "cpu"), default="auto", help="where they are kept; auto (default): host memory when the GPU is full"
    )
    runs.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[:STRENGTH]",
        help="LoRA of any trainer; strength 1 unless given, negative too; give the option again for each. In batch: for jobs that have no lora of their own",
    )
    runs.add_argument("--debug", action="store_true", help="show the traceback of an error")

    generate = commands.add_parser(
        "generate", parents=[runs], help="paint a picture, or edit pictures", description="Paint a picture from a prompt, or edit pictures with --image."
    )
    generate.add_argument("prompt", metavar="PROMPT", help="what to paint; pictures are called <image1>, <image2> ... in the order of --image")
    generate.add_argument("-o", "--output", required=True, metavar="OUT.png", help="RGBA PNG to write; with --batch the seed is added to each name")
    generate.add_argument("--image", action="append", default=[], metavar="FILE", help="reference picture, up to 10; give the option again for each")
    generate.add_argument("--negative", metavar="TEXT", help="what to steer away from, used when --cfg is not 1 (default: empty)")
    generate.add_argument("--cfg", type=float, default=1.0, metavar="X", help="guidance scale; 1 (default) means none and halves the work")
    generate.add_argument("--steps", type=int, metavar="N", help="default: 40, or the checkpoint's own sigmas")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    generate.add_argument("--width", type=int, metavar="W", help="pixels; default: square, or as the last reference")
    generate.add_argument("--height", type=int, metavar="H", help="pixels; default: square, or as the last reference")
    generate.add_argument(
        "--resolution", type=int, metavar="N", help="references are resized to an area of N x N pixels; default: the checkpoint's native size"
    )
    generate.add_argument("--schedule", choices=("auto", "dynamic", "turbo"), default="auto", help="auto (default) follows the checkpoint")
    generate.add_argument("--batch", type=int, default=1, metavar="N", help="paint N pictures with seeds SEED, SEED + 1, ...; default: 1")
    generate.add_argument("--json", action="store_true", help="print one line of JSON: sizes, token counts, seconds a stage, prefix cache, peak memory")

    batch = commands.add_parser(
        "batch",
        parents=[runs],
        help="run many jobs in one process",
        description="Run the jobs of a file: one JSON object a line, with prompt and output and, if wanted, images (a list of files), negative, seed, batch, "
        "cfg, steps, width, height, resolution, schedule and lora (a list), as in generate. What jobs share is computed once; pictures that are there already are skipped.",
    )
    batch.add_argument("jobs", metavar="JOBS.jsonl", help="file with one job a line")
    batch.add_argument("--json", action="store_true", help="print a line of JSON a job, and one for all")

    inspect = commands.add_parser(
        "inspect",
        help="say what a file or folder is",
        description="Say what a file or folder is: which part, in which layout and precision, how large, Turbo or not, a LoRA's rank and targets, and why it "
        "cannot be used if it cannot (exit code 1).",
    )
    inspect.add_argument("source", metavar="FILE_OR_FOLDER", help="safetensors or GGUF file, checkpoint folder, the folder of a part, or tiny")
    inspect.add_argument("--json", action="store_true", help="print one line of JSON")
    inspect.add_argument("--debug", action="store_true", help="show the traceback of an error")

    random = commands.add_parser(
        "make-random", help="write a small checkpoint with random weights", description="Write a small random checkpoint, for tests: it paints noise."
    )
    random.add_argument("folder", metavar="FOLDER", help="new folder")
    random.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    random.add_argument("--turbo", action="store_true", help="as a Turbo checkpoint, with fixed sigmas")
    random.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        return _run(arguments)
    finally:
        _flush()


def _run(arguments: list[str] | None) -> int:
    options = _parser().parse_args(arguments)
    try:
        from . import commands

        {"generate": commands.generate, "batch": commands.batch, "inspect": commands.inspect, "make-random": commands.make_random}[options.command](options)
        return 0
    except BrokenPipeError:
        return 141  # as for the programs that SIGPIPE ends, such as those before `head`
    except (Exception, KeyboardInterrupt) as error:
        if options.debug:
            traceback.print_exc()
        message, code = _failure(error)
        print(" ".join(message.splitlines()), file=sys.stderr)
        return code


def _flush() -> None:
    """What is left in the buffer goes out, or is dropped if its reader has gone: Python would complain of that at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failure(error: BaseException) -> tuple[str, int]:
    """What to say of `error`, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: nothing was left half-written", 130
    if isinstance(error, Qwen21Error):
        return f"error: {error}", 2 if isinstance(error, UsageError) else 1
    return f"error: {''.join(traceback.format_exception_only(error)).strip()} (not foreseen here: --debug shows where it came from)", 1


def _terminate(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)  # unwinds, so that a file that is being written is removed
    sys.exit(main())
