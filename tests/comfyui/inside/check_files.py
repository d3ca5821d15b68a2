"""Single files in ComfyUI's model folders: found, put together, and painting what the core paints with the same weights."""

import json
import os
import shutil
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import folder_paths
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor, get_layout_class
from graph import call, close, core, differs, encode, folder, picture, references, samples, sentence
from safetensors.torch import load_file, save_file

sys.path += [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]  # behind ComfyUI's own: there is a `nodes` of ours
from formats import files

CPU = torch.device("cpu")
SMALL = "small.safetensors"


def path(root: str, name: str = SMALL) -> Path:
    return Path(folder_paths.models_dir) / root / name


@cache
def single(checkpoint: str = SMALL) -> tuple:
    """(MODEL, CLIP, VAE) of a denoiser's file and what fits it."""
    return call("Qwen21Loader", checkpoint=checkpoint)


def opened(transformer: Path | None = None):
    """The same files in the core, without ComfyUI."""
    tokenizer = Path(sys.modules["comfy.sd"].__file__).parent / "text_encoders/qwen25_tokenizer"
    names = {"text_encoder": path("text_encoders"), "vae": path("vae"), "transformer": transformer or path("diffusion_models")}
    return core("qwen21.checkpoint").Checkpoint(**names, tokenizer=tokenizer)


@cache
def parts(pictures: int = 1) -> tuple:
    """(positive, negative, LATENT) of the small files."""
    _, clip, vae = single()
    images = {f"image_{i + 1}": picture(256, 256, seed=i) for i in range(pictures)}
    return references(*encode("a red star", images=images, resolution=256, clip=clip), vae=vae, width=64, height=96)


def core_samples(checkpoint, steps: int = 2) -> torch.Tensor:
    """What the core paints of `parts` with the denoiser of `checkpoint`."""
    (positive, _, latent), sampling = parts(), core("qwen21.sampling")
    (states, extra), *_ = positive
    model, vae = checkpoint.transformer(CPU, torch.float32), checkpoint.vae(CPU, torch.float32)
    prefix = model.prefill(states.float(), extra["image_slots"], [vae.normalize(one) for one in extra["reference_latents"]])
    _, _, rows, columns = latent["samples"].shape
    sigmas = core("qwen21.schedule").sigmas("auto", steps, rows * columns, checkpoint.schedule, checkpoint.index.sample_sigmas)
    noise = sampling.initial_noise(7, rows, columns)
    return vae.denormalize(sampling.euler(noise, sigmas, lambda x, sigma: model.denoise(x, sigma, prefix)))


def check_three_single_files_paint_what_the_core_paints():
    model, clip, vae = single()
    checkpoint = opened()
    pictures = core("nodes.bridge_clip").to_pictures(picture(256, 256))
    (expected,) = checkpoint.text_encoder(CPU, torch.float32).encode(["a red star"], pictures)
    found, _ = encode("a red star", images={"image_1": picture(256, 256)}, resolution=256, clip=clip)
    close(found[0][0], expected.states, 1e-3, "text states")
    assert found[0][1]["image_slots"] == list(expected.image_slots)
    close(samples(model, *parts(), steps=2), core_samples(checkpoint), 1e-3, "latents")
    pixels = picture(64, 64)
    latents = vae.encode(pixels)
    core_vae = checkpoint.vae(CPU, torch.float32)
    close(latents, core_vae.encode(pixels.movedim(-1, 1) * 2 - 1), 1e-3, "VAE")
    assert model.model.model_config.schedule == checkpoint.schedule and clip.cond_stage_model.native_resolution == 1024


def check_lists_hold_only_what_fits():
    for root, name in (("diffusion_models", "other.safetensors"), ("text_encoders", "a_t5.safetensors"), ("vae", "a_flux_vae.safetensors")):
        save_file({"some.weight": torch.zeros(2, 2)}, path(root, name))
    path("vae", "cut.safetensors").write_bytes(path("vae").read_bytes()[:1000])
    inputs = {one.id: one for one in _schema().inputs}
    assert SMALL in inputs["checkpoint"].options and inputs["checkpoint"].options[0] == "tiny"
    assert (
        inputs["text_encoder"].options[0] == inputs["vae"].options[0] == "auto" and SMALL in inputs["vae"].options and SMALL in inputs["text_encoder"].options
    )
    for name in ("other.safetensors", "a_t5.safetensors", "a_flux_vae.safetensors", "cut.safetensors"):
        assert all(name not in one.options for one in inputs.values())


