"""Files of tensors: what lies in them, told from their headers, and one tensor at a time.

safetensors and GGUF are read, nothing is ever unpickled. Tensors come as views of the mapped file: nothing is copied until somebody moves or
casts them. Whatever a damaged file makes the readers raise becomes a Qwen21Error that names it.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .config import read_json
from .errors import Qwen21Error
from .gguf_file import GGUF, open_gguf

SAFETENSORS = (".safetensors", ".sft")
SUFFIXES = (*SAFETENSORS, GGUF)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its `shape`, and its `dtype` as the file calls it (BF16, F8_E4M3, U8 ..., of GGUF Q4_K, Q8_0 ...)."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


# (tensor) -> it, in the file's dtype. Of quantised GGUF the bytes, uint8 (rows, bytes a row), or (bytes,) of tensors without rows of whole blocks.
Read = Callable[[Stored], torch.Tensor]


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of one file, or of all the shards of one, and the metadata the files carry."""

    source: Path
    tensors: dict[str, Stored]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> list[Path]:
        return sorted({stored.path for stored in self.tensors.values()} or {self.source})

    def file_bytes(self) -> int:
        """Size on disk."""
        return sum(path.stat().st_size for path in self.paths)

    @contextmanager
    def reading(self) -> Iterator[Read]:
        """A function that gives one tensor of these files, for as long as they are open."""
        with ExitStack() as stack:
            files = {path: stack.enter_context(_open(path)) for path in self.paths}
            yield lambda stored: files[stored.path](stored.name)


def open_tensors(source: Path) -> TensorFiles:
    """What a file, or the shards of a folder, hold. Raises Qwen21Error that names what is missing, damaged or of no known kind."""
    if source.is_dir():
        return _open_folder(source)
    if not source.is_file():
        raise Qwen21Error(f"{source} is missing: give a file of tensors ({', '.join(SUFFIXES)}), or a folder in the diffusers layout")
    if source.suffix.lower() not in SUFFIXES:
        raise Qwen21Error(f"{source} is a {source.suffix or 'nameless'} file, expected one of {', '.join(SUFFIXES)}: pickles are never opened, convert it")
    if source.suffix.lower() == GGUF:
        with open_gguf(source) as file:
            return TensorFiles(source, {name: Stored(source, name, *kind) for name, kind in file.kinds.items()}, file.metadata)
    with open_safetensors(source) as file:
        return TensorFiles(source, {name: _stored(source, name, file) for name in file.keys()}, dict(file.metadata() or {}))


def _open_folder(folder: Path) -> TensorFiles:
    """The tensors of a `*.safetensors.index.json`, or of the single safetensors file there."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise Qwen21Error(f"{folder} holds {len(indexes)} indexes ({', '.join(path.name for path in indexes)}), expected one: leave only the variant to use")
    if indexes:
        return _open_shards(indexes[0])
    files = sorted(path for path in folder.glob("*") if path.suffix in SAFETENSORS)
    if len(files) != 1:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        found = f"only {', '.join(others)}" if others and not files else f"{len(files)} safetensors files and no index"
        raise Qwen21Error(f"{folder} holds {found}, expected one safetensors file or shards with their index: download the folder again")
    return TensorFiles(folder, open_tensors(files[0]).tensors)


def _open_shards(index: Path) -> TensorFiles:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) and file.endswith(".safetensors") for file in names.values()):
        raise Qwen21Error(f"{index}: `weight_map` does not give a safetensors file for each tensor: download the file again")
    by_file: dict[str, list[str]] = {}
    for name, file in names.items():
        by_file.setdefault(file, []).append(name)
    tensors = {}
    for shard in sorted(by_file):
        path = index.parent / shard
        if not path.is_file():
            raise Qwen21Error(f"{path} is missing: {index.name} lists it, download it again")
        with open_safetensors(path) as file:
            missing = set(by_file[shard]) - set(file.keys())
            if missing:
                raise Qwen21Error(f"{path} lacks the tensor {min(missing)} that the index lists: download it again")
            tensors |= {name: _stored(path, name, file) for name in by_file[shard]}
    return TensorFiles(index.parent, tensors)


def _stored(path: Path, name: str, file) -> Stored:
    part = file.get_slice(name)
    return Stored(path, name, tuple(part.get_shape()), part.get_dtype())


@contextmanager
def _open(path: Path) -> Iterator[Callable[[str], torch.Tensor]]:
    if path.suffix.lower() == GGUF:
        with open_gguf(path) as file:
            yield file.read
    else:
        with open_safetensors(path) as file:
            yield file.get_tensor


@contextmanager
def open_safetensors(path: Path):
    """safetensors.safe_open whose errors name the file."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise Qwen21Error(f"{path} is damaged or truncated ({one_line(error)}): download it again") from None


def one_line(error: Exception) -> str:
    """What an exception says, without line breaks and final stop; its class if it says nothing."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def json_of(metadata: dict[str, str], key: str) -> object:
    """The JSON under `key` of a file's metadata; None if there is none, or it is not JSON."""
    try:
        return json.loads(metadata.get(key) or "null")
    except (ValueError, RecursionError):
        return None
