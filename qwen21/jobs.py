"""One job of the command line: what to paint, where to, and what is written down about it."""

import hashlib
import json
import stat
import tempfile
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from .errors import Qwen21Error, UsageError
from .lora import digest, parse
from .pictures import open_rgba
from .pipeline import Report, Request

SEEDS = 2**64  # torch's generators take seeds below this
MAX_BATCH = 10000


@dataclass(frozen=True)
class Job:
    """The options of `generate`, or a line of the file that `batch` reads. `images` are file names, `output` is a .png."""

    prompt: str
    output: str
    images: list[str] = field(default_factory=list)
    negative: str | None = None
    seed: int = 0
    batch: int = 1
    cfg: float = 1.0
    steps: int | None = None
    width: int | None = None
    height: int | None = None
    resolution: int | None = None
    schedule: str = "auto"
    lora: list[str] = field(default_factory=list)  # FILE or FILE:STRENGTH

    @classmethod
    def from_json(cls, line: str, **defaults: Any) -> "Job":
        """A job from a line of JSON, over `defaults`. Raises UsageError that names what is wrong."""
        try:
            values = json.loads(line)
        except ValueError as error:
            raise UsageError(f"the line is not JSON ({error}): write one object a line") from None
        if not isinstance(values, dict):
            raise UsageError(f"the line holds a JSON {type(values).__name__}, expected an object with prompt and output")
        names = {one.name: one.type for one in fields(cls)}
        for name, value in values.items():
            if name not in names:
                raise UsageError(f"`{name}` is not known: expected {', '.join(names)}")
            if not _fits(value, names[name]):
                raise UsageError(f"`{name}` is {value!r}, expected {_spelled(names[name])}")
        for name in ("prompt", "output"):
            if name not in values:
                raise UsageError(f"`{name}` is missing: every job needs prompt and output")
        return cls(**(defaults | values))

    def request(self) -> Request:
        """What the pipeline is asked for; opens the pictures."""
        return Request(
            prompt=self.prompt,
            negative=self.negative,
            pictures=[open_rgba(path) for path in self.images],
            cfg=self.cfg,
            steps=self.steps,
            width=self.width,
            height=self.height,
            resolution=self.resolution,
            schedule=self.schedule,
            loras=[parse(one) for one in self.lora],
        )

    def outputs(self) -> dict[int, Path]:
        """The file each seed goes to: the name as given for one picture; of several, each carries its seed. Checks that they can be written."""
        output = Path(self.output)
        if output.suffix.lower() != ".png":
            raise UsageError(f"the output {output} does not end in .png, the only format written here: it keeps transparency and the prompt")
        if not 1 <= self.batch <= MAX_BATCH:
            raise UsageError(f"batch is {self.batch}, expected 1 to {MAX_BATCH}")
        if not 0 <= self.seed <= SEEDS - self.batch:
            raise UsageError(f"seed is {self.seed}, expected 0 to {SEEDS - self.batch}")
        if not output.parent.is_dir():
            raise Qwen21Error(f"the output folder {output.parent} does not exist: create it first")
        seeds = range(self.seed, self.seed + self.batch)
        outputs = {seed: output.with_stem(f"{output.stem}-{seed}") if self.batch > 1 else output for seed in seeds}
        for path in outputs.values():
            _check_writable(path)
        return outputs

    def settings(self, seed: int, run: dict[str, str]) -> dict[str, Any]:
        """What a PNG says about how it was made: the job, its pictures and LoRAs by file name and SHA-256, and `run` (model and dtype)."""
        images = {
            "images": [Path(path).name for path in self.images],
            "images_sha256": [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in self.images],
        }
        loras = [(Path(path).name, digest(path), strength) for path, strength in map(parse, self.lora)]
        values = asdict(self) | {"seed": seed} | images | {"lora": [list(one) for one in loras]} | run
        return {name: value for name, value in values.items() if name not in ("output", "batch")}

    def is_finished(self, seed: int, path: Path, run: dict[str, str]) -> bool:
        """Whether `path` already holds this job's picture for `seed`, made by `run`, as its own settings tell."""
        try:
            with Image.open(path) as picture:
                found = json.loads(picture.text["settings"])
            wanted = self.settings(seed, run)
        except (OSError, AttributeError, KeyError, ValueError):
            return False
        decided = ("steps", "width", "height")  # by the checkpoint where the job leaves them open
        return all(found.get(name) == value for name, value in wanted.items() if not (name in decided and value is None))


def write_png(path: Path, picture: Image.Image, job: Job, seed: int, report: Report, run: dict[str, str]) -> None:
    """Write beside `path` first, so that `path` is either whole or as it was. See Job.settings for `run`."""
    settings = job.settings(seed, run) | {"steps": report.steps, "width": report.width, "height": report.height}
    chunks = PngInfo()
    chunks.add_itxt("prompt", job.prompt)
    chunks.add_text("seed", str(seed))
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


def _unwritable(path: Path, error: OSError) -> Qwen21Error:
    return Qwen21Error(f"{path} cannot be written ({error.strerror or error}): check the name, the folder's permissions and the free space")


def _fits(value: Any, kind: Any) -> bool:
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float if kind is float else kind)


def _spelled(kind: Any) -> str:
    spelled = {list[str]: "a list of file names", float: "a number", int: "a whole number", str: "a text", int | None: "a whole number", str | None: "a text"}
    return spelled[kind]
