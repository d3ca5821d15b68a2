"""The nodes inside ComfyUI: what a step takes there, and what a card of so many GiB still paints.

    python tests/bench/comfyui.py --comfyui FOLDER [--size small|full] [--device cpu|cuda] [--only steps] [--limit-gib 12] [--encoder]
        [--checkpoint FOLDER] [--options=--disable-dynamic-vram] [--repeats 5] [--scale 0.03] [--json]

Runs in ComfyUI's Python, without its server, and starts ComfyUI as its main.py does; what that decides before torch is imported is left to the caller:
with PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync it uses that allocator, as it does by itself on CUDA 13. Reads a checkpoint folder with random
weights, which is written first if it is not there: "small" is the toy in float32, "full" the published sizes in bfloat16 (14 GB, and 17 GB for
the text encoder, of which only a stub is written without --encoder).

Measures: "steps" (8 steps of the Sampler: a step without loading and prefix, and all of it), "error" (of one step, against float32), "memory"
(4 steps and decoding, with each kind of weights: whether it works, the step without loading and prefix, the most that PyTorch held, and how much
of the denoiser was on the card after sampling), "encode" (the text encoder, likewise), "vae" (a picture of 1024 x 1024, decoded and encoded, with
the convolutions on the kernels' way and as ComfyUI has them), "quality" (what fp8 weights change in the pictures of the tiny checkpoint, whichever
--checkpoint is given; eleven minutes on one CPU core). --limit-gib takes the rest of the card's memory away first.
"""

import argparse
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from measuring import arguments, in_turn, peak_gib, relative_error, take
from PIL import Image
from safetensors.torch import save_file

REPOSITORY = Path(__file__).parents[2]
PACK = "qwen_image_21"
HEAD, GAP, TEXT = 4, 3, 300  # text tokens: before the first reference, between two, in all
STEPS, MEMORY_STEPS = 8, 4
SHARD = 2 * 2**30  # bytes a file of a checkpoint
WAYS = (
    "ours",
    "ours, prompt seen before",
    "ours, plain PyTorch",
    "ours, ComfyUI's order of attention kernels",
    "ours, prefix recomputed",
    "ours fp8",
    "ours fp8, ComfyUI's product",
)
QUALITIES = ("default", "fp8", "fp8, ComfyUI's product")  # the first is what the others are compared with
WEIGHTS = {"default": False, "fp8": True}  # the Loader's weight_dtype -> whether it is fp8
PROMPT = "a red star over two blue circles beside the green square under one yellow moon, " * 4


def limit_memory(gib: float) -> None:
    """Leave `gib` GiB of the card, in which the driver's own share lies as on a card of that size, and let whoever asks see no more."""
    size, ask = int(gib * 2**30), torch.cuda.mem_get_info
    _, total = ask()
    taken = ctypes.c_void_p()
    failed = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(taken), ctypes.c_size_t(total - size))
    if failed:
        raise SystemExit(f"the card does not give away all but {gib} GiB (CUDA error {failed}): let nothing else run on it")
    torch.cuda.mem_get_info = lambda device=None: (ask(device)[0], size)


def start_comfyui(folder: Path, base: str, options: list[str]) -> None:
    """Import ComfyUI with those command line options and its working folders in `base`."""
    sys.path.insert(0, str(folder))
    if "cudaMallocAsync" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        options = ["--cuda-malloc", *options]
    import comfy.options

    comfy.options.enable_args_parsing()
    sys.argv[1:] = ["--base-directory", base, "--disable-api-nodes", *options]
    from comfy.cli_args import args, enables_dynamic_vram

    if enables_dynamic_vram():
        import comfy_aimdo.control

        comfy_aimdo.control.init(nvml_pressure=not args.disable_nvml_pressure)
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher
    import comfy.utils

    if enables_dynamic_vram() and comfy_aimdo.control.init_devices((device.index, 0) for device in comfy.model_management.get_all_torch_devices()):
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True
        comfy_aimdo.control.set_log_info()  # else it logs every weight that is used
    comfy.utils.PROGRESS_BAR_ENABLED = False


def pack(module: str):
    """A module of the node pack, such as "nodes.sampler", in a package of its own as ComfyUI imports it."""
    if PACK not in sys.modules:
        spec = importlib.util.spec_from_file_location(PACK, REPOSITORY / "__init__.py", submodule_search_locations=[str(REPOSITORY)])
        sys.modules[PACK] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACK])
    return importlib.import_module(f"{PACK}.{module}")


