"""Every layout of LoRA files against weights changed by hand in float64, and a model that is given back bit for bit."""

import copy
import itertools
import json
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from unit.layouts import Layout
from unit.lora_files import LAYERS, LAYOUTS, RANK, config, random_factors, spelled, write, write_layout

from qwen21.errors import Qwen21Error, UsageError
from qwen21.lora import LoraFile, attach, digest, parse, places
from qwen21.lora.places import flat
from qwen21.random_model import TRANSFORMER

DIFFUSERS = ("transformer.{}.lora_A.weight", "transformer.{}.lora_B.weight")
ATTENTION, GATE, PROJ = "transformer_blocks.0.attn.to_q", "transformer_blocks.2.img_mlp.gate_layer", "transformer_blocks.2.img_mlp.proj"
FUSED = "transformer_blocks.2.img_mlp.gate_up"
NORM = "transformer_blocks.1.attn.norm_q"


def velocity(model: nn.Module) -> torch.Tensor:
    """Of a prefix with one picture; it depends on every layer."""
    context, slots, references = Layout((None, None, (2, 2), None)).inputs()
    with torch.inference_mode():
        prefix = model.prefill(context, slots, references)
        return model.denoise(torch.randn(1, 64, 2, 3, generator=torch.Generator().manual_seed(1)), 0.7, prefix)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert (found - expected).norm() <= tolerance * expected.norm(), (found - expected).norm() / expected.norm()


def by_hand(model: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    """A copy with these weights, given in float64."""
    changed = copy.deepcopy(model)
    for name, weight in weights.items():
        changed.get_submodule(name).weight = nn.Parameter(weight.float(), requires_grad=False)
    return changed


def weight(model: nn.Module, layer: str) -> torch.Tensor:
    return model.get_submodule(layer).weight.detach().double()


def plus(model: nn.Module, factors, scale: float) -> nn.Module:
    return by_hand(model, {layer: weight(model, layer) + one.delta(scale) for layer, one in factors.items()})


def fitted(path, model):
    return LoraFile.read(path).fit(places(model))


@pytest.fixture
def applied(transformer):
    """`applied(path, strength)`: the velocity with that file, after which every weight must be the model's own again."""

    def run(path, strength: float = 1.0, model: nn.Module = transformer) -> torch.Tensor:
        plain, before = velocity(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
        parameters = dict(model.named_parameters())
        with attach(model, [(fitted(path, model), strength)]):
            found = velocity(model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        assert torch.equal(velocity(model), plain)
        assert (found - plain).norm() > 1e-3 * plain.norm() or strength == 0
        return found

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout, transformer, applied, tmp_path):
    factors = random_factors(transformer)
    path, scale = write_layout(tmp_path / "a.safetensors", layout, factors)
    for strength in (1.0, -0.7):
        close(applied(path, strength), velocity(plus(transformer, factors, strength * scale)))


def test_every_layer_has_a_name_of_its_own(transformer):
    names = [name for name, module in transformer.named_modules() if getattr(module, "weight", None) is not None]
    assert len({flat(name) for name in names}) == len(names)
    assert {flat(name) for name in names} <= places(transformer).keys()


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ({"r": RANK, "lora_alpha": 8}, 8 / RANK),
        ({"r": RANK, "lora_alpha": 8, "use_rslora": True}, 8 / RANK**0.5),
        ({"r": 99, "lora_alpha": 8, "rank_pattern": {"to_q": RANK}}, 8 / RANK),
        ({"r": RANK}, 1.0),
        ({"r": RANK, "lora_alpha": 1, "alpha_pattern": {name: 8 for name in LAYERS}}, 8 / RANK),
        (
            {"r": RANK, "lora_alpha": 1, "alpha_pattern": {r"^transformer_blocks\.0\.attn\.to_q$": 8} | {name: 8 for name in LAYERS if name != ATTENTION}},
            8 / RANK,
        ),
    ],
)
def test_alpha_of_the_metadata(values, scale, transformer, applied, tmp_path):
    factors = random_factors(transformer)
    path = write(tmp_path / "a.safetensors", spelled(factors, *DIFFUSERS), lora_adapter_metadata=config(**values))
    close(applied(path), velocity(plus(transformer, factors, scale)))


