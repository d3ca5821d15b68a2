"""The cache computes what it does not hold, and nothing else; what it gives equals a fresh prefill."""

from dataclasses import dataclass

import pytest
import torch
from unit.layouts import joined, picture

from qwen21.prefix_cache import PrefixCache, digest, prefix_items

GRIDS = [(4, 6), (2, 2), (6, 4), (4, 4)]


class Prompt:
    """Text around pictures: `head` and a gap of two tokens before each picture, `tail` after them."""

    def __init__(self, tail: str, pictures=(0, 1, 2, 3), weights="w"):
        self.weights = weights
        self.text = "".join(f"<{i}" for i in range(len(pictures))) + "|" + tail
        self.slots = [2 * (i + 1) for i in range(len(pictures))]
        self.references = [picture(*GRIDS[i], seed=i) for i in pictures]
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(128, 64, generator=generator)
        self.context = table[[ord(letter) for letter in self.text]][None]

    @property
    def items(self):
        return prefix_items(list(self.text), self.slots, [(*r.shape[2:], digest(r)) for r in self.references])

    def prefill(self, transformer):
        def run(past, texts, pictures):
            slots = [slot - texts for slot in self.slots[pictures:]]
            return transformer.prefill(self.context[:, texts:], slots, self.references[pictures:], past)

        return run

    def fresh(self, transformer):
        return transformer.prefill(self.context, self.slots, self.references)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def use(cache, transformer, prompt):
    """(what the cache gives, tokens it computed for that)."""
    before = cache.statistics.computed_tokens
    with cache.prefix(prompt.weights, prompt.items, prompt.prefill(transformer)) as prefix:
        return prefix, cache.statistics.computed_tokens - before


def close(a, b, tolerance=1e-5):
    return all(((x - y).abs().max() <= tolerance * y.abs().max()).item() for x, y in zip(joined(a), joined(b), strict=True))


def test_first_use_is_the_prefill_itself(transformer):
    prompt = Prompt("red star")
    prefix, computed = use(PrefixCache(), transformer, prompt)
    assert computed == prefix.tokens == prompt.fresh(transformer).tokens
    assert all(map(torch.equal, joined(prefix), joined(prompt.fresh(transformer))))


def test_again_computes_nothing(transformer):
    cache = PrefixCache()
    first, _ = use(cache, transformer, Prompt("red star"))
    again, computed = use(cache, transformer, Prompt("red star"))
    assert computed == 0 and all(map(torch.equal, joined(first), joined(again)))


@pytest.mark.parametrize(
    ("other", "new_tokens"),
    [
        (Prompt("red moon"), len("moon")),
        (Prompt("red star and moon"), len(" and moon")),
        (Prompt("red"), 0),
        (Prompt("red star", pictures=(0, 1, 2)), len("|red star")),
        (Prompt("red star", pictures=(0, 1, 2, 2)), 6 * 4 + len("|red star")),
        (Prompt("red star", pictures=(0, 2, 1, 3)), 6 * 4 + 2 + 2 * 2 + 2 + 4 * 4 + len("|red star")),
    ],
    ids=["another word", "longer", "shorter", "a picture less", "another last picture", "another order"],
)
def test_only_what_differs_is_computed(transformer, other, new_tokens):
    cache = PrefixCache()
    use(cache, transformer, Prompt("red star"))
    prefix, computed = use(cache, transformer, other)
    assert computed == new_tokens
    assert close(prefix, other.fresh(transformer))
    assert prefix.position == other.fresh(transformer).position


def test_two_branches_share_pictures_and_memory(transformer):
    cache, positive, negative = PrefixCache(), Prompt("a red star on blue"), Prompt("blurry")
    use(cache, transformer, positive)
    use(cache, transformer, negative)
    alone = positive.fresh(transformer), negative.fresh(transformer)
    assert cache.statistics.computed_tokens <= 0.6 * sum(prefix.tokens for prefix in alone)
    assert cache.tree.nbytes() == cache.statistics.computed_tokens / alone[0].tokens * alone[0].nbytes


def test_other_weights_never_share(transformer):
    cache = PrefixCache()
    use(cache, transformer, Prompt("red star"))
    _, computed = use(cache, transformer, Prompt("red star", weights="with a LoRA"))
    assert computed == Prompt("red star").fresh(transformer).tokens


