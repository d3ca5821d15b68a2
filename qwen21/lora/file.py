"""Reading LoRA files: which tensors belong to which layer, and what they do to it."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from ..errors import Qwen21Error, UsageError
from ..files import GGUF, SAFETENSORS, open_safetensors
from .places import Change, Lora, Place, find
from .updates import Additive, Butterfly, Decomposed, Difference, Generalized, Hadamard, Kronecker, LowRank, Replacement, Rotation, Update

# role -> the endings that trainers give its tensors, behind the layer's name
ENDINGS = {
    "down": ("lora_A", "lora_down", "lora.down", "lora_linear_layer.down"),
    "up": ("lora_B", "lora_up", "lora.up", "lora_linear_layer.up"),
    "alpha": ("alpha",),
    "magnitude": ("dora_scale", "lora_magnitude_vector"),
    "difference": ("diff", "w_norm"),
    "replacement": ("set_weight",),
    **{name: (name,) for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")},
    **{name: (name,) for name in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
    **{name: (name,) for name in ("a1", "a2", "b1", "b2")},
    "oft_blocks": ("oft_blocks",),
    "rescale": ("rescale",),
}
_ROLES = {ending: role for role, endings in ENDINGS.items() for ending in endings}
# PEFT writes the adapter's name in between: lora_A.default.weight
_KEY = re.compile(rf"(?P<layer>.+?)[._](?P<ending>{'|'.join(map(re.escape, sorted(_ROLES, key=len, reverse=True)))})(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight)?")
METADATA = "lora_adapter_metadata"
BIASES = (".bias", ".diff_b", ".b_norm")
KINDS = {LowRank: "LoRA", Decomposed: "DoRA", Hadamard: "LoHa", Kronecker: "LoKr", Generalized: "GLoRA", Rotation: "OFT", Butterfly: "BOFT"}
KINDS |= {Difference: "difference", Replacement: "replacement"}


@dataclass(frozen=True, eq=False)
class LoraFile:
    """A LoRA file as it is, before it is compared with a model: the tensors of every layer by role, and the names of those nobody knows."""

    name: str
    layers: Mapping[str, Mapping[str, torch.Tensor]]
    unknown: tuple[str, ...]
    config: Mapping[str, object] = field(default_factory=dict)  # PEFT's, for alpha

    @staticmethod
    def is_one(names: Iterable[str]) -> bool:
        """Whether a file whose tensors have these `names` is meant as a LoRA."""
        return any(_KEY.fullmatch(name) or "lora" in name for name in names)

    @classmethod
    def read(cls, path: str | Path) -> "LoraFile":
        """Raises Qwen21Error that names the file if it is not safetensors, is damaged, or holds two adapters."""
        path = Path(path)
        if not path.is_file():
            raise Qwen21Error(f"the LoRA {path} is not a file: give a .safetensors file")
        if path.suffix.lower() == GGUF:
            raise Qwen21Error(f"the LoRA {path} is GGUF, and LoRAs are read from safetensors only: take the .safetensors file that it was made of")
        if path.suffix.lower() not in SAFETENSORS:
            raise Qwen21Error(f"the LoRA {path} is not safetensors, the only format read here: pickled files can run programs, convert it first")
        layers: dict[str, dict[str, torch.Tensor]] = {}
        unknown = []
        with open_safetensors(path) as file:
            for key in file.keys():
                match = _KEY.fullmatch(key)
                if not match:
                    unknown.append(key)
                    continue
                roles, role = layers.setdefault(match["layer"], {}), _ROLES[match["ending"]]
                if role in roles:
                    raise Qwen21Error(f"the LoRA {path} has two tensors for one place, the second is {key}: give a file with a single adapter")
                tensor = file.get_tensor(key)
                roles[role] = _readable(tensor.float() if role == "alpha" else tensor, key, path)  # some trainers write a whole number
            config = _peft_config(file.metadata() or {}, path)
        return cls(path.name, layers, tuple(unknown), config)

    def fit(self, known: Mapping[str, Place]) -> Lora:
        """What the file does to a model whose layers are `known`, see `places`.

        Raises Qwen21Error that says what does not fit and why, unless every tensor of the file does.
        """
        if not self.layers:
            held = f"no LoRA, but tensors such as {self.unknown[0]}" if self.unknown else "nothing"
            raise Qwen21Error(f"the file {self.name} holds {held}: give a LoRA that was trained on Qwen-Image 2.1")
        changes: list[Change] = []
        kinds: Counter[str] = Counter()
        taken: dict[str, str] = {}
        misfits: list[str] = []
        for name, roles in self.layers.items():
            try:
                place = find(name, known)
                if place is None:
                    raise Qwen21Error(_stranger(name))
                if place.name in taken:
                    raise Qwen21Error(f"names the same layer as {taken[place.name]}")
                taken[place.name] = name
                updates = self._updates(place, roles)
                changes += [change for update in updates for change in _placed(place, update)]
                kinds.update(_kind(update) for update in updates)
            except Qwen21Error as error:
                misfits.append(f"{name} {error}")
        problems = misfits + [f"{key} {_stranger(key)}" for key in self.unknown]
        if problems:
            fitting, others = len(self.layers) - len(misfits), f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            found = f"fits {fitting} of its {len(self.layers)} layers" if fitting else "fits no layer of Qwen-Image 2.1"
            raise Qwen21Error(
                f"the LoRA {self.name} {found}: {problems[0]}{others}; take a LoRA that was trained on Qwen-Image 2.1, or take out what does not belong"
            )
        return Lora(self.name, tuple(changes), len(self.layers), dict(kinds))

    def _updates(self, place: Place, roles: Mapping[str, torch.Tensor]) -> list[Update]:
        """Everything that a layer's tensors do to it. Raises Qwen21Error if they do not fit together, or do not fit the layer."""
        left = dict(roles)
        alpha = _number(left.pop("alpha", None))
        updates: list[Update] = []
        if {"down", "up"} & left.keys():
            down, up = _take(left, "down", "up")
            low = _low_rank(up, down)
            updates.append(LowRank(low.up, low.down, self._scale(place.name, low.down.shape[0], alpha)))
        if "hada_w1_a" in left or "hada_w1_b" in left:
            w1_a, w1_b, w2_a, w2_b = _take(left, "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
            first, second = _low_rank(w1_a, w1_b), _low_rank(w2_a, w2_b)
            if first.shape != second.shape:
                raise Qwen21Error(f"has LoHa factors of shapes {first.shape} and {second.shape}, expected the same")
            updates.append(Hadamard(first, second, _ratio(alpha, w1_b.shape[0])))
        if any(role.startswith("lokr") for role in left):
            first, second = _lokr_factor(left, "lokr_w1"), _lokr_factor(left, "lokr_w2")
            ranks = [factor.down.shape[0] for factor in (second, first) if isinstance(factor, LowRank)]
            updates.append(Kronecker(first, second, _ratio(alpha, ranks[0]) if ranks else 1.0))
        if "magnitude" in left:
            if len(updates) != 1 or not isinstance(updates[0], Additive):
                raise Qwen21Error("has a DoRA scale, but not the one LoRA that goes with it")
            updates = [Decomposed(updates[0], _magnitude(left.pop("magnitude"), place))]
        if {"a1", "a2", "b1", "b2"} & left.keys():
            updates.append(_glora(*_take(left, "a1", "a2", "b1", "b2"), place, alpha))
        if "oft_blocks" in left:
            updates.append(_rotation(left.pop("oft_blocks"), left.pop("rescale", None), place, alpha or 0.0))
        if "difference" in left:
            updates.append(Difference(left.pop("difference")))
        if "replacement" in left:
            updates.append(Replacement(left.pop("replacement")))
        if left or not updates:
            raise Qwen21Error(f"has {', '.join(left) or 'an alpha'} without what belongs to it")
        for update in updates:
            if not update.fits(place.shape):
                raise Qwen21Error(f"has shape {update.shape}, the model {place.shape}")
        return updates

    def _scale(self, name: str, rank: int, alpha: float | None) -> float:
        """alpha / rank: from the layer's own tensor, else as PEFT's config says, else 1."""
        if alpha is None and self.config:
            patterns = self.config["alpha_pattern"]
            alpha = next((value for key, value in patterns.items() if name == key or name.endswith(f".{key}")), self.config["lora_alpha"])
            if self.config["use_rslora"]:
                return 1.0 if alpha is None else alpha / math.sqrt(rank)
        return _ratio(alpha, rank)


def parse(argument: str) -> tuple[str, float]:
    """FILE or FILE:STRENGTH as file and strength, which is 1 unless given. Raises UsageError if there is no such file."""
    if Path(argument).is_file():
        return argument, 1.0
    path, _, number = argument.rpartition(":")
    try:
        strength = float(number)
    except ValueError:
        path, strength = argument, 1.0
    if not math.isfinite(strength):
        raise UsageError(f"the LoRA {path} has strength {number}, expected a number such as 0.8")
    if not Path(path).is_file():
        raise UsageError(f"the LoRA {path or argument} is not a file: give FILE.safetensors or FILE.safetensors:STRENGTH")
    return path, strength


def digest(path: str | Path) -> str:
    """SHA-256 of a file, in hex; computed once as long as its time and size stay."""
    status = Path(path).stat()
    return _digest(str(path), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=256)
def _digest(path: str, *_: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _placed(place: Place, update: Update) -> list[Change]:
    return [Change(part.weight, part.target, update.rows(part.source) if part.source else update) for part in place.parts]


def _kind(update: Update) -> str:
    return f"{KINDS[type(update)]} of rank {update.down.shape[0]}" if isinstance(update, LowRank) else KINDS[type(update)]


def _stranger(name: str) -> str:
    """Why a tensor's name means nothing to the model."""
    if name.endswith(BIASES):
        return "is for a bias, of which Qwen-Image 2.1 has none"
    if name.startswith(("lora_te", "text_encoder")):
        return "belongs to the text encoder, and only the denoiser is changed here"
    if any(word in name for word in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "img_mod", "txt_mod", "txt_mlp")):
        return "is a layer of the first Qwen-Image, which 2.1 has not"
    return "is no layer of Qwen-Image 2.1, or of a kind not known here"


def _readable(tensor: torch.Tensor, key: str, path: Path) -> torch.Tensor:
    if not tensor.is_floating_point():
        raise Qwen21Error(f"the LoRA {path} holds {key} as {str(tensor.dtype).removeprefix('torch.')}, expected floating point: take the file as trained")
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    if not tensor.isfinite().all():
        raise Qwen21Error(f"the LoRA {path} holds numbers in {key} that are not finite: its training failed, or download it again")
    if tensor.numel() == 0:
        raise Qwen21Error(f"the LoRA {path} holds {key} with shape {tuple(tensor.shape)}: download it again")
    while tensor.ndim > 2 and tensor.shape[-1] == 1:  # written for 1 x 1 convolutions
        tensor = tensor[..., 0]
    return tensor


def _take(roles: dict[str, torch.Tensor], *names: str) -> list[torch.Tensor]:
    missing = [name for name in names if name not in roles]
    if missing:
        raise Qwen21Error(f"lacks {ENDINGS[missing[0]][0]}")
    return [roles.pop(name) for name in names]


def _low_rank(up: torch.Tensor, down: torch.Tensor) -> LowRank:
    if up.ndim != 2 or down.ndim != 2 or up.shape[1] != down.shape[0]:
        raise Qwen21Error(f"has factors of shapes {tuple(up.shape)} and {tuple(down.shape)}, expected (out, rank) and (rank, in)")
    return LowRank(up, down)


def _lokr_factor(roles: dict[str, torch.Tensor], name: str) -> Additive:
    if name not in roles:
        return _low_rank(*_take(roles, f"{name}_a", f"{name}_b"))
    tensor = roles.pop(name)
    if tensor.ndim != 2:
        raise Qwen21Error(f"has a {name} of shape {tuple(tensor.shape)}, expected a matrix")
    return Difference(tensor)


def _glora(a1: torch.Tensor, a2: torch.Tensor, b1: torch.Tensor, b2: torch.Tensor, place: Place, alpha: float | None) -> Generalized:
    """LyCORIS has changed the names once: a1 (in, rank), a2 (rank, in), b1 (out, rank), b2 (rank, in) now; before, 1 and 2 were the other way round."""
    columns = place.shape[-1]
    if any(factor.ndim != 2 for factor in (a1, a2, b1, b2)):
        raise Qwen21Error(f"has GLoRA factors of shapes {', '.join(str(tuple(one.shape)) for one in (a1, a2, b1, b2))}, expected matrices")
    if (a1.shape[-1], a2.shape[0]) == (columns, columns):
        a1, a2, b1, b2 = a2, a1, b2, b1
    inner, added = _low_rank(a1, a2), _low_rank(b1, b2)
    if inner.shape != (columns, columns):
        raise Qwen21Error(f"has GLoRA factors that change the columns by a matrix {inner.shape}, the model {place.shape}")
    return Generalized(inner, added, _ratio(alpha, a2.shape[0]))


def _rotation(blocks: torch.Tensor, rescale: torch.Tensor | None, place: Place, constraint: float) -> Rotation | Butterfly:
    """OFT or, with a dimension more, BOFT."""
    if blocks.ndim not in (3, 4) or blocks.shape[-1] != blocks.shape[-2]:
        raise Qwen21Error(f"has rotations of shape {tuple(blocks.shape)}, expected (count, size, size), or of BOFT (times, count, size, size)")
    if rescale is not None:
        if rescale.numel() != place.shape[0]:
            raise Qwen21Error(f"has a rescale of shape {tuple(rescale.shape)}, the model {place.shape}")
        rescale = rescale.reshape(-1, *(1,) * (len(place.shape) - 1))
    if blocks.ndim == 3:
        return Rotation(blocks, rescale, constraint)
    times, count, size, _ = blocks.shape
    if size % 2 or count % 2 ** (times - 1):
        raise Qwen21Error(f"has BOFT rotations of shape {tuple(blocks.shape)}, expected an even size, and blocks that can be paired {times} times")
    return Butterfly(blocks, rescale, constraint)


def _magnitude(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """As (out, 1) or (1, in)."""
    column = tensor[:, None] if tensor.ndim == 1 else tensor
    if len(place.shape) != 2 or tuple(column.shape) not in ((place.shape[0], 1), (1, place.shape[1])):
        raise Qwen21Error(f"has a DoRA scale of shape {tuple(tensor.shape)}, the layer {place.shape}")
    return column


def _number(tensor: torch.Tensor | None) -> float | None:
    if tensor is None:
        return None
    if tensor.numel() != 1:
        raise Qwen21Error(f"has an alpha of shape {tuple(tensor.shape)}, expected one number")
    return float(tensor)


def _ratio(alpha: float | None, rank: int) -> float:
    return 1.0 if alpha is None else alpha / rank


def _peft_config(metadata: Mapping[str, str], path: Path) -> dict[str, object]:
    """lora_alpha, alpha_pattern and use_rslora as diffusers writes them into the file, or PEFT beside `adapter_model.safetensors`; empty if nobody did."""
    beside = path.with_name("adapter_config.json")
    try:
        if METADATA in metadata:
            values = json.loads(metadata[METADATA])
        elif path.name == "adapter_model.safetensors" and beside.is_file():
            values = json.loads(beside.read_text(encoding="utf-8"))
        else:
            return {}
        ours = {key.removeprefix("transformer."): value for key, value in values.items()}
        alpha, patterns, rslora = ours.get("lora_alpha"), ours.get("alpha_pattern") or {}, ours.get("use_rslora", False)
        patterns = {re.sub(r"\\(?=\.)|^\^|\$$", "", key): _finite(value) for key, value in patterns.items()}
        if not all(re.fullmatch(r"[\w.]+", key) for key in patterns):
            raise ValueError("alpha_pattern is not a list of names")
        return {"lora_alpha": None if alpha is None else _finite(alpha), "alpha_pattern": patterns, "use_rslora": bool(rslora)}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        what = METADATA if METADATA in metadata else beside.name
        raise Qwen21Error(f"the alpha of the LoRA {path} cannot be read from its {what} ({error}): take the file as trained") from None


def _finite(value: object) -> float:
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"alpha is {number}")
    return number
