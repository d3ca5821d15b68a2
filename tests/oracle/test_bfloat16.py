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
    """Our denoiser and the reference's, in bfloat16."""
    return checkpoint.transformer(torch.device("cpu"), HALF), QwenImage21Transformer2DModel.from_pretrained(model_folder / "transformer", torch_dtype=HALF)


@pytest.fixture(scope="module")
def rounded(halves):
    """The reference in float32 with weights rounded to bfloat16."""
    exact = QwenImage21Transformer2DModel.from_config(halves[1].config)
    exact.load_state_dict(halves[1].state_dict())
    return exact.eval()


def rounded_sigma(sigma: float) -> float:
    """What both models make of sigma in bfloat16, rounding twice."""
    return (torch.tensor(1000 * sigma).to(HALF) / 1000).item()


def squared_errors(halves, exact, exact_sigma, number):
    """Mean square of (our error, the reference's) on one of INPUTS, relative to the velocity's own. The reference's: its first step and a cached one."""
    ours, theirs = halves
    items, target, sigma = INPUTS[number]
    context, slots, references = Layout(items).inputs(seed=number)
    half = context.to(HALF), slots, [latents.to(HALF) for latents in references]
    noisy = picture(*target, seed=100 + number).to(HALF)
    truth = reference_velocity(exact, half[0].float(), slots, [latents.float() for latents in half[2]], noisy.float(), exact_sigma(sigma))
    velocity = ours.denoise(noisy, sigma, ours.prefill(*half))
    assert velocity.dtype == HALF
    cache = QwenImage21KVCache(len(theirs.transformer_blocks))
    their_velocities = torch.stack([reference_velocity(theirs, *half, noisy, sigma, cache, mode) for mode in ("extract", "cached")])
    return [((each.float() - truth).square().mean() / truth.square().mean()).item() for each in (velocity, their_velocities)]


@pytest.mark.parametrize("same_start", [False, True], ids=["from float32", "of the computation alone"])
@torch.inference_mode()
def test_error_of_the_velocity(halves, reference, rounded, same_start):
    """Over all inputs together; on a single one both throw dice. Each is printed.

    Most of the whole error is the rounded timestep's, which both share and which would hide much. So once more against float32 that
    starts from the same rounded weights and timestep: then the arithmetic's error alone is compared.
    """
    exact, exact_sigma = (rounded, rounded_sigma) if same_start else (reference.transformer, float)
    squares = torch.tensor([squared_errors(halves, exact, exact_sigma, number) for number in range(len(INPUTS))])
    ours, theirs = squares.mean(dim=0).sqrt().tolist()
    for number, (a, b) in enumerate(squares.sqrt().tolist()):
        print(f"input {number}: ours {a:.4f}, reference {b:.4f}, ratio {a / b:.3f}")
    print(f"together: ours {ours:.4f}, reference {theirs:.4f}, ratio {ours / theirs:.3f}")
    assert 0 < theirs < 1
    assert ours <= 1.2 * theirs
