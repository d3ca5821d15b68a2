"""The VAE in ComfyUI's hands, and the canvas: sizes, crops, alpha, tiles, and what is remembered."""

import torch
from graph import call, close, core, core_vae, counted, differs, encode, equal, loaded, picture, references, replaced, sample, sentence


def latents(rows: int = 6, columns: int = 4, batch: int = 1) -> dict:
    return {"samples": torch.randn(batch, 64, rows, columns, generator=torch.manual_seed(1))}


def decoded(latent: dict, alpha: str = "as decoded", colour: str = "#ffffff") -> tuple:
    return call("Qwen21Decode", vae=loaded()[2], latent=latent, alpha=alpha, colour=colour)


def core_rgba(latent: dict) -> torch.Tensor:
    return (core_vae().decode(latent["samples"]).movedim(1, -1) + 1) / 2


def check_as_decoded_equals_core():
    latent = latents(batch=2)
    rgb, mask, rgba = decoded(latent)
    close(rgba, core_rgba(latent), 1e-5)
    equal(rgb, rgba[..., :3])
    equal(mask, 1 - rgba[..., 3])


def check_snap_and_over_colour():
    latent, alpha = latents(), core("qwen21.alpha")
    raw = decoded(latent)[2].movedim(-1, 1)
    rgb, mask, rgba = decoded(latent, "snap")
    close(rgba, alpha.snap(raw).movedim(1, -1), 1e-6)
    rgb, mask, rgba = decoded(latent, "over colour", "#ff8000")
    close(rgb, alpha.composite(raw, (1.0, 128 / 255, 0.0)).movedim(1, -1), 1e-6)
    assert not mask.any() and (rgba[..., 3] == 1).all()
    for colour in ("red", "#ff80", "#ff800g", ""):
        assert "hexadecimal" in sentence(decoded, latent, "over colour", colour)
    decoded(latent, "snap", "not used")


def check_vae_encode_and_decode():
    vae = loaded()[2]
    image = picture(64, 96)
    four = call("VAEEncode", pixels=image, vae=vae)[0]["samples"]
    close(four, core_vae().encode(image.movedim(-1, 1) * 2 - 1), 1e-5)
    three = call("VAEEncode", pixels=image[..., :3], vae=vae)[0]["samples"]
    opaque = torch.cat([image[..., :3], torch.ones(1, 96, 64, 1)], dim=-1)
    close(three, core_vae().encode(opaque.movedim(-1, 1) * 2 - 1), 1e-5)
    both = call("VAEEncode", pixels=torch.cat([image, picture(64, 96, 1)]), vae=vae)[0]["samples"]
    close(both[:1], four, 1e-5)
    back = call("VAEDecode", vae=vae, samples={"samples": both})[0]
    close(back, core_rgba({"samples": both}), 1e-5)
    assert back.shape == (2, 96, 64, 4)


def check_tiles_equal_the_whole():
    vae, image = loaded()[2], picture(480, 64)  # wider than a tile with all it sees
    whole = vae.encode(image)
    tiled = call("VAEEncodeTiled", pixels=image, vae=vae, tile_size=128, overlap=64)[0]["samples"]
    close(tiled, whole, 1e-5, "encode")
    tiled = call("VAEDecodeTiled", vae=vae, samples={"samples": whole}, tile_size=64, overlap=0)[0]
    close(tiled, vae.decode(whole), 1e-5, "decode")


def check_short_memory_falls_back_to_tiles():
    vae, latent, image = loaded()[2], latents(8, 8), picture(96, 128)
    expected, encoded = decoded(latent)[2], vae.encode(image)

    def full(real):
        return lambda x, tile=None: real(x, tile) if tile else (_ for _ in ()).throw(torch.OutOfMemoryError("allocate"))

    for name in ("decode", "encode"):
        model = vae.first_stage_model
        with replaced(model, name, full(getattr(model, name))):
            close(decoded(latent)[2] if name == "decode" else vae.encode(image), expected if name == "decode" else encoded, 1e-5, name)


def check_decode_batch_equals_single():
    latent = latents(batch=3)
    whole = decoded(latent, "snap")[2]
    for row in range(3):
        close(decoded({"samples": latent["samples"][row : row + 1]}, "snap")[2], whole[row : row + 1], 1e-5, f"row {row}")


def check_canvas():
    images = {"image_1": picture(64, 96, 0), "image_2": picture(128, 32, 1)}
    conditionings = encode(images=images, policy="keep")
    for canvas, shape in (("last reference", (2, 8)), ("first reference", (6, 4)), ("width and height", (10, 4))):
        _, _, latent = references(*conditionings, canvas, width=64, height=160, batch_size=2)
        assert tuple(latent["samples"].shape) == (2, 64, *shape), canvas
        assert not latent["samples"].any() and latent["downscale_ratio_spacial"] == 16
    for canvas in ("last reference", "first reference"):
        assert tuple(references(*encode(), canvas, width=96, height=64)[2]["samples"].shape) == (1, 64, 4, 6), "without references"


