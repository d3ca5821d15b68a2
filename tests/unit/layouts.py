"""Random prefixes for property tests: text tokens and pictures in any order."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from qwen21.workspace import Workspace

Grid = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """`items` in order: None is one text token, (rows, columns) a picture of that latent size."""

    items: tuple[Grid | None, ...]

    @property
    def text_tokens(self) -> int:
        return self.items.count(None)

    @property
    def image_slots(self) -> list[int]:
        return [self.items[:i].count(None) for i, item in enumerate(self.items) if item]

    @property
    def grids(self) -> list[Grid]:
        return [item for item in self.items if item]

    def split(self, at: int) -> tuple["Layout", "Layout"]:
        return Layout(self.items[:at]), Layout(self.items[at:])

    def blocks(self) -> list[int]:
        """For each token of the prefix: -1 for text, else the number of its picture."""
        sizes = iter(enumerate(self.grids))
        blocks = []
        for item in self.items:
            number, (rows, columns) = next(sizes) if item else (-1, (1, 1))
            blocks += [number] * (rows * columns)
        return blocks

    def inputs(self, seed: int = 0, width: int = 64) -> tuple[torch.Tensor, list[int], list[torch.Tensor]]:
        """Random (text states, image slots, reference latents), the arguments of `prefill`."""
        generator = torch.Generator().manual_seed(seed)
        context = 2 * torch.randn(1, self.text_tokens, width, generator=generator)
        return context, self.image_slots, [torch.randn(1, 64, *grid, generator=generator) for grid in self.grids]


def allowed(blocks: list[int]) -> torch.Tensor:
    """The dense mask, token by token: (queries, keys) bool. A query sees what is not after it, and all of its own picture."""
    return torch.tensor([[q >= k or blocks[q] == blocks[k] >= 0 for k in range(len(blocks))] for q in range(len(blocks))])


def picture(rows: int, columns: int, seed: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 64, rows, columns, generator=torch.Generator().manual_seed(seed))


sides = st.integers(1, 5)
grids = st.tuples(sides, sides)
_runs = st.one_of(st.integers(1, 6).map(lambda n: (None,) * n), grids.map(lambda grid: (grid,)))
layouts = st.lists(_runs, min_size=1, max_size=6).map(lambda runs: Layout(sum(runs, ())))
sigmas = st.integers(1, 64).map(lambda n: n / 64)
seeds = st.integers(0, 2**16)


def joined(prefix) -> list[torch.Tensor]:
    """Keys and values of the whole prefix, layer by layer: (1, heads, tokens, head_dim)."""
    first = prefix.parts[0].layers[0][0].values
    _, heads, _, dim = first.shape
    tensors = []
    with Workspace().reading(prefix, (1, heads, 0, dim), first.new_empty(0, dtype=prefix.parts[0].dtype)) as reader:
        for layer in range(len(prefix.parts[0].layers)):
            with reader.layer(layer) as room:
                tensors += [room.keys.clone(), room.values.clone()]
    return tensors
