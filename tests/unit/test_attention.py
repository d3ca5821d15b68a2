"""Piecewise attention equals attention under the dense mask, and makes nothing of its size."""

import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from unit.devices import DEVICES
from unit.layouts import Layout, allowed, layouts, picture, seeds

from qwen21.attention import causal_attention, prefix_attention
from qwen21.sequence import prefix_segments


def dense_attention(q, k, v, mask):
    """Softmax written out, in double precision."""
    scores = q.double() @ k.double().transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.double()


def relative_error(ours, exact):
    assert ours.shape == exact.shape
    return ((ours - exact).abs().max() / exact.abs().max()).item()


def random_heads(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(1, 2, tokens, 8, generator=generator) for _ in range(3))


def segments_of(layout: Layout):
    return prefix_segments(layout.text_tokens, layout.image_slots, layout.grids)


@given(layout=layouts, seed=seeds)
def test_any_layout_equals_the_dense_mask(layout, seed):
    mask = allowed(layout.blocks())
    q, k, v = random_heads(len(mask), seed)
    assert relative_error(prefix_attention(q, k, v, segments_of(layout)), dense_attention(q, k, v, mask)) <= 1e-5


@given(before=layouts, after=layouts, seed=seeds)
def test_with_earlier_tokens_equals_the_last_rows_of_the_dense_mask(before, after, seed):
    past = len(before.blocks())
    whole = Layout(before.items + after.items)
    q, k, v = random_heads(len(whole.blocks()), seed)
    ours = prefix_attention(q[:, :, past:], k, v, segments_of(after), past)
    assert relative_error(ours, dense_attention(q, k, v, allowed(whole.blocks()))[:, :, past:]) <= 1e-5


@pytest.mark.parametrize(("queries", "keys"), [(1, 300), (3, 1030), (100, 333), (287, 287)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_text_sees_the_keys_up_to_its_own_with_every_kernel(device, dtype, queries, keys):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, tokens, 64, generator=generator).to(device, dtype) for tokens in (queries, keys + 5, keys + 5))
    k, v = k[:, :, :keys], v[:, :, :keys]  # part of a longer tensor, as in a run
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    assert relative_error(causal_attention(q, k, v), dense_attention(q, k, v, mask)) <= (1e-5 if dtype == torch.float32 else 1e-2)


class LargestTensor(TorchDispatchMode):
    """Watches what every operation returns, also those inside PyTorch's own attention."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        self.elements = max([self.elements, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))])
        return result


# Tokens enough that S x S is far more than the widest activation: S times 384, the MLP's hidden width.
LARGE = Layout(((None,) * 70 + ((16, 16),)) * 3 + (None,) * 70)


def test_no_tensor_of_the_sequences_square_is_made(transformer):
    inputs, noisy = LARGE.inputs(), picture(20, 20, 1)
    prefix_tokens = len(LARGE.blocks())
    with torch.inference_mode(), LargestTensor() as prefill:
        prefix = transformer.prefill(*inputs)
    with torch.inference_mode(), LargestTensor() as denoise:
        transformer.denoise(noisy, 0.5, prefix)
    assert prefill.elements < prefix_tokens**2
    assert denoise.elements < 400 * (prefix_tokens + 400)


def test_and_the_watcher_would_have_seen_one():
    mask = allowed(LARGE.blocks())
    tokens = len(mask)
    q, k, v = random_heads(tokens, 0)
    with LargestTensor() as masked:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.clone())
    assert masked.elements >= tokens**2
