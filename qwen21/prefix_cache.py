"""Which prefixes are kept between uses: a tree of keys and values with a budget, shared by branches, batch rows, seeds and runs."""

import hashlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import torch

from .prefix import KVPart, PrefixKV, divide
from .prefix_tree import Item, Match, PrefixTree
from .sequence import Segment, prefix_segments

# (what the cache holds of the prefix, text tokens and pictures that it covers) -> that prefix and the rest, in parts
Prefill = Callable[[PrefixKV, int, int], PrefixKV]


@dataclass
class CacheStatistics:
    """Since the cache was made: prefixes found whole, tokens taken from it and computed, seconds that took."""

    found: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    seconds: float = 0.0


@dataclass
class PrefixCache:
    """Keeps what was prefilled.

    `budget` in bytes (None: no bound) covers every device. `precision` is one of prefix.PRECISIONS. `placement` "gpu" leaves keys and
    values where they are computed, "cpu" moves them to host memory, "auto" does so when less than twice their size is free there, as
    `room` (device -> bytes) tells.
    """

    budget: int | None = None
    precision: str = "default"
    placement: str = "auto"
    room: Callable[[torch.device], float] = lambda _: float("inf")
    tree: PrefixTree = field(default_factory=PrefixTree)
    statistics: CacheStatistics = field(default_factory=CacheStatistics)

    @contextmanager
    def prefix(self, weights: Hashable, items: Sequence[Item], prefill: Prefill) -> Iterator[PrefixKV]:
        """The prefix of `items` for as long as the block runs, computing what is not there yet.

        `weights` stands for everything else that decides keys and values: checkpoint, patches, dtype. Nothing enters the tree
        before its prefill is complete. Inside the block the prefix is not evicted.
        """
        match = self.tree.match(weights, items)
        node = match.node
        self.tree.lock(node)
        try:
            reused = match.prefix.tokens
            whole = match.items == len(items)
            if not whole:
                rest = _rest(items, match)
                last = self.tree.insert(node, rest, self._compute(items, match, rest, prefill))
                self.tree.lock(last)
                self.tree.unlock(node)
                node = last
            held = Match(node, len(items), 0).prefix
            self.statistics.found += whole
            self.statistics.reused_tokens += reused
            self.statistics.computed_tokens += held.tokens - reused
            yield held
        finally:
            self.tree.unlock(node)
            self.shrink()
            self.settle()

    def shrink(self) -> None:
        """Drop what is over the budget, the least recently used first."""
        if self.budget is not None:
            self.tree.evict(self.tree.nbytes() - self.budget)

    def give_way(self, wanted: int, device: torch.device) -> int:
        """Drop what lies on `device` and is not in use, the least recently used first, until `wanted` bytes are free. Returns the bytes freed."""
        before = self.tree.nbytes(device)
        while 0 < self.tree.nbytes(device) > before - wanted and self.tree.evict(1):
            pass
        return before - self.tree.nbytes(device)

    def settle(self) -> None:
        """Between uses: what takes more than half of a device's room goes to host memory, the least recently used first. Only with
        placement "auto"; what is in use stays."""
        if self.placement != "auto":
            return
        host = torch.device("cpu")
        for node in sorted(self.tree.nodes(), key=lambda node: node.used):
            device = node.part.device
            if device != host and not node.locks and self.tree.nbytes(device) > self.room(device):
                node.part = node.part.to(host)

    def _compute(self, items: Sequence[Item], match: Match, rest: Sequence[Item], prefill: Prefill) -> list[KVPart]:
        """The keys and values of `rest`, one part an item, in the cache's precision."""
        done = items[: match.items]
        texts = sum(item.segment.length for item in done if item.segment.is_text) + match.tokens
        pictures = sum(not item.segment.is_text for item in done)
        held = match.prefix
        began = time.perf_counter()
        (whole,) = prefill(held, texts, pictures).parts[len(held.parts) :]  # one call makes one part
        if whole.device.type == "cuda":
            torch.cuda.synchronize(whole.device)  # so that the seconds are the device's
        self.statistics.seconds += time.perf_counter() - began
        layers, device = list(whole.layers), whole.device
        lengths = [item.segment.length for item in rest]
        devices = [self._place(device, whole.nbytes * length // whole.tokens) for length in lengths]
        del whole
        return divide(layers, lengths, self.precision, devices)

    def _place(self, device: torch.device, nbytes: int) -> torch.device:
        """Where to keep that much of what was computed on `device`."""
        on_host = self.placement == "cpu" or (self.placement == "auto" and self.room(device) < 2 * nbytes)
        return torch.device("cpu") if on_host else device

    def since(self, before: CacheStatistics) -> CacheStatistics:
        """What happened since `before`, a copy of `statistics` made then."""
        return CacheStatistics(*(getattr(self.statistics, one.name) - getattr(before, one.name) for one in fields(CacheStatistics)))

    def saved(self, run: CacheStatistics) -> float:
        """About how many seconds the tokens that `run` reused would have taken, judged by all that were computed so far."""
        return run.reused_tokens * self.statistics.seconds / self.statistics.computed_tokens if self.statistics.computed_tokens else 0.0


def _rest(items: Sequence[Item], match: Match) -> list[Item]:
    """The items behind a match, the first without the tokens that are covered."""
    first, *others = items[match.items :]
    if match.tokens:
        first = Item(Segment(first.segment.length - match.tokens), first.keys[match.tokens :])
    return [first, *others]


def text_item(keys: Sequence[Hashable]) -> Item:
    """A run of text, recognised token by token."""
    return Item(Segment(len(keys)), tuple(("text", key) for key in keys))


def picture_item(rows: int, columns: int, key: Hashable) -> Item:
    """A picture's latents, recognised as a whole."""
    return Item(Segment.picture(rows, columns), (("picture", rows, columns, key),))


def prefix_items(text_keys: Sequence[Hashable], image_slots: Sequence[int], pictures: Sequence[tuple[int, int, Hashable]]) -> list[Item]:
    """The items of a prefix: text with pictures (rows, columns, key) spliced in at `image_slots`, as the transformer's segments."""
    items, start, waiting = [], 0, iter(pictures)
    for segment in prefix_segments(len(text_keys), image_slots, [(rows, columns) for rows, columns, _ in pictures]):
        if segment.is_text:
            items.append(text_item(text_keys[start : start + segment.length]))
            start += segment.length
        else:
            items.append(picture_item(*next(waiting)))
    return items


def digest(tensor: torch.Tensor) -> bytes:
    """What a tensor's shape, dtype and content are recognised by."""
    flat = tensor.detach().contiguous().cpu()
    return hashlib.sha256(repr((tuple(flat.shape), flat.dtype)).encode() + flat.view(torch.uint8).numpy().tobytes()).digest()
