"""Velocities of the first and of later steps equal the reference's, with and without its cache, in every layout."""

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from hypothesis import given
from oracle.reference import reference_velocity, relative_error, rows_of
from unit.layouts import Layout, grids, joined, layouts, picture, seeds, sigmas

from qwen21.pictures import resize, to_pixels

TEXT = (None,) * 5
LAYOUTS = {
    "text alone": TEXT,
    "one reference": (*TEXT, (4, 6), *TEXT),
    "two references": (None, (4, 4), *TEXT, (2, 6), *TEXT),
    "adjacent references": (*TEXT, (4, 4), (2, 6), (3, 3), None),
    "odd grids": (*TEXT, (3, 5), None, (5, 1), None, None, (1, 1), *TEXT),
    "reference first": ((3, 4), *TEXT),
    "reference last": (*TEXT, (4, 3)),
    "references alone": ((2, 2), (5, 3)),
    "one text token": (None,),
}
TARGETS = [(4, 4), (3, 5), (6, 1)]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("items", LAYOUTS.values(), ids=LAYOUTS)
@torch.inference_mode()
def test_first_and_cached_step(transformer, reference, items, target):
    """The reference fills its cache in the first step and reads it in the next; so the noisy picture and sigma change between."""
    inputs = Layout(items).inputs()
    prefix = transformer.prefill(*inputs)
    cache = QwenImage21KVCache(len(transformer.transformer_blocks))
    for seed, sigma, mode in ((1, 1.0, "extract"), (2, 0.7, "cached"), (3, 0.02, "cached")):
        noisy = picture(*target, seed)
        ours = transformer.denoise(noisy, sigma, prefix)
        assert relative_error(ours, reference_velocity(reference.transformer, *inputs, noisy, sigma, cache, mode)) <= 1e-5
        assert relative_error(ours, reference_velocity(reference.transformer, *inputs, noisy, sigma)) <= 1e-5


@torch.inference_mode()
def test_the_reference_cache_holds_our_prefix(transformer, reference):
    inputs = Layout(LAYOUTS["odd grids"]).inputs()
    cache = QwenImage21KVCache(len(transformer.transformer_blocks))
    reference_velocity(reference.transformer, *inputs, picture(3, 5, 0), 0.5, cache, "extract")
    theirs = [tensor for layer in cache.layer_caches for tensor in layer.get()]
    for ours, their in zip(joined(transformer.prefill(*inputs)), theirs, strict=True):
        assert relative_error(ours.transpose(1, 2), their) <= 1e-5


@given(layout=layouts, target=grids, sigma=sigmas, seed=seeds)
@torch.inference_mode()
def test_any_layout_equals_the_reference_without_cache(transformer, reference, layout, target, sigma, seed):
    inputs, noisy = layout.inputs(seed), picture(*target, seed + 1)
    ours = transformer.denoise(noisy, sigma, transformer.prefill(*inputs))
    assert relative_error(ours, reference_velocity(reference.transformer, *inputs, noisy, sigma)) <= 1e-5


@torch.inference_mode()
def test_a_batch_equals_the_reference(transformer, reference):
    """Three noisy pictures before one prefix."""
    inputs, noisy = Layout(LAYOUTS["two references"]).inputs(), picture(4, 5, 1, batch=3)
    theirs = reference_velocity(reference.transformer, *inputs, noisy, 0.7)
    assert relative_error(transformer.denoise(noisy, 0.7, transformer.prefill(*inputs)), theirs) <= 1e-5


@torch.inference_mode()
def test_as_the_reference_pipeline_calls_it(checkpoint, transformer, text_encoder, vae, reference, smooth_picture):
    """Nothing of the reference touched: its own prompt states with vision tokens, its mask of slots, each 2 x 2 latent tokens."""
    pictures = [resize(smooth_picture(90, 60, seed=1), 96, 64), resize(smooth_picture(40, 70, seed=2), 64, 96)]
    references = [vae.normalize(vae.encode(to_pixels(each))) for each in pictures]
    noisy, sigma = picture(6, 4, 3), 0.7
    states, _, mask = reference.encode_prompt("a cat on a mat", image=pictures)
    latents = [*references, noisy]
    theirs = reference.transformer(
        hidden_states=torch.cat([rows_of(each) for each in latents], dim=1),
        encoder_hidden_states=states,
        timestep=torch.tensor([sigma]),
        img_shapes=[[(1, *each.shape[2:]) for each in latents]],
        img_mask=torch.cat([mask, mask.new_ones(1, 6)], dim=1),
        return_dict=False,
    )[0][:, -24:]
    (encoding,) = text_encoder.encode(["a cat on a mat"], pictures)
    ours = transformer.denoise(noisy, sigma, transformer.prefill(encoding.states, encoding.image_slots, references))
    assert relative_error(rows_of(ours), theirs) <= 1e-5
