"""Training data: tasks drawn on all processor cores, their pictures rendered and encoded once on the GPU and kept there."""

import os
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from . import world
from .batched import Batch
from .grammar import COMPOSITIONS, EDITS, draw_task
from .layout import GRIDS, LARGE_GRIDS, REFERENCE_GRIDS, REFERENCE_TOKENS, ROOMS, SMALL_GRIDS, Layouter, Room
from .tokens import load_tokenizer

BLANK = {"t2i": 0.08, "large": 0.08, "edit": 0.03, "compose": 0.0}  # of prompts, for classifier-free guidance
SQUARE = 0.85  # of the pictures are 256 x 256
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
        task = draw_task(rng, draw_kind(rng, room))
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


class Samples:
    """The samples of one room on the device. Drawn from while it is still being filled: `ready` counts what is there."""

    def __init__(self, name: str, count: int, encode: Callable[[torch.Tensor], torch.Tensor], device: torch.device, paint=world.paint, chunk: int = 256):
        """`encode(pixels, square)` maps (chunk, 4, height, width) to normalised latents; `square` says that the shape is always (chunk, 4, 256, 256)."""
        self.room, self.ready, self.encode, self.paint, self.chunk = ROOMS[name], 0, encode, paint, chunk
        self.colours = world.palette(device)
        room, empty = self.room, lambda *shape, dtype=torch.bfloat16: torch.zeros(count, *shape, dtype=dtype, device=device)
        example = draw_samples(name, 1, 0)
        self.arrays = [empty(*example[key].shape[1:], dtype=torch.int16) for key in LAYOUT_KEYS]
        self.target = empty(room.target, 64)
        self.reference_latents = empty(room.references, REFERENCE_TOKENS, 64)
        self.patches = empty(room.references, REFERENCE_TOKENS, 768, dtype=torch.uint8)

    @torch.no_grad()
    def add(self, drawn: dict[str, np.ndarray]) -> None:
        """Render and encode what `draw_samples` made."""
        start, count, device = self.ready, len(drawn["ids"]), self.target.device
        for array, key in zip(self.arrays, LAYOUT_KEYS):
            array[start : start + count] = torch.from_numpy(drawn[key]).to(device)
        slots, used = self.room.references, drawn["reference_of"]
        for index, latents, _ in self._pictures(drawn, "target", drawn["target_grid"]):
            self.target[start + index] = self.to_tokens(latents, self.room.target).to(torch.bfloat16)
        if slots:
            flat_latents, flat_patches = self.reference_latents.flatten(0, 1), self.patches.flatten(0, 1)
            where = start * slots + torch.from_numpy(used).to(device)
            for index, latents, pixels in self._pictures(drawn, "reference", drawn["reference_grids"].reshape(-1)[used]):
                flat_latents[where[index]] = self.to_tokens(latents, REFERENCE_TOKENS).to(torch.bfloat16)
                flat_patches[where[index]] = self.to_patches(pixels)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self.ready += count

    def _pictures(self, drawn: dict[str, np.ndarray], name: str, grids: np.ndarray):
        """(indices, latents, pixels) of the pictures `name`, size by size."""
        device = self.target.device
        things, backgrounds = (torch.from_numpy(drawn[f"{name}_{part}"]).to(device) for part in ("things", "backgrounds"))
        for grid in np.unique(grids):
            rows, columns = GRIDS[grid]
            square = rows == columns == 16
            step = max(1, self.chunk * 256 // max(256, rows * columns))
            for index in torch.from_numpy(np.flatnonzero(grids == grid)).to(device).split(step):
                full = torch.cat([index, index[:1].expand(step - len(index))]) if square else index  # one compiled shape
                pixels = world.render(things[full], backgrounds[full], 16 * rows, 16 * columns, self.colours, self.paint if square else world.paint)
                pixels = (pixels * 127.5 + 127.5).round() / 127.5 - 1  # what a PNG keeps
                yield index, self.encode(pixels, square)[: len(index)], pixels[: len(index)]

    @staticmethod
    def to_tokens(latents: torch.Tensor, tokens: int) -> torch.Tensor:
        """(batch, 64, rows, columns) to (batch, tokens, 64), padded with zeros."""
        flat = latents.flatten(2).transpose(1, 2)
        return torch.nn.functional.pad(flat, (0, 0, 0, tokens - flat.shape[1]))

    @staticmethod
    def to_patches(pixels: torch.Tensor) -> torch.Tensor:
        """RGBA (batch, 4, height, width) in [-1, 1] to what the tower reads: uint8 (batch, 256, 768) over white, in 2 x 2 merge order."""
        batch, _, height, width = pixels.shape
        alpha = pixels[:, 3:] * 0.5 + 0.5
        rgb = ((pixels[:, :3] * alpha + 1 - alpha) * 127.5 + 127.5).round().to(torch.uint8)
        grid = rgb.view(batch, 3, height // 32, 2, 16, width // 32, 2, 16).permute(0, 2, 5, 3, 6, 1, 4, 7)
        flat = grid.reshape(batch, height * width // 256, 768)
        return torch.nn.functional.pad(flat, (0, 0, 0, REFERENCE_TOKENS - flat.shape[1]))

    def batch(self, index: torch.Tensor) -> Batch:
        return Batch(*(a[index] for a in self.arrays), patches=self.patches[index], reference_latents=self.reference_latents[index], target=self.target[index])

    def random(self, count: int) -> Batch:
        return self.batch(torch.randint(0, self.ready, (count,), device=self.target.device))


def processes() -> int:
    """Workers for this process, if the processes of one machine share its cores."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1)
