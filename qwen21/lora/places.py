"""Which layers of a denoiser the names in a LoRA file mean, also where one of the two has the MLP's gate and projection fused."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from .updates import Update

# Written before a layer's name by PEFT, diffusers, ComfyUI, kohya and musubi, OneTrainer, SimpleTuner and DiffSynth; dots count as underscores.
PREFIXES = (
    "base_model_model",
    "model_diffusion_model",
    "diffusion_model",
    "transformer",
    "lora_unet",
    "lora_transformer",
    "lycoris",
    "unet",
    "pipe_dit",
    "dit",
)
GATE, PROJ, FUSED = "gate_layer", "proj", "gate_up"  # of `img_mlp`; the rows of the fused weight are those of gate, then those of proj


@dataclass(frozen=True)
class Part:
    """Rows of a layer as a file has it (`source`), and the rows of the model's `weight` that they change (`target`); None: all."""

    weight: str
    source: slice | None = None
    target: slice | None = None


@dataclass(frozen=True)
class Place:
    """A layer that a file may name: its own name, the `shape` it has there, and where its rows are in the model."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Change:
    """What happens to `rows` (None: all) of the layer `weight`."""

    weight: str
    rows: slice | None
    update: Update


@dataclass(frozen=True, eq=False)
class Lora:
    """A file that fits a model."""

    name: str
    changes: tuple[Change, ...]
    layers: int
    kinds: Mapping[str, int]  # how many layers of each kind, and LoRA by rank

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        return f"{self.name}: all {self.layers} layers matched ({kinds})"


def places(model: nn.Module) -> dict[str, Place]:
    """Every layer of `model` that has a weight, and the halves or the whole of its MLP layers in the other spelling; by `flat` name."""
    shapes = dict(_shapes(model))
    found = {name: Place(name, shape, (Part(name),)) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        layer, _, leaf = name.rpartition(".")
        if leaf == FUSED:
            half = shape[0] // 2
            for one, rows in ((GATE, slice(0, half)), (PROJ, slice(half, 2 * half))):
                found[f"{layer}.{one}"] = Place(f"{layer}.{one}", (half, *shape[1:]), (Part(name, target=rows),))
        elif leaf == GATE and shapes.get(f"{layer}.{PROJ}") == shape:
            rows = shape[0]
            halves = (Part(name, slice(0, rows)), Part(f"{layer}.{PROJ}", slice(rows, 2 * rows)))
            found[f"{layer}.{FUSED}"] = Place(f"{layer}.{FUSED}", (2 * rows, *shape[1:]), halves)
    return {flat(name): place for name, place in found.items()}


def flat(name: str) -> str:
    """kohya writes underscores for dots; in this model no two layers become one by that."""
    return name.replace(".", "_")


def find(name: str, known: Mapping[str, Place]) -> Place | None:
    """The place that a file calls `name`, behind any of the PREFIXES."""
    name = flat(name).lstrip("_")
    while name not in known:
        prefix = next((prefix for prefix in PREFIXES if name.startswith(f"{prefix}_")), None)
        if prefix is None:
            return None
        name = name.removeprefix(f"{prefix}_").lstrip("_")
    return known[name]


def _shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or hasattr(module, "in_features"):
            yield name, (module.out_features, module.in_features)  # a quantised weight may be packed
        elif getattr(module, "weight", None) is not None:
            yield name, tuple(module.weight.shape)
