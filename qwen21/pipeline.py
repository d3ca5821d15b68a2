"""The stages in order: encode, VAE encode, prefill, steps, decode. For the command line and for tests."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from PIL import Image

from .checkpoint import Checkpoint
from .errors import Qwen21Error, UsageError
from .pictures import MULTIPLE, area_size, from_pixels, resize, to_pixels
from .sampling import Velocity, euler, guided, initial_noise
from .schedule import sigmas
from .text_encoder import Encoding, template
from .transformer import PrefixKV, QwenImage21Transformer

KV_CACHES = ("run", "off")
STAGES = ("load", "encode", "vae encode", "prefill", "steps", "decode")
MAX_SIDE = 16384  # pixels, as in ComfyUI; the published model is made for about 2048
MAX_STEPS = 10000


@dataclass(frozen=True)
class Request:
    """What to paint. None leaves a choice to the checkpoint (and to the last reference, for the size)."""

    prompt: str
    negative: str | None = None
    pictures: Sequence[Image.Image] = ()  # RGBA, up to 10
    cfg: float = 1.0
    steps: int | None = None
    width: int | None = None
    height: int | None = None
    resolution: int | None = None
    schedule: str = "auto"
    kv_cache: str = "run"

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("width", self.width), ("height", self.height), ("resolution", self.resolution)):
            least, most = (1, MAX_STEPS) if name == "steps" else (MULTIPLE, MAX_SIDE)
            if value is not None and not least <= value <= most:
                raise UsageError(f"{name} is {value}, expected {least} to {most}")
        if not 0 <= self.cfg < float("inf"):
            raise UsageError(f"cfg is {self.cfg}, expected a number that is not negative: 1 means no guidance")
        for prompt in self.prompts:
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise UsageError("the prompt holds bytes that are not text in UTF-8: type it again, or check the terminal's encoding")
            template(prompt, len(self.pictures))  # refuses vision tokens and too many pictures before anything is loaded

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompt and, if guidance needs it, the negative one (empty unless given)."""
        return (self.prompt,) if self.cfg == 1 else (self.prompt, self.negative or "")


@dataclass
class Report:
    """What a run was and cost: sizes in pixels, counts of tokens, seconds a stage (all of `STAGES`, 0 for what was not needed)."""

    width: int = 0
    height: int = 0
    steps: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    kv_bytes: int = 0
    notes: list[str] = field(default_factory=list)


def canvas(request: Request, native_resolution: int) -> tuple[int, int, list[str]]:
    """(width, height) of the picture to paint, multiples of 32, and what there is to say about them."""
    resolution = request.resolution or native_resolution
    wide, high = area_size(resolution, *request.pictures[-1].size) if request.pictures else (resolution, resolution)
    notes = []
    sides = {"width": request.width or wide, "height": request.height or high}
    for name, side in sides.items():
        sides[name] = side // MULTIPLE * MULTIPLE
        if sides[name] != side:
            notes.append(f"{name} {side} is not a multiple of {MULTIPLE}: painting {sides[name]}")
    return sides["width"], sides["height"], notes


def notes(request: Request, native_resolution: int) -> list[str]:
    """What a person should know about a request before it is painted, a sentence each."""
    *_, said = canvas(request, native_resolution)
    if request.negative and request.cfg == 1:
        said.append("the negative prompt is not used at cfg 1: give a larger cfg")
    return said


