"""Which part of which model a file of tensors is, and what each tensor is called here.

Files are recognised by the names and shapes of their tensors, never by their own names or metadata. Whatever stands before a known name is
its prefix (`model.diffusion_model.`, `diffusion_model.`, `transformer.`, `text_encoders.qwen3vl_8b.transformer.` ...), so that one file may
hold several parts. Names here are those of the diffusers checkpoint (transformer, vae) and of transformers' Qwen3VLModel (text_encoder).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .errors import Qwen21Error
from .files import Stored

OLDER = {"scale_weight": "weight_scale", "scale_input": "input_scale"}  # what older files of scaled 8-bit floats call the scales beside a weight
OLDER_MARK = "scaled_fp8"  # a tensor that only says that there are such scales

# Names that only this model's part has.
MARKS = {
    "transformer": ("txt_in.text_norm.weight",),
    "text_encoder": ("visual.deepstack_merger_list.0.norm.weight",),
    "vae": ("decoder.up_blocks.0.resnets.0.norm1.gamma", "decoder.upsamples.0.upsamples.0.residual.0.gamma"),
}


@dataclass(frozen=True)
class Piece:
    """A parameter of a part: where it is stored, and which rows of that tensor it is (None: all)."""

    stored: Stored
    rows: slice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape if self.rows is None else (self.rows.stop - self.rows.start, *self.stored.shape[1:])


@dataclass(frozen=True)
class Layout:
    """How a file lays out a `part`: `prefix` stands before its names; `name` says what these are like."""

    part: str
    prefix: str
    name: str


def layouts_of(tensors: Mapping[str, Stored]) -> list[Layout]:
    """Every part of Qwen-Image 2.1 that is among `tensors`; empty if there is none."""
    found = []
    for part, marks in MARKS.items():
        mark = next((name for name in tensors if name.endswith(marks)), None)
        if part == "text_encoder" and any(".linear_attn." in name for name in tensors):
            continue
        if mark is not None:
            ending = next(ending for ending in marks if mark.endswith(ending))
            prefix = mark.removesuffix(ending)
            if prefix == "" or prefix.endswith("."):
                found.append(Layout(part, prefix, _NAMES[part](tensors, prefix)))
    return found


def find_layout(part: str, tensors: Mapping[str, Stored]) -> Layout | None:
    """How `part` is laid out among `tensors`; None if it is not there."""
    return next((layout for layout in layouts_of(tensors) if layout.part == part), None)


def layout_of(part: str, tensors: Mapping[str, Stored], source: object) -> Layout:
    """How `part` is laid out among `tensors`. Raises Qwen21Error that says what `source` holds instead, if it is not there."""
    found = find_layout(part, tensors)
    if found is None:
        held = " and ".join(f"the {_CALLED[layout.part]}" for layout in layouts_of(tensors))
        raise Qwen21Error(f"{source} holds {held or other_model(tensors)}, expected {WANTED[part]}")
    return found


def pieces_of(layout: Layout, tensors: Mapping[str, Stored]) -> dict[str, Piece]:
    """Every tensor of a part under its name here, in the file's order. What the part never uses is left out; unknown names stay as they are."""
    pieces = {}
    for name, stored in tensors.items():
        for target, piece in _RENAME[layout.part](name, stored, layout, tensors):
            pieces[_quantization_name(target)] = piece
    return pieces


