"""Where each token stands, and in which segment."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit.layouts import Layout, layouts

from qwen21.errors import Qwen21Error
from qwen21.sequence import bounds, positions, prefix_segments


def naive_positions(layout: Layout, running: int) -> list[list[int]]:
    """The rule, token by token."""
    table = []
    for item in layout.items:
        if item is None:
            table.append([running] * 3)
            running += 1
            continue
        rows, columns = item
        for row in range(rows):
            for column in range(columns):
                # floor(h / 2) rows from zero on, the rest before it
                table.append([running, row - (rows + 1) // 2, column - (columns + 1) // 2])
        running += max(rows, columns)
    return table


@given(layout=layouts, start=st.integers(0, 50))
def test_positions_follow_the_rule(layout, start):
    segments = prefix_segments(layout.text_tokens, layout.image_slots, layout.grids)
    table = positions(segments, start)
    assert table.dtype == torch.int64
    assert table.tolist() == naive_positions(layout, start)
    assert start + sum(segment.advance for segment in segments) == naive_positions(Layout((*layout.items, None)), start)[-1][0]


def test_positions_of_a_known_sequence():
    """Two text tokens, a picture of 3 rows and 2 columns, one text token."""
    assert positions(prefix_segments(3, [2], [(3, 2)])).tolist() == [
        [0, 0, 0], [1, 1, 1],
        [2, -2, -1], [2, -2, 0], [2, -1, -1], [2, -1, 0], [2, 0, -1], [2, 0, 0],
        [5, 5, 5],
    ]  # fmt: skip


@given(layout=layouts)
def test_segments_cover_the_prefix_and_keep_pictures_apart(layout):
    segments = list(bounds(prefix_segments(layout.text_tokens, layout.image_slots, layout.grids)))
    blocks = layout.blocks()
    assert [start for start, _, _ in segments] == [0, *(end for _, end, _ in segments[:-1])]
    assert segments[-1][1] == len(blocks)
    numbers = [set(blocks[start:end]) for start, end, _ in segments]
    assert all(len(number) == 1 for number in numbers)
    assert [segment.grid for _, _, segment in segments if not segment.is_text] == layout.grids
    assert not any(a == b == {-1} for a, b in pairwise(numbers))


@pytest.mark.parametrize("slots, grids", [([1], []), ([], [(2, 2)]), ([3], [(2, 2)]), ([-1], [(2, 2)]), ([2, 1], [(2, 2), (2, 2)])])
def test_slots_that_do_not_fit_are_refused(slots, grids):
    with pytest.raises(Qwen21Error, match="slots"):
        prefix_segments(2, slots, grids)
