"""Text states and image slots equal the reference's `encode_prompt`."""

import pytest
import torch
from oracle.reference import relative_error

from qwen21.pictures import area_size, resize

PROMPTS = {"english": "a cat on a mat", "chinese": "一只猫坐在垫子上", "emoji": "🐈‍⬛ on a 🟥 mat", "empty": "", "long": "grey stones under water, " * 12}
SHAPES = [(90, 60), (64, 64), (50, 90)]


@pytest.fixture(scope="module")
def prepared(smooth_picture):
    return [resize(smooth_picture(*shape, seed=seed), *area_size(96, *shape)) for seed, shape in enumerate(SHAPES)]


def reference_states(reference, prompt, pictures):
    """(states without vision tokens, slots) from what the reference returns: states of all tokens and a mask of vision tokens."""
    with torch.inference_mode():
        states, padding, vision = reference.encode_prompt(prompt, image=list(pictures) or None)
    assert padding is None
    slots, text = [], 0
    for i, here in enumerate(vision[0].tolist()):
        if here and not vision[0, i - 1]:
            slots.append(text)
        text += not here
    return states[:, ~vision[0]], tuple(slots)


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_states_and_slots(text_encoder, reference, prepared, prompt, count):
    (ours,) = text_encoder.encode([prompt], prepared[:count])
    states, slots = reference_states(reference, prompt, prepared[:count])
    assert ours.image_slots == slots and len(slots) == count
    assert len(ours.token_ids) == states.shape[1]
    assert relative_error(ours.states, states) <= 1e-5


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("negative", ["", "a cat on a hat, and much more than that", "a cat on a mat"], ids=["empty", "longer", "same"])
def test_two_prompts_in_one_call_equal_each_alone(text_encoder, prepared, negative, count):
    prompts = ["a cat on a mat", negative]
    for together, prompt in zip(text_encoder.encode(prompts, prepared[:count]), prompts):
        (alone,) = text_encoder.encode([prompt], prepared[:count])
        assert together.image_slots == alone.image_slots
        assert together.token_ids == alone.token_ids
        assert relative_error(together.states, alone.states) <= 1e-5


def test_the_vision_tower_runs_once_for_both_prompts(text_encoder, prepared):
    calls = []
    hook = text_encoder.model.visual.register_forward_hook(lambda *call: calls.append(call))
    text_encoder.encode(["a cat", "a dog"], prepared)
    hook.remove()
    assert len(calls) == 1