def _quantization_name(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{layer}.{OLDER[kind]}" if kind in OLDER else name


# --- denoiser


def _transformer_layout(tensors: Iterable[str], prefix: str) -> str:
    return "fused MLP" if any(".img_mlp.gate_up." in name for name in tensors) else "split MLP"


def _transformer_pieces(name: str, stored: Stored, layout: Layout, tensors: Mapping[str, Stored]) -> list[tuple[str, Piece]]:
    if not name.startswith(layout.prefix) or name == layout.prefix + OLDER_MARK:
        return []
    target = name.removeprefix(layout.prefix)
    if ".img_mlp.gate_up." not in target:
        return [(target, Piece(stored))]
    weight = tensors.get(f"{name.rpartition('.')[0]}.weight", stored)
    rows = weight.shape[0] if weight.shape else 0
    halves = [slice(0, rows // 2), slice(rows // 2, rows)]  # gate_layer first, then proj
    by_rows = rows > 1 and rows % 2 == 0 and stored.shape[:1] == (rows,)  # else a factor of the whole, which both share
    names = [target.replace(".gate_up.", f".{half}.") for half in ("gate_layer", "proj")]
    return [(one, Piece(stored, half if by_rows else None)) for one, half in zip(names, halves)]


# --- text encoder


def _encoder_layout(tensors: Iterable[str], prefix: str) -> str:
    return "Hugging Face" if any(".language_model." in f".{name}" for name in tensors) else "ComfyUI"


def _encoder_pieces(name: str, stored: Stored, layout: Layout, tensors: Mapping[str, Stored]) -> list[tuple[str, Piece]]:
    """The head and the final norm are not used."""
    if name.startswith(layout.prefix + "visual."):
        return [(name.removeprefix(layout.prefix), Piece(stored))]
    root = layout.prefix.removesuffix("model.")
    target = name.removeprefix(root)
    if not name.startswith(root) or target == OLDER_MARK or target.startswith(("lm_head.", "model.lm_head.")):
        return []
    target = re.sub(r"^(model\.)?(language_model\.)?(model\.)?", "language_model.", target)
    return [] if target == "language_model.norm.weight" else [(target, Piece(stored))]


# --- VAE

_WAN = (  # names as in Wan 2.2's own files, which ComfyUI keeps, to those of diffusers
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"^(encoder|decoder)\.head\.0\.", r"\1.norm_out."),
    (r"^(encoder|decoder)\.head\.2\.", r"\1.conv_out."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.downsamples\.(\d+)\.downsamples\.\d+\.(resample|time_conv)", r".down_blocks.\1.downsampler.\2"),
    (r"\.upsamples\.(\d+)\.upsamples\.\d+\.(resample|time_conv)", r".up_blocks.\1.upsampler.\2"),
    (r"\.downsamples\.(\d+)\.downsamples\.(\d+)\.", r".down_blocks.\1.resnets.\2."),
    (r"\.upsamples\.(\d+)\.upsamples\.(\d+)\.", r".up_blocks.\1.resnets.\2."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)


def _vae_layout(tensors: Iterable[str], prefix: str) -> str:
    return "Wan" if any(name.startswith(f"{prefix}decoder.upsamples.") for name in tensors) else "diffusers"


def _vae_pieces(name: str, stored: Stored, layout: Layout, tensors: Mapping[str, Stored]) -> list[tuple[str, Piece]]:
    """`time_conv` is not used for one frame."""
    target = name.removeprefix(layout.prefix)
    if not name.startswith(layout.prefix) or ".time_conv." in name:
        return []
    if layout.name == "Wan":
        for pattern, replacement in _WAN:
            target = re.sub(pattern, replacement, target)
    return [(target, Piece(stored))]


_NAMES = {"transformer": _transformer_layout, "text_encoder": _encoder_layout, "vae": _vae_layout}
_RENAME = {"transformer": _transformer_pieces, "text_encoder": _encoder_pieces, "vae": _vae_pieces}

# --- what else there is

_CALLED = {"transformer": "denoiser of Qwen-Image 2.1", "text_encoder": "Qwen3-VL text encoder", "vae": "VAE of Qwen-Image 2.1"}
WANTED = {
    "transformer": "the denoiser of Qwen-Image 2.1: take qwen_image_2.1_*.safetensors, a GGUF of it, or the transformer folder",
    "text_encoder": "Qwen3-VL 8B with its vision tower: take qwen3vl_8b_*.safetensors, or the text_encoder folder of a Qwen-Image 2.1 checkpoint",
    "vae": "the 64-channel VAE of Qwen-Image 2.1: take qwen_image_2.1_vae_*.safetensors, or the vae folder",
}
# A name's ending -> what has it. The first that fits counts.
_OTHERS = (
    (r"linear_attn\..*", "Qwen3.5, such as the prompt expander"),
    (r"visual\.blocks\.\d+\.mlp\.gate_proj\.weight", "Qwen2.5-VL, the text encoder of the first Qwen-Image"),
    (r"visual\.patch_embed\.proj\.weight", "another vision-language model"),
    (r"layers\.\d+\.self_attn\.q_norm\.weight", "a Qwen3 without a vision tower"),
    (r"blk\.\d+\.attn_q\.weight", "a language model in llama.cpp's layout"),
    (r"layers\.\d+\.self_attn\.q_proj\.weight", "another language model"),
    (r"transformer_blocks\.\d+\.attn\.add_q_proj\.weight", "the denoiser of the first Qwen-Image"),
    (r"double_blocks\.\d+\..*", "the denoiser of a Flux model"),
    (r"decoder\.(middle\.0\.residual\.0\.gamma|mid_block\.resnets\.0\.norm1\.gamma)", "the 16-channel VAE of Wan or of the first Qwen-Image"),
    (r"decoder\.(mid\.block_1|mid_block\.resnets\.0)\.norm1\.weight", "the VAE of another model"),
    (r"encoder\.block\.\d+\.layer\.0\..*", "a T5 text encoder"),
    (r"text_model\.encoder\..*", "a CLIP text encoder"),
    (r"(lora_[AB]|lora_down|lora_up)(\.\w+)?\.weight", "a LoRA"),
)


def other_model(tensors: Iterable[str]) -> str:
    """What these tensors are of, if they are of no part of Qwen-Image 2.1, in words."""
    names = list(tensors)
    for pattern, what in _OTHERS:
        ending = re.compile(rf"(^|.*[._]){pattern}$")
        if any(ending.match(name) for name in names):
            return what
    return f"no model that is known here (its first tensor is {names[0]!r})" if names else "no tensors"