def test_alpha_pattern_names_the_end_of_a_layer(transformer, applied, tmp_path):
    factors = random_factors(transformer, ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q", "img_in"))
    metadata = config(r=RANK, lora_alpha=RANK, alpha_pattern={"1.attn.to_q": 3 * RANK})
    path = write(tmp_path / "a.safetensors", spelled(factors, *DIFFUSERS), lora_adapter_metadata=metadata)
    scales = {"transformer_blocks.1.attn.to_q": 3.0}
    expected = by_hand(transformer, {layer: weight(transformer, layer) + one.delta(scales.get(layer, 1.0)) for layer, one in factors.items()})
    close(applied(path), velocity(expected))


def test_ranks_may_differ_and_a_tensor_of_alpha_counts_before_the_metadata(transformer, applied, tmp_path):
    narrow, wide = random_factors(transformer, ("img_in",), 1), random_factors(transformer, ("proj_out",), 8)
    tensors = spelled(narrow | wide, *DIFFUSERS) | {"transformer.img_in.alpha": torch.tensor(0.5)}
    path = write(tmp_path / "a.safetensors", tensors, lora_adapter_metadata=config(r=8, lora_alpha=16))
    weights = {"img_in": weight(transformer, "img_in") + narrow["img_in"].delta(0.5), "proj_out": weight(transformer, "proj_out") + wide["proj_out"].delta(2.0)}
    close(applied(path), velocity(by_hand(transformer, weights)))
    assert fitted(path, transformer).kinds == {"LoRA of rank 1": 1, "LoRA of rank 8": 1}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16, torch.float64])
def test_alpha_may_be_a_whole_number(dtype, transformer, applied, tmp_path):
    factors = random_factors(transformer)
    written = [spelled(factors, *DIFFUSERS) | {f"transformer.{name}.alpha": torch.tensor(2, dtype=one) for name in factors} for one in (torch.float32, dtype)]
    expected, found = (applied(write(tmp_path / f"{i}.safetensors", tensors)) for i, tensors in enumerate(written))
    assert torch.equal(found, expected)


