"""What a file or folder is: part, layout, precision, size, Turbo or not, and why it cannot be used if it cannot. For `python -m qwen21 inspect`."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from .checkpoint import TINY, TINY_FOLDER, Checkpoint, meta_module
from .config import TransformerConfig
from .errors import Qwen21Error
from .files import GGUF, TensorFiles, open_tensors
from .inferred import sample_sigmas
from .layouts import layouts_of, other_model
from .lora import LoraFile, places
from .part import Part, open_part
from .stored import FLOAT8
from .transformer import QwenImage21Transformer

CORE_FORMATS = set(FLOAT8.values())  # which the command reads as well as ComfyUI


def describe(source: Path) -> dict:
    """A JSON object about `source`: "source", "bytes", "parts" (a list of objects), "lora" (an object or None), "problems" (sentences).

    "tiny" is the built-in checkpoint. Damage and misfits are problems; Qwen21Error is raised only if there is nothing of that name.
    """
    if not source.exists() and str(source) == TINY:
        source = TINY_FOLDER
    if not source.exists():
        raise Qwen21Error(f"{source} is missing: give a file of tensors, or a folder")
    found: dict = {"source": str(source), "bytes": None, "parts": [], "lora": None, "problems": []}
    with _noted(found):
        if (source / "model_index.json").is_file():
            _describe_checkpoint(source, found)
        else:
            _describe_tensors(source, open_tensors(source), found)
    return found


@contextmanager
def _noted(found: dict) -> Iterator[None]:
    try:
        yield
    except Qwen21Error as error:
        if str(error) not in found["problems"]:
            found["problems"].append(str(error))


def _describe_checkpoint(folder: Path, found: dict) -> None:
    for name in ("text_encoder", "transformer", "vae"):
        with _noted(found):
            found["parts"].append(_describe_part(open_part(name, folder), found["problems"]))
    found["bytes"] = sum(part["bytes"] for part in found["parts"])
    checkpoint = Checkpoint(folder)
    checkpoint.tokenizer()
    checkpoint.picture_processor()
    for part in found["parts"]:
        if part["part"] == "transformer":
            part["turbo"], part["sigmas"] = bool(checkpoint.index.sample_sigmas), list(checkpoint.index.sample_sigmas)


def _describe_tensors(source: Path, files: TensorFiles, found: dict) -> None:
    found["bytes"] = files.file_bytes()
    layouts = layouts_of(files.tensors)
    for layout in layouts:
        with _noted(found):
            found["parts"].append(_describe_part(open_part(layout.part, source), found["problems"]))
    if not layouts:
        if LoraFile.is_one(files.tensors):
            found["lora"] = _describe_lora(source, found)
        else:
            found["problems"].append(f"{source} holds {other_model(files.tensors)}, of which nothing is used here")


def _describe_part(part: Part, problems: list[str]) -> dict:
    stored: Counter[str] = Counter()
    for piece in part.pieces.values():
        stored[piece.stored.dtype] += piece.stored.count // (2 if piece.rows is not None else 1)
    formats = Counter(conf["format"] for conf in part.quantization.values())
    module = meta_module(part)
    problems += part.misfits(module)
    described = {
        "part": part.name,
        "source": str(part.source),
        "shape": _SHAPES[part.name](module),
        "layout": part.layout.name,
        "prefix": part.layout.prefix,
        "container": "GGUF" if part.source.suffix.lower() == GGUF else "safetensors",
        "config": "config.json" if part.config is not None else "from the tensors' shapes",
        "bytes": part.files.file_bytes(),
        "tensors": len(part.pieces),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "stored_as": dict(stored.most_common()),
        "quantised_layers": dict(formats),
        "read_by": ["nodes"] if set(formats) - CORE_FORMATS else ["nodes", "command"],
    }
    if part.name == "transformer":
        sigmas = sample_sigmas(part)
        described |= {"turbo": bool(sigmas), "sigmas": list(sigmas)}
    return described


_SHAPES: dict[str, Callable[[nn.Module], str]] = {
    "transformer": lambda model: f"{model.config.num_layers} blocks of width {model.config.dim}, for text states of width {model.config.context_in_dim}",
    "text_encoder": lambda model: f"{model.config.text_config.num_hidden_layers} layers of width {model.config.text_config.hidden_size}, and a vision tower",
    "vae": lambda model: f"{model.config.z_dim} latent channels",
}


def _describe_lora(source: Path, found: dict) -> dict:
    """Ranks and targets come from the file alone; whether it fits, from comparing it with the published model."""
    file = LoraFile.read(source)
    ranks = Counter(roles["down"].shape[0] for roles in file.layers.values() if "down" in roles)
    described = {
        "layers": len(file.layers),
        "ranks": {str(rank): count for rank, count in sorted(ranks.items())},
        "targets": dict(sorted(Counter(_without_number(name) for name in file.layers).items())),
        "alpha": any("alpha" in roles for roles in file.layers.values()) or file.config.get("lora_alpha") is not None,
        "unknown": list(file.unknown),
        "fits": False,
        "kinds": {},
    }
    found["lora"] = described
    with _noted(found):
        with torch.device("meta"):
            model = QwenImage21Transformer(TransformerConfig())
        lora = file.fit(places(model))
        described |= {"fits": True, "kinds": dict(lora.kinds)}
    return described


def _without_number(name: str) -> str:
    """A layer's name with `*` for the number of its block."""
    return re.sub(r"(?<=[._])\d+(?=[._])", "*", name)


