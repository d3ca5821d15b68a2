"""What the steps of a run share: rotary tables, and memory in which the keys and values of prefix and target lie side by side.

Attention wants the keys of prefix and target in one tensor. Stored parts of a prefix belong to several prefixes and are never written to,
so they are copied, in one of two ways:

- Kept: a prefix that comes a second time in a row with targets of one shape gets memory of its own for every layer, with room behind it for
  the target's keys and values, and later steps copy nothing. That holds it twice, and the target's of all layers (for a branch 2 GiB each at
  1024 x 1024 pixels, reference or target), so it is done where a GPU has ample room, and only for prefixes long enough to notice.
- Scratch: one slot takes the prefix of one layer, the target's keys and values are written behind it, and on a CUDA device there are two
  slots: while one layer computes, the prefix of the next is copied into the other slot on a stream of its own. That costs two layers of keys
  and values, whatever the depth of the model and the number of branches.

Both copy from wherever the prefix is. From host memory that is the prefetch which hides the transfer (pinned memory, as StoredTensor.to
makes it); FP8 is widened on that stream too.

Order on a CUDA device: a slot is filled after the attention that read it last (its `free` event), attention waits until its slot is
filled (its `filled` event), and a call is not over before all copies are ordered before what follows: memory can be let go of without
record_stream, which would hold it back as far as the host runs ahead.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from .prefix import PrefixKV

SHORT = 4  # a prefix of less than 1/SHORT of the target's tokens is copied faster than anyone would notice


class InlineCopies:
    """One slot of scratch, filled when its layer is computed, in the same queue."""

    slots = 1

    def begin(self) -> None:
        """A pass over the layers begins on the current stream."""

    def wait_for_computing(self) -> None:
        """Let copies that follow see everything computed so far."""

    @contextmanager
    def filling(self, slot: int) -> Iterator[None]:
        """What is issued inside fills `slot`, once it is free."""
        yield

    def wait_until_filled(self, slot: int) -> None:
        """Let what is computed from here on see `slot` filled."""

    def free(self, slot: int) -> None:
        """What was computed so far is all that reads `slot`."""

    def end(self) -> None:
        """Let what is computed from here on come after all copies."""


class SideStreamCopies(InlineCopies):
    """Two slots of scratch on a CUDA device, filled a layer ahead on a stream of their own."""

    slots = 2

    def __init__(self, device: torch.device):
        self._side = _side_stream(device)
        self._filled, self._free = (defaultdict[int, torch.cuda.Event](torch.cuda.Event) for _ in range(2))
        self.begin()

    def begin(self) -> None:
        self._computing = torch.cuda.current_stream(self._side.device)

    def wait_for_computing(self) -> None:
        self._side.wait_stream(self._computing)

    @contextmanager
    def filling(self, slot: int) -> Iterator[None]:
        self._side.wait_event(self._free[slot])
        with torch.cuda.stream(self._side):
            yield
        self._filled[slot].record(self._side)

    def wait_until_filled(self, slot: int) -> None:
        self._computing.wait_event(self._filled[slot])

    def free(self, slot: int) -> None:
        self._free[slot].record(self._computing)

    def end(self) -> None:
        self._computing.wait_stream(self._side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device, since the allocator keeps memory by stream."""
    return torch.cuda.Stream(device)


class Slots:
    """Memory for the keys and values of one layer each, and which layer's prefix lies there."""

    def __init__(self, count: int, elements: int, like: torch.Tensor):
        with torch.inference_mode(False):  # else only a call in that mode could write to it
            self.memory = like.new_empty(count, elements)
        self.held: list[int | None] = [None] * count

    def rooms(self, shape: Sequence[int]) -> list[torch.Tensor]:
        return [slot[: math.prod(shape)].view(shape) for slot in self.memory]


