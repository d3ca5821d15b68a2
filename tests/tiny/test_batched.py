"""The batched training forward must be the network that is used afterwards: right-padded rows equal unpadded runs of the core."""

import random

import pytest
import torch

from qwen21.pictures import to_pixels
from qwen21.text_encoder import PictureProcessor, TextEncoder
from qwen21.tiny import MODEL, batched, grammar, layout, models, tokens, world
from qwen21.tiny.data import collate, to_patches, to_tokens

TASKS = {"t2i": ("t2i",), "large": ("t2i",), "edit": ("add", "clear"), "compose": ("gather", "gather three")}


@pytest.fixture(scope="module")
def networks():
    torch.manual_seed(3)
    tokenizer = tokens.load_tokenizer()
    encoder, transformer = models.new_text_encoder(tokenizer), models.new_transformer()
    for module in (encoder, transformer):
        for name, weight in module.named_parameters():
            if weight.ndim == 1 or name == "proj_out.weight":
                weight.data.add_(0.2 * torch.randn_like(weight))
        module.requires_grad_(False)
    pictures = PictureProcessor.from_pretrained(MODEL / "processor", local_files_only=True)
    return tokenizer, encoder, transformer, pictures


@pytest.mark.parametrize("room_name", list(layout.ROOMS))
def test_equals_core(networks, room_name):
    tokenizer, encoder, transformer, pictures = networks
    room, rng = layout.ROOMS[room_name], random.Random(7)
    layouter = layout.Layouter(tokenizer)
    samples = []
    while len(samples) < 3:
        task = grammar.draw_task(rng, TASKS[room_name][len(samples) % len(TASKS[room_name])])
        grids = [rng.randrange(len(layout.REFERENCE_GRIDS)) for _ in task.references]
        if room_name == "large":
            target = layout.GRIDS.index(rng.choice(((16, 24), (20, 20))))
        else:
            target = grids[-1] if grids else rng.randrange(len(layout.SMALL_GRIDS))
        arrays = layouter(task.prompt, grids, target, room)
        if arrays:
            samples.append((task, grids, target, arrays))
    torch.manual_seed(11)
    images = [
        [world.picture(scene, *(16 * side for side in layout.GRIDS[grid])) for scene, grid in zip(task.references, grids)] for task, grids, _, _ in samples
    ]
    latents = [[torch.randn(1, 64, *layout.GRIDS[grid]) for grid in grids] for _, grids, _, _ in samples]
    targets = [torch.randn(2, 64, *layout.GRIDS[target]) for _, _, target, _ in samples]
    sigmas = torch.tensor([[0.3, 0.9]] * 3)
    batch = collate([arrays for *_, arrays in samples], room)
    for row, (pictures_of, latents_of) in enumerate(zip(images, latents)):
        for slot, (image, z) in enumerate(zip(pictures_of, latents_of)):
            batch.patches[row, slot] = to_patches(to_pixels(image))[0]
            batch.reference_latents[row, slot] = to_tokens(z, 256)[0]
    noisy = torch.cat([to_tokens(z, room.target) for z in targets])
    states = batched.TextEncoder(encoder, "cpu")(batch, batched.PLAIN_BLOCKS)
    denoiser = batched.Denoiser(transformer, "cpu")
    prefix = denoiser.prefill(states, batch, batched.PLAIN_BLOCKS)
    velocity = denoiser.denoise(noisy, sigmas.flatten(), batch.target_grid, prefix, batched.PLAIN_BLOCKS)
    norm, core = encoder.language_model.norm, TextEncoder(encoder, tokenizer, pictures)
    try:
        for row, (task, _, target, _) in enumerate(samples):
            (encoding,) = core.encode([task.prompt], images[row])
            expected = transformer.denoise(targets[row], sigmas[row], transformer.prefill(encoding.states, encoding.image_slots, latents[row]))
            rows, columns = layout.GRIDS[target]
            got = velocity[2 * row : 2 * row + 2, : rows * columns].transpose(1, 2).reshape(expected.shape)
            assert expected.std() > 0.1
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-3)
    finally:
        encoder.language_model.norm = norm


def test_blind_to_padding(networks):
    """A sample's velocity must not change with what its padding holds: the check that the equality above could fail."""
    tokenizer, encoder, transformer, _ = networks
    room = layout.ROOMS["t2i"]
    batch = collate([layout.Layouter(tokenizer)("a large red star", [], 0, room)], room)
    denoiser, target = batched.Denoiser(transformer, "cpu"), torch.randn(1, 256, 64)
    velocity = lambda b: denoiser.denoise(
        target, torch.tensor([0.5]), b.target_grid, denoiser.prefill(states(b), b, batched.PLAIN_BLOCKS), batched.PLAIN_BLOCKS
    )
    states = lambda b: batched.TextEncoder(encoder, "cpu")(b, batched.PLAIN_BLOCKS)
    other = batch._replace(ids=batch.ids.clone())
    used = int(batch.source[0, : int(batch.length)].max()) + 1
    other.ids[:, used:] = 300
    torch.testing.assert_close(velocity(other), velocity(batch))
    other.ids[:, used - 8] = 300
    assert not torch.allclose(velocity(other), velocity(batch), atol=1e-3)
