"""Prefix and target side by side: equal to concatenating them, filled a layer ahead in an order that no slot can be read or written too early."""

import copy
import itertools
import weakref
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit.devices import needs_cuda
from unit.layouts import picture

from qwen21.checkpoint import Checkpoint
from qwen21.pipeline import Pipeline, Report, Request
from qwen21.prefix import PRECISIONS, KVPart, PrefixKV
from qwen21.vae import QwenImage21VAE
from qwen21.workspace import InlineCopies, Slots, Workspace

LAYERS = 5


class Recorded(InlineCopies):
    """Two slots; fills and uses are written down as they are issued."""

    slots = 2

    def __init__(self, log: list):
        self.log = log

    def wait_for_computing(self):
        self.log.append("wait for computing")

    @contextmanager
    def filling(self, slot):
        self.log.append(("fill", slot))
        yield

    def wait_until_filled(self, slot):
        self.log.append(("use", slot))

    def free(self, slot):
        self.log.append(("free", slot))

    def end(self):
        self.log.append("end")


def part(tokens: int, seed: int, precision: str = "default") -> KVPart:
    generator = torch.Generator().manual_seed(seed)
    return KVPart.of([tuple(torch.randn(1, 2, tokens, 4, generator=generator) for _ in range(2)) for _ in range(LAYERS)]).quantized(precision)


def concatenated(prefix: PrefixKV, layer: int, own: torch.Tensor, half: int) -> torch.Tensor:
    stored = [part.layers[layer][half] for part in prefix.parts]
    plain = [(x.values if x.scale is None else x.values.float() * x.scale).to(own.dtype).expand(len(own), -1, -1, -1) for x in stored]
    return torch.cat([*plain, own], dim=2)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=0, max_size=3),
    calls=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.lists(st.integers(0, LAYERS - 1), max_size=8)), min_size=1, max_size=4),
    precision=st.sampled_from(PRECISIONS),
    two=st.booleans(),
    ample=st.booleans(),
)
@torch.inference_mode()
def test_equals_concatenating(sizes, calls, precision, two, ample):
    """In any order of layers, calls of any size after one another, prefixes in turn, kept or not."""
    prefixes = [PrefixKV(tuple(part(size, seed, precision) for seed, size in enumerate(sizes, first))) for first in (0, 10)]
    workspace = Workspace(lambda device: Recorded([]) if two else InlineCopies(), lambda nbytes, device: ample)
    for (tokens, batch, layers), prefix in itertools.product(calls, prefixes):
        k, v = torch.randn(2, batch, 2, tokens, 4)
        with workspace.reading(prefix, k.shape, k) as reader:
            for layer in layers:
                with reader.layer(layer) as room:
                    room.own_keys.copy_(k)
                    room.own_values.copy_(v)
                    assert torch.equal(room.keys, concatenated(prefix, layer, k, 0)) and torch.equal(room.values, concatenated(prefix, layer, v, 1))


def test_the_next_layer_is_issued_before_a_layer_computes():
    log = []
    workspace = Workspace(lambda device: Recorded(log))
    with workspace.reading(PrefixKV((part(2, 0),)), (1, 2, 3, 4), torch.empty(0)) as reader:
        for layer in range(LAYERS):
            with reader.layer(layer):
                log.append("attention")
    expected = ["wait for computing", ("fill", 0), "wait for computing"]  # once each: for new memory, for the prefix that was computed there
    for layer in range(LAYERS):
        expected += [("fill", (layer + 1) % 2)] if layer + 1 < LAYERS else []
        expected += [("use", layer % 2), "attention", ("free", layer % 2)]
    assert log == [*expected, "end"]