def check_kept_size_comes_back():
    """A picture of odd size is mirrored up to 32, and what is painted is cut back to its own size."""
    odd, other = picture(70, 45, 0), picture(64, 64, 1)
    conditionings = encode(images={"image_1": odd, "image_2": other}, policy="keep")
    kept = conditionings[0][0][1]["qwen21_references"][0].picture
    assert kept.size == (96, 64)
    equal(torch.tensor(list(kept.crop((0, 0, 70, 45)).tobytes())), (odd * 255).round().to(torch.uint8).flatten().long(), "own pixels")
    positive, negative, latent = references(*conditionings, "first reference")
    painted, _ = sample(loaded()[0], positive, negative, latent, steps=1)
    rgb, mask, rgba = decoded(painted)
    assert rgba.shape == (1, 45, 70, 4) and rgb.shape == (1, 45, 70, 3) and mask.shape == (1, 45, 70)
    equal(rgba, decoded({"samples": painted["samples"]})[2][:, :45, :70])
    ksampled = call(
        "KSampler",
        model=loaded()[0],
        seed=1,
        steps=1,
        cfg=1.0,
        sampler_name="euler",
        scheduler="simple",
        positive=positive,
        negative=negative,
        latent_image=latent,
        denoise=1.0,
    )[0]
    assert decoded(ksampled)[2].shape == (1, 45, 70, 4), "through KSampler"
    assert "qwen21_crop" not in references(*conditionings, "last reference")[2]
    assert "qwen21_crop" not in references(*conditionings, "width and height")[2]


def check_crop_is_not_applied_to_another_size():
    """A latent that was scaled after the canvas was made is no longer the padded picture."""
    _, _, latent = references(*encode(images={"image_1": picture(70, 45)}, policy="keep"), "last reference")
    larger = call("LatentUpscale", samples=latent, upscale_method="nearest-exact", width=384, height=256, crop="disabled")[0]
    rows, columns = larger["samples"].shape[2:]
    assert (rows, columns) != latent["samples"].shape[2:]
    assert decoded(larger)[2].shape == (1, rows * 16, columns * 16, 4)


def check_too_large_to_keep():
    assert "megapixels" in sentence(encode, images={"image_1": torch.zeros(1, 2200, 2200, 3)}, policy="keep")


def check_slots_and_pictures_that_do_not_match():
    positive, negative = encode(images={"image_1": picture(seed=0), "image_2": picture(seed=1)})
    for key, value, counts in (("image_slots", [3], ("1", "2")), ("image_slots", [], ("0", "2")), ("qwen21_references", [], ("2", "0"))):
        changed = with_value(negative, key, value)
        for pair in ((positive, changed), (changed, negative)):
            text = sentence(references, *pair)
            assert f"{counts[0]} image slots" in text and f"{counts[1]} pictures" in text, text


def with_value(conditioning, key: str, value) -> list:
    return [[states, extra | {key: value}] for states, extra in conditioning]


def check_each_conditioning_gets_the_pictures_it_was_encoded_with():
    positive, _ = encode(images={"image_1": picture(seed=0)})
    negative, _ = encode(images={"image_1": picture(seed=1)})
    plain = call("CLIPTextEncode", clip=loaded()[1], text="blurry")[0]
    first, second, _ = references(positive, negative)
    assert not torch.equal(first[0][1]["reference_latents"][0], second[0][1]["reference_latents"][0])
    equal(second[0][1]["reference_latents"][0], references(negative, positive)[0][0][1]["reference_latents"][0])
    assert "reference_latents" not in references(positive, plain)[1][0][1]


def check_latents_are_remembered():
    vae = call("Qwen21Loader", checkpoint="random")[2]
    images = {"image_1": picture(seed=0), "image_2": picture(seed=1)}
    with counted(vae.first_stage_model, "encode") as encodes:
        first = references(*encode("one", images=images), vae=vae)[0][0][1]["reference_latents"]
        assert len(encodes) == 2
        again = references(*encode("another prompt", images=images), vae=vae)[0][0][1]["reference_latents"]
        assert len(encodes) == 2, "a changed prompt encoded pictures again"
        for one, other in zip(first, again):
            equal(one, other)
        clear = picture(seed=0)
        clear[..., 3] = 1 - clear[..., 3]
        changed = references(*encode(images={"image_1": clear}), vae=vae)[0][0][1]["reference_latents"]
        assert len(encodes) == 3, "another alpha is another picture"
        differs(changed[0], first[0])
        swapped = references(*encode(images={"image_1": images["image_2"], "image_2": images["image_1"]}), vae=vae)[0][0][1]["reference_latents"]
        assert len(encodes) == 3
        equal(swapped[0], first[1])
    other = call("Qwen21Loader", checkpoint="turbo")[2]
    differs(references(*encode(images=images), vae=other)[0][0][1]["reference_latents"][0], first[0], what="another VAE's")


def check_memory_that_references_take_is_bounded():
    module = core("nodes.references")
    vae = call("Qwen21Loader", checkpoint="random")[2]
    with replaced(module, "REMEMBERED", 2), counted(vae.first_stage_model, "encode") as encodes:
        for seed in (0, 1, 2, 2, 1, 0):
            references(*encode(images={"image_1": picture(32, 32, seed)}, resolution=32), vae=vae)
    assert len(encodes) == 4, len(encodes)


def check_vae_memory_estimates():
    vae = loaded()[2]
    small, large = (vae.memory_used_decode((1, 64, side, side), torch.float32) for side in (8, 16))
    assert 0 < small * 4 == large
    assert vae.memory_used_encode((1, 4, 256, 256), torch.bfloat16) > 0
