"""What of Qwen-Image 2.1 lies in ComfyUI's model folders: checkpoint folders, and single files of each part, recognised by their headers."""

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import comfy
import folder_paths

from ..qwen21.checkpoint import TINY, TINY_FOLDER, Checkpoint
from ..qwen21.config import PIPELINE, read_json
from ..qwen21.encoder_files import BUNDLED_TOKENIZER
from ..qwen21.errors import Qwen21Error
from ..qwen21.files import GGUF, SAFETENSORS
from ..qwen21.inferred import encoder_values, transformer_config, vae_config
from ..qwen21.layouts import MARKS
from ..qwen21.part import open_part

AUTO = "auto"
ROOTS = {"transformer": "diffusion_models", "text_encoder": "text_encoders", "vae": "vae"}  # where ComfyUI keeps single files
FOLDER_ROOTS = ("diffusers", "diffusion_models")
GGUF_HEADER = 2**22  # bytes at most: that of a denoiser has no vocabulary
_FACTS = {
    "transformer": lambda part: transformer_config(part).context_in_dim,
    "text_encoder": lambda part: encoder_values(part)["text_config"]["hidden_size"],
    "vae": lambda part: vae_config(part).z_dim,
}


def checkpoint_folders() -> dict[str, str]:
    """Name in the list -> path: the built-in tiny checkpoint, then every Qwen-Image 2.1 folder under ComfyUI's model folders."""
    found = {}
    for root in FOLDER_ROOTS:
        for base in folder_paths.get_folder_paths(root):
            for folder, children, files in os.walk(base, followlinks=True):
                if "model_index.json" in files:
                    children.clear()
                    if _is_ours(Path(folder)):
                        name = os.path.relpath(folder, base)
                        found[f"{root}/{name}" if name in found or name == TINY else name] = folder
    return ({TINY: TINY} if (TINY_FOLDER / "model_index.json").is_file() else {}) | dict(sorted(found.items()))


def single_files(part: str) -> dict[str, str]:
    """Name in the list -> path of every file of `part` in its model folder, outside checkpoint folders."""
    found = {}
    for base in folder_paths.get_folder_paths(ROOTS[part]):
        for path in _walk(base):
            if fact(part, path) is not None:
                found.setdefault(os.path.relpath(path, base), path)
    return dict(sorted(found.items()))


def _walk(base: str) -> Iterator[str]:
    for folder, children, files in os.walk(base, followlinks=True):
        if "model_index.json" in files:
            children.clear()
            continue
        yield from (os.path.join(folder, file) for file in files if file.lower().endswith((*SAFETENSORS, GGUF)))


def fact(part: str, path: str) -> int | None:
    """What `part` in that file or folder must have in common with the others: the width of text states, or the latent channels. None: it holds no such part."""
    return _fact(part, path, _stamp(part, Path(path)))


def _stamp(part: str, source: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of the files that say what `part` in `source` is: they change when one is replaced, which a folder's own time does not tell."""
    files = [source, source.with_name("config.json")] if source.is_file() else [*source.glob("*"), *(source / part).glob("*")]
    found = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue
        found.append((str(file), status.st_mtime_ns, status.st_size))
    return tuple(sorted(found))


@lru_cache(maxsize=4096)
def _fact(part: str, path: str, _: tuple) -> int | None:
    try:
        return _FACTS[part](open_part(part, Path(path)))
    except Qwen21Error:
        return 0 if part == "transformer" and path.lower().endswith(GGUF) and _names_denoiser(path) else None


def _names_denoiser(path: str) -> bool:
    """Without the gguf package such a file is still offered: loading it then says what to install."""
    with open(path, "rb") as file:
        return MARKS["transformer"][0].encode() in file.read(GGUF_HEADER)


def _is_ours(folder: Path) -> bool:
    try:
        return read_json(folder / "model_index.json").get("_class_name") == PIPELINE
    except Qwen21Error:
        return False


def open_checkpoint(checkpoint: str, text_encoder: str = AUTO, vae: str = AUTO) -> tuple[Checkpoint, str]:
    """The checkpoint of these names in the lists, and a sentence about what was chosen for it, empty if nothing was.

    "auto" is the checkpoint folder's own part; for a denoiser in a single file, the first file that fits it, else the first folder's.
    Raises Qwen21Error if there is none, or a name is not in its list any more.
    """
    sources, sentence = _sources(checkpoint, text_encoder, vae)
    return Checkpoint(**sources, tokenizer=_tokenizer()), sentence


def stamp(checkpoint: str, text_encoder: str = AUTO, vae: str = AUTO) -> str | None:
    """Changes when a file that `open_checkpoint` would read is replaced; None if a name is not in its list. A digest: ComfyUI writes it into pictures."""
    try:
        sources, _ = _sources(checkpoint, text_encoder, vae)
    except Qwen21Error:
        return None
    read = {part: sources.get(part, sources.get("folder")) for part in ROOTS}
    files = [_stamp(part, TINY_FOLDER if source == TINY else Path(source)) for part, source in read.items()]
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _sources(checkpoint: str, text_encoder: str, vae: str) -> tuple[dict[str, str], str]:
    """Path of the "folder" and of the parts that are not its own, as Checkpoint takes them; the sentence of `open_checkpoint`."""
    folders = checkpoint_folders()
    denoisers = folders | single_files("transformer")
    source = _path(checkpoint, denoisers, "diffusers, models/diffusion_models or models/unet")
    others = {"text_encoder": text_encoder, "vae": vae}
    parts = {part: _path(name, folders | single_files(part), ROOTS[part]) for part, name in others.items() if name != AUTO}
    if checkpoint in folders:
        return {"folder": source, **parts}, ""
    chosen = {part: _fitting(part, checkpoint, fact("transformer", source), folders) for part in others if part not in parts}
    sentence = " and ".join(f"{name} as {part.replace('_', ' ')}" for part, (name, _) in chosen.items())
    parts |= {part: path for part, (_, path) in chosen.items()}
    return {"transformer": source, **parts}, f"took {sentence}" if sentence else ""


def _fitting(part: str, denoiser: str, width: int | None, folders: dict[str, str]) -> tuple[str, str]:
    """(name, path) of the first file, else folder, whose `part` goes with a denoiser that takes text states of `width`."""
    candidates = single_files(part) | {name: path for name, path in folders.items() if name != TINY}
    for name, path in candidates.items():
        if fact(part, path) is not None and (part == "vae" or fact(part, path) == width):
            return name, path
    wanted = "Qwen3-VL text encoder, such as qwen3vl_8b_bf16.safetensors" if part == "text_encoder" else "VAE, such as qwen_image_2.1_vae_bf16.safetensors"
    raise Qwen21Error(f"{denoiser} is the denoiser alone, and no {wanted}, that fits it is in models/{ROOTS[part]}: put it there and refresh")


def _path(name: str, choices: dict[str, str], where: str) -> str:
    if name not in choices:
        raise Qwen21Error(f"{name!r} is not in models/{where} (found: {', '.join(choices) or 'none'}): put it there and refresh")
    return choices[name]


def _tokenizer() -> Path:
    """ComfyUI's own for Qwen."""
    return Path(next(iter(comfy.__path__))).parent / BUNDLED_TOKENIZER
