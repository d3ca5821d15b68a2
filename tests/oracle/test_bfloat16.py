"""In bfloat16 the velocity strays from float32 no further than the reference's own does."""

import pytest
import torch
from diffusers.models import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from oracle.reference import reference_velocity
from unit.layouts import Layout, picture

HALF = torch.bfloat16
TEXT = (None,) * 20
INPUTS = [  # layout, target, sigma
    (TEXT, (8, 8), 1.0),
    (TEXT, (6, 10), 0.9),
    (TEXT * 4, (8, 8), 0.7),
    ((None,), (5, 7), 0.5),
    ((None, (8, 8), *TEXT), (8, 8), 0.95),
    ((None, (6, 10), *TEXT), (6, 10), 0.6),
    ((None, (4, 6), *TEXT, (8, 4), *TEXT), (8, 4), 0.3),
    ((None, (4, 4), None, (5, 5), None, (6, 6), *TEXT), (6, 6), 0.1),
    ((*TEXT, (3, 5), (5, 3)), (7, 3), 0.02),
    (((8, 8), *TEXT), (4, 12), 0.8),
]


@pytest.fixture(scope="module")
def halves(checkpoint, model_folder):
    theirs = QwenImage21Transformer2DModel.from_pretrained(model_folder / "transformer", torch_dtype=HALF)
    return checkpoint.transformer(torch.device("cpu"), HALF), theirs


def errors(halves, exact, number):
    """Root mean square of (our error, the reference's) on one of INPUTS, in units of the velocity's own. The reference: first step and cached step."""
    ours, theirs = halves
    items, target, sigma = INPUTS[number]
    context, slots, references = Layout(items).inputs(seed=number)
    # Rounded to bfloat16 beforehand, so that all start from the same numbers.
    context, noisy, *references = (tensor.to(HALF).float() for tensor in (context, picture(*target, seed=100 + number), *references))
    truth = reference_velocity(exact, context, slots, references, noisy, sigma)
    half = [context.to(HALF), slots, [latents.to(HALF) for latents in references]]
    velocity = ours.denoise(noisy.to(HALF), sigma, ours.prefill(*half))
    assert velocity.dtype == HALF
    cache = QwenImage21KVCache(len(theirs.transformer_blocks))
    their_errors = [reference_velocity(theirs, *half, noisy.to(HALF), sigma, cache, mode).float() - truth for mode in ("extract", "cached")]
    scale = truth.square().mean()
    return (((velocity.float() - truth).square().mean() / scale).item(), (torch.stack(their_errors).square().mean() / scale).item())


@torch.inference_mode()
def test_error_of_the_velocity(halves, reference):
    """Over all inputs together; a single one is a throw of the dice for both, and is listed when this fails."""
    squares = [errors(halves, reference.transformer, number) for number in range(len(INPUTS))]
    ours, theirs = (torch.tensor(column).mean().sqrt().item() for column in zip(*squares))
    table = "\n".join(f"input {number}: ours {a**0.5:.4f}, reference {b**0.5:.4f}, ratio {(a / b) ** 0.5:.2f}" for number, (a, b) in enumerate(squares))
    print(f"{table}\ntogether: ours {ours:.4f}, reference {theirs:.4f}, ratio {ours / theirs:.3f}")
    assert 0 < theirs < 1
    assert ours <= 1.2 * theirs, table