def table(found: dict) -> str:
    """`describe`'s object as lines of text."""
    lines = [found["source"] + (f"  ({_size(found['bytes'])})" if found["bytes"] is not None else "")]
    for part in found["parts"]:
        lines += ["", *_rows(_part_rows(part))]
    if found["lora"]:
        lines += ["", *_rows(_lora_rows(found["lora"]))]
    problems = [f"problem: {problem}" for problem in found["problems"]] or ["no problems found"]
    return "\n".join([*lines, "", *problems])


def _part_rows(part: dict) -> dict[str, object]:
    rows = {
        "part": part["part"],
        "shape": part["shape"],
        "layout": part["layout"] + (f", names begin with {part['prefix']}" if part["prefix"] else ""),
        "container": part["container"],
        "config": part["config"],
        "parameters": _count(part["parameters"]),
        "stored as": ", ".join(f"{kind} {_count(count)}" for kind, count in part["stored_as"].items()),
        "quantised": ", ".join(f"{layers} layers {kind}" for kind, layers in part["quantised_layers"].items()) or "no",
        "read by": " and ".join(f"the {reader}" for reader in part["read_by"]),
    }
    if "turbo" in part:
        rows["turbo"] = f"yes, {len(part['sigmas'])} steps" if part["turbo"] else "no"
    return rows


def _lora_rows(lora: dict) -> dict[str, object]:
    return {
        "part": "LoRA",
        "layers": lora["layers"],
        "rank": ", ".join(f"{rank} ({count} layers)" for rank, count in lora["ranks"].items()) or "none",
        "kinds": ", ".join(f"{count} {kind}" for kind, count in lora["kinds"].items()) or "unknown",
        "alpha": "yes" if lora["alpha"] else "no",
        "targets": ", ".join(f"{name} ({count})" for name, count in lora["targets"].items()),
        "fits": "Qwen-Image 2.1" if lora["fits"] else "no",
    }


def _rows(values: dict[str, object]) -> list[str]:
    return [f"  {name:<11}{value}" for name, value in values.items()]


def _count(number: int) -> str:
    return next((f"{number / size:.3g} {unit}" for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if number >= size), str(number))


def _size(number: int) -> str:
    return next((f"{number / size:.3g} {unit}" for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if number >= size), f"{number} B")
