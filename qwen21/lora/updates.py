"""What a LoRA file does to one weight, whatever the trainer called it.

Every update is an immutable value made of small tensors. `changed` gives the new weight; only there are matrices of the weight's size made.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

from ..errors import Qwen21Error


class Update:
    """A change to a weight (out, in) or (dim,)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight it fits; of a rotation, which turns any number of columns, the rows alone."""
        raise NotImplementedError

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.shape == shape

    def changed(self, weight: torch.Tensor, strength: float) -> torch.Tensor:
        """`weight` (float, on the update's device) after this update; 0 leaves it as it is, 1 is what was trained. A new tensor."""
        raise NotImplementedError

    def rows(self, rows: slice) -> "Update":
        """The same for some rows of the weight. Raises Qwen21Error if they cannot be told from the others."""
        raise NotImplementedError

    def tensors(self) -> Iterator[torch.Tensor]:
        """What it is made of, always in the same order."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, Update):
                yield from value.tensors()

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> "Update":
        """The same update made of other `tensors`, in that order."""
        new = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                new[field.name] = next(tensors)
            elif isinstance(value, Update):
                new[field.name] = value.with_tensors(tensors)
        return replace(self, **new)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Update":
        return self.with_tensors(tensor.to(device, dtype) for tensor in self.tensors())


class Additive(Update):
    """Something is added to the weight."""

    def delta(self) -> torch.Tensor:
        """What is added at strength 1, in the weight's shape."""
        raise NotImplementedError

    def changed(self, weight: torch.Tensor, strength: float) -> torch.Tensor:
        return torch.add(weight, self.delta(), alpha=strength)

    def rows(self, rows: slice) -> "Additive":
        return RowsOf(self, rows)


@dataclass(frozen=True, eq=False)
class Difference(Additive):
    """The added tensor itself: full-weight and norm differences."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def delta(self) -> torch.Tensor:
        return self.tensor

    def rows(self, rows: slice) -> "Difference":
        return Difference(self.tensor[rows])


@dataclass(frozen=True, eq=False)
class LowRank(Additive):
    """LoRA: `up` (out, rank) times `down` (rank, in) times alpha / rank, which is `scale`."""

    up: torch.Tensor
    down: torch.Tensor
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.up.shape[0], self.down.shape[1])

    def delta(self) -> torch.Tensor:
        return self.up @ self.down * self.scale

    def rows(self, rows: slice) -> "LowRank":
        return replace(self, up=self.up[rows])


@dataclass(frozen=True, eq=False)
class Hadamard(Additive):
    """LoHa: the product, element by element, of two matrices of low rank."""

    first: LowRank
    second: LowRank
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.first.shape

    def delta(self) -> torch.Tensor:
        return self.first.delta() * self.second.delta() * self.scale


@dataclass(frozen=True, eq=False)
class Kronecker(Additive):
    """LoKr: the Kronecker product of two small matrices, either of which may be of low rank."""

    first: Additive
    second: Additive
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        (a, b), (c, d) = self.first.shape, self.second.shape
        return (a * c, b * d)

    def delta(self) -> torch.Tensor:
        return torch.kron(self.first.delta(), self.second.delta()) * self.scale


@dataclass(frozen=True, eq=False)
class RowsOf(Additive):
    """Some rows of an update whose factors do not divide by rows."""

    whole: Additive
    picked: slice

    @property
    def shape(self) -> tuple[int, ...]:
        out, *rest = self.whole.shape
        return (len(range(out)[self.picked]), *rest)

    def delta(self) -> torch.Tensor:
        return self.whole.delta()[self.picked]


@dataclass(frozen=True, eq=False)
class Decomposed(Update):
    """DoRA: the weight after `inner` gets the trained `magnitude` for a norm, row by row (out, 1), or column by column (1, in) as older LyCORIS has it.

    The norm is that of the changed weight, as PEFT and LyCORIS train it; between 0 and 1 the strength blends old weight and new.
    """

    inner: Additive
    magnitude: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    def changed(self, weight: torch.Tensor, strength: float) -> torch.Tensor:
        new = self.inner.changed(weight, 1.0)
        norm = new.norm(dim=1 if self.magnitude.shape[1] == 1 else 0, keepdim=True)
        return torch.lerp(weight, new * (self.magnitude / norm.clamp(min=torch.finfo(norm.dtype).tiny)), strength)

    def rows(self, rows: slice) -> "Decomposed":
        if self.magnitude.shape[1] != 1:
            raise Qwen21Error("has a DoRA scale that runs over columns, which both halves of the fused layer share: load it on a checkpoint with a fused MLP")
        return Decomposed(self.inner.rows(rows), self.magnitude[rows])


@dataclass(frozen=True, eq=False)
class Generalized(Update):
    """GLoRA: the weight times `inner` (in, in) is added to it, and `added` (out, in), both of low rank and times `scale`."""

    inner: LowRank
    added: LowRank
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.added.shape

    def changed(self, weight: torch.Tensor, strength: float) -> torch.Tensor:
        up, down = torch.cat([weight @ self.inner.up, self.added.up], dim=1), torch.cat([self.inner.down, self.added.down])
        return torch.addmm(weight, up, down, alpha=strength * self.scale)

    def rows(self, rows: slice) -> "Generalized":
        return replace(self, added=self.added.rows(rows))


@dataclass(frozen=True, eq=False)
class Rotation(Update):
    """OFT: blocks of rows are turned by the Cayley transform of `blocks` (count, size, size); `rescale` (out, 1) follows, if there is one.

    `constraint` bounds the norm of the generator; 0 does not.
    """

    blocks: torch.Tensor
    rescale: torch.Tensor | None = None
    constraint: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.blocks.shape[0] * self.blocks.shape[1],)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.shape == shape[:1]

    def changed(self, weight: torch.Tensor, strength: float) -> torch.Tensor:
        turn = _cayley(self.blocks, self.constraint).to(weight.dtype)
        new = (turn.mT @ weight.reshape(*self.blocks.shape[:2], -1)).reshape(weight.shape)
        return torch.lerp(weight, new if self.rescale is None else new * self.rescale, strength)

    def rows(self, rows: slice) -> "Rotation":
        size = self.blocks.shape[1]
        _check_apart(rows, size, self.constraint)
        blocks = self.blocks[rows.start // size : rows.stop // size]
        return Rotation(blocks, None if self.rescale is None else self.rescale[rows])


@dataclass(frozen=True, eq=False)
class Butterfly(Update):
    """BOFT: rows are turned several times, by the Cayley transforms of `blocks` (times, count, size, size).

    Every time, a block takes its rows from twice as far apart: its neighbours in pairs are rows that lie size / 2, size, 2 size ... apart.
    `rescale` (out, 1) and `constraint` are as for Rotation.
    """

    blocks: torch.Tensor
    rescale: torch.Tensor | None = None
    constraint: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.blocks.shape[1] * self.blocks.shape[2],)

    @property
    def widest(self) -> int:
        """Rows that are mixed with each other: as many as the last turn reaches over."""
        return 2 ** (len(self.blocks) - 1) * self.blocks.shape[2]

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.shape == shape[:1]

    def changed(self, weight: torch.Tensor, strength: float) -> torch.Tensor:
        new = weight.reshape(len(weight), -1)
        for times, turn in enumerate(_cayley(self.blocks, self.constraint).to(weight.dtype)):
            apart = 2**times * turn.shape[-1] // 2
            paired = new.reshape(-1, 2, apart, new.shape[1]).transpose(1, 2)
            turned = turn @ paired.reshape(*turn.shape[:2], -1)
            new = turned.reshape(paired.shape).transpose(1, 2).reshape(new.shape)
        new = new.reshape(weight.shape)
        return torch.lerp(weight, new if self.rescale is None else new * self.rescale, strength)

    def rows(self, rows: slice) -> "Butterfly":
        _check_apart(rows, self.widest, self.constraint)
        size = self.blocks.shape[2]
        blocks = self.blocks[:, rows.start // size : rows.stop // size]
        return Butterfly(blocks, None if self.rescale is None else self.rescale[rows])


def _cayley(blocks: torch.Tensor, constraint: float) -> torch.Tensor:
    """Rotations (..., size, size) in float32 from trained `blocks`; a `constraint` above 0 bounds the norm of all their generators together."""
    skew = blocks - blocks.mT
    norm = skew.norm()
    if 0 < constraint < norm:
        skew = skew * (constraint / norm)
    one = torch.eye(skew.shape[-1], device=skew.device, dtype=torch.float32)
    return torch.linalg.solve(one - skew.float(), one + skew.float(), left=False)


def _check_apart(rows: slice, together: int, constraint: float) -> None:
    """Raises Qwen21Error unless `rows` are turned without the others, `together` rows being turned at once."""
    if constraint or rows.start % together or rows.stop % together:
        raise Qwen21Error("has a rotation that ties both halves of the fused layer together: load it on a checkpoint with a fused MLP")


@dataclass(frozen=True, eq=False)
class Replacement(Update):
    """The weight is set to `tensor`; between 0 and 1 the strength blends old weight and new."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def changed(self, weight: torch.Tensor, strength: float) -> torch.Tensor:
        return torch.lerp(weight, self.tensor, strength)

    def rows(self, rows: slice) -> "Replacement":
        return Replacement(self.tensor[rows])