def test_alpha_beside_a_file_of_peft(transformer, applied, tmp_path):
    factors = random_factors(transformer)
    tensors = spelled(factors, "base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight")
    path = write(tmp_path / "adapter_model.safetensors", tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": 2 * RANK}))
    close(applied(path), velocity(plus(transformer, factors, 2.0)))


def decomposed(old: torch.Tensor, new: torch.Tensor, magnitude: torch.Tensor, strength: float) -> torch.Tensor:
    """PEFT's DoRA for Linear, in float64; `strength` blends."""
    dim = 1 if magnitude.shape[1] == 1 else 0
    return old + strength * (new * magnitude.double() / new.norm(dim=dim, keepdim=True) - old)


@pytest.mark.parametrize("strength", [1.0, 0.4, -0.5])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("name", ["dora_scale", "lora_magnitude_vector", "lora_magnitude_vector.weight", "lora_magnitude_vector.default.weight"])
def test_dora(name, columns, strength, transformer, applied, tmp_path):
    factors = random_factors(transformer, (ATTENTION, "img_in"))
    tensors, weights = spelled(factors, *DIFFUSERS, alpha="transformer.{}.alpha", value=8.0), {}
    for layer, one in factors.items():
        old = weight(transformer, layer)
        magnitude = old.norm(dim=0 if columns else 1, keepdim=True).float() * 1.3
        tensors[f"transformer.{layer}.{name}"] = magnitude if columns or name == "dora_scale" else magnitude[:, 0]
        weights[layer] = decomposed(old, old + one.delta(8.0 / RANK), magnitude, strength)
    close(applied(write(tmp_path / "a.safetensors", tensors), strength), velocity(by_hand(transformer, weights)))


def loha(out: int, columns: int, generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    one = {name: torch.randn(out, RANK, generator=generator) * 0.5 for name in ("hada_w1_a", "hada_w2_a")}
    one |= {name: torch.randn(RANK, columns, generator=generator) / columns**0.5 for name in ("hada_w1_b", "hada_w2_b")}
    delta = (one["hada_w1_a"].double() @ one["hada_w1_b"].double()) * (one["hada_w2_a"].double() @ one["hada_w2_b"].double())
    return one | {"alpha": torch.tensor(2.0)}, delta * 2 / RANK


def lokr(out: int, columns: int, generator, factored: tuple[bool, bool]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tensors, whole = {"alpha": torch.tensor(2.0)}, []
    for number, (shape, low) in enumerate(zip(((4, 4), (out // 4, columns // 4)), factored), start=1):
        if low:
            a, b = torch.randn(shape[0], 2, generator=generator), torch.randn(2, shape[1], generator=generator) / columns**0.5
            tensors |= {f"lokr_w{number}_a": a, f"lokr_w{number}_b": b}
            whole.append(a.double() @ b.double())
        else:
            tensors[f"lokr_w{number}"] = torch.randn(*shape, generator=generator) / columns**0.25
            whole.append(tensors[f"lokr_w{number}"].double())
    return tensors, torch.kron(*whole) * (2 / 2 if any(factored) else 1.0)


LYCORIS = {"LoHa": loha, **{f"LoKr {a} {b}": lambda *args, f=(a, b): lokr(*args, f) for a, b in itertools.product((False, True), repeat=2)}}


def lycoris(make, model, layers, dora: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors of a file, and the weights they lead to."""
    generator, tensors, weights = torch.Generator().manual_seed(5), {}, {}
    for layer in layers:
        old = weight(model, layer)
        one, delta = make(*old.shape, generator)
        new = old + delta
        if dora:
            one["dora_scale"] = old.norm(dim=1, keepdim=True).float() * 0.8
            new = decomposed(old, new, one["dora_scale"], 1.0)
        tensors |= {f"lycoris_{flat(layer)}.{name}": tensor for name, tensor in one.items()}
        weights[layer] = new
    return tensors, weights


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", LYCORIS)
def test_lycoris(kind, dora, transformer, applied, tmp_path):
    tensors, weights = lycoris(LYCORIS[kind], transformer, (ATTENTION, GATE, "proj_out"), dora)
    close(applied(write(tmp_path / "a.safetensors", tensors)), velocity(by_hand(transformer, weights)))


@pytest.mark.parametrize("constraint", [0.0, 0.05])
@pytest.mark.parametrize("rescaled", [False, True])
def test_rotation(rescaled, constraint, transformer, applied, tmp_path):
    old, generator = weight(transformer, ATTENTION), torch.Generator().manual_seed(6)
    size = 8
    blocks = torch.randn(old.shape[0] // size, size, size, generator=generator) * 0.1
    tensors = {f"{ATTENTION}.oft_blocks": blocks, f"{ATTENTION}.alpha": torch.tensor(constraint)}
    skew = blocks.double() - blocks.double().mT
    if constraint:
        skew = skew * constraint / skew.norm()
    one = torch.eye(size, dtype=torch.float64)
    new = torch.cat([((one + s) @ (one - s).inverse()).T @ rows for s, rows in zip(skew, old.split(size))])
    if rescaled:
        tensors[f"{ATTENTION}.rescale"] = torch.rand(old.shape[0], 1, generator=generator) + 0.5
        new = new * tensors[f"{ATTENTION}.rescale"].double()
    close(applied(write(tmp_path / "a.safetensors", tensors)), velocity(by_hand(transformer, {ATTENTION: new})), 1e-4 if constraint else 1e-5)


OLDER = {"a1": "a2", "a2": "a1", "b1": "b2", "b2": "b1"}


def glora(out: int, columns: int, generator, older: bool = False) -> dict[str, torch.Tensor]:
    one = {"a1": torch.randn(columns, RANK, generator=generator), "a2": torch.randn(RANK, columns, generator=generator) / columns}
    one |= {"b1": torch.randn(out, RANK, generator=generator) * 0.3, "b2": torch.randn(RANK, columns, generator=generator) / columns**0.5}
    return {f"{OLDER[name] if older else name}.weight": tensor for name, tensor in one.items()} | {"alpha": torch.tensor(2.0)}


@pytest.mark.parametrize("strength", [1.0, 0.4, -0.5])
@pytest.mark.parametrize("older", [False, True])
def test_glora(older, strength, transformer, applied, tmp_path):
    """f(x + A x) + B x, on square and other layers; the names that LyCORIS had first are known, too."""
    tensors, weights, generator = {}, {}, torch.Generator().manual_seed(5)
    for layer in (ATTENTION, GATE, "proj_out"):
        old = weight(transformer, layer)
        one = glora(*old.shape, generator, older)
        a1, a2, b1, b2 = (one[f"{OLDER[name] if older else name}.weight"].double() for name in OLDER)
        weights[layer] = old + strength * 2.0 / RANK * (old @ a1 @ a2 + b1 @ b2)
        tensors |= {f"lycoris_{flat(layer)}.{name}": tensor for name, tensor in one.items()}
    path = write(tmp_path / "a.safetensors", tensors)
    close(applied(path, strength), velocity(by_hand(transformer, weights)))
    assert fitted(path, transformer).kinds == {"GLoRA": 3}


def boft(out: int, generator, times: int = 3, size: int = 8) -> torch.Tensor:
    return torch.randn(times, out // size, size, size, generator=generator) * 0.1


@pytest.mark.parametrize("constraint", [0.0, 2.0])
@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_butterfly(times, rescaled, constraint, transformer, applied, tmp_path):
    """Each turn as one large matrix, whose rows are gathered one by one."""
    old, generator, size = weight(transformer, GATE), torch.Generator().manual_seed(6), 8
    blocks = boft(len(old), generator, times)
    tensors = {f"{GATE}.oft_blocks": blocks, f"{GATE}.alpha": torch.tensor(constraint)}
    skew = blocks.double() - blocks.double().mT
    if constraint:
        skew = skew * constraint / skew.norm()
    one, new = torch.eye(size, dtype=torch.float64), old
    for number, generators in enumerate(skew):
        apart = 2**number * size // 2
        gathered = [start + step + side * apart for start in range(0, len(old), 2 * apart) for step in range(apart) for side in (0, 1)]
        turned = torch.block_diag(*[(one + s) @ (one - s).inverse() for s in generators]) @ new[gathered]
        new = torch.empty_like(new).index_copy(0, torch.tensor(gathered), turned)
    if rescaled:
        tensors[f"{GATE}.rescale"] = torch.rand(old.shape[0], 1, generator=generator) + 0.5
        new = new * tensors[f"{GATE}.rescale"].double()
    path = write(tmp_path / "a.safetensors", tensors)
    for strength in (1.0, 0.5):
        expected = velocity(by_hand(transformer, {GATE: torch.lerp(old, new, strength)}))
        close(applied(path, strength), expected, 1e-4 if constraint else 1e-5)
    assert fitted(path, transformer).kinds == {"BOFT": 1}


@pytest.mark.parametrize("shape", [(8, 4, 4), (2, 8, 4, 4)])
def test_a_rotated_norm_is_rescaled_entry_by_entry(shape, transformer, applied, tmp_path):
    old = weight(transformer, NORM)
    tensors = {f"{NORM}.oft_blocks": torch.zeros(shape), f"{NORM}.rescale": torch.rand(len(old), 1) + 0.5}
    new = old * tensors[f"{NORM}.rescale"][:, 0].double()
    close(applied(write(tmp_path / "a.safetensors", tensors)), velocity(by_hand(transformer, {NORM: new})))


@pytest.mark.parametrize("ending", ["diff", "w_norm", "set_weight"])
@pytest.mark.parametrize("layer", [NORM, "txt_in.text_norm", ATTENTION])
def test_differences_and_replacements(layer, ending, transformer, applied, tmp_path):
    old = weight(transformer, layer)
    tensor = torch.randn(old.shape, generator=torch.Generator().manual_seed(7)) * old.std().float()
    path = write(tmp_path / "a.safetensors", {f"diffusion_model.{layer}.{ending}": tensor})
    for strength in (1.0, 0.5):
        new = torch.lerp(old, tensor.double(), strength) if ending == "set_weight" else old + strength * tensor.double()
        close(applied(path, strength), velocity(by_hand(transformer, {layer: new})))


def test_a_layer_may_have_several_updates(transformer, applied, tmp_path):
    factors = random_factors(transformer, (ATTENTION,))
    difference = torch.randn(weight(transformer, ATTENTION).shape, generator=torch.Generator().manual_seed(8)) * 0.05
    path = write(tmp_path / "a.safetensors", spelled(factors, *DIFFUSERS) | {f"{ATTENTION}.diff": difference})
    with pytest.raises(Qwen21Error, match="names the same layer"):
        fitted(path, transformer)
    path = write(tmp_path / "b.safetensors", spelled(factors, *DIFFUSERS) | {f"transformer.{ATTENTION}.diff": difference})
    new = weight(transformer, ATTENTION) + factors[ATTENTION].delta() + difference.double()
    close(applied(path), velocity(by_hand(transformer, {ATTENTION: new})))


class FusedMLP(nn.Module):
    """As ComfyUI may store it: rows of gate, then of proj."""

    takes_rows = False

    def __init__(self, split: nn.Module):
        super().__init__()
        self.gate_up = nn.Linear(split.gate_layer.in_features, 2 * split.gate_layer.out_features, bias=False)
        self.gate_up.weight = nn.Parameter(torch.cat([split.gate_layer.weight, split.proj.weight]), requires_grad=False)
        self.out = split.out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


@pytest.fixture
def fused(transformer) -> nn.Module:
    """The same model with fused MLP layers."""
    model = copy.deepcopy(transformer)
    for block in model.transformer_blocks:
        block.img_mlp = FusedMLP(block.img_mlp)
    close(velocity(model), velocity(transformer))
    return model


def kinds(model, layers) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of each kind of update for these layers, without the layout's prefix."""
    factors = random_factors(model, layers, seed=9)
    plain = spelled(factors, "{}.lora_A.weight", "{}.lora_B.weight", alpha="{}.alpha", value=8.0)
    dora = plain | {f"{layer}.dora_scale": model.get_submodule(layer).weight.norm(dim=1, keepdim=True) * 1.3 for layer in layers}
    made = {"LoRA": plain, "DoRA": dora, "difference": {f"{layer}.diff": one.delta().float() for layer, one in factors.items()}}
    made["replacement"] = {f"{layer}.set_weight": one.delta().float() for layer, one in factors.items()}
    made["OFT"] = {
        f"{layer}.oft_blocks": torch.randn(one.up.shape[0] // 8, 8, 8, generator=torch.Generator().manual_seed(3)) * 0.1 for layer, one in factors.items()
    }
    generator = torch.Generator().manual_seed(4)
    made["BOFT"] = {f"{layer}.oft_blocks": boft(one.up.shape[0], generator) for layer, one in factors.items()}
    for older in (False, True):
        ones = {layer: glora(*one.delta().shape, generator, older) for layer, one in factors.items()}
        made["older GLoRA" if older else "GLoRA"] = {f"{layer}.{name}": tensor for layer, one in ones.items() for name, tensor in one.items()}
    for kind, make in LYCORIS.items():
        generator = torch.Generator().manual_seed(5)
        made[kind] = {f"{layer}.{name}": tensor for layer, one in factors.items() for name, tensor in make(*one.delta().shape, generator)[0].items()}
    return made


KINDS = ["LoRA", "DoRA", "difference", "replacement", "OFT", "BOFT", "GLoRA", "older GLoRA", *LYCORIS]


@pytest.mark.parametrize("kind", KINDS)
def test_split_keys_on_a_fused_model(kind, transformer, fused, applied, tmp_path):
    path = write(tmp_path / "a.safetensors", kinds(transformer, (GATE, PROJ))[kind])
    close(applied(path, model=fused), applied(path))


@pytest.mark.parametrize("kind", KINDS)
def test_fused_keys_on_a_split_model(kind, transformer, fused, applied, tmp_path):
    path = write(tmp_path / "a.safetensors", {f"lora_unet_{flat(FUSED)}{name.removeprefix(FUSED)}": one for name, one in kinds(fused, (FUSED,))[kind].items()})
    close(applied(path), applied(path, model=fused))


def test_fused_keys_change_the_rows_they_mean(transformer, applied, tmp_path):
    old = torch.cat([weight(transformer, GATE), weight(transformer, PROJ)])
    up, down = torch.randn(old.shape[0], 2), torch.randn(2, old.shape[1]) * 0.1
    path = write(tmp_path / "a.safetensors", {f"{FUSED}.lora_A.weight": down, f"{FUSED}.lora_B.weight": up})
    gate, proj = (old + up.double() @ down.double()).chunk(2)
    close(applied(path), velocity(by_hand(transformer, {GATE: gate, PROJ: proj})))


def test_what_cannot_be_halved_is_refused(transformer, fused, tmp_path):
    tensors = kinds(fused, (FUSED,))["LoRA"] | {f"{FUSED}.dora_scale": fused.get_submodule(FUSED).weight.norm(dim=0, keepdim=True)}
    with pytest.raises(Qwen21Error, match="runs over columns"):
        fitted(write(tmp_path / "a.safetensors", tensors), transformer)
    for shape, constraint in (((2, 384, 384), 0.5), ((1, 48, 16, 16), 0.5), ((6, 96, 8, 8), 0.0)):
        tensors = {f"{FUSED}.oft_blocks": torch.zeros(shape), f"{FUSED}.alpha": torch.tensor(constraint)}
        with pytest.raises(Qwen21Error, match="ties both halves"):
            fitted(write(tmp_path / "a.safetensors", tensors), transformer)


def test_strength_zero_is_none(transformer, applied, tmp_path):
    path, _ = write_layout(tmp_path / "a.safetensors", "bare", random_factors(transformer))
    assert torch.equal(applied(path, 0.0), velocity(transformer))


def test_loras_stack_in_order(transformer, tmp_path):
    one, two = random_factors(transformer, seed=1), random_factors(transformer, seed=2)
    first, second = (write_layout(tmp_path / f"{i}.safetensors", "bare", factors)[0] for i, factors in enumerate((one, two)))
    old = weight(transformer, ATTENTION)
    magnitude = old.norm(dim=1, keepdim=True).float() * 2
    third = write(tmp_path / "3.safetensors", spelled({ATTENTION: two[ATTENTION]}, *DIFFUSERS) | {f"transformer.{ATTENTION}.dora_scale": magnitude})
    stack = [(fitted(first, transformer), 0.5), (fitted(second, transformer), -1.5)]
    weights = {layer: weight(transformer, layer) + one[layer].delta(0.5) + two[layer].delta(-1.5) for layer in LAYERS}
    expected = velocity(by_hand(transformer, weights))
    with attach(transformer, stack):
        close(velocity(transformer), expected)
    middle = weights[ATTENTION]
    weights[ATTENTION] = decomposed(middle, middle + two[ATTENTION].delta(), magnitude, 1.0)
    expected = velocity(by_hand(transformer, weights))
    with attach(transformer, [*stack, (fitted(third, transformer), 1.0)]):
        close(velocity(transformer), expected)


class Quantized(nn.Module):
    """A linear layer whose weight is bytes: what a GGUF or 8-bit layer is to a LoRA."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax() / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))

    def dequantized(self) -> torch.Tensor:
        return self.weight * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.dequantized())


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_layers_keep_their_bytes(kind, transformer, applied, tmp_path):
    model, dense = copy.deepcopy(transformer), copy.deepcopy(transformer)
    for layer in (ATTENTION, GATE, PROJ):
        owner, _, leaf = layer.rpartition(".")
        packed = Quantized(model.get_submodule(layer))
        setattr(model.get_submodule(owner), leaf, packed)
        dense.get_submodule(layer).weight = nn.Parameter(packed.dequantized(), requires_grad=False)
    path = write(tmp_path / "a.safetensors", kinds(transformer, (ATTENTION, GATE, PROJ))[kind])
    close(applied(path, 0.8, model), applied(path, 0.8, dense))


def test_bfloat16_is_rounded_as_a_branch_not_into_the_weight(checkpoint, tmp_path):
    """A change far below the weight's last bit is not lost."""
    model = checkpoint.transformer(torch.device("cpu"), torch.bfloat16)
    layer = model.get_submodule(ATTENTION)
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
    down, up = torch.randn(1, layer.in_features) * 1e-4, torch.ones(layer.out_features, 1)
    path = write(tmp_path / "a.safetensors", {f"{ATTENTION}.lora_A.weight": down, f"{ATTENTION}.lora_B.weight": up})
    with torch.inference_mode(), attach(model, [(fitted(path, model), 1000.0)]):
        found = layer(x).double()
    close(found, F.linear(x.double(), layer.weight.double() + 1000.0 * (up.double() @ down.double())), 1e-2)


def test_weights_come_back_after_an_error(transformer, tmp_path):
    factors = random_factors(transformer)
    tensors = spelled(factors, *DIFFUSERS) | {f"transformer.{NORM}.diff": torch.ones(transformer.get_submodule(NORM).weight.shape)}
    lora, plain = fitted(write(tmp_path / "a.safetensors", tensors), transformer), velocity(transformer)
    with pytest.raises(ZeroDivisionError), attach(transformer, [(lora, 1.0)]):
        raise ZeroDivisionError
    assert torch.equal(velocity(transformer), plain)


def refused(transformer, tmp_path, tensors, **metadata) -> str:
    with pytest.raises(Qwen21Error) as error:
        fitted(write(tmp_path / "a.safetensors", tensors, **metadata), transformer)
    assert "\n" not in str(error.value)
    return str(error.value)


WIDTH = TRANSFORMER.dim
PAIR = {f"{ATTENTION}.lora_A.weight": torch.ones(2, WIDTH), f"{ATTENTION}.lora_B.weight": torch.ones(WIDTH, 2)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.lora_A.weight": torch.ones(2, 2), "a.lora_B.weight": torch.ones(2, 2)}, "fits no layer of Qwen-Image 2.1: a is no layer"),
        (PAIR | {"transformer_blocks.0.attn.add_q_proj.lora_A.weight": torch.ones(2, 2)}, "fits 1 of its 2 layers.*of the first Qwen-Image"),
        (PAIR | {"transformer_blocks.9.attn.to_q.lora_A.weight": torch.ones(2, WIDTH)}, "fits 1 of its 2 layers: transformer_blocks.9.attn.to_q is no layer"),
        (PAIR | {f"{ATTENTION}.lora_B.bias": torch.ones(2)}, "is for a bias, of which Qwen-Image 2.1 has none"),
        (PAIR | {f"{ATTENTION}.diff_b": torch.ones(2)}, "is for a bias"),
        (PAIR | {"lora_te_layers_0_q.lora_down.weight": torch.ones(2, 2)}, "fits 1 of its 2 layers: lora_te_layers_0_q belongs to the text encoder"),
        (PAIR | {f"{ATTENTION}.lora_mid.weight": torch.ones(2, 2)}, "fits 1 of its 1 layers: .*lora_mid.weight is no layer.*or of a kind not known"),
        (PAIR | {"strange": torch.ones(2)}, "strange is no layer"),
        ({f"{'dit_' * 2000}a.lora_A.weight": torch.ones(2, 2)}, "is no layer"),
        ({f"{ATTENTION}.weight": torch.ones(WIDTH, WIDTH)}, "holds no LoRA, but tensors such as"),
        ({}, "holds nothing"),
        ({f"{ATTENTION}.lora_A.weight": torch.ones(2, WIDTH)}, "lacks lora_B"),
        ({f"{ATTENTION}.lora_B.weight": torch.ones(WIDTH, 2)}, "lacks lora_A"),
        ({f"{ATTENTION}.alpha": torch.ones(())}, "an alpha without what belongs to it"),
        ({f"{ATTENTION}.dora_scale": torch.ones(WIDTH, 1)}, "has a DoRA scale, but not the one LoRA"),
        (
            {f"{ATTENTION}.lora_A.weight": torch.ones(2, WIDTH), f"{ATTENTION}.lora_B.weight": torch.ones(WIDTH, 3)},
            r"factors of shapes \(\d+, 3\) and \(2, \d+\)",
        ),
        ({f"{ATTENTION}.lora_A.weight": torch.ones(2, 32), f"{ATTENTION}.lora_B.weight": torch.ones(WIDTH, 2)}, r"has shape \(\d+, 32\), the model \("),
        ({f"{NORM}.lora_A.weight": torch.ones(1, 2), f"{NORM}.lora_B.weight": torch.ones(2, 1)}, r"has shape \(2, 2\), the model \("),
        (PAIR | {f"{ATTENTION}.alpha": torch.ones(2)}, r"has an alpha of shape \(2,\), expected one number"),
        (PAIR | {f"{ATTENTION}.dora_scale": torch.ones(3, 1)}, r"has a DoRA scale of shape \(3, 1\)"),
        (PAIR | {f"{ATTENTION}.lora_A.other.weight": torch.ones(2, WIDTH)}, "two tensors for one place"),
        (PAIR | {f"transformer.{name}": tensor.clone() for name, tensor in PAIR.items()}, "fits 1 of its 2 layers: .*names the same layer as"),
        ({f"{ATTENTION}.lora_A.weight": torch.full((2, WIDTH), float("nan")), f"{ATTENTION}.lora_B.weight": torch.ones(WIDTH, 2)}, "not finite"),
        ({f"{ATTENTION}.lora_A.weight": torch.ones(2, WIDTH).int(), f"{ATTENTION}.lora_B.weight": torch.ones(WIDTH, 2)}, "as int32, expected floating point"),
        ({f"{ATTENTION}.oft_blocks": torch.ones(2, 3, 4)}, "has rotations of shape"),
        ({f"{ATTENTION}.oft_blocks": torch.ones(2, 4, 3, 3)}, "has BOFT rotations of shape"),
        ({f"{ATTENTION}.oft_blocks": torch.ones(3, 2, 4, 4)}, "paired 3 times"),
        ({f"{ATTENTION}.a1.weight": torch.ones(WIDTH, 2)}, "lacks a2"),
        ({f"{ATTENTION}.{name}.weight": torch.ones(()) for name in ("a1", "a2", "b1", "b2")}, "has GLoRA factors of shapes"),
        (
            {f"{ATTENTION}.{name}.weight": torch.ones(2, 2) for name in ("a1", "a2", "b1", "b2")},
            r"has GLoRA factors that change the columns by a matrix \(2, 2\)",
        ),
        ({f"{ATTENTION}.oft_blocks": torch.ones(2, 4, 4), f"{ATTENTION}.rescale": torch.ones(3, 1)}, "has a rescale of shape"),
        ({f"{ATTENTION}.lokr_w1": torch.ones(2)}, "has a lokr_w1 of shape|lacks lokr_w2"),
        ({f"{ATTENTION}.hada_w1_a": torch.ones(WIDTH, 2)}, "lacks hada_w1_b"),
    ],
)
def test_refused(tensors, words, transformer, tmp_path):
    message = refused(transformer, tmp_path, tensors)
    assert re.search(words, message), message


@pytest.mark.parametrize(
    "metadata", ["{", "[]", "3", '{"lora_alpha": "many"}', '{"lora_alpha": NaN}', '{"alpha_pattern": [1]}', '{"alpha_pattern": {"(a+)+$": 1}}', "[" * 100000]
)
def test_metadata_that_makes_no_sense(metadata, transformer, tmp_path):
    tensors = spelled(random_factors(transformer), *DIFFUSERS)
    assert "the alpha of the LoRA" in refused(transformer, tmp_path, tensors, lora_adapter_metadata=metadata)


@pytest.mark.parametrize(("name", "words"), [("a.gguf", "is GGUF, and LoRAs are read from safetensors only"), ("a.pt", "pickled files can run programs")])
def test_only_safetensors_are_read(name, words, tmp_path):
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(Qwen21Error, match=words) as error:
        LoraFile.read(tmp_path / name)
    assert ("pickled" in str(error.value)) == (name == "a.pt")


def test_file_and_strength(tmp_path):
    path = write(tmp_path / "a:0.5.safetensors", {})
    plain = write(tmp_path / "a.safetensors", {})
    assert parse(str(path)) == (str(path), 1.0)
    assert parse(f"{path}:-0.25") == (str(path), -0.25)
    assert parse(f"{plain}:2") == (str(plain), 2.0)
    for wrong in (f"{plain}:nan", f"{plain}:inf", f"{plain}:much", str(tmp_path / "b.safetensors"), f"{tmp_path}/b.safetensors:1", ":1", "", str(tmp_path)):
        with pytest.raises(UsageError):
            parse(wrong)


def test_digest_follows_the_content(tmp_path):
    path = write(tmp_path / "a.safetensors", {"a": torch.ones(2)})
    before = digest(path)
    write(path, {"a": torch.ones(3)})
    assert digest(path) != before
