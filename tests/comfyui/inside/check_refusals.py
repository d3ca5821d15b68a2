"""What does not belong here is refused with one sentence that says what was found and what to do."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import comfy.latent_formats
import comfy.model_base
import comfy.sd
import torch
from graph import call, encode, folder, loaded, picture, prepared, references, sample, sentence


def another_model() -> SimpleNamespace:
    """As much as the nodes look at of a MODEL of another family."""
    return SimpleNamespace(model=object.__new__(comfy.model_base.BaseModel), get_model_object={"latent_format": comfy.latent_formats.SD15()}.get)


def vae_of(latent_channels: int, output_channels: int):
    vae = object.__new__(comfy.sd.VAE)
    vae.latent_channels, vae.output_channels = latent_channels, output_channels
    return vae


def check_model_of_another_family():
    model, parts = another_model(), prepared()
    for text in (
        sentence(sample, model, *parts),
        sentence(call, "Qwen21Schedule", model=model, latent=parts[2], steps=0, schedule="auto"),
        sentence(call, "Qwen21PrefixCache", model=model, budget_mb=0, device="auto", precision="default"),
    ):
        assert "the MODEL is a BaseModel" in text and "Loader" in text


def check_clip_of_another_family():
    clip = object.__new__(comfy.sd.CLIP)
    clip.cond_stage_model = torch.nn.Linear(1, 1)
    text = sentence(encode, clip=clip)
    assert "the CLIP is a Linear" in text and "Loader" in text
    text = sentence(encode, clip=clip, images={"image_1": picture()}, resolution=64)
    assert "the CLIP is a Linear" in text
    text = sentence(call, "Qwen21Encode", clip=None, prompt="", negative_prompt="", size_policy="auto", resolution=0)
    assert "no CLIP" in text


def check_vae_of_another_family():
    conditionings = encode()
    decode = {"latent": {"samples": torch.zeros(1, 64, 4, 4)}, "alpha": "snap", "colour": "#ffffff"}
    for vae, found in ((vae_of(16, 3), "16"), (vae_of(4, 3), "4"), (vae_of(64, 3), "3")):
        text = sentence(
            call,
            "Qwen21ReferenceLatents",
            positive=conditionings[0],
            negative=conditionings[1],
            vae=vae,
            canvas="last reference",
            width=64,
            height=64,
            batch_size=1,
        )
        assert found in text and "64 and 4" in text
    for channels in (4, 16):
        assert f"{channels} latent" in sentence(call, "Qwen21Decode", vae=vae_of(channels, 3), **decode)
    assert "3 picture channels" in sentence(call, "Qwen21Decode", vae=vae_of(64, 3), **decode)
    assert "no VAE" in sentence(call, "Qwen21Decode", vae=None, **decode)
    assert "no VAE" in sentence(
        call,
        "Qwen21ReferenceLatents",
        positive=conditionings[0],
        negative=conditionings[1],
        vae=None,
        canvas="last reference",
        width=64,
        height=64,
        batch_size=1,
    )


def check_latents_of_another_family():
    positive, negative, _ = prepared()
    for shape in ((1, 4, 8, 8), (1, 16, 8, 8), (1, 16, 1, 8, 8), (1, 64, 2, 8, 8)):
        latent = {"samples": torch.ones(shape)}
        for text in (
            sentence(sample, loaded()[0], positive, negative, latent),
            sentence(call, "Qwen21Schedule", model=loaded()[0], latent=latent, steps=0, schedule="auto"),
            sentence(call, "Qwen21Decode", vae=loaded()[2], latent=latent, alpha="snap", colour="#ffffff"),
        ):
            assert str(shape) in text and "64" in text, text


def check_reference_latents_of_another_family():
    positive, negative, latent = prepared()
    added = call("ReferenceLatent", conditioning=positive, latent={"samples": torch.ones(1, 16, 8, 8)})[0]
    text = sentence(sample, loaded()[0], added, negative, latent)
    assert "16" in text and "64" in text and "VAE" in text, text


def check_conditioning_of_another_family():
    _, _, latent = prepared()
    other = [[torch.randn(1, 77, 768), {"pooled_output": torch.randn(1, 768)}]]
    text = sentence(sample, loaded()[0], other, other, latent)
    assert "768" in text and "64" in text and "text encoder" in text, text
    positive, _, _ = references(other, other)
    assert "reference_latents" not in positive[0][1]


def check_checkpoint_that_is_gone():
    text = sentence(call, "Qwen21Loader", checkpoint="nowhere")
    assert "nowhere" in text and "random" in text and "models/diffusers" in text


def check_damaged_and_foreign_files_are_named():
    broken = Path(folder("broken"))
    for part, damage, words in (
        ("transformer", lambda file: file.write_bytes(file.read_bytes()[:5000]), "damaged or truncated"),
        ("text_encoder", lambda file: file.unlink(), "safetensors"),
        ("vae", lambda file: shutil.copy(next(Path(folder(), "transformer").glob("*.safetensors")), file), "it is another model's"),
    ):
        shutil.copytree(folder(), broken)
        try:
            damage(next((broken / part).glob("*.safetensors")))
            text = sentence(call, "Qwen21Loader", checkpoint="broken")
            assert str(broken / part) in text and words in text, text
        finally:
            shutil.rmtree(broken)
