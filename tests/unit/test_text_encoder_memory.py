"""What the text encoder remembers between calls saves work and changes nothing."""

import numpy as np
import pytest
import torch
from PIL import Image

from qwen21.checkpoint import Checkpoint


def picture(seed, width=64, height=96):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8))


@pytest.fixture
def encoder(model_folder):
    """Remembers, and writes down how many tokens it ran and how many pictures it looked at."""
    encoder = Checkpoint(model_folder).text_encoder(torch.device("cpu"), torch.float32)
    encoder.remember = True
    encoder.ran, encoder.looked = [], []
    run, see = encoder._run, encoder._see
    encoder._run = lambda ids, common, *rest: (encoder.ran.append(len(ids) - common), run(ids, common, *rest))[1]
    encoder._see = lambda pictures: (encoder.looked.append(len(pictures)), see(pictures))[1]
    return encoder


def check(encoder, model_folder, prompt, pictures):
    """(tokens run, pictures looked at) of a call that gives what a fresh encoder gives."""
    encoder.ran.clear(), encoder.looked.clear()
    (ours,) = encoder.encode([prompt], pictures)
    (fresh,) = Checkpoint(model_folder).text_encoder(torch.device("cpu"), torch.float32).encode([prompt], pictures)
    assert (ours.image_slots, ours.token_ids, ours.keys) == (fresh.image_slots, fresh.token_ids, fresh.keys)
    assert (ours.states - fresh.states).abs().max() <= 1e-5 * fresh.states.abs().max()
    return sum(encoder.ran), sum(encoder.looked)


def test_a_new_instruction_costs_its_own_tokens(encoder, model_folder):
    pictures = [picture(0), picture(1, 96, 64)]
    whole, looked = check(encoder, model_folder, "make it red", pictures)
    assert looked == 2
    ran, looked = check(encoder, model_folder, "make it blue", pictures)
    assert looked == 0 and ran == len("blue<\nassistant\n<")
    assert check(encoder, model_folder, "make it blue", pictures) == (1, 0)


def test_a_new_last_picture_keeps_the_earlier_ones(encoder, model_folder):
    whole, _ = check(encoder, model_folder, "mix", [picture(0), picture(1)])
    ran, looked = check(encoder, model_folder, "mix", [picture(0), picture(2)])
    assert looked == 1 and ran < whole / 2


def test_another_picture_of_the_same_size_is_noticed(encoder, model_folder):
    check(encoder, model_folder, "mix", [picture(0)])
    _, looked = check(encoder, model_folder, "mix", [picture(3)])
    assert looked == 1


def test_keys_tell_the_pictures_before_a_token(encoder):
    (a,), (b,) = encoder.encode(["mix"], [picture(0)]), encoder.encode(["mix"], [picture(3)])
    slot = a.image_slots[0]
    assert a.keys[:slot] == b.keys[:slot] and not set(a.keys[slot:]) & set(b.keys[slot:])


def test_an_interrupted_call_is_forgotten(encoder, model_folder):
    check(encoder, model_folder, "make it red", [picture(0)])
    run = encoder._run
    encoder._run = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(["make it blue"], [picture(0)])
    encoder._run = run
    assert check(encoder, model_folder, "make it blue", [picture(0)])[1] == 1