def test_a_prefix_that_comes_again_is_copied_once():
    log = []
    asked = []
    workspace = Workspace(lambda device: Recorded(log), lambda nbytes, device: asked.append(nbytes) or True)
    prefix = PrefixKV((part(2, 0),))

    def run(prefix: PrefixKV) -> int:
        """How many slots were filled."""
        log.clear()
        with workspace.reading(prefix, (1, 2, 3, 4), torch.empty(0)) as reader:
            for layer in range(LAYERS):
                with reader.layer(layer):
                    pass
        return sum(entry[0] == "fill" for entry in log)

    assert [run(prefix) for _ in range(4)] == [LAYERS, LAYERS, 0, 0]
    assert asked == [LAYERS * 2 * 2 * 5 * 4 * 4]
    assert [run(PrefixKV((part(2, 0),))) for _ in range(3)] == 3 * [LAYERS] and len(asked) == 1  # one that comes once is not kept


def test_what_is_kept_goes_with_its_prefix():
    workspace = Workspace(ample=lambda nbytes, device: True)
    prefix = PrefixKV((part(2, 0),))
    for _ in range(2):
        with workspace.reading(prefix, (1, 2, 3, 4), torch.empty(0)) as reader, reader.layer(0):
            pass
    memory = weakref.ref(workspace._kept[prefix][1].memory)
    del reader
    assert memory() is not None
    del prefix
    assert memory() is None


def test_decoding_has_the_room_of_the_steps(model_folder, monkeypatch):
    """A seed leaves nothing in memory of what its steps shared, and the next seed's steps have it again."""
    made, alive = [], []
    new_memory, decode = Slots.__init__, QwenImage21VAE.decode

    def counted(slots, *arguments):
        new_memory(slots, *arguments)
        made.append(weakref.ref(slots.memory))

    def watched(*arguments):
        alive.append((sum(memory() is not None for memory in made), len(made)))
        return decode(*arguments)

    monkeypatch.setattr(Slots, "__init__", counted)
    monkeypatch.setattr(QwenImage21VAE, "decode", watched)
    pipeline = Pipeline(Checkpoint(model_folder), torch.device("cpu"), torch.float32)
    list(pipeline.generate(Request("a star", steps=2, resolution=64), [0, 1], Report()))
    assert alive == [(0, 1), (0, 2)]


def test_a_short_prefix_is_not_kept():
    workspace = Workspace(ample=lambda nbytes, device: pytest.fail("asked for room"))
    prefix = PrefixKV((part(2, 0),))
    for _ in range(3):
        with workspace.reading(prefix, (1, 2, 9, 4), torch.empty(0)):
            pass


def test_a_prefix_whose_targets_differ_in_shape_is_not_kept():
    """As areas of the picture do that take turns: nothing kept would serve the next call."""
    workspace = Workspace(ample=lambda nbytes, device: pytest.fail("asked for room"))
    prefix = PrefixKV((part(2, 0),))
    for tokens in (3, 4, 3, 4):
        with workspace.reading(prefix, (1, 2, tokens, 4), torch.empty(0)):
            pass


def test_without_memory_to_keep_it_a_prefix_is_copied(monkeypatch):
    """It is tried once, and the run goes on."""
    prefix, own, tried = PrefixKV((part(2, 0),)), torch.randn(1, 2, 3, 4), []
    workspace = Workspace(lambda device: Recorded([]), lambda nbytes, device: True)

    class Crowded(Slots):
        def __init__(self, count, elements, like):
            if count == LAYERS:
                tried.append(count)
                raise torch.OutOfMemoryError
            super().__init__(count, elements, like)

    monkeypatch.setattr("qwen21.workspace.Slots", Crowded)
    for _ in range(4):
        with workspace.reading(prefix, own.shape, own) as reader, reader.layer(1) as room:
            room.own_keys.copy_(own)
            assert torch.equal(room.keys, concatenated(prefix, 1, own, 0))
    assert tried == [LAYERS]


