"""The stages in order: encode, VAE encode, prefill, steps, decode. For the command line and for tests."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from PIL import Image

from .checkpoint import Checkpoint, meta_module
from .errors import Qwen21Error, UsageError
from .fp8 import check_device, quantize_linears
from .lora import Lora, LoraFile, attach, digest, places
from .pictures import MULTIPLE, area_size, from_pixels, resize, to_pixels
from .prefix import PRECISIONS, PrefixKV
from .prefix_cache import CacheStatistics, PrefixCache, prefix_items
from .recent import Recent
from .references import near_copy_warning
from .sampling import Velocity, euler, guided, initial_noise
from .schedule import SCHEDULES, sigmas
from .text_encoder import Encoding, TextEncoder, picture_digest, template
from .transformer import QwenImage21Transformer
from .vae import QwenImage21VAE
from .workspace import Workspace, free_bytes

KV_CACHES = ("off", "run", *PRECISIONS)
STAGES = ("load", "encode", "vae encode", "prefill", "steps", "decode")
MAX_SIDE = 16384  # pixels, as in ComfyUI; the published model is made for about 2048
MAX_STEPS = 10000
REMEMBERED_PICTURES = 64  # latents of about 1 MB each at 1024 x 1024


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
    loras: Sequence[tuple[str, float]] = ()  # files and strengths, applied in order

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("width", self.width), ("height", self.height), ("resolution", self.resolution)):
            least, most = (1, MAX_STEPS) if name == "steps" else (MULTIPLE, MAX_SIDE)
            if value is not None and not least <= value <= most:
                raise UsageError(f"{name} is {value}, expected {least} to {most}")
        if not 0 <= self.cfg < float("inf"):
            raise UsageError(f"cfg is {self.cfg}, expected a number that is not negative: 1 means no guidance")
        if self.schedule not in SCHEDULES:
            raise UsageError(f"schedule is {self.schedule!r}, expected one of {', '.join(SCHEDULES)}")
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
    prefix: dict[str, float] = field(default_factory=dict)
    loras: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def prefix_report(before: CacheStatistics, cache: PrefixCache) -> dict[str, float]:
    """What the cache did since `before`: tokens reused and computed, prefixes found whole, entries and bytes held, time saved."""
    run = cache.since(before)
    return {
        "reused_tokens": run.reused_tokens,
        "computed_tokens": run.computed_tokens,
        "hits": run.found,
        "entries": len(cache.tree),
        "bytes": cache.tree.nbytes(),
        "saved_ms": round(1000 * cache.saved(run), 1),
    }


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


def compute_dtype(precision: str | None, device: torch.device) -> torch.dtype:
    """What to compute in when asked for `precision`: None is the device's own choice, which is also what goes with "fp8"."""
    if precision in (None, "fp8"):
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, precision)


def notes(request: Request, native_resolution: int) -> list[str]:
    """What a person should know about a request before it is painted, a sentence each."""
    width, height, said = canvas(request, native_resolution)
    resolution = request.resolution or native_resolution
    near_copy = near_copy_warning((width, height), [area_size(resolution, *picture.size) for picture in request.pictures])
    if near_copy:
        said.append(near_copy)
    if request.negative and request.cfg == 1:
        said.append("the negative prompt is not used at cfg 1: give a larger cfg")
    return said


