"""GGUF files through the `gguf` package, an optional dependency, with the bounds that the package leaves out."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .errors import Qwen21Error

GGUF = ".gguf"
MAGIC = b"GGUF"  # what every such file begins with
LONGEST_ARRAY = 2**20  # entries of a metadata array, of which the longest known are vocabularies
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."  # the shape of a tensor that a converter had to store in another one


class GGUFFile:
    """An open GGUF file: `kinds`, each tensor's (shape, type's name); `metadata`, its text fields; `read`."""

    def __init__(self, reader):
        fields = {name: _value(field) for name, field in reader.fields.items()}
        self.metadata = {name: value for name, value in fields.items() if isinstance(value, str)}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.kinds = {name: (self._shape(tensor, fields.get(ORIGINAL_SHAPE + name)), tensor.tensor_type.name) for name, tensor in self._tensors.items()}

    @staticmethod
    def _shape(tensor, original) -> tuple[int, ...]:
        """Dimensions from the slowest to the fastest, as PyTorch gives them."""
        shape = tuple(map(int, reversed(tensor.shape)))
        if isinstance(original, list) and math.prod(original) == math.prod(shape):
            return tuple(map(int, original))
        return shape

    def read(self, name: str) -> torch.Tensor:
        """The tensor, or if it is quantised its bytes: uint8 (rows, bytes a row), flat if no row is made of whole blocks."""
        tensor, (shape, kind) = self._tensors[name], self.kinds[name]
        values = torch.from_numpy(tensor.data)
        if kind == "BF16":
            return values.view(torch.bfloat16).reshape(shape)
        if values.dtype != torch.uint8:
            return values.reshape(shape)
        return values.reshape(shape[0], -1) if values.numel() % shape[0] == 0 else values.flatten()


@contextmanager
def open_gguf(path: Path) -> Iterator[GGUFFile]:
    """Raises Qwen21Error if the file is not GGUF, damaged or truncated, or the package missing."""
    begins = _beginning(path)
    if not MAGIC.startswith(begins):
        raise Qwen21Error(f"{path} is not GGUF, whatever its name says (it begins with {begins!r}): download it again, or give it its own ending")
    try:
        import gguf
    except ImportError:
        raise Qwen21Error(f"{path} is a GGUF file, which needs the gguf package: install it (pip install gguf), or take a safetensors file") from None

    class Reader(gguf.GGUFReader):
        """Refuses what lies beyond the end of the file, where the package would go on for as long as a damaged header says."""

        def _get(self, offset, dtype, count=1, *args, **kwargs):
            found = super()._get(offset, dtype, count, *args, **kwargs)
            if len(found) != int(count):
                raise ValueError("it ends too early")
            return found

        def _get_field_parts(self, orig_offs, raw_type):
            if raw_type == gguf.GGUFValueType.ARRAY and self._get(orig_offs + 4, "uint64")[0] > LONGEST_ARRAY:
                raise ValueError("a metadata array is too long")
            return super()._get_field_parts(orig_offs, raw_type)

    try:
        reader = Reader(path, "c")  # copy on write: PyTorch does not take read-only memory
        if reader.byte_order == "S":
            raise ValueError("it is in the byte order of another kind of machine")
        file = GGUFFile(reader)
    except Exception as error:  # the package raises whatever the bytes lead it to
        message = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise Qwen21Error(f"{path} is damaged or truncated ({message}): download it again") from None
    yield file


def _beginning(path: Path) -> bytes:
    """As many bytes as the magic has, fewer of a file cut short."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC))
    except OSError as error:
        raise Qwen21Error(f"{path} cannot be read ({error.strerror or error}): check the file and its permissions") from None


def _value(field) -> object:
    """A metadata field's text, number or list; None for what cannot be read."""
    try:
        return field.contents()
    except Exception:
        return None