def outputs(module: str, node: str, **inputs) -> tuple:
    """Of a node, called as ComfyUI calls it."""
    from comfy_api.latest import io

    with node_done():
        return getattr(pack(module), node).PREPARE_CLASS_CLONE({"hidden_inputs": {io.Hidden.unique_id: None}}).execute(**inputs).args


@contextmanager
def node_done() -> Iterator[None]:
    """What ComfyUI does after each node."""
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_prefetch
    import comfy_aimdo.model_vbar

    try:
        yield
    finally:
        if comfy.memory_management.aimdo_enabled:
            comfy.model_management.reset_cast_buffers()
            comfy.model_prefetch.cleanup_prefetch_queues()
            comfy_aimdo.model_vbar.vbars_reset_watermark_limits()


def write_checkpoint(folder: Path, full: bool, encoder: bool, device: torch.device) -> None:
    """A checkpoint folder with random weights."""
    sys.path.append(str(REPOSITORY))  # the core as a package, which ComfyUI's Python may not have
    from pictures import Published

    from qwen21.checkpoint import TINY_FOLDER
    from qwen21.random_model import make_random

    if not full:
        make_random(folder, resolution=64)
        return
    made = Published(device)
    if not encoder:
        stub = made.parts["text_encoder"]
        tiny = json.loads((TINY_FOLDER / "text_encoder/config.json").read_text())
        width = made.transformer_config.context_in_dim
        values = {"text_config": {"hidden_size": width, "num_hidden_layers": 1}, "vision_config": {"out_hidden_size": width}}
        made.parts["text_encoder"] = replace(stub, config=tiny | {name: tiny[name] | value for name, value in values.items()})
    for name, part in made.parts.items():
        write_part(folder / name, part, device)
    for name in ("scheduler", "processor"):
        shutil.copytree(TINY_FOLDER / name, folder / name)
    index = json.loads((TINY_FOLDER / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"native_resolution": made.index.native_resolution}))  # last: the folder is whole


