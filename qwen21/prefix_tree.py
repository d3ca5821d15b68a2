"""A radix tree of keys and values, as in LLM serving.

Attention is causal between segments, so two prefixes share K and V exactly as far as they begin alike. A node of the tree is a run of text
tokens or one picture; the path from the root is the prefix. Nodes on the path of a running sample are locked; of the others the least
recently used go first when memory is wanted.
"""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .prefix import KVPart, PrefixKV
from .sequence import Segment, common_length


@dataclass(frozen=True)
class Item:
    """A segment and what it is recognised by: one key a token for text, a single key for a picture, which cannot be divided."""

    segment: Segment
    keys: tuple[Hashable, ...]


@dataclass(eq=False)
class Node:
    """A segment in the tree, with its keys and values."""

    item: Item
    part: KVPart
    parent: "Node | None"
    children: dict[Hashable, "Node"] = field(default_factory=dict)
    used: int = 0
    locks: int = 0

    def path(self) -> list["Node"]:
        """From the root down to this node."""
        return [*(self.parent.path() if self.parent else []), self]


@dataclass(frozen=True)
class Match:
    """What the tree holds of a prefix: the last node of the shared path, and how much of the items it covers."""

    node: Node
    items: int  # whole items
    tokens: int  # text tokens of the next item

    @property
    def prefix(self) -> PrefixKV:
        _, *path = self.node.path()
        return PrefixKV(tuple(node.part for node in path), sum(node.item.segment.advance for node in path))


class PrefixTree:
    """Prefixes that were computed with the same weights are children of one root, found by the weights' identity."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._clock = itertools.count(1)

    def match(self, weights: Hashable, items: Sequence[Item]) -> Match:
        """The longest prefix of `items` in the tree. Divides a node of text where only its beginning is shared."""
        node, count = self._root(weights), 0
        node.used = next(self._clock)
        covered = 0
        while count < len(items):
            rest = items[count].keys[covered:]
            child = node.children.get(rest[0])
            if child is None or child.item.segment.is_text != items[count].segment.is_text:
                break
            shared = common_length(child.item.keys, rest)
            if child.item.segment.is_text and shared < len(child.item.keys):
                child = self._divide(child, shared)
            node = child
            node.used = next(self._clock)
            if shared == len(rest):
                count, covered = count + 1, 0
            else:
                covered += shared
        return Match(node, count, covered)

    def insert(self, node: Node, items: Sequence[Item], parts: Sequence[KVPart]) -> Node:
        """Append `items` with their keys and values under `node`, which is locked or was just matched; returns the last node.

        Raises ValueError if the tree already holds what is inserted.
        """
        for item, part in zip(items, parts, strict=True):
            if item.keys[0] in node.children:
                raise ValueError("the tree already holds what is inserted: match first")
            child = Node(item, part, node, used=next(self._clock))
            node.children[item.keys[0]] = child
            node = child
        return node

    def lock(self, node: Node) -> None:
        """Keep `node` and all before it from being evicted."""
        for one in node.path():
            one.locks += 1

    def unlock(self, node: Node) -> None:
        for one in node.path():
            one.locks -= 1

    def evict(self, wanted: int) -> int:
        """Drop least recently used, unlocked leaves until `wanted` bytes are free; returns the bytes freed."""
        freed = 0
        while freed < wanted:
            leaves = [node for node in self.nodes() if not node.children and not node.locks]
            if not leaves:
                break
            victim = min(leaves, key=lambda node: node.used)
            freed += victim.part.nbytes
            del victim.parent.children[victim.item.keys[0]]
        return freed

    def __len__(self) -> int:
        """How many segments are held."""
        return sum(1 for _ in self.nodes())

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before children."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def nbytes(self, device: torch.device | None = None) -> int:
        """Bytes held, on `device` if given."""
        return sum(node.part.nbytes for node in self.nodes() if device is None or node.part.device == device)

    def clear(self) -> None:
        """Drop everything that is not locked."""
        self.evict(self.nbytes() + 1)

    def _root(self, weights: Hashable) -> Node:
        if weights not in self._roots:
            for old in [old for old, root in self._roots.items() if not root.children and not root.locks]:
                del self._roots[old]
            self._roots[weights] = Node(Item(Segment(0), ()), KVPart((), torch.float32), None)
        return self._roots[weights]

    def _divide(self, node: Node, length: int) -> Node:
        """Cut a node of text after `length` tokens; returns the new node that holds the first of them."""
        first = Node(
            Item(Segment(length), node.item.keys[:length]), node.part.slice(0, length), node.parent, {node.item.keys[length]: node}, node.used, node.locks
        )
        node.parent.children[first.item.keys[0]] = first
        node.item = Item(Segment(node.item.segment.length - length), node.item.keys[length:])
        node.part = node.part.slice(length, node.part.tokens)
        node.parent = first
        return first
