"""The LoRA node: every layout and kind, on plain, fused, quantised and lazily loaded weights, against weights changed by hand."""

import os

import comfy.lora
import comfy.model_management
import comfy.ops
import folder_paths
import torch
from check_quantized import cast, checkpoint_with, fp8, int8
from check_weights import LAYERS, LAYOUTS, core_with_lora, write_lora
from graph import (
    call,
    close,
    core,
    core_paint,
    core_transformer,
    core_velocity,
    differs,
    equal,
    folder,
    loaded,
    opened,
    prefills,
    prepared,
    replaced,
    samples,
    sentence,
)
from safetensors.torch import save_file
from torch import nn

ATTENTION, GATE, PROJ = "transformer_blocks.0.attn.to_q", "transformer_blocks.2.img_mlp.gate_layer", "transformer_blocks.2.img_mlp.proj"
FUSED = "transformer_blocks.2.img_mlp.gate_up"
NORM, TEXT_NORM = "transformer_blocks.1.attn.norm_q", "txt_in.text_norm"


def with_lora(file: str, strength: float = 1.0, model=None):
    return call("Qwen21Lora", model=model or loaded()[0], lora=file, strength=strength)[0]


def write(name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    file = f"{name}.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, f"{folder_paths.get_folder_paths('loras')[0]}/{file}", metadata=metadata)
    return file


def weight(layer: str, model=None) -> torch.Tensor:
    return (model or core_transformer()).get_submodule(layer).weight.detach()


def plain(*layers: str, rank: int = 2, seed: int = 5, model=None) -> dict[str, torch.Tensor]:
    """Bare keys of a LoRA with alpha for these layers."""
    generator, tensors = torch.manual_seed(seed), {}
    for layer in layers:
        rows, columns = weight(layer, model).shape
        tensors[f"{layer}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / columns**0.5
        tensors[f"{layer}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.3
        tensors[f"{layer}.alpha"] = torch.tensor(3.0)
    return tensors


def kinds() -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of each kind of update, for layers whose dimensions are multiples of 8."""
    layers = (ATTENTION, GATE, PROJ)
    generator, made = torch.manual_seed(6), {"LoRA": plain(*layers)}
    made["DoRA"] = made["LoRA"] | {f"{layer}.dora_scale": weight(layer).norm(dim=1, keepdim=True) * 1.3 for layer in layers}
    made["DoRA by columns"] = made["LoRA"] | {f"{layer}.dora_scale": weight(layer).norm(dim=0, keepdim=True) * 1.3 for layer in layers}
    made |= {kind: {} for kind in ("LoHa", "LoKr", "GLoRA", "older GLoRA", "OFT", "BOFT", "difference", "replacement")}
    for layer in layers:
        rows, columns = weight(layer).shape
        for number in (1, 2):
            made["LoHa"][f"{layer}.hada_w{number}_a"] = torch.randn(rows, 2, generator=generator) * 0.5
            made["LoHa"][f"{layer}.hada_w{number}_b"] = torch.randn(2, columns, generator=generator) / columns**0.25
        made["LoKr"][f"{layer}.lokr_w1"] = torch.randn(4, 4, generator=generator) * 0.2
        made["LoKr"][f"{layer}.lokr_w2_a"] = torch.randn(rows // 4, 2, generator=generator)
        made["LoKr"][f"{layer}.lokr_w2_b"] = torch.randn(2, columns // 4, generator=generator) / columns**0.5
        for kind, a, b in (("GLoRA", "a1 a2", "b1 b2"), ("older GLoRA", "a2 a1", "b2 b1")):
            for (up, down), height, scale in ((a.split(), columns, 1 / columns**0.5), (b.split(), rows, 0.3)):
                made[kind][f"{layer}.{up}.weight"] = torch.randn(height, 2, generator=generator) * scale
                made[kind][f"{layer}.{down}.weight"] = torch.randn(2, columns, generator=generator) / columns**0.5
            made[kind][f"{layer}.alpha"] = torch.tensor(3.0)
        made["BOFT"][f"{layer}.oft_blocks"] = torch.randn(3, rows // 8, 8, 8, generator=generator) * 0.1
        made["BOFT"][f"{layer}.alpha"] = torch.tensor(0.0)  # theirs needs one
        made["OFT"][f"{layer}.oft_blocks"] = torch.randn(rows // 8, 8, 8, generator=generator) * 0.1
        made["difference"][f"{layer}.diff"] = torch.randn(rows, columns, generator=generator) * 0.05
        made["replacement"][f"{layer}.set_weight"] = torch.randn(rows, columns, generator=generator) * 0.1
    made["norms"] = {f"{layer}.diff": torch.randn(weight(layer).shape, generator=generator) for layer in (NORM, TEXT_NORM)}
    return made


def core_samples(parts, file: str, strength: float, model=None) -> torch.Tensor:
    """What the core paints with the file."""
    lora, model = core("qwen21.lora"), model or core_transformer()
    path = folder_paths.get_full_path_or_raise("loras", file)
    with lora.attach(model, [(lora.LoraFile.read(path).fit(lora.places(model)), strength)]):
        return core_paint(core_velocity(parts[0], model), parts[2])


def check_every_layout_and_without_it_again():
    parts = prepared(pictures=1)
    before = samples(loaded()[0], *parts)
    for layout in LAYOUTS:
        file, deltas = write_lora(layout)
        for strength in (0.7, -0.7):
            found = samples(with_lora(file, strength), *parts)
            close(found, core_paint(core_velocity(parts[0], core_with_lora(deltas, strength)), parts[2]), what=layout)
            differs(found, before, what=layout)
        equal(samples(loaded()[0], *parts), before, f"after {layout} was taken away")


def check_kinds_that_the_core_knows():
    parts = prepared(pictures=1)
    before = samples(loaded()[0], *parts)
    for kind, tensors in kinds().items():
        file = write(kind, tensors)
        for strength in (1.0, 0.5):
            found = samples(with_lora(file, strength), *parts)
            close(found, core_samples(parts, file, strength), what=kind)
            differs(found, before, 1e-3, kind)
        equal(samples(loaded()[0], *parts), before, f"after {kind}")


def check_kinds_that_comfyui_adapters_know_come_out_alike():
    parts = prepared()
    for kind, tensors in kinds().items():
        if kind in ("DoRA", "DoRA by columns", "norms"):  # 0.33 divides by another norm; it has no names for norms behind bare keys
            continue
        file = write(kind, tensors)
        strength = 1.0 if kind in ("replacement", "OFT", "BOFT") else 0.6  # theirs takes no strength for one, and its square for the other
        theirs = call("LoraLoaderModelOnly", model=loaded()[0], lora_name=file, strength_model=strength)[0]
        close(samples(with_lora(file, strength), *parts), samples(theirs, *parts), what=kind)


def check_alpha_of_the_metadata():
    tensors = {f"transformer.{key}": tensor for key, tensor in plain(*LAYERS).items() if not key.endswith("alpha")}
    parts = prepared()
    file = write("metadata", tensors, {"lora_adapter_metadata": '{"transformer.r": 2, "transformer.lora_alpha": 3}'})
    close(samples(with_lora(file), *parts), samples(with_lora(write("tensors", plain(*LAYERS))), *parts))


def check_stacked_in_any_number():
    parts = prepared(pictures=1)
    norms = [{f"{TEXT_NORM}.diff": torch.randn(weight(TEXT_NORM).shape, generator=torch.manual_seed(i))} for i in (1, 2)]
    one, two = write("one", plain(ATTENTION, GATE, seed=1) | norms[0]), write("two", plain(ATTENTION, PROJ, seed=2) | norms[1])
    none, first = samples(loaded()[0], *parts), with_lora(one)
    before = samples(first, *parts)
    both = with_lora(two, -0.5, first)
    lora, model = core("qwen21.lora"), core_transformer()
    known = lora.places(model)
    stack = [(lora.LoraFile.read(folder_paths.get_full_path_or_raise("loras", file)).fit(known), s) for file, s in ((one, 1.0), (two, -0.5))]
    found = samples(both, *parts)
    with lora.attach(model, stack):
        close(found, core_paint(core_velocity(parts[0]), parts[2]))
    equal(samples(first, *parts), before, "the first alone again")
    equal(samples(loaded()[0], *parts), none, "none again")
    theirs = call("LoraLoaderModelOnly", model=with_lora(one), lora_name=write("three", plain(PROJ, seed=3)), strength_model=-0.5)[0]
    close(samples(theirs, *parts), samples(with_lora("three.safetensors", -0.5, first), *parts), what="with ComfyUI's loader behind it")


def check_strength_zero_is_no_lora():
    parts = prepared(pictures=1)
    file, _ = write_lora("peft")
    model, report = call("Qwen21Lora", model=loaded()[0], lora=file, strength=0.0)
    assert model is loaded()[0] and "not applied" in report, report
    equal(samples(model, *parts), samples(loaded()[0], *parts))


def check_report():
    model, report = call("Qwen21Lora", model=loaded()[0], lora=write_lora("kohya")[0], strength=0.5)
    assert report == f"kohya.safetensors: all {len(LAYERS)} layers matched ({len(LAYERS)} LoRA of rank 2); strength 0.5", report


def check_refusals():
    good = plain(ATTENTION)
    for tensors, words in (
        ({f"double_blocks.{key}": tensor for key, tensor in good.items()}, "fits no layer of Qwen-Image 2.1"),
        (good | {"transformer_blocks.0.attn.add_q_proj.lora_A.weight": torch.ones(2, 8)}, "fits 1 of its 2 layers"),
        (good | {f"{ATTENTION}.lora_B.bias": torch.ones(8)}, "is for a bias"),
        (good | {"lora_te_layers_0.lora_up.weight": torch.ones(8, 2)}, "belongs to the text encoder"),
        ({f"{ATTENTION}.lora_A.weight": torch.ones(2, 8), f"{ATTENTION}.lora_B.weight": torch.ones(8, 2)}, "has shape (8, 8), the model"),
        ({}, "holds nothing"),
    ):
        for strength in (1.0, 0.0):
            text = sentence(with_lora, write("refused", tensors), strength)
            assert words in text and "refused.safetensors" in text, text
    text = sentence(call, "Qwen21Lora", model=type("Model", (), {"model": nn.Identity()})(), lora=write("good", good), strength=1.0)
    assert "expected Qwen-Image 2.1" in text, text


def check_a_file_of_another_content_is_read_again():
    node = core("nodes.lora").Qwen21Lora
    file = write("again", plain(ATTENTION))
    before = node.fingerprint_inputs(lora=file, model=None, strength=1.0)
    write("again", plain(ATTENTION, GATE))
    assert node.fingerprint_inputs(lora=file, model=None, strength=1.0) != before
    os.remove(folder_paths.get_full_path("loras", file))
    assert node.fingerprint_inputs(lora=file, model=None, strength=1.0) is None


def check_the_cache_never_serves_other_weights():
    """Alternating models: each finds its own keys and values, and only those."""
    parts, file = prepared("a red star", "blurry", 1), write_lora("peft")[0]
    models = {"none": loaded()[0], "full": with_lora(file), "half": with_lora(file, 0.5), "bypass": bypassed(file)}
    off = {name: call("Qwen21PrefixCache", model=model, budget_mb=0, device="off", precision="default")[0] for name, model in models.items()}
    expected = {name: samples(model, *parts, cfg=2.0) for name, model in off.items()}
    with prefills(loaded()[0]) as calls:
        for name in ("none", "full", "half", "bypass", "none", "bypass", "full", "half"):
            close(samples(models[name], *parts, cfg=2.0), expected[name], 1e-5, name)
    assert len(calls) == 8, f"{len(calls)} prefills, expected two for each of four models"
    differs(expected["full"], expected["none"])
    differs(expected["bypass"], expected["none"])


def bypassed(file: str):
    """ComfyUI's loader that adds to what layers give."""
    return call("LoraLoaderBypassModelOnly", model=loaded()[0], lora_name=file, strength_model=1.0)[0]


class FusedMLP(nn.Module):
    """As ComfyUI's own Qwen-Image 2.1 has it: one matrix, rows of gate, then of proj."""

    takes_rows = False

    def __init__(self, split):
        super().__init__()
        gate, proj = split.gate_layer, split.proj
        self.gate_up = comfy.ops.disable_weight_init.Linear(gate.in_features, 2 * gate.out_features, bias=False)
        self.gate_up.weight = nn.Parameter(torch.cat([gate.weight.detach(), proj.weight.detach()]), requires_grad=False)
        self.out = split.out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(torch.nn.functional.silu(gate) * up)


def fused_model():
    model = core("nodes.bridge_model").load_model(opened())
    for block in model.model.diffusion_model.transformer_blocks:
        block.img_mlp = FusedMLP(block.img_mlp)
    return model


def check_split_keys_on_a_fused_model():
    parts, model = prepared(pictures=1), fused_model()
    before = samples(model, *parts)
    close(before, samples(loaded()[0], *parts))
    for kind, tensors in kinds().items():
        file = write(f"split {kind}", tensors)
        found = samples(with_lora(file, 0.8, model), *parts)
        close(found, samples(with_lora(file, 0.8), *parts), what=kind)
        equal(samples(model, *parts), before, kind)


def check_fused_keys_on_both():
    parts, model = prepared(), fused_model()
    inner = model.model.diffusion_model
    tensors = plain(FUSED, model=inner)
    for kind, some in (("LoRA", tensors), ("DoRA", tensors | {f"{FUSED}.dora_scale": weight(FUSED, inner).norm(dim=1, keepdim=True) * 1.3})):
        file = write(f"fused {kind}", some)
        found = samples(with_lora(file), *parts)
        close(found, samples(with_lora(file, 1.0, model), *parts), what=kind)
        differs(found, samples(loaded()[0], *parts), 1e-3, kind)


def check_comfyui_class_by_name():
    """A MODEL of ComfyUI's own loader is known by the name of its class alone."""
    model = fused_model()
    base = type(model.model).__mro__[1]
    model.model.__class__ = type("QwenImage21", (base,), {})
    _, report = call("Qwen21Lora", model=model, lora=write("by name", plain(GATE, PROJ, ATTENTION)), strength=1.0)
    assert "all 3 layers matched" in report, report


def quantized_weights(model) -> dict[str, torch.Tensor]:
    """The stored bytes of every quantised weight, copied."""
    found = {}
    for name, module in model.model.diffusion_model.named_modules():
        one = getattr(module, "weight", None)
        if one is not None and (hasattr(one, "_qdata") or one.dtype.itemsize == 1):
            found[name] = getattr(one, "_qdata", one).detach().view(torch.uint8).clone()
    return found


def check_quantised_weights_are_not_touched():
    """Every kind, against the core with the dequantised weights; the bytes are the same while a run goes on."""
    parts = prepared(pictures=1)
    for quantize in (fp8, int8, cast):
        with checkpoint_with("transformer", quantize) as name:
            made, stored = core("nodes.bridge_model").load_model(opened(name), torch.float8_e4m3fn if quantize is cast else None), None
            bytes_before = quantized_weights(made)
            assert ATTENTION in bytes_before and GATE in bytes_before, quantize.__name__
            before = samples(made, *parts)
            dense = core("qwen21.checkpoint").Checkpoint(folder()).transformer(torch.device("cpu"), torch.float32)
            for layer in bytes_before:
                stored = made.model.diffusion_model.get_submodule(layer).weight.detach()
                value = stored.dequantize() if hasattr(stored, "dequantize") and hasattr(stored, "_qdata") else stored
                dense.get_submodule(layer).weight = nn.Parameter(value.float(), requires_grad=False)
            for kind, tensors in kinds().items():
                if kind == "norms":
                    continue
                file = write(f"{quantize.__name__} {kind}", tensors)
                model, report = call("Qwen21Lora", model=made, lora=file, strength=0.8)
                assert "beside the weights of 3 quantised layers" in report, report
                seen = []

                def look(executor, *args, **kwargs):
                    seen.append(all(torch.equal(one, bytes_before[layer]) for layer, one in quantized_weights(model).items()))
                    return executor(*args, **kwargs)

                watched = model.clone()
                watched.add_wrapper_with_key("diffusion_model", "test", look)
                found = samples(watched, *parts)
                assert seen and all(seen), f"{quantize.__name__} {kind}: weights were quantised again"
                close(found, core_samples(parts, file, 0.8, dense), 0.05, f"{quantize.__name__} {kind}")
                differs(found, before, 1e-3, f"{quantize.__name__} {kind}")
                equal(samples(model, *parts), found, "again")
                equal(samples(made, *parts), before, f"{quantize.__name__} after {kind}")
            assert not any(module._forward_hooks for module in made.model.diffusion_model.modules())


def check_quantised_and_stacked():
    parts = prepared()
    with checkpoint_with("transformer", fp8) as name:
        stacked(call("Qwen21Loader", checkpoint=name)[0], parts)
    stacked(call("Qwen21Loader", checkpoint="random", weight_dtype="fp8")[0], parts)


def stacked(model, parts) -> None:
    before = samples(model, *parts)
    one, two = write("one", plain(ATTENTION, GATE, seed=1)), write("two", kinds()["DoRA"])
    first = with_lora(one, 1.0, model)
    alone = samples(first, *parts)
    both = samples(with_lora(two, 0.5, first), *parts)
    differs(both, alone, 1e-3)
    equal(samples(first, *parts), alone)
    close(samples(with_lora(one, -1.0, first), *parts), before, 1e-5, "and taken away by its negative")
    equal(samples(model, *parts), before)


def check_a_lora_that_is_gone_leaves_nothing():
    """The clone that carried it is collected while its weights are still loaded."""
    parts = prepared()
    for quantize in (None, fp8):
        if quantize is None:
            close_after_collection(loaded()[0], parts)
        else:
            with checkpoint_with("transformer", quantize) as name:
                close_after_collection(call("Qwen21Loader", checkpoint=name)[0], parts)


def close_after_collection(model, parts) -> None:
    import gc

    before = samples(model, *parts)
    for kind in ("LoRA", "LoKr", "norms"):
        changed = with_lora(write("gone", kinds()[kind]), 1.0, model)
        differs(samples(changed, *parts), before, 1e-3, kind)
        del changed
        gc.collect()
        equal(samples(model, *parts), before, f"after {kind} was collected")


def check_weights_that_stay_on_the_host():
    """Layers that ComfyUI patches as they are called, for want of memory."""
    parts = prepared(pictures=1)
    for kind, tensors in kinds().items():
        file = write(f"host {kind}", tensors)
        expected, model = samples(with_lora(file, 0.8), *parts), with_lora(file, 0.8)
        comfy.model_management.unload_all_models()
        model.unpatch_model()
        model.load(torch.device("cpu"), lowvram_model_memory=1)
        model.model.current_weight_patches_uuid = model.patches_uuid
        assert model.model.lowvram_patch_counter > 0
        with replaced(comfy.model_management, "load_models_gpu", lambda *args, **kwargs: None):
            close(samples(model, *parts), expected, 1e-4, kind)
        model.unpatch_model(torch.device("cpu"))
        comfy.model_management.unload_all_models()
