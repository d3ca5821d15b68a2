"""The prefix is immutable: no target changes it, it can be computed in parts, and nobody writes to it."""

import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st
from unit.layouts import grids, joined, layouts, picture, seeds, sigmas

from qwen21.prefix import PRECISIONS, KVPart, divide


def tensors(prefix) -> list[torch.Tensor]:
    """What is stored, part by part."""
    return [stored.values for part in prefix.parts for layer in part.layers for stored in layer]


def copies(prefix) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors(prefix)]


def all_equal(a, b) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and ((a - b).abs().max() <= 1e-5 * b.abs().max()).item()


@given(layout=layouts, targets=st.lists(st.tuples(grids, sigmas, seeds), min_size=2, max_size=3))
@torch.inference_mode()
def test_targets_and_sigmas_leave_it_bit_identical(transformer, layout, targets):
    prefix = transformer.prefill(*layout.inputs())
    before = copies(prefix)
    for grid, sigma, seed in targets:
        transformer.denoise(picture(*grid, seed), sigma, prefix)
        assert all_equal(tensors(prefix), before)
    assert all_equal(tensors(transformer.prefill(*layout.inputs())), before)


@given(layout=layouts, data=st.data(), grid=grids, sigma=sigmas, seed=seeds)
@torch.inference_mode()
def test_in_two_parts_equals_at_once(transformer, layout, data, grid, sigma, seed):
    """Cut between any two text tokens or pictures."""
    at = data.draw(st.integers(1, len(layout.items)))
    context, _, references = layout.inputs(seed)
    (first, second), whole = layout.split(at), transformer.prefill(*layout.inputs(seed))
    texts, pictures = first.text_tokens, len(first.grids)
    past = transformer.prefill(context[:, :texts], first.image_slots, references[:pictures])
    before = copies(past)
    both = transformer.prefill(context[:, texts:], second.image_slots, references[pictures:], past)
    assert both.position == whole.position
    assert all(map(close, joined(both), joined(whole)))
    assert both.parts[:1] == past.parts  # shared, not copied
    assert all_equal(tensors(past), before)
    noisy = picture(*grid, seed + 1)
    assert close(transformer.denoise(noisy, sigma, both), transformer.denoise(noisy, sigma, whole))


@given(layout=layouts, data=st.data())
@torch.inference_mode()
def test_what_follows_changes_nothing_before_it(transformer, layout, data):
    """Prefixes that begin alike hold the same keys and values as far as they are alike."""
    shorter = layout.split(data.draw(st.integers(1, len(layout.items))))[0]
    context, _, references = layout.inputs()
    whole = transformer.prefill(*layout.inputs())
    alone = transformer.prefill(context[:, : shorter.text_tokens], shorter.image_slots, references[: len(shorter.grids)])
    assert all(close(long[:, :, : alone.tokens], short) for long, short in zip(joined(whole), joined(alone)))


@given(layout=layouts, grid=grids, sigma=sigmas, seed=seeds)
@torch.inference_mode()
def test_a_batch_equals_each_alone(transformer, layout, grid, sigma, seed):
    prefix, noisy = transformer.prefill(*layout.inputs()), picture(*grid, seed, batch=2)
    batch = transformer.denoise(noisy, sigma, prefix)
    assert all(close(batch[i : i + 1], transformer.denoise(noisy[i : i + 1], sigma, prefix)) for i in range(2))


@torch.inference_mode()
def test_a_sigma_for_each_row(transformer):
    prefix, noisy = transformer.prefill(torch.ones(1, 3, 64)), picture(2, 3, 0, batch=2)
    batch = transformer.denoise(noisy, torch.tensor([0.9, 0.2]), prefix)
    assert close(batch[:1], transformer.denoise(noisy[:1], 0.9, prefix))
    assert close(batch[1:], transformer.denoise(noisy[1:], 0.2, prefix))


@given(layout=layouts, grid=grids, seed=seeds)
def test_inputs_are_not_written_to(transformer, layout, grid, seed):
    """Outside inference mode, where PyTorch counts the writes to each tensor."""
    context, slots, references = layout.inputs(seed)
    noisy, sigma = picture(*grid, seed), torch.tensor(0.5)
    with torch.no_grad():
        prefix = transformer.prefill(context, slots, references)
        given_tensors = [context, *references, noisy, sigma, *tensors(prefix)]
        versions, before = [tensor._version for tensor in given_tensors], [tensor.clone() for tensor in given_tensors]
        transformer.denoise(noisy, sigma, prefix)
        transformer.prefill(context, slots, references, past=prefix)
    assert [tensor._version for tensor in given_tensors] == versions
    assert all_equal(given_tensors, before)
    assert slots == layout.image_slots


@given(layout=layouts)
@torch.inference_mode()
def test_size(transformer, layout):
    prefix = transformer.prefill(*layout.inputs())
    assert prefix.tokens == len(layout.blocks())
    assert prefix.nbytes == 2 * transformer.config.num_layers * prefix.tokens * transformer.config.dim * 4


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), precision=st.sampled_from(PRECISIONS))
def test_dividing_keeps_every_token_and_frees_the_whole(lengths, precision):
    whole = KVPart.of([tuple(torch.randn(1, 2, sum(lengths), 8) for _ in range(2)) for _ in range(3)])
    layers, freed = list(whole.layers), weakref.ref(whole.layers[0][0])
    expected = whole.quantized(precision)
    parts = divide(layers, lengths, precision, [torch.device("cpu")] * len(lengths))
    del whole
    assert not layers and [part.tokens for part in parts] == lengths
    assert sum(part.nbytes for part in parts) == expected.nbytes
    for layer, pair in enumerate(expected.layers):
        for half, stored in enumerate(pair):
            assert torch.equal(torch.cat([part.layers[layer][half].values.float() for part in parts], dim=2), stored.values.float())
    del expected, pair, stored
    assert len(parts) == 1 or freed() is None
