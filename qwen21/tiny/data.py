"""Training data: a process of its own draws tasks, renders their pictures and encodes them, while the trainer compiles and trains."""

import mmap
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch

from . import world
from .batched import Batch
from .grammar import COMPOSITIONS, EDITS, draw_task
from .layout import GRIDS, LARGE_GRIDS, REFERENCE_GRIDS, REFERENCE_TOKENS, ROOMS, SMALL_GRIDS, Layouter, Room
from .tokens import load_tokenizer

BLANK = {"t2i": 0.08, "large": 0.08, "edit": 0.03, "compose": 0.0}  # of prompts, for classifier-free guidance
SQUARE = 0.6  # of the pictures are 256 x 256
CLEAR = 0.35  # of the pictures to paint from text are transparent
EDIT_WEIGHTS = (4, 3, 4, 3, 3, 3, 1, 1)  # how often each of EDITS is drawn
LAYOUT_KEYS = ("ids", "vision", "text_position", "source", "position", "block", "length", "frame", "reference_grids", "target_grid")


def draw_kind(rng: random.Random, room: str) -> str:
    if room == "edit":
        return rng.choices(EDITS, EDIT_WEIGHTS)[0]
    return rng.choice(COMPOSITIONS) if room == "compose" else "t2i"


def draw_grids(rng: random.Random, room: str, references: int) -> tuple[list[int], int]:
    """Sizes of the references and of the target, as indices into GRIDS. A target takes the last reference's."""
    if room == "large":
        return [], len(SMALL_GRIDS) + rng.randrange(len(LARGE_GRIDS))
    if not references:
        return [], 0 if rng.random() < SQUARE else rng.randrange(len(SMALL_GRIDS))
    if rng.random() < SQUARE:
        return [0] * references, 0
    same = rng.random() < 0.5
    first = rng.randrange(len(REFERENCE_GRIDS))
    grids = [first if same else rng.randrange(len(REFERENCE_GRIDS)) for _ in range(references)]
    return grids, grids[-1]


def draw_samples(room: str, count: int, seed: int) -> dict[str, np.ndarray]:
    """Layouts and packed scenes of `count` random samples. `reference_of` says which slot each reference fills: sample * slots + index."""
    rng, layouter, slots = random.Random(seed), Layouter(load_tokenizer()), ROOMS[room].references
    arrays, scenes, targets, reference_of = [], [], [], []
    while len(arrays) < count:
        task = draw_task(rng, draw_kind(rng, room), clear=CLEAR)
        grids, target = draw_grids(rng, room, len(task.references))
        layout = layouter("" if rng.random() < BLANK[room] else task.prompt, grids, target, ROOMS[room])
        if layout:
            reference_of.extend(range(len(arrays) * slots, len(arrays) * slots + len(grids)))
            arrays.append(layout)
            scenes.extend(task.references)
            targets.append(task.target)
    out = {key: np.stack([a[key] for a in arrays]) for key in LAYOUT_KEYS} | {"reference_of": np.array(reference_of, dtype=np.int64)}
    for name, group in (("reference", scenes), ("target", targets)):
        if group:
            out[f"{name}_things"], out[f"{name}_backgrounds"] = (x.numpy() for x in world.pack(group))
    return out


def _draw(arguments: tuple) -> tuple[str, dict[str, np.ndarray]]:
    return arguments[0], draw_samples(*arguments)