class Pipeline:
    """Runs requests against a checkpoint folder. A part is loaded when its stage begins and dropped when it ends, so that memory holds
    the largest part and not their sum.

    `progress` wraps the range of steps (tqdm, say).
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: Callable[[Iterable[int]], Iterable[int]] = iter):
        self.checkpoint, self.device, self.dtype, self.progress = checkpoint, device, dtype, progress
        # The published VAE overflows in float16.
        self.vae_dtype = torch.float32 if dtype == torch.float16 else dtype

    @torch.inference_mode()
    def generate(self, request: Request, seeds: Sequence[int], report: Report) -> Iterator[Image.Image]:
        """An RGBA picture a seed, as each is ready; all share one encode and one prefill. Fills `report` on the way."""
        checkpoint = self.checkpoint
        report.width, report.height, _ = canvas(request, checkpoint.index.native_resolution)
        report.notes = notes(request, checkpoint.index.native_resolution)
        rows, columns = report.height // checkpoint.vae_config.spatial_ratio, report.width // checkpoint.vae_config.spatial_ratio
        schedule = sigmas(request.schedule, request.steps, rows * columns, checkpoint.schedule, checkpoint.index.sample_sigmas)
        report.steps = len(schedule) - 1
        resolution = request.resolution or checkpoint.index.native_resolution
        pictures = [resize(picture, *area_size(resolution, *picture.size)) for picture in request.pictures]

        encodings = self._encode(request, pictures, report)
        with self._stage("load", report):
            vae = checkpoint.vae(self.device, self.vae_dtype)
        with self._stage("vae encode", report):
            references = [vae.normalize(vae.encode(to_pixels(picture).to(self.device, self.vae_dtype))).to(self.dtype) for picture in pictures]
            self._check_finite("vae encode", *references)
        with self._stage("load", report):
            transformer = checkpoint.transformer(self.device, self.dtype)
        report.tokens = {
            "text": len(encodings[0].token_ids),
            "negative text": len(encodings[1].token_ids) if len(encodings) > 1 else 0,
            "references": sum(latents.shape[2] * latents.shape[3] for latents in references),
            "target": rows * columns,
        }
        velocity = self._velocity(transformer, encodings, references, request, report)
        for seed in seeds:
            with self._stage("steps", report):
                noise = initial_noise(seed, rows, columns, checkpoint.transformer_config.in_channels).to(self.device)
                latents = euler(noise, schedule.to(self.device), velocity, self.progress)
                self._check_finite("steps", latents)
            with self._stage("decode", report):
                pixels = vae.decode(vae.denormalize(latents.to(self.vae_dtype)))
                self._check_finite("decode", pixels)
                picture = from_pixels(pixels)
            yield picture

    def _encode(self, request: Request, pictures: Sequence[Image.Image], report: Report) -> list[Encoding]:
        with self._stage("load", report):
            encoder = self.checkpoint.text_encoder(self.device, self.dtype)
        with self._stage("encode", report):
            encodings = encoder.encode(request.prompts, pictures)
            self._check_finite("encode", *(encoding.states for encoding in encodings))
        del encoder
        gc.collect()  # transformers' modules refer to one another in circles
        return encodings

    def _velocity(
        self, transformer: QwenImage21Transformer, encodings: Sequence[Encoding], references: Sequence[torch.Tensor], request: Request, report: Report
    ) -> Velocity:
        """The guided velocity over the prefixes of `encodings`, prefilled now, or before every evaluation if the cache is off."""

        def prefill(encoding: Encoding) -> PrefixKV:
            return transformer.prefill(encoding.states, encoding.image_slots, references)

        def branch(encoding: Encoding) -> Velocity:
            if request.kv_cache == "off":
                return lambda latents, sigma: transformer.denoise(latents.to(self.dtype), sigma, prefill(encoding))
            with self._stage("prefill", report):
                prefix = prefill(encoding)
            report.kv_bytes += prefix.nbytes
            return lambda latents, sigma: transformer.denoise(latents.to(self.dtype), sigma, prefix)

        positive, *negative = map(branch, encodings)
        return guided(positive, negative[0] if negative else None, request.cfg)

    def _check_finite(self, stage: str, *tensors: torch.Tensor) -> None:
        """A picture of NaN would be written as plain black: say where it went wrong."""
        if not all(tensor.isfinite().all() for tensor in tensors):
            dtype = str(self.dtype).removeprefix("torch.")
            way_out = "lower the cfg, or download the checkpoint again" if dtype == "float32" else "use --dtype float32, or lower the cfg"
            raise Qwen21Error(f"the stage '{stage}' gave numbers that are not finite in {dtype}: {way_out}")

    @contextmanager
    def _stage(self, name: str, report: Report) -> Iterator[None]:
        """Add what the block takes to `report.seconds[name]`; say in which stage memory ran out."""
        start = time.perf_counter()
        try:
            yield
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(words in str(error) for words in _NO_MEMORY):
                raise
            raise Qwen21Error(f"out of memory on {self.device} in the stage '{name}': {_REMEDY[name]}") from error
        report.seconds[name] += time.perf_counter() - start


_NO_MEMORY = ("allocate", "ALLOC_FAILED")  # what PyTorch's CPU and MPS allocators and cuBLAS say in a plain RuntimeError
_SMALLER = "paint a smaller picture (--width, --height, --resolution) or use --dtype bfloat16"
_REMEDY = {
    "load": "use --dtype bfloat16, or --device cpu",
    "encode": "give fewer or smaller reference pictures (--resolution), or use --dtype bfloat16",
    "vae encode": "give smaller reference pictures (--resolution), or use --dtype bfloat16",
    "prefill": "give fewer or smaller reference pictures (--resolution), or use --dtype bfloat16",
    "steps": _SMALLER,
    "decode": _SMALLER,
}
