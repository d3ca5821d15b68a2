"""One part of the model (text encoder, denoiser or VAE) in the files it comes in, whatever their layout."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from .config import read_json
from .errors import Qwen21Error
from .files import Read, TensorFiles, json_of, open_tensors
from .ggml import is_readable
from .layouts import OLDER_MARK, Layout, Piece, find_layout, layout_of, pieces_of
from .stored import FLOAT8, PLAIN, StoredLinear, is_packed, matrix

LONGEST_NOTE = 4096  # bytes of JSON about one quantised layer
# What a config.json beside a single file must say to be taken for that file's.
_OWN = {
    "transformer": ("_class_name", "QwenImage21Transformer2DModel"),
    "text_encoder": ("model_type", "qwen3_vl"),
    "vae": ("_class_name", "AutoencoderKLQwenImage21"),
}


@dataclass(frozen=True)
class Weight:
    """A parameter as its file stores it: `name` in the module, the `tensor` as read, the file's dtype `kind`, and the `shape` it stands for.

    `quantization` is what ComfyUI needs to know of a quantised layer (None: nothing), `beside` the scales stored with it, by their names.
    """

    name: str
    tensor: torch.Tensor
    kind: str
    shape: tuple[int, ...]
    quantization: dict | None = None
    beside: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Part `name` in `files`; `config` is the content of its config.json at `config_path`, if there is one."""

    name: str
    files: TensorFiles
    layout: Layout
    pieces: dict[str, Piece]
    config: dict | None
    config_path: Path

    @property
    def source(self) -> Path:
        """The file or folder it comes from."""
        return self.files.source

    @cached_property
    def quantization(self) -> dict[str, dict]:
        """Layer -> what ComfyUI must know to read it ("format", ...): from `comfy_quant` tensors, the file's metadata, or plain scales beside 8-bit floats."""
        layers = {}
        noted = json_of(self.files.metadata, "_quantization_metadata")
        noted = noted.get("layers") if isinstance(noted, dict) else None
        with self.files.reading() as read:
            for target, piece in self.pieces.items():
                layer, _, kind = target.rpartition(".")
                if kind == "comfy_quant":
                    layers[layer] = _parsed(read, piece)
                elif kind == "weight" and isinstance(noted, dict) and piece.stored.name.removesuffix(".weight") in noted:
                    layers.setdefault(layer, _with_format(noted[piece.stored.name.removesuffix(".weight")], piece))
                elif kind == "weight" and piece.stored.dtype in FLOAT8 and f"{layer}.weight_scale" in self.pieces:
                    layers.setdefault(layer, {"format": FLOAT8[piece.stored.dtype]} | self._full_precision)
        return layers

    @property
    def _full_precision(self) -> dict:
        """Files that mark scaled 8-bit floats with a tensor of two elements want products in full precision."""
        mark = self.files.tensors.get(self.layout.prefix + OLDER_MARK)
        return {"full_precision_matrix_mult": True} if mark is not None and mark.count == 2 else {}

    def misfits(self, module: nn.Module) -> list[str]:
        """Why these tensors are not the parameters of `module`, a sentence each; empty if they are."""
        parameters = dict(module.named_parameters())
        found = []
        for target, piece in self.pieces.items():
            path, name = piece.stored.path, piece.stored.name
            layer, _, kind = target.rpartition(".")
            if layer in self.quantization and f"{layer}.weight" in parameters and kind != "bias":
                if kind == "weight" and self.quantization[layer]["format"] in FLOAT8.values():
                    found += self._scaled_misfits(layer, tuple(parameters[target].shape))
                continue  # what is packed has the packing's shape, and beside it lies whatever that needs
            if target not in parameters:
                found.append(
                    f"{path} holds the tensor {name}, which a {type(module).__name__} of its size has not: it is another model's, take the file from a "
                    "Qwen-Image 2.1 checkpoint"
                )
                continue
            expected = tuple(parameters[target].shape)
            if piece.shape != expected and not (self.name == "vae" and _without_ones(piece.shape) == _without_ones(expected)):
                asks = "the config asks for" if self.config else "its other tensors ask for"
                found.append(f"{path}: tensor {name} has shape {piece.shape}, {asks} {expected}: weights and config come from different models")
            elif piece.stored.dtype not in (*PLAIN, *FLOAT8) and not is_packed(piece.stored.dtype):
                found.append(f"{path} stores {name} as {piece.stored.dtype} without saying how it is quantised: take another file of this model")
            elif is_packed(piece.stored.dtype) and not is_readable(piece.stored.dtype):
                found.append(f"{path} stores {name} as {piece.stored.dtype}, which the gguf package does not read: take a file in another quantisation")
            elif piece.rows and is_packed(piece.stored.dtype) and piece.stored.count % piece.stored.shape[0]:
                found.append(f"{path}: the rows of {name} are not whole blocks of {piece.stored.dtype}: take another file of this model")
        missing = parameters.keys() - self.pieces.keys()
        if missing:
            found.append(f"{self.source} lacks {len(missing)} of {len(parameters)} tensors, the first is {min(missing)}: download it again")
        return [" ".join(sentence.split()) for sentence in found]  # names may hold anything

    def _scaled_misfits(self, layer: str, expected: tuple[int, ...]) -> list[str]:
        """Why a weight of 8-bit floats and the scale beside it do not stand for a matrix of shape `expected`; empty if they do."""
        weight, scale, kind = self.pieces[f"{layer}.weight"], self.pieces.get(f"{layer}.weight_scale"), self.quantization[layer]["format"]
        what = f"{weight.stored.path}: tensor {weight.stored.name}"
        if FLOAT8.get(weight.stored.dtype) != kind:
            return [f"{what} is stored as {weight.stored.dtype}, but noted as {kind}: take another file of this model"]
        if weight.shape != expected:
            return [f"{what} has shape {weight.shape}, expected {expected}: weights and config come from different models"]
        if scale is None:
            return [f"{what} lacks its scale ({layer}.weight_scale): download the file again"]
        if math.prod(scale.shape) != 1 and scale.shape not in ((expected[0],), (expected[0], 1)):
            return [
                f"{what} has a scale of shape {scale.shape}, expected one number, or one for each of its {expected[0]} rows: take another file of this model"
            ]
        return []

    def weights(self, module: nn.Module) -> Iterator[Weight]:
        """Every parameter of `module`, read one by one. Raises Qwen21Error that names the tensor if one is missing, unknown, or of another shape."""
        misfits = self.misfits(module)
        if misfits:
            raise Qwen21Error(misfits[0])
        with self.files.reading() as read:
            for name, parameter in list(module.named_parameters()):
                piece, (layer, _, kind) = self.pieces[name], name.rpartition(".")
                tensor, quantization, beside = _rows(read(piece.stored), piece), None, {}
                if kind == "weight" and layer in self.quantization:
                    quantization = self.quantization[layer]
                    beside = {kind: _rows(read(one.stored), one) for kind, one in self._beside[layer].items()}
                    if quantization["format"] in FLOAT8.values() and beside["weight_scale"].ndim == 1:
                        beside["weight_scale"] = beside["weight_scale"][:, None] if len(beside["weight_scale"]) > 1 else beside["weight_scale"][0]
                elif not is_packed(piece.stored.dtype):
                    tensor = tensor.reshape(parameter.shape)
                yield Weight(name, tensor, piece.stored.dtype, tuple(parameter.shape), quantization, beside)

    @cached_property
    def _beside(self) -> dict[str, dict[str, Piece]]:
        """Quantised layer -> what is stored beside its weight, by its name: scales and the like, but not the note that says what they are."""
        layers: dict[str, dict[str, Piece]] = {layer: {} for layer in self.quantization}
        for target, piece in self.pieces.items():
            layer, _, kind = target.rpartition(".")
            if layer in layers and kind not in ("weight", "bias", "comfy_quant"):
                layers[layer][kind] = piece
        return layers

    def fill(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Give `module`, built under `meta_parameters`, its weights on `device`: plain ones in `dtype`, 8-bit floats and GGUF blocks as they are,
        in linear layers that make a matrix of them when it is used. Raises Qwen21Error, also for what only ComfyUI's operations can read."""
        for weight in self.weights(module):
            if weight.quantization is not None and weight.quantization["format"] not in FLOAT8.values():
                stored = self.pieces[weight.name].stored
                raise Qwen21Error(
                    f"{stored.path} is quantised for ComfyUI ({stored.name} is {weight.quantization['format']}): load it with the nodes, or take the "
                    "unquantised, 8-bit float or GGUF file"
                )
            owner, _, leaf = weight.name.rpartition(".")
            layer, tensor, scale = module.get_submodule(owner), weight.tensor.to(device), weight.beside.get("weight_scale")
            if leaf == "weight" and isinstance(layer, nn.Linear) and weight.kind not in PLAIN:
                parent, _, name = owner.rpartition(".")
                scale = None if scale is None else scale.to(device, torch.float32)
                setattr(module.get_submodule(parent), name, StoredLinear(layer, tensor, weight.kind, scale))
            else:
                setattr(layer, leaf, nn.Parameter(matrix(tensor, weight.kind, weight.shape, dtype, scale), requires_grad=False))
        return module.to(device).eval()  # .to: buffers; the parameters are there


def open_part(name: str, source: Path) -> Part:
    """Part `name` in `source`: a checkpoint folder, the part's own folder, or a single file (whose config.json may lie beside it).

    Raises Qwen21Error if it is missing, damaged, or something else.
    """
    folder = source / name if (source / "model_index.json").is_file() or (source / name).is_dir() else source
    config_path = (source.parent if source.is_file() else folder) / "config.json"
    config = None
    if folder != source:  # the diffusers layout, which always has one
        config = read_json(config_path)
    elif config_path.is_file():
        config = read_json(config_path)
        key, value = _OWN[name]
        if source.is_file() and config.get(key) != value:
            config = None
    files = open_tensors(folder)
    is_own = config is not None and _OWN[name][0] in config  # its values are compared later, where the config is read
    layout = find_layout(name, files.tensors) or Layout(name, "", "diffusers") if is_own else layout_of(name, files.tensors, source)
    return Part(name, files, layout, pieces_of(layout, files.tensors), config, config_path)


def _rows(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor if piece.rows is None else tensor[piece.rows]


def _parsed(read: Read, piece: Piece) -> dict:
    try:
        if piece.stored.count > LONGEST_NOTE:
            raise ValueError
        note = json.loads(bytes(read(piece.stored).flatten().tolist()))
    except (ValueError, TypeError, RecursionError):
        note = None
    return _with_format(note, piece)


def _with_format(note: object, piece: Piece) -> dict:
    """A `note` about a quantised layer, found in or for `piece`. Raises Qwen21Error if it does not name a format."""
    if isinstance(note, dict) and isinstance(note.get("format"), str):
        return note
    raise Qwen21Error(f"{piece.stored.path}: {piece.stored.name} does not say how its layer is quantised: download the file again")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