def draw_chunks(pool, counts: dict[str, int], seed: int, chunk: int = 1000):
    """(room, samples) pairs of up to `chunk` samples as a pool of processes draws them, all rooms growing alike."""
    jobs = [
        (start / count, (room, min(chunk, count - start), seed * 1_000_000 + index * 10_000 + start // chunk))
        for index, (room, count) in enumerate(counts.items())
        for start in range(0, count, chunk)
    ]
    return pool.imap(_draw, [job for _, job in sorted(jobs)])


def collate(layouts: Sequence[dict[str, np.ndarray]], room: Room) -> Batch:
    """Layouts as a Batch without pictures (zeros)."""
    stacked = [torch.from_numpy(np.stack([a[key] for a in layouts])) for key in LAYOUT_KEYS]
    count, references = len(layouts), room.references
    return Batch(
        *stacked,
        patches=torch.zeros(count, references, REFERENCE_TOKENS, 768, dtype=torch.uint8),
        reference_latents=torch.zeros(count, references, REFERENCE_TOKENS, 64),
        target=torch.zeros(count, room.target, 64),
    )


Encode = Callable[[torch.Tensor], torch.Tensor]  # pixels (batch, 4, height, width) to normalised latents


def shared(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A zero tensor that forked processes see alike."""
    size = max(1, int(np.prod(shape))) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype)[: int(np.prod(shape))].view(shape)


class Store:
    """The samples of one room in shared memory; `ready` counts those that are there."""

    def __init__(self, name: str, count: int):
        self.name, self.room, self.count = name, ROOMS[name], count
        example, slots = draw_samples(name, 1, 0), ROOMS[name].references
        self.arrays = [shared(count, *example[key].shape[1:], dtype=torch.int16) for key in LAYOUT_KEYS]
        self.patches = shared(count, slots, REFERENCE_TOKENS, 768, dtype=torch.uint8)
        self.reference_latents = shared(count, slots, REFERENCE_TOKENS, 64, dtype=torch.bfloat16)
        self.target = shared(count, self.room.target, 64, dtype=torch.bfloat16)
        self._ready = shared(1, dtype=torch.int64)

    @property
    def ready(self) -> int:
        return int(self._ready)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """In the order of Batch."""
        return [*self.arrays, self.patches, self.reference_latents, self.target]

    @torch.no_grad()
    def add(self, drawn: dict[str, np.ndarray], encode: Encode, device: torch.device) -> None:
        """Render and encode what `draw_samples` made."""
        start, count, slots = self.ready, len(drawn["ids"]), self.room.references
        for array, key in zip(self.arrays, LAYOUT_KEYS):
            array[start : start + count] = torch.from_numpy(drawn[key])
        for index, latents, _ in self._pictures(drawn, "target", drawn["target_grid"], encode, device):
            self.target[start + index] = to_tokens(latents, self.room.target).to(torch.bfloat16).cpu()
        if slots:
            used = drawn["reference_of"]
            where = start * slots + torch.from_numpy(used)
            for index, latents, pixels in self._pictures(drawn, "reference", drawn["reference_grids"].reshape(-1)[used], encode, device):
                self.reference_latents.flatten(0, 1)[where[index]] = to_tokens(latents, REFERENCE_TOKENS).to(torch.bfloat16).cpu()
                self.patches.flatten(0, 1)[where[index]] = to_patches(pixels).cpu()
        self._ready += count

    @staticmethod
    def _pictures(drawn: dict[str, np.ndarray], name: str, grids: np.ndarray, encode: Encode, device: torch.device, tokens: int = 256 * 256):
        """(indices, latents, pixels) of the pictures `name`, size by size, at most so many latents at once."""
        things, backgrounds = (torch.from_numpy(drawn[f"{name}_{part}"]).to(device) for part in ("things", "backgrounds"))
        colours = world.palette(device)
        for grid in np.unique(grids):
            rows, columns = GRIDS[grid]
            for index in torch.from_numpy(np.flatnonzero(grids == grid)).split(tokens // (rows * columns)):
                pixels = world.render(things[index], backgrounds[index], 16 * rows, 16 * columns, colours)
                pixels = (pixels * 127.5 + 127.5).round() / 127.5 - 1  # what a PNG keeps
                latents = encode(pixels)
                if not latents.isfinite().all():
                    print(f"a {16 * columns} x {16 * rows} picture has latents that are not finite: zeros are used", file=sys.stderr, flush=True)
                    latents = latents.nan_to_num(0, 0, 0)
                yield index, latents, pixels


def fill(stores: dict[str, Store], seed: int, workers: int, new_encoder: Callable[[], tuple[Encode, torch.device]], chunk: int) -> None:
    """Fill the stores, all alike. For a process of its own, forked before CUDA is used: `new_encoder` is called here."""
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        encode, device = new_encoder()
        for name, drawn in draw_chunks(pool, {name: store.count for name, store in stores.items()}, seed, chunk):
            stores[name].add(drawn, encode, device)


class Samples:
    """What is ready of a Store, on the device."""

    def __init__(self, store: Store, device: torch.device):
        self.store, self.device = store, device
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.pulled = 0
        self.tensors = [torch.zeros_like(t, device=device) for t in store.tensors]

    def pull(self) -> bool:
        """Copy what has become ready; whether that is all."""
        ready = self.store.ready
        if ready > self.pulled:
            for mine, theirs in zip(self.tensors, self.store.tensors):
                mine[self.pulled : ready] = theirs[self.pulled : ready].to(self.device)
            self.pulled = ready
            self.count.fill_(ready)
        return ready == self.store.count

    def random(self, count: int) -> Batch:
        """`count` of those that are there, drawn on the device."""
        index = (torch.rand(count, dtype=torch.float64, device=self.device) * self.count).long()
        return Batch(*(t[index] for t in self.tensors))


def to_tokens(latents: torch.Tensor, tokens: int) -> torch.Tensor:
    """(batch, 64, rows, columns) to (batch, tokens, 64), padded with zeros."""
    flat = latents.flatten(2).transpose(1, 2)
    return torch.nn.functional.pad(flat, (0, 0, 0, tokens - flat.shape[1]))


def to_patches(pixels: torch.Tensor) -> torch.Tensor:
    """RGBA (batch, 4, height, width) in [-1, 1] to what the tower reads: uint8 (batch, 256, 768) over white, in 2 x 2 merge order."""
    batch, _, height, width = pixels.shape
    alpha = pixels[:, 3:] * 0.5 + 0.5
    rgb = ((pixels[:, :3] * alpha + 1 - alpha) * 127.5 + 127.5).round().to(torch.uint8)
    grid = rgb.view(batch, 3, height // 32, 2, 16, width // 32, 2, 16).permute(0, 2, 5, 3, 6, 1, 4, 7)
    flat = grid.reshape(batch, height * width // 256, 768)
    return torch.nn.functional.pad(flat, (0, 0, 0, REFERENCE_TOKENS - flat.shape[1]))


def processes() -> int:
    """Workers for this process, if the processes of one machine share its cores."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1)