def _schema():
    import nodes

    return nodes.NODE_CLASS_MAPPINGS["Qwen21Loader"].define_schema()


def check_a_file_takes_parts_of_a_folder_and_a_folder_parts_of_files():
    model, _, vae = call("Qwen21Loader", checkpoint=SMALL, vae="random")
    assert vae.config.latents_mean == model.model.latent_format.vae.latents_mean != single()[2].config.latents_mean
    _, _, vae = call("Qwen21Loader", checkpoint="random", vae=SMALL)
    assert vae.config.latents_mean == single()[2].config.latents_mean
    assert call("Qwen21Loader", checkpoint="random", vae="tiny")[2].config.base_dim != vae.config.base_dim
    text = sentence(call, "Qwen21Loader", checkpoint=SMALL, text_encoder="random")
    assert "width 256" in text, text
    text = sentence(call, "Qwen21Loader", checkpoint="random", text_encoder=SMALL)
    assert "width 64" in text, text


@contextmanager
def away(root: str):
    """Without the file of that folder."""
    file = path(root)
    hidden = file.with_suffix(".hidden")
    file.rename(hidden)
    try:
        yield
    finally:
        hidden.rename(file)


def check_what_is_missing_is_named():
    for root, word in (("text_encoders", "qwen3vl_8b"), ("vae", "qwen_image_2.1_vae")):
        with away(root):
            if root == "vae":  # the random checkpoint's has as many channels
                assert call("Qwen21Loader", checkpoint=SMALL)[2].config.latents_mean != single()[2].config.latents_mean
            else:
                text = sentence(call, "Qwen21Loader", checkpoint=SMALL)
                assert word in text and f"models/{root}" in text and SMALL in text, text


@contextmanager
def denoiser(tensors: dict, name: str = "variant.safetensors", metadata: dict | None = None):
    """Name of a file with these tensors in models/diffusion_models."""
    file = path("diffusion_models", name)
    save_file({key: value.contiguous() for key, value in tensors.items()}, file, metadata=metadata)
    try:
        yield name
    finally:
        file.unlink()


@cache
def plain() -> dict:
    return {name: value.float() for name, value in load_file(path("diffusion_models")).items()}


def quantized(kind: str, **options):
    """Tensors in one of ComfyUI's quantisations, as its own layouts make them; the matrices are fused as in the small file."""
    layout = get_layout_class(QUANT_ALGOS[kind]["comfy_tensor_layout"])
    made = dict(plain())
    for name in files.matrices(plain()):
        layer = name.removesuffix("weight")
        value = QuantizedTensor.from_float(made.pop(name), QUANT_ALGOS[kind]["comfy_tensor_layout"], **options)
        made |= {f"{layer}weight{ending}": tensor for ending, tensor in layout.state_dict_tensors(value._qdata, value._params).items()}
        note = {"format": kind} | {key: options[key] for key in ("convrot",) if key in options}
        made[f"{layer}comfy_quant"] = torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)
    return made


FORMATS = {  # -> options, and how far the picture may be from the unquantised one
    "float8_e4m3fn": ({"scale": "recalculate"}, 0.2),
    "int8_tensorwise": ({"per_channel": True}, 0.1),
    "int8_tensorwise convrot": ({"per_channel": True, "convrot": True}, 0.1),
    "nvfp4": ({"scale": "recalculate"}, 0.6),
    "mxfp8": ({}, 0.2),
    "asym_w4a8_int8": ({}, 0.6),
    "convrot_w4a4": ({}, 0.9),
}


def check_every_quantisation_of_comfyui_fused():
    exact = samples(single()[0], *parts(), steps=1)
    for name, (options, tolerance) in FORMATS.items():
        kind = name.split()[0]
        if kind not in QUANT_ALGOS:
            continue
        with denoiser(quantized(kind, **options)) as file:
            model = call("Qwen21Loader", checkpoint=file)[0]
            mlp = model.model.diffusion_model.transformer_blocks[0].img_mlp
            assert isinstance(mlp.gate_layer.weight.data, QuantizedTensor) or isinstance(mlp.gate_layer.weight, QuantizedTensor), name
            for half, rows in ((mlp.gate_layer, slice(0, 768)), (mlp.proj, slice(768, 1536))):
                weight = half.weight.dequantize() if hasattr(half.weight, "dequantize") else half.weight
                close(weight.float(), plain()["transformer_blocks.0.img_mlp.gate_up.weight"][rows], 0.3, f"{name} rows")
            found = samples(model, *parts(), steps=1)
        close(found, exact, tolerance, name)
        differs(found, exact, 1e-4, name)


