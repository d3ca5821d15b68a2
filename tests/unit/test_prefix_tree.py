"""The tree of prefixes against a naive model: a set of every prefix that is held, token by token."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qwen21.prefix import KVPart
from qwen21.prefix_cache import picture_item, prefix_items, text_item
from qwen21.prefix_tree import PrefixTree

# A word is a text token ("a" to "c") or a picture of some tokens ("P2x3").
WORDS = st.lists(st.sampled_from(["a", "b", "c", "P1x1", "P2x3"]), min_size=1, max_size=7)


def items_of(words):
    texts = [word for word in words if not word.startswith("P")]
    slots, pictures, seen = [], [], 0
    for word in words:
        if word.startswith("P"):
            slots.append(seen)
            pictures.append((int(word[1]), int(word[3]), word))
        else:
            seen += 1
    return prefix_items(texts, slots, pictures)


def part_of(item, start):
    """Keys and values that say which absolute token they belong to and what it is."""
    length = item.segment.length
    content = [hash((key, start + i)) % 9973 for i, key in enumerate(item.keys * (length // len(item.keys)))]
    values = torch.tensor(content, dtype=torch.float32).view(1, 1, length, 1)
    return KVPart.of([(values, values + 0.5)])


def contents(items):
    parts, start = [], 0
    for item in items:
        parts.append(part_of(item, start))
        start += item.segment.length
    return parts


def keys_before(items):
    """The naive model's view: one entry a text token or picture."""
    return tuple(key for item in items for key in item.keys)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.tree = PrefixTree()
        self.held = set()  # (weights, keys of a prefix)
        self.locked = []  # (node, weights, items)

    @rule(words=WORDS, weights=st.sampled_from(["w1", "w2"]), lock=st.booleans())
    def use(self, words, weights, lock):
        items = items_of(words)
        keys = keys_before(items)
        match = self.tree.match(weights, items)
        matched = sum(len(item.keys) for item in items[: match.items]) + match.tokens
        assert matched == max(end for end in range(len(keys) + 1) if end == 0 or (weights, keys[:end]) in self.held)
        rest = items[match.items :]
        if rest:
            start = match.prefix.tokens
            if match.tokens:
                rest = [text_item([key for _, key in rest[0].keys[match.tokens :]]), *rest[1:]]
            parts = []
            for item in rest:
                parts.append(part_of(item, start))
                start += item.segment.length
            node = self.tree.insert(match.node, rest, parts)
        else:
            node = match.node
        self.held.update((weights, keys[:end]) for end in range(1, len(keys) + 1))
        again = self.tree.match(weights, items)
        assert again.node is node and again.items == len(items)
        assert again.prefix.position == sum(item.segment.advance for item in items)
        self.check_content(again.prefix, items)
        if lock:
            self.tree.lock(node)
            self.locked.append((node, weights, items))

    def check_content(self, prefix, items):
        k, v = (torch.cat([part.layers[0][half].values for part in prefix.parts], dim=2) for half in range(2))
        assert torch.equal(k, torch.cat([part.layers[0][0].values for part in contents(items)], dim=2))
        assert torch.equal(v, k + 0.5)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data):
        node, _, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.tree.unlock(node)

    @rule(wanted=st.integers(1, 200))
    def evict(self, wanted):
        before = self.tree.nbytes()
        freed = self.tree.evict(wanted)
        assert freed == before - self.tree.nbytes()
        self.forget_what_is_gone()
        if freed < wanted:
            locked = {node for leaf, _, _ in self.locked for node in leaf.path()}
            assert all(node in locked for node in self.tree.nodes())

    @rule()
    def clear(self):
        self.tree.clear()
        self.forget_what_is_gone()
        if not self.locked:
            assert self.tree.nbytes() == 0

    def forget_what_is_gone(self):
        present = set()
        for node in self.tree.nodes():
            root, *path = node.path()
            weights = next(weights for weights, one in self.tree._roots.items() if one is root)
            keys = tuple(key for one in path for key in one.item.keys)
            present.update((weights, keys[: len(keys) - i]) for i in range(len(node.item.keys)))
        assert present <= self.held, "the tree holds what was never put there"
        for _, weights, items in self.locked:
            assert (weights, keys_before(items)) in present
        self.held = present

    @invariant()
    def locked_prefixes_are_whole(self):
        for node, _, items in self.locked:
            root, *path = node.path()
            assert sum(one.item.segment.length for one in path) == sum(item.segment.length for item in items)
            assert all(one.locks > 0 for one in path)


TestTree = Machine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_least_recently_used_goes_first():
    tree = PrefixTree()
    for words in (["a"], ["b"], ["c"]):
        items = items_of(words)
        tree.insert(tree.match("w", items).node, items, contents(items))
    tree.match("w", items_of(["a"]))
    tree.evict(1)
    assert [tree.match("w", items_of([word])).items for word in "abc"] == [1, 0, 1]


def test_a_picture_is_never_divided():
    tree = PrefixTree()
    items = items_of(["P2x3"])
    tree.insert(tree.match("w", items).node, items, contents(items))
    assert tree.match("w", [picture_item(3, 2, "P2x3")]).items == 0