class Pipeline:
    """Runs requests against a checkpoint folder.

    For one request, a part is loaded when its stage begins, and the text encoder is dropped before the denoiser comes, so that memory never
    holds both. With `keep`, for many requests, parts stay as long as there is room, and so does what they found out: text states, reference
    latents, keys and values. `kv_cache` is one of KV_CACHES: "off" computes the prefix at every step, "run" keeps it for one request, the
    others between requests too, in that precision; `kv_device` says where (see PrefixCache.placement). With `fp8` the denoiser's linear
    layers are brought to 8 bits as it is loaded (see quantize_linears); the rest is computed in `dtype`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache: str = "default",
        kv_device: str = "auto",
        keep: bool = False,
        fp8: bool = False,
    ):
        if fp8:
            check_device(device)
        self.checkpoint, self.device, self.dtype, self.keep = checkpoint, device, dtype, keep
        self.precision = "fp8" if fp8 else str(dtype).removeprefix("torch.")
        self.vae_dtype = torch.float32 if dtype == torch.float16 else dtype  # the published VAE overflows in float16
        self.kv_cache = kv_cache
        self.cache = PrefixCache(precision=kv_cache if kv_cache in PRECISIONS else "default", placement=kv_device, room=self._room)
        self._parts: dict[str, TextEncoder | QwenImage21VAE | QwenImage21Transformer] = {}
        self._latents = Recent[torch.Tensor](REMEMBERED_PICTURES)
        self._loras: dict[str, Lora] = {}  # by digest

    @torch.inference_mode()
    def generate(
        self, request: Request, seeds: Sequence[int], report: Report, progress: Callable[[Iterable[int]], Iterable[int]] = iter
    ) -> Iterator[Image.Image]:
        """An RGBA picture a seed, as each is ready; all share one encode and one prefill. Fills `report` on the way.

        `progress` wraps the range of steps (tqdm, say).
        """
        checkpoint = self.checkpoint
        report.width, report.height, _ = canvas(request, checkpoint.index.native_resolution)
        report.notes = notes(request, checkpoint.index.native_resolution)
        rows, columns = report.height // checkpoint.vae_config.spatial_ratio, report.width // checkpoint.vae_config.spatial_ratio
        schedule = sigmas(request.schedule, request.steps, rows * columns, checkpoint.schedule, checkpoint.index.sample_sigmas)
        report.steps = len(schedule) - 1
        resolution = request.resolution or checkpoint.index.native_resolution
        pictures = [resize(picture, *area_size(resolution, *picture.size)) for picture in request.pictures]
        loras = self._read_loras(request, report)

        encodings = self._encode(request, pictures, report)
        references = self._encode_references(pictures, report)
        vae, transformer = self._part("vae", report), self._part("transformer", report)
        report.tokens = {
            "text": len(encodings[0].token_ids),
            "negative text": len(encodings[1].token_ids) if len(encodings) > 1 else 0,
            "references": sum(latents.shape[2] * latents.shape[3] for _, latents in references),
            "target": rows * columns,
        }
        with ExitStack() as held:
            held.callback(self._tidy)
            with self._stage("load", report):
                held.enter_context(attach(transformer, [(self._loras[key], strength) for key, strength in loras]))
            workspace = Workspace()
            velocity = self._velocity(transformer, loras, encodings, references, request.cfg, report, held, workspace)
            for seed in seeds:
                with self._stage("steps", report):
                    noise = initial_noise(seed, rows, columns, checkpoint.transformer_config.in_channels).to(self.device)
                    latents = euler(noise, schedule.to(self.device), velocity, progress)
                    workspace.let_go()  # decoding wants the room
                    self._check_finite("steps", latents)
                with self._stage("decode", report):
                    pixels = vae.decode(vae.denormalize(latents.to(self.vae_dtype)))
                    self._check_finite("decode", pixels)
                    picture = from_pixels(pixels)
                yield picture

    def _tidy(self) -> None:
        """After a request, drop what is not kept for the next."""
        if self.kv_cache == "run":
            self.cache.tree.clear()
        if not self.keep:
            self._drop(*self._parts)

    def _read_loras(self, request: Request, report: Report) -> list[tuple[str, float]]:
        """Digest and strength of each LoRA of the request, of which `_loras` then holds the content. Strength 0 is none."""
        wanted = {digest(path): path for path, _ in request.loras}
        self._loras = {key: lora for key, lora in self._loras.items() if key in wanted}
        with self._stage("load", report):
            for key, path in wanted.items():
                if key not in self._loras:
                    self._loras[key] = LoraFile.read(path).fit(places(meta_module(self.checkpoint.parts["transformer"])))
        report.loras = [str(self._loras[digest(path)]) for path, _ in request.loras]
        return [(digest(path), strength) for path, strength in request.loras if strength]

    def _encode(self, request: Request, pictures: Sequence[Image.Image], report: Report) -> list[Encoding]:
        encoder = self._part("text_encoder", report)
        with self._stage("encode", report):
            encoder.remember = self.keep
            encodings = encoder.encode(request.prompts, pictures)
            self._check_finite("encode", *(encoding.states for encoding in encodings))
        if not self.keep:
            del encoder
            self._drop("text_encoder")
        return encodings

    def _encode_references(self, pictures: Sequence[Image.Image], report: Report) -> list[tuple[bytes, torch.Tensor]]:
        """What each picture is recognised by, and its normalised latents."""

        def encode(picture: Image.Image) -> torch.Tensor:
            vae = self._part("vae", report)
            with self._stage("vae encode", report):
                latents = vae.normalize(vae.encode(to_pixels(picture).to(self.device, self.vae_dtype))).to(self.dtype)
                self._check_finite("vae encode", latents)
            return latents

        digests = [picture_digest(picture) for picture in pictures]
        return [(digest, self._latents.get(digest, partial(encode, picture))) for digest, picture in zip(digests, pictures)]

    def _velocity(
        self,
        transformer: QwenImage21Transformer,
        loras: Sequence[tuple[str, float]],
        encodings: Sequence[Encoding],
        references: Sequence[tuple[bytes, torch.Tensor]],
        cfg: float,
        report: Report,
        held: ExitStack,
        workspace: Workspace,
    ) -> Velocity:
        """The guided velocity over the prefixes of `encodings`, which the cache holds until `held` is closed. `loras` (digest, strength) are attached."""
        latents = [one for _, one in references]

        def branch(encoding: Encoding) -> Velocity:
            def prefill(past: PrefixKV = PrefixKV(), texts: int = 0, pictures: int = 0) -> PrefixKV:
                slots = [slot - texts for slot in encoding.image_slots[pictures:]]
                return transformer.prefill(encoding.states[:, texts:], slots, latents[pictures:], past)

            if self.kv_cache == "off":
                return lambda x, sigma: transformer.denoise(x.to(self.dtype), sigma, prefill(), workspace=workspace)
            items = prefix_items(encoding.keys, encoding.image_slots, [(*one.shape[2:], digest) for digest, one in references])
            with self._stage("prefill", report):
                prefix = held.enter_context(self.cache.prefix((self.precision, *loras), items, prefill))
            return lambda x, sigma: transformer.denoise(x.to(self.dtype), sigma, prefix, workspace=workspace)

        before = replace(self.cache.statistics)
        positive, *negative = map(branch, encodings)
        report.prefix = prefix_report(before, self.cache)
        return guided(positive, negative[0] if negative else None, cfg)

    def _part(self, name: str, report: Report):
        """A part of the model, loaded if it is not there. On a GPU without room for it, parts of earlier stages go first."""
        if name not in self._parts:
            with self._stage("load", report):
                if self._room(self.device) < 1.1 * self.checkpoint.file_bytes(name):
                    self._drop(*self._parts)
                dtype = self.vae_dtype if name == "vae" else self.dtype
                to_fp8 = name == "transformer" and self.precision == "fp8"
                self._parts[name] = getattr(self.checkpoint, name)(torch.device("cpu") if to_fp8 else self.device, dtype)
                if to_fp8:
                    quantize_linears(self._parts[name], self.device)
        return self._parts[name]

    def _drop(self, *names: str) -> None:
        for name in names:
            del self._parts[name]
        if "text_encoder" in names:
            gc.collect()  # transformers' modules refer to one another in circles
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _room(self, device: torch.device) -> float:
        """Bytes that are free on `device`: known for CUDA, elsewhere the host's memory is the system's to manage."""
        return free_bytes(device) if device.type == "cuda" else float("inf")

    def _check_finite(self, stage: str, *tensors: torch.Tensor) -> None:
        """A picture of NaN would be written as plain black: say where it went wrong."""
        if not all(tensor.isfinite().all() for tensor in tensors):
            way_out = "lower the cfg, or download the checkpoint again" if self.precision == "float32" else "use --dtype float32, or lower the cfg"
            raise Qwen21Error(f"the stage '{stage}' gave numbers that are not finite in {self.precision}: {way_out}")

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