def check_8_bit_floats_with_a_scale_a_row_become_plain_matrices():
    """ComfyUI's layout has one scale a tensor, and its kernels would refuse the others or leave them out."""
    scaled = files.scaled8(plain(), files.comfy_note, rows=True)
    for tensors in (scaled, {name: value.flatten() if name.endswith("weight_scale") else value for name, value in scaled.items()}):
        with denoiser(tensors) as file:
            model = call("Qwen21Loader", checkpoint=file)[0]
            weight = model.model.diffusion_model.transformer_blocks[0].attn.to_q.weight
            assert not isinstance(weight, QuantizedTensor) and weight.dtype.itemsize > 1
            close(weight.float(), plain()["transformer_blocks.0.attn.to_q.weight"], 0.05, "weight")
            close(samples(model, *parts(), steps=1), samples(single()[0], *parts(), steps=1), 0.2, "latents")


def check_scaled_8_bit_floats_however_they_are_noted():
    exact = samples(single()[0], *parts(), steps=1)
    bare = lambda layer, scale: {f"{layer}.weight_scale": scale}
    mark = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    notes = json.dumps({"layers": {name.removesuffix(".weight"): {"format": "float8_e4m3fn"} for name in files.matrices(plain())}})
    for noted, more, metadata in (
        (files.comfy_note, {}, None),
        (files.older_note, mark, None),
        (bare, {}, None),
        (bare, {}, {"_quantization_metadata": notes}),
    ):
        with denoiser(files.scaled8(plain(), noted) | more, metadata=metadata) as file:
            model = call("Qwen21Loader", checkpoint=file)[0]
            assert isinstance(model.model.diffusion_model.transformer_blocks[0].attn.to_q.weight, QuantizedTensor)
            found = samples(model, *parts(), steps=1)
        close(found, exact, 0.2)
        differs(found, exact, 1e-4)


def check_plain_8_bit_floats_keep_norms():
    exact = samples(single()[0], *parts(), steps=1)
    with denoiser(files.cast8(plain())) as file:
        checkpoint = opened(path("diffusion_models", file))
        model = core("nodes.bridge_model").load_model(checkpoint, torch.float8_e4m3fn)
        block = model.model.diffusion_model.transformer_blocks[0]
        assert block.attn.to_q.weight.dtype == torch.float8_e4m3fn and block.attn.norm_q.weight.dtype == torch.float32
        close(samples(model, *parts(), steps=1), core_samples(checkpoint, steps=1), 1e-2)
        differs(samples(call("Qwen21Loader", checkpoint=file)[0], *parts(), steps=1), exact, 1e-4)


def check_gguf():
    for kinds, arch in ((["Q8_0", "Q4_K", "Q6_K"], "qwen_image21"), (["Q5_K", "Q3_K", "IQ4_XS"], None)):
        file = path("diffusion_models", "variant.gguf")
        packed, _ = files.quantized_gguf(plain(), kinds)
        files.write_gguf(file, files.prefixed(packed, "model.diffusion_model."), arch)
        model = call("Qwen21Loader", checkpoint=file.name)[0]
        weight = model.model.diffusion_model.transformer_blocks[0].attn.to_q.weight
        assert isinstance(weight, QuantizedTensor) and weight._qdata.dtype == torch.uint8 and tuple(weight.shape) == (256, 256)
        close(samples(model, *parts(), steps=2), core_samples(opened(file)), 1e-3, str(kinds))
        file.unlink()


def check_core_lora_loader_on_gguf():
    """ComfyUI's own way: the patched layers become plain ones, and what was there comes back."""
    file = path("diffusion_models", "variant.gguf")
    files.write_gguf(file, files.quantized_gguf(plain(), ["Q8_0"])[0])
    model = call("Qwen21Loader", checkpoint=file.name)[0]
    before = samples(model, *parts(), steps=1)
    generator = torch.manual_seed(0)
    lora = {
        f"diffusion_model.transformer_blocks.0.attn.to_q.lora_{letter}.weight": torch.randn(shape, generator=generator)
        for letter, shape in (("A", (4, 256)), ("B", (256, 4)))
    }
    save_file(lora, path("loras", "x.safetensors"))
    patched = call("LoraLoaderModelOnly", model=model, lora_name="x.safetensors", strength_model=1.0)[0]
    differs(samples(patched, *parts(), steps=1), before)
    assert torch.equal(samples(model, *parts(), steps=1), before)
    file.unlink()


