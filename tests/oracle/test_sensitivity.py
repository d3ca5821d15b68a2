"""The random model answers to everything a person can change: a comparison of its pictures would see a mistake."""

import numpy as np
import pytest
from oracle.reference import paint_reference

PROMPT = "a cat on a mat"


def moved(a: np.ndarray, b: np.ndarray) -> bool:
    """Tens of grey levels somewhere and several everywhere, where comparisons allow one."""
    change = np.abs(a - b)
    return change.max() >= 30 and change.mean() >= 4


@pytest.fixture(scope="module")
def pictures(smooth_picture):
    return [smooth_picture(90, 60, seed=1), smooth_picture(60, 80, seed=2)]


@pytest.fixture(scope="module")
def plain(reference):
    return paint_reference(reference, PROMPT)


@pytest.fixture(scope="module")
def edited(reference, pictures):
    return paint_reference(reference, PROMPT, image=pictures, width=96, height=96)


def test_one_letter_of_the_prompt(reference, plain):
    assert moved(plain, paint_reference(reference, "a cat on a mad"))


def test_the_seed(reference, plain):
    assert moved(plain, paint_reference(reference, PROMPT, seed=1))


def test_one_letter_of_the_negative_prompt(reference):
    dull, dusk = (paint_reference(reference, PROMPT, negative_prompt=negative, true_cfg_scale=3.0) for negative in ("dull", "dusk"))
    assert moved(dull, dusk)


def test_one_letter_of_the_prompt_beside_references(reference, pictures, edited):
    assert moved(edited, paint_reference(reference, "a cat on a mad", image=pictures, width=96, height=96))


def test_the_order_of_references(reference, pictures, edited):
    assert moved(edited, paint_reference(reference, PROMPT, image=pictures[::-1], width=96, height=96))


def test_one_reference(reference, pictures, edited, smooth_picture):
    other = [smooth_picture(90, 60, seed=3), pictures[1]]
    assert moved(edited, paint_reference(reference, PROMPT, image=other, width=96, height=96))


def test_but_not_to_the_references_own_cache(reference, pictures, edited):
    without = paint_reference(reference, PROMPT, image=pictures, width=96, height=96, use_kv_cache=False)
    assert np.abs(edited - without).max() <= 1