def write_part(folder: Path, part, device: torch.device) -> None:
    """Config and random weights in bfloat16, in shards."""
    from pictures import random_weight

    from qwen21.checkpoint import meta_module

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(part.config))
    torch.manual_seed(0)
    prefix, stem = ("model.", "model") if part.name == "text_encoder" else ("", "diffusion_pytorch_model")
    files, shard = {}, {}

    def write() -> None:
        file = f"{stem}-{len(set(files.values())):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, file))
        shard.clear()

    for path, owner in meta_module(part).named_modules():
        for name, weight in owner.named_parameters(recurse=False):
            shard[prefix + ".".join(filter(None, (path, name)))] = random_weight(owner, name, weight.shape, device, torch.bfloat16).cpu()
            if sum(tensor.nbytes for tensor in shard.values()) > SHARD:
                write()
    write()
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options, self.device = options, torch.device(options.device)
        self.small = options.size == "small"
        self.side = 4 if self.small else 64  # of target and references, in latent positions
        self.checkpoint = pack("qwen21.checkpoint").Checkpoint(options.checkpoint)

    def load(self, fp8: bool):
        """The denoiser as a MODEL."""
        return pack("nodes.bridge_model").load_model(self.checkpoint, fp8=fp8)

    def conditioning(self, references: list[torch.Tensor]) -> list:
        """Random text with so many references in it."""
        text = TEXT // 10 if self.small else TEXT
        states = torch.randn(1, text, self.checkpoint.transformer_config.context_in_dim, generator=torch.Generator().manual_seed(0))
        slots = [HEAD + GAP * i for i in range(len(references))]
        return [[states, {"image_slots": slots, "reference_latents": references} if references else {}]]

    def sample(self, model, references: list[torch.Tensor], steps: int) -> tuple[dict, str]:
        """(LATENT, report) of the Sampler."""
        prompt, latent = self.conditioning(references), {"samples": torch.zeros(1, 64, self.side, self.side)}
        return sampled(model, prompt, prompt, latent, steps, schedule="dynamic")

    def way(self, name: str, model, references: int, steps: int = STEPS) -> Callable[[], tuple[dict, str]]:
        """So many steps of `name`, one of WAYS: (LATENT, report)."""
        generator = torch.Generator().manual_seed(1)
        latents = [torch.randn(1, 64, self.side, self.side, generator=generator) for _ in range(references)]
        if "recomputed" in name:
            (model,) = outputs("nodes.prefix_cache", "Qwen21PrefixCache", model=model, budget_mb=0, device="off", precision="default")
        replaced = []
        if "plain" in name:
            replaced = [(pack("qwen21.kernels"), "fusible"), (pack("qwen21.kernels"), "kitchen_fits")]
        if "product" in name:
            replaced = [(pack("nodes.bridge_operations"), "_runs_on")]
        if "order" in name:
            replaced = [(pack("nodes.bridge_model"), "prefers_cudnn")]

        def run() -> tuple[dict, str]:
            if "seen before" not in name:
                model.model.diffusion_model.cache.tree.clear()
            with ExitStack() as stack:
                for module, function in replaced:
                    stack.enter_context(mock.patch.object(module, function, lambda x: False))
                return self.sample(model, latents, steps)

        return run

    def picture(self) -> Image.Image:
        side = 16 * self.side
        return Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 4), dtype=np.uint8))

    def paint(self, row: dict, model, vae, edit: bool) -> None:
        """From conditioning to a picture."""
        vae.__dict__.pop("qwen21_references", None)  # latents it remembers
        references = [pack("nodes.references").reference_latents(vae, self.picture())] if edit else []
        latent, report = self.sample(model, references, MEMORY_STEPS)
        row["seconds_a_step"] = step_seconds(report)
        note_loaded(row, model)
        outputs("nodes.decode", "Qwen21Decode", vae=vae, latent=latent, alpha="snap", colour="#ffffff")

    def read(self, row: dict, clip, images: dict[str, torch.Tensor]) -> None:
        """From prompt and pictures to conditioning."""
        encoded(clip, PROMPT, images)
        note_loaded(row, clip.patcher)

    def tried(self, function: Callable, *arguments) -> dict:
        """The row that `function` notes in, with the first line of what it raised, and what it took."""
        row: dict = {"result": "done"}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        try:
            function(row, *arguments)
        except Exception as error:  # noqa: BLE001 - whatever the card's size makes of it
            row["result"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        row["seconds"] = time.perf_counter() - began
        if self.device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if row["result"] != "done":
            unload()
        return row


def encoded(clip, prompt: str, images: dict[str, torch.Tensor]) -> tuple[list, list]:
    """(positive, negative) of Encode."""
    inputs = {"clip": clip, "prompt": prompt, "negative_prompt": "", "size_policy": "official", "resolution": 0, "images": images}
    return outputs("nodes.encode", "Qwen21Encode", **inputs)


def sampled(model, positive: list, negative: list, latent: dict, steps: int, seed: int = 0, schedule: str = "auto") -> tuple[dict, str]:
    """(LATENT, report) of the Sampler."""
    inputs = {"model": model, "positive": positive, "negative": negative, "latent": latent, "seed": seed, "steps": steps, "cfg": 1.0, "schedule": schedule}
    return outputs("nodes.sampler", "Qwen21Sampler", **inputs, sampler_name="euler", denoise=1.0, cfg_until=1.0)


def step_seconds(report: str) -> float:
    """What the Sampler says of a step, without loading and prefix."""
    return float(re.search(r"each step: (\S+) s", report)[1])


def note_loaded(row: dict, patcher) -> None:
    """How much of a model is on the device, of how much, and whether ComfyUI loads it page by page."""
    row |= {"loaded_gib": patcher.loaded_size() / 2**30, "model_gib": patcher.model_size() / 2**30, "dynamic": patcher.is_dynamic()}


def unload() -> None:
    import comfy.model_management

    gc.collect()
    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()


def steps(bench: Bench) -> list[dict]:
    """8 steps of every way: a step alone, and seconds in all. In turn where they share a model, for ComfyUI takes time over a change."""
    rows = []
    for fp8 in WEIGHTS.values():
        names = [name for name in bench.options.way if ("fp8" in name) == fp8]
        if not names:
            continue
        model = bench.load(fp8)
        for references in (0, 4):
            ways, alone = {name: bench.way(name, model, references) for name in names}, defaultdict(list)

            def noting(name: str, ways=ways, alone=alone) -> Callable[[], None]:
                return lambda: alone[name].append(step_seconds(ways[name]()[1]))

            for name, row in in_turn({name: noting(name) for name in ways}, bench.device, bench.options.repeats).items():
                timed = {"step_ms": 1000 * statistics.median(alone[name][1 : 1 + bench.options.repeats]), "seconds": row["ms"] / 1000, "sm_mhz": row["sm_mhz"]}
                rows.append({"what": f"{references} references, {name}", **timed})
        del model, ways
        unload()
    return rows


def error(bench: Bench) -> list[dict]:
    """Of what one step over one reference gives, against the plain computation in float32."""
    models, rows = {fp8: bench.load(fp8) for fp8 in WEIGHTS.values()}, []
    exact = pack("nodes.bridge_model").load_model(bench.checkpoint, torch.float32)
    truth = bench.way("ours, plain PyTorch", exact, 1, 1)()[0]["samples"]
    for name in ("ours", "ours, plain PyTorch", "ours fp8", "ours fp8, ComfyUI's product"):
        found = bench.way(name, models["fp8" in name], 1, 1)()[0]["samples"]
        rows.append({"what": name, "relative_error": relative_error(found, truth)})
    del models, exact
    unload()
    return rows


def memory(bench: Bench) -> list[dict]:
    """Text to image, then an edit with one reference, with each kind of weights."""
    vae, rows = pack("nodes.bridge_vae").load_vae(bench.checkpoint), []
    for weights, fp8 in WEIGHTS.items():
        model = bench.load(fp8)
        for edit, what in enumerate(("text to image", "edit")):
            rows.append({"what": f"{what}, {weights}", **bench.tried(bench.paint, model, vae, edit)})
        del model
        unload()
    return rows


def encode(bench: Bench) -> list[dict]:
    """A prompt alone, then with a picture; nothing where the checkpoint has a stub for an encoder."""
    if bench.checkpoint.encoder_config().text_config.num_hidden_layers == 1:
        return []
    clip = pack("nodes.bridge_clip").load_clip(bench.checkpoint)
    picture = torch.from_numpy(np.array(bench.picture()))[None] / 255
    cases = {"prompt": {}, "prompt and picture": {"image_1": picture}}
    rows = [{"what": what, **bench.tried(bench.read, clip, images)} for what, images in cases.items()]
    del clip
    unload()
    return rows


def vae(bench: Bench) -> list[dict]:
    """ComfyUI's calls of the autoencoder, with what they move between card and memory, and how far the results lie from those of its convolutions."""
    made, rows = pack("nodes.bridge_vae").load_vae(bench.checkpoint), []
    pixels = torch.from_numpy(np.array(bench.picture()))[None] / 255
    maps, latents = pack("qwen21.kernels.maps"), torch.randn(1, 64, bench.side, bench.side, generator=torch.Generator().manual_seed(1))
    for what, given in (("decode", latents), ("encode", pixels)):

        def run(lent=maps._lent, what=what, given=given) -> torch.Tensor:
            with mock.patch.object(maps, "_lent", lent), node_done():
                return getattr(made, what)(given)

        ways = {"ours": run, "ours, ComfyUI's convolutions": lambda run=run: run(lambda conv, x: nullcontext())}
        timed = in_turn(ways, bench.device, bench.options.repeats)
        theirs = run(lambda conv, x: nullcontext())
        for name, row in timed.items():
            difference = relative_error(ways[name](), theirs)
            rows.append({"what": f"{what}, {name}", **row, "peak_gib": peak_gib(ways[name], bench.device), "difference": difference})
    del made
    unload()
    return rows


def quality(bench: Bench) -> list[dict]:
    """Pictures of the tiny checkpoint through the nodes, from the prompts and seeds of qwen21.tiny.evaluate: how much of each its reader finds right,
    and how far those with fp8 weights are from those with default ones ("worse": in how many an attribute is less right).

    Nothing multiplies in 8 bits on a CPU: the nodes would leave each product to ComfyUI, and ComfyUI would leave the inputs as they are. Here both are
    told that the CPU does: the same numbers as on a GPU are multiplied in float32, in ours rows with a scale each, in ComfyUI's inputs without one.
    """
    evaluate, operations = pack("qwen21.tiny.evaluate"), pack("nodes.bridge_operations")
    right = *evaluate.Verdict.ATTRIBUTES, "background", "all right"
    jobs, runs_on, pictures, rows = evaluate.draw_jobs(bench.options.scale), operations._runs_on, {}, []
    _, clip, vae = outputs("nodes.loader", "Qwen21Loader", checkpoint="tiny")
    requests = [asked(clip, vae, job) for job in jobs]
    for name in QUALITIES:
        model, *_ = outputs("nodes.loader", "Qwen21Loader", checkpoint="tiny", weight_dtype=name.partition(",")[0])
        if bench.device.type == "cpu":
            for layer in model.model.diffusion_model.modules():
                if getattr(layer, "quant_format", None):
                    layer._full_precision_mm = False
        ours = lambda device, name=name: "product" not in name and (device.type == "cpu" or runs_on(device))
        with mock.patch.object(operations, "_runs_on", ours):
            pictures[name] = [painted(model, vae, *request, evaluate.STEPS, job.seed) for job, request in zip(jobs, requests)]
        del model
        unload()
    scores = {name: evaluate.score_all(jobs, made) for name, made in pictures.items()}
    for name in QUALITIES:
        row = {"what": name} | evaluate.summarize([replace(job, group=name) for job in jobs], scores[name])[name]
        if name != QUALITIES[0]:
            decibels = [evaluate.psnr(*pair) for pair in zip(pictures[name], pictures[QUALITIES[0]])]
            worse = [any(now[key] < before[key] for key in right) for now, before in zip(scores[name], scores[QUALITIES[0]])]
            row |= {"worse": sum(worse), "psnr": float(np.mean(decibels)), "worst psnr": float(min(decibels))}
        rows.append(row)
    return rows


def asked(clip, vae, job) -> tuple[list, list, dict]:
    """(positive, negative, LATENT) for the Sampler, of a Job of qwen21.tiny.evaluate."""
    images = {f"image_{i}": pack("nodes.bridge_clip").to_image(picture) for i, picture in enumerate(job.references, start=1)}
    positive, negative = encoded(clip, job.task.prompt, images)
    canvas = {"canvas": "width and height", "width": job.width, "height": job.height, "batch_size": 1}
    return outputs("nodes.references", "Qwen21ReferenceLatents", positive=positive, negative=negative, vae=vae, **canvas)


def painted(model, vae, *request) -> np.ndarray:
    """The picture that `sampled` gives for `request`, in uint8 RGBA."""
    latent, _ = sampled(model, *request)
    *_, rgba = outputs("nodes.decode", "Qwen21Decode", vae=vae, latent=latent, alpha="as decoded", colour="#ffffff")
    return np.asarray(pack("nodes.bridge_clip").to_pictures(rgba)[0])


MEASURES = {"steps": steps, "error": error, "memory": memory, "encode": encode, "vae": vae, "quality": quality}


def main() -> None:
    parser = arguments("comfyui", __doc__.splitlines()[0], MEASURES)
    parser.add_argument("--comfyui", type=Path, required=True, help="ComfyUI's folder")
    parser.add_argument("--checkpoint", type=Path, help="folder of the random checkpoint, kept; a temporary one without it")
    parser.add_argument("--way", choices=WAYS, action="append", help="of the steps, all without it")
    parser.add_argument("--scale", type=float, default=0.03, help="of the quality, fraction of the 1500 prompts to use")
    parser.add_argument("--encoder", action="store_true", help="write the text encoder in its published size")
    parser.add_argument("--limit-gib", type=float, help="memory that the card is to have")
    parser.add_argument("--options", default="", help="ComfyUI's own, such as --options=--lowvram")
    options = parser.parse_args()
    options.way = options.way or WAYS
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as temporary:
        options.checkpoint = options.checkpoint or Path(temporary, "checkpoint")
        if not (options.checkpoint / "model_index.json").is_file():
            began = time.perf_counter()
            write_checkpoint(options.checkpoint, options.size == "full", options.encoder, device)
            print(f"checkpoint written in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        if options.limit_gib:
            if device.type != "cuda":
                raise SystemExit(f"--limit-gib takes memory of a CUDA device away, but the device is {device}: add --device cuda")
            torch.cuda.empty_cache()
            limit_memory(options.limit_gib)
        start_comfyui(options.comfyui.resolve(), temporary, [*(["--cpu"] if device.type == "cpu" else []), *shlex.split(options.options)])
        take(options, Bench, MEASURES)


if __name__ == "__main__":
    main()