def check_text_encoder_quantised_by_comfyui():
    exact, _ = encode("a red star", images={"image_1": picture(256, 256)}, resolution=256, clip=single()[1])
    source = {name: value.float() for name, value in load_file(path("text_encoders")).items()}
    for kind, options, tolerance in (("int8_tensorwise", {"per_channel": True, "convrot": True}, 0.1), ("asym_w4a8_int8", {}, 0.6)):
        made, layout = dict(source), QUANT_ALGOS[kind]["comfy_tensor_layout"]
        for name in files.matrices(source):
            value = QuantizedTensor.from_float(made.pop(name), layout, **options)
            layer = name.removesuffix("weight")
            made |= {f"{layer}weight{ending}": tensor for ending, tensor in value.layout_cls.state_dict_tensors(value._qdata, value._params).items()}
            note = {"format": kind} | {key: options[key] for key in ("convrot",) if key in options}
            made[f"{layer}comfy_quant"] = torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)
        file = path("text_encoders", "variant.safetensors")
        save_file({name: value.contiguous() for name, value in made.items()}, file)
        clip = call("Qwen21Loader", checkpoint=SMALL, text_encoder=file.name)[1]
        packed = [one.weight for one in clip.cond_stage_model.modules() if isinstance(getattr(one, "weight", None), QuantizedTensor)]
        assert len(packed) == len(files.matrices(source)) and {one._layout_cls for one in packed} == {layout}, kind
        found, _ = encode("a red star", images={"image_1": picture(256, 256)}, resolution=256, clip=clip)
        close(found[0][0], exact[0][0], tolerance, kind)
        differs(found[0][0], exact[0][0], 1e-4, kind)
        file.unlink()


def check_a_file_that_is_replaced_in_a_folder_is_seen():
    """The folder's own time stays what it was."""
    files, part = core("nodes.model_files"), "text_encoder"
    with TemporaryDirectory() as temporary:
        made = Path(temporary, "made")
        shutil.copytree(folder("random"), made)
        for source in (made, made / part):
            config, weights = made / part / "config.json", made / part / "model.safetensors"
            before, whole = config.read_text(), weights.read_bytes()
            times = [one.stat().st_mtime_ns for one in (made, made / part)]
            assert files.fact(part, str(source)) == 64
            values = json.loads(before)
            values["text_config"]["hidden_size"] = 96
            config.write_text(json.dumps(values))
            assert files.fact(part, str(source)) == 96
            config.write_text(before)
            assert files.fact(part, str(source)) == 64
            weights.write_bytes(whole[:100])
            assert files.fact(part, str(source)) is None
            weights.write_bytes(whole)
            assert files.fact(part, str(source)) == 64
            assert times == [one.stat().st_mtime_ns for one in (made, made / part)]
        beside = Path(temporary, "x.safetensors")
        shutil.copy(path("text_encoders"), beside)
        assert files.fact(part, str(beside)) == 256
        beside.with_name("config.json").write_text(json.dumps(values))
        assert files.fact(part, str(beside)) == 96
    assert files.fact(part, str(made)) is None


def check_the_loader_sees_that_a_file_was_replaced():
    node, weights = core("nodes.loader").Qwen21Loader, path("text_encoders")
    before = node.fingerprint_inputs(checkpoint=SMALL, weight_dtype="default")
    assert before is not None and before == node.fingerprint_inputs(checkpoint=SMALL, weight_dtype="fp8")
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    assert node.fingerprint_inputs(checkpoint=SMALL) not in (before, None)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert node.fingerprint_inputs(checkpoint=SMALL) == before
    assert node.fingerprint_inputs(checkpoint="missing.safetensors") is None


def check_a_turbo_file_samples_its_own_sigmas():
    shutil.copy(path("diffusion_models"), path("diffusion_models", "small_turbo.safetensors"))
    model = call("Qwen21Loader", checkpoint="small_turbo.safetensors")[0]
    assert model.model.model_config.index.sample_sigmas == core("qwen21.schedule").TURBO_SIGMAS
    path("diffusion_models", "small_turbo.safetensors").unlink()


def check_a_denoiser_does_not_take_the_sigmas_of_a_turbo_folder_that_lends_it_a_vae():
    model = call("Qwen21Loader", checkpoint=SMALL, vae="turbo")[0]
    assert model.model.model_config.index.sample_sigmas == () and model.model.model_config.schedule == core("qwen21.config").ScheduleConfig()
