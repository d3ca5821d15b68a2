"""Prefixes of a sampling run: recognised by content, taken from the model's cache, held until the run ends."""

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import comfy.model_management
import torch

from ..qwen21.prefix import PrefixKV
from ..qwen21.prefix_cache import PrefixCache, digest, prefix_items
from ..qwen21.workspace import Workspace

CACHE_DEVICES = ("auto", "gpu", "cpu", "off")
CACHE_OPTION = "qwen21_prefix_cache"  # in a model's transformer_options

# (context, slots, references, past) -> past and what follows it
Prefill = Callable[[torch.Tensor, Sequence[int], Sequence[torch.Tensor], PrefixKV], PrefixKV]


@dataclass(frozen=True)
class CacheSettings:
    """Where keys and values are kept, how many bytes of them (0: a quarter of the memory that is free), and in which precision."""

    budget: int = 0
    device: str = "auto"
    precision: str = "default"


@dataclass(frozen=True, eq=False)
class TextIdentity:
    """What Encode knows about a conditioning's text: one key a token, good for as long as `digest` is that of the states."""

    keys: tuple[Hashable, ...]
    digest: bytes

    def of(self, states: torch.Tensor) -> tuple[Hashable, ...] | None:
        """The keys if `states` (1, tokens, width) are the ones they were made for, else None: another node has changed them."""
        return self.keys if digest(states) == self.digest else None


@dataclass(frozen=True, eq=False)
class TextKeys:
    """Keys that go with a conditioning's states through ComfyUI to the denoiser. Compared by identity: two prompts are never batched."""

    states: torch.Tensor
    keys: tuple[Hashable, ...]

    def of(self, context: torch.Tensor) -> tuple[Hashable, ...] | None:
        """The keys if `context` is still what `states` became on the way; a wrapper may have changed it."""
        unchanged = self.states.shape == context.shape and torch.equal(self.states.to(context.device, context.dtype), context)
        return self.keys if unchanged else None


@dataclass(frozen=True)
class RunPrefix:
    """A prefix seen in this run: what it was made of, and its keys and values."""

    context: torch.Tensor
    slots: list[int]
    references: list[torch.Tensor]
    kv: PrefixKV

    def is_made_of(self, context: torch.Tensor, slots: list[int], references: list[torch.Tensor]) -> bool:
        return (
            self.slots == slots
            and len(self.references) == len(references)
            and torch.equal(self.context, context)
            and all(torch.equal(mine, other) for mine, other in zip(self.references, references))
        )


@dataclass
class Run:
    """One sampling run over a model's `cache`, from ComfyUI's pre_run to its cleanup.

    `weights` is what decides keys and values beside the prefix; None if that may change between two calls, and then nothing is kept.
    """

    cache: PrefixCache
    weights: Hashable | None = None
    started: float | None = None  # time.perf_counter() at the first call, when the model is loaded
    prefixes: list[RunPrefix] = field(default_factory=list)
    held: ExitStack = field(default_factory=ExitStack)
    workspace: Workspace = field(default_factory=Workspace)

    def start(self) -> None:
        """Note when the first call came."""
        if self.started is None:
            self.started = time.perf_counter()

    def prefix(
        self, context: torch.Tensor, slots: list[int], references: list[torch.Tensor], text: TextKeys | None, settings: CacheSettings, prefill: Prefill
    ) -> RunPrefix:
        """The prefix with that content, computed as far as neither this run nor the cache has it."""
        known = next((prefix for prefix in self.prefixes if prefix.is_made_of(context, slots, references)), None)
        if known is not None:
            return known
        if self.weights is None or settings.device == "off":
            return RunPrefix(context, slots, references, prefill(context, slots, references, PrefixKV()))
        keys = (text and text.of(context)) or [digest(state) for state in context[0].cpu()]  # all at once: the host waits for every copy
        items = prefix_items(keys, slots, [(*latents.shape[2:], digest(latents)) for latents in references])

        def rest(past: PrefixKV, texts: int, pictures: int) -> PrefixKV:
            return prefill(context[:, texts:], [slot - texts for slot in slots[pictures:]], references[pictures:], past)

        self._configure(settings, context.device)
        weights = (self.weights, context.dtype, context.device, settings.precision)
        kv = self.held.enter_context(self.cache.prefix(weights, items, rest))
        # What the host hands in may be views of tensors it overwrites: keep copies to compare with.
        prefix = RunPrefix(context.clone(), slots, [latents.clone() for latents in references], kv)
        self.prefixes.append(prefix)
        return prefix

    def close(self) -> None:
        """Let go of what this run held; the cache keeps it within its budget."""
        self.prefixes.clear()
        self.held.close()
        self.workspace = Workspace()

    def _configure(self, settings: CacheSettings, device: torch.device) -> None:
        self.cache.precision, self.cache.placement = settings.precision, settings.device
        self.cache.room = comfy.model_management.get_free_memory
        free = comfy.model_management.get_free_memory(torch.device("cpu")) + (comfy.model_management.get_free_memory(device) if device.type != "cpu" else 0)
        self.cache.budget = settings.budget or int(free // 4) + self.cache.tree.nbytes()