@pytest.mark.parametrize("ample", [False, True])
def test_calls_may_differ_in_inference_mode(ample):
    prefix, own = PrefixKV((part(2, 0),)), torch.randn(1, 2, 3, 4)
    workspace = Workspace(ample=lambda nbytes, device: ample)
    for mode in (torch.inference_mode, torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode(), workspace.reading(prefix, own.shape, own) as reader:
            for layer in range(LAYERS):
                with reader.layer(layer) as room:
                    room.own_keys.copy_(own)
                    assert torch.equal(room.keys, concatenated(prefix, layer, own, 0))


def test_copies_end_in_order_when_a_call_is_interrupted():
    log = []
    workspace = Workspace(lambda device: Recorded(log))
    with pytest.raises(InterruptedError), workspace.reading(PrefixKV((part(2, 0),)), (1, 2, 3, 4), torch.empty(0)) as reader, reader.layer(0):
        raise InterruptedError
    assert log[-2:] == [("free", 0), "end"]  # what the layer issued before is ordered before what fills its slot next


def test_gradients_pass_through(transformer):
    """A backward pass reads what the slots held."""
    with torch.no_grad():
        prefix = transformer.prefill(torch.ones(1, 3, 64))
    noisy, direction = picture(2, 3, 0).double(), picture(2, 3, 1).double()
    model = copy.deepcopy(transformer).double()
    noisy.requires_grad_()
    model.denoise(noisy, 0.5, prefix).backward(direction)
    with torch.no_grad():
        step = 1e-3 * picture(2, 3, 2).double()
        change = model.denoise(noisy + step, 0.5, prefix) - model.denoise(noisy - step, 0.5, prefix)
    assert torch.allclose((noisy.grad * step).sum() * 2, (change * direction).sum(), rtol=1e-2)  # rotations are in float32


@torch.inference_mode()
def test_steps_of_a_run_share_it(transformer):
    """Prefixes of two branches in turn, and a change of size and batch, give what each gives alone."""
    prefixes = [transformer.prefill(torch.full((1, tokens, 64), 0.3)) for tokens in (3, 5)]
    workspace = Workspace(lambda device: Recorded([]), lambda nbytes, device: True)
    for sigma, grid, batch in ((0.9, (2, 3), 1), (0.7, (2, 3), 1), (0.5, (2, 3), 1), (0.5, (2, 3), 2), (0.5, (4, 4), 1), (0.3, (4, 4), 1)):
        for prefix in prefixes:
            noisy = picture(*grid, 0, batch)
            assert torch.equal(transformer.denoise(noisy, sigma, prefix, workspace=workspace), transformer.denoise(noisy, sigma, prefix))


@needs_cuda
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("place", ["host", "device", "both"])
@pytest.mark.parametrize("ample", [False, True])
@torch.inference_mode()
def test_on_a_side_stream(transformer, precision, place, ample):
    """The same numbers as without one, while the computing stream is kept busy so that copies do run ahead."""
    model = copy.deepcopy(transformer).cuda()
    context = torch.randn(1, 500, 64, generator=torch.Generator().manual_seed(0)).cuda()
    first = model.prefill(context)
    second = model.prefill(context[:, :300], past=first)
    host = torch.device("cpu")
    parts = [one.quantized(precision) for one in second.parts]
    parts = [one.to(host) if place == "host" or (place == "both" and i == 0) else one for i, one in enumerate(parts)]
    prefix = PrefixKV(tuple(parts), second.position)
    noisy, work = picture(24, 24, 0).cuda(), torch.randn(2048, 2048, device="cuda")
    plain, ahead = Workspace(lambda device: InlineCopies(), lambda nbytes, device: False), Workspace(ample=lambda nbytes, device: ample)
    expected = model.denoise(noisy, 0.5, prefix, workspace=plain)
    for _ in range(20):
        for _ in range(10):
            work = (work @ work).tanh()
        assert torch.equal(model.denoise(noisy, 0.5, prefix, workspace=ahead), expected)


@needs_cuda
def test_a_slice_of_pinned_memory_is_pinned():
    stored = part(4, 0).layers[0][0].to(torch.device("cuda")).to(torch.device("cpu"))
    assert stored.values.is_pinned() and stored.slice(1, 3).values.is_pinned()