class Workspace:
    """Made once a run and passed to every step of it; calls may differ in prefix, batch and size. Holds no result."""

    def __init__(self, copies: Callable[[torch.device], InlineCopies] | None = None, ample: Callable[[int, torch.device], bool] | None = None):
        """`copies` says how slots are filled; None: a layer ahead where the device has streams. `ample` says whether so many bytes may go
        to a prefix that is kept; None: on a CUDA device, if twice as many are free."""
        self._make_copies = copies or (lambda device: SideStreamCopies(device) if device.type == "cuda" else InlineCopies())
        self._ample = ample or (lambda nbytes, device: 2 * nbytes <= free_bytes(device))
        self._copies: InlineCopies | None = None
        self._placed_for: tuple[torch.device, torch.dtype] | None = None
        self._scratch: Slots | None = None
        self._seen: WeakKeyDictionary[PrefixKV, Sequence[int]] = WeakKeyDictionary()  # and the shape it came with
        self._kept: WeakKeyDictionary[PrefixKV, tuple[Sequence[int], Slots | None]] = WeakKeyDictionary()  # None: it was too much after all
        self._tables: dict[Hashable, torch.Tensor] = {}

    def once(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` gave the first time it was asked for under `key`."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    def let_go(self) -> None:
        """Of the memory, until the next call."""
        self._scratch = None
        self._kept.clear()

    @contextmanager
    def reading(self, prefix: PrefixKV, own: Sequence[int], like: torch.Tensor) -> Iterator["PrefixReader"]:
        """A pass over the layers of `prefix` with keys and values of shape `own` (batch, heads, tokens, head_dim) behind it; `like` gives device and dtype."""
        if self._placed_for != (like.device, like.dtype):
            self._placed_for, self._copies, self._scratch = (like.device, like.dtype), self._make_copies(like.device), None
            self._kept.clear()
        self._copies.begin()
        batch, heads, tokens, dim = own
        shape = (2, batch, heads, prefix.tokens + tokens, dim)  # K and V
        try:
            yield PrefixReader(prefix, self._keep(prefix, shape, like) or self._share(shape, like), shape, self._copies)
        finally:
            self._copies.end()

    def _keep(self, prefix: PrefixKV, shape: Sequence[int], like: torch.Tensor) -> Slots | None:
        """A slot for every layer of `prefix`, if it comes again as it came, is worth it and there is room."""
        if prefix in self._kept and self._kept[prefix][0] == shape:
            return self._kept[prefix][1]
        self._kept.pop(prefix, None)
        layers = len(prefix.parts[0].layers) if prefix.parts else 0
        comes_again, long = self._seen.get(prefix) == shape, SHORT * prefix.tokens >= shape[3] - prefix.tokens
        self._seen[prefix] = shape
        if not (comes_again and long and layers and self._ample(layers * math.prod(shape) * like.element_size(), like.device)):
            return None
        self._scratch = None
        try:
            slots = self._new(layers, shape, like)
        except torch.OutOfMemoryError:  # what is free may lie in pieces
            slots = None
        self._kept[prefix] = shape, slots
        return slots

    def _share(self, shape: Sequence[int], like: torch.Tensor) -> Slots:
        """Slots that every prefix uses in turn."""
        if self._scratch is None or self._scratch.memory.shape[1] < math.prod(shape):
            self._scratch = None  # let go of the smaller first
            self._scratch = self._new(self._copies.slots, shape, like)
        self._scratch.held[:] = [None] * len(self._scratch.held)
        return self._scratch

    def _new(self, count: int, shape: Sequence[int], like: torch.Tensor) -> Slots:
        slots = Slots(count, math.prod(shape), like)
        self._copies.wait_for_computing()  # which may still use what the allocator gave
        return slots


def free_bytes(device: torch.device) -> int:
    """What PyTorch can still take on a CUDA `device`; 0 elsewhere, where nobody says."""
    if device.type != "cuda":
        return 0
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class Room(NamedTuple):
    """Keys and values of one layer, (batch, heads, tokens, head_dim): all of them, and those behind the prefix, which are to be written."""

    keys: torch.Tensor
    values: torch.Tensor
    own_keys: torch.Tensor
    own_values: torch.Tensor


class PrefixReader:
    """Hands out a prefix layer by layer, mostly in order; a layer may be left out or asked for again."""

    def __init__(self, prefix: PrefixKV, slots: Slots, shape: Sequence[int], copies: InlineCopies):
        """`shape` (2, batch, heads, all tokens, head_dim) of a slot."""
        self._prefix, self._rooms, self._held, self._copies = prefix, slots.rooms(shape), slots.held, copies
        self._layers = len(prefix.parts[0].layers) if prefix.parts else 0
        self._tokens = prefix.tokens
        self._ready = False  # the copies come after what computed the parts on this device
        self._fill(0)

    @contextmanager
    def layer(self, index: int) -> Iterator[Room]:
        """Layer `index` with the prefix in place. Good inside the block only."""
        slot = index % len(self._rooms)
        self._fill(index)
        if len(self._rooms) > 1:
            self._fill(index + 1)
        self._copies.wait_until_filled(slot)
        keys, values = self._rooms[slot][0], self._rooms[slot][1]
        if torch.is_grad_enabled():  # a backward pass reads them after the slot has changed
            keys, values = keys.clone(), values.clone()
        try:
            yield Room(keys, values, keys[:, :, self._tokens :], values[:, :, self._tokens :])
        finally:
            self._copies.free(slot)

    def _fill(self, index: int) -> None:
        """Put the prefix of layer `index` in its slot, unless it is there. What comes from another device needs no computing awaited."""
        slot = index % len(self._rooms)
        if index >= self._layers or self._held[slot] == index:
            return
        self._held[slot] = None
        room = self._rooms[slot]
        placed, start = [], 0
        for part in self._prefix.parts:
            placed.append((part, room[..., start : start + part.tokens, :]))
            start += part.tokens
        with self._copies.filling(slot):
            for part, place in sorted(placed, key=lambda pair: pair[0].device == room.device):
                if part.device == room.device and not self._ready:
                    self._copies.wait_for_computing()
                    self._ready = True
                for stored, half in zip(part.layers[index], place):
                    stored.write(half)
        self._held[slot] = index