def test_changed_latents_are_another_picture(transformer):
    cache, prompt = PrefixCache(), Prompt("red star", pictures=(0,))
    use(cache, transformer, prompt)
    prompt.references[0] = prompt.references[0].clone()
    prompt.references[0][0, 0, 0, 0] += 1e-3
    _, computed = use(cache, transformer, prompt)
    assert computed == GRIDS[0][0] * GRIDS[0][1] + len("|red star")


@pytest.mark.parametrize(("precision", "bytes_kept", "error"), [("fp8_v", 0.78, 0.06), ("fp8_kv", 0.55, 0.06)])
def test_eight_bits(transformer, precision, bytes_kept, error):
    exact, small = PrefixCache(), PrefixCache(precision=precision)
    fresh, _ = use(exact, transformer, Prompt("red star"))
    stored, _ = use(small, transformer, Prompt("red star"))
    assert small.tree.nbytes() <= bytes_kept * exact.tree.nbytes()
    assert close(stored, fresh, error) and not close(stored, fresh, 1e-4)


def test_budget_drops_the_oldest(transformer):
    whole = Prompt("red star").fresh(transformer).nbytes
    cache = PrefixCache(budget=int(1.5 * whole))
    for weights in "abc":
        use(cache, transformer, Prompt("red star", weights=weights))
        assert cache.tree.nbytes() <= cache.budget
    assert use(cache, transformer, Prompt("red star", weights="c"))[1] == 0
    assert use(cache, transformer, Prompt("red star", weights="a"))[1] > 0


def test_it_gives_way_as_far_as_wanted(transformer):
    cache = PrefixCache()
    for weights in "abc":
        use(cache, transformer, Prompt("red star", weights=weights))
    held, kept = cache.tree.nbytes(), Prompt("red star", weights="c")
    with cache.prefix("c", kept.items, kept.prefill(transformer)):
        assert 1 <= cache.give_way(1, torch.device("cpu")) < held / 2
        assert cache.give_way(2 * held, torch.device("cpu")) < held  # what is in use stays
    assert use(cache, transformer, kept)[1] == 0
    assert cache.give_way(1, torch.device("meta")) == 0 < cache.tree.nbytes()


def test_what_is_in_use_stays(transformer):
    cache, prompt = PrefixCache(budget=0), Prompt("red star")
    with cache.prefix("w", prompt.items, prompt.prefill(transformer)) as prefix:
        cache.shrink()
        assert cache.tree.nbytes() == prefix.nbytes > 0
    assert cache.tree.nbytes() == 0


def test_an_interrupted_prefill_leaves_nothing(transformer):
    cache, prompt = PrefixCache(), Prompt("red star")

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), cache.prefix("w", prompt.items, interrupted):
        pass
    assert cache.tree.nbytes() == 0 and not list(cache.tree.nodes())
    assert use(cache, transformer, prompt)[1] == prompt.fresh(transformer).tokens
    cache.tree.clear()
    assert cache.tree.nbytes() == 0


def test_many_uses_hold_memory_flat(transformer):
    cache = PrefixCache(budget=2 * Prompt("x" * 12).fresh(transformer).nbytes)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        tail = "".join("abcx"[int(i)] for i in torch.randint(4, (12,), generator=generator))
        pictures = tuple(int(i) for i in torch.randperm(4, generator=generator)[: int(torch.randint(5, (1,), generator=generator))])
        use(cache, transformer, Prompt(tail, pictures))
        assert cache.tree.nbytes() <= cache.budget


@dataclass(frozen=True)
class PartElsewhere:
    """Stands in for keys and values on a device that the tests do not have."""

    device: torch.device
    nbytes: int = 100

    def to(self, device):
        return PartElsewhere(device)


def test_what_a_device_has_no_room_for_goes_to_the_host_when_idle():
    gpu, host = torch.device("cuda"), torch.device("cpu")
    cache = PrefixCache(room=lambda device: 150.0)
    nodes = []
    for word in "abc":
        items = prefix_items([word], [], [])
        nodes.append(cache.tree.insert(cache.tree.match("w", items).node, items, [PartElsewhere(gpu)]))
    cache.tree.lock(nodes[0])
    cache.settle()
    assert [node.part.device for node in nodes] == [gpu, host, host]
    cache.tree.unlock(nodes[0])
    cache.room = lambda device: 50.0
    cache.placement = "gpu"
    cache.settle()
    assert nodes[0].part.device == gpu
    cache.placement = "auto"
    cache.settle()
    assert nodes[0].part.device == host
