"""What a first picture costs on a machine where no kernel was ever compiled, and what another length or canvas compiles.

    python tests/bench/cold.py [--size small|full] [--device cpu|cuda] [--way ours] [--json]

Starts with an empty cache of Triton's. Pictures of two steps: text to image, then edits, each with other lengths and canvases after the first.
`compiled` counts kernels, `compile_seconds` is what the calls took that compiled one, with the launcher and at the first the driver's
interface; `longest_seconds` the longest of them. `again_seconds` is another such picture: what more the first took, PyTorch and its libraries
spent on a new shape.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from unittest import mock

from measuring import arguments, take
from pictures import Bench
from PIL import Image

from qwen21.pipeline import Report

WAYS = ("ours", "ours fp8")
STEPS = 2
LENGTHS = (60, 0, 15, 61, 400)  # words
CANVASES = ((1024, 1024), (1280, 768), (512, 2048), (1056, 992), (32, 32))


@contextmanager
def noting_compiles() -> Iterator[list[float]]:
    """Seconds of each call of a kernel that had to compile it. Without Triton there are none."""
    seconds: list[float] = []
    if find_spec("triton") is None:
        yield seconds
        return
    from triton import knobs
    from triton.runtime.jit import JITFunction

    run, compiled = JITFunction.run, []

    def timed(*arguments, **options):
        before, began = len(compiled), time.perf_counter()
        result = run(*arguments, **options)
        if len(compiled) > before:
            seconds.append(time.perf_counter() - began)
        return result

    with mock.patch.object(JITFunction, "run", timed), mock.patch.object(knobs.runtime, "jit_post_compile_hook", lambda **note: compiled.append(note)):
        yield seconds


def compiles(seconds: list[float]) -> dict:
    return {"compiled": len(seconds), "compile_seconds": sum(seconds), "longest_seconds": max(seconds, default=0.0)}


class Cold(Bench):
    def loading(self, way: str) -> dict:
        """All parts: weights are brought to FP8 by kernels."""
        with noting_compiles() as seconds:
            for name in ("text_encoder", "vae", "transformer"):
                self.pipelines[way]._part(name, Report())
        return {"what": f"{way}, loading", **compiles(seconds)}

    def painting(self, way: str, what: str, words: int = LENGTHS[0], canvas: tuple[int, int] = CANVASES[0], pictures: Sequence[Image.Image] = ()) -> dict:
        """A picture, and another like it."""
        width, height = (max(side * self.side // 1024, 32) for side in canvas)
        request = {"schedule": "dynamic", "steps": STEPS, "width": width, "height": height, "pictures": pictures}
        with noting_compiles() as seconds:
            taken = [sum(self.seconds(way, prompt=self.prompt(words), **request).values()) for _ in range(2)]
        return {"what": f"{way}, {what}, {words} words, {width} x {height}", **compiles(seconds), "seconds": taken[0], "again_seconds": taken[1]}


def cold(bench: Cold) -> list[dict]:
    """Loading, and a row a picture, in this order."""
    rows = []
    for way in bench.options.way:
        rows.append(bench.loading(way))
        one = bench.picture(0)
        for what, pictures in (("text to image", []), ("1 reference", [one])):
            rows += [bench.painting(way, what, words, pictures=pictures) for words in LENGTHS]
            rows += [bench.painting(way, what, canvas=canvas, pictures=pictures) for canvas in CANVASES[1:]]
        rows.append(bench.painting(way, "3 references", pictures=[one, one.resize((bench.side, bench.side // 2)), one.resize((bench.side // 2, bench.side))]))
    return rows


MEASURES = {"cold": cold}


def main() -> None:
    parser = arguments("cold", __doc__.splitlines()[0], MEASURES)
    parser.add_argument("--way", choices=WAYS, action="append", help="all without it, one after another: what they share is compiled by the first")
    options = parser.parse_args()
    options.way = options.way or WAYS
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # read when a kernel is compiled
        take(options, Cold, MEASURES)


if __name__ == "__main__":
    main()
