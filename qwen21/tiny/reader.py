"""Reads a picture of the world back by ordinary image processing: no network, no knowledge of what was asked.

The background is fitted to the picture's border, objects are what differs from it, and each is compared with masks of the ten shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np
import torch
from PIL import Image

from . import world
from .world import CENTRES, CLEAR, GRADIENT, NATIVE, PLAIN, RADII, SHAPES, STRIPES, Scene

PALETTE = np.array(list(world.COLOURS.values()), dtype=np.float32) / 255
WINDOW = 96  # side of the masks that are compared, pixels at 256
TEMPLATE_RADII = np.arange(14, 46, 0.25, dtype=np.float32)
LEAST_AREA = 110  # pixels at 256: a third of the smallest object
LEAST_LIKENESS = 0.6
MOST_THINGS = 6  # the largest ones are read
REACH = 4.0  # pixels at 256 that a shape may be from where it was read, and its radius from what was


@dataclass(frozen=True)
class ReadThing:
    """`shape` is None if nothing fits. `fits[s]` is (likeness, x, y, radius) of the best fit of shape s, in the units of world.Thing."""

    shape: int | None
    colour: int
    size: int
    place: int
    fits: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True)
class Reading:
    background: world.Background
    things: tuple[ReadThing, ...]


def read(rgba: np.ndarray) -> Reading:
    """`rgba` is uint8 (height, width, 4)."""
    pixels = rgba.astype(np.float32) / 255
    height, width = pixels.shape[:2]
    unit = min(height, width) / NATIVE
    background, behind = read_background(pixels)
    if background.kind == CLEAR:
        difference = pixels[..., 3]
        mask = difference > 0.5
    else:
        difference = np.linalg.norm(pixels[..., :3] - behind, axis=-1)
        mask = (difference > world.CONTRAST / 2) & (pixels[..., 3] > 0.5)
    labels, areas = components(mask)
    large = sorted((label for label, area in enumerate(areas, start=1) if area >= LEAST_AREA * unit**2), key=lambda label: -areas[label - 1])
    things = [_read_thing(pixels, behind, labels, label, background, unit) for label in large[:MOST_THINGS]]
    return Reading(background, tuple(things))


def read_background(pixels: np.ndarray) -> tuple[world.Background, np.ndarray]:
    """The background and its RGB at every pixel, from the border alone (objects keep away from it)."""
    height, width = pixels.shape[:2]
    edge = max(2, round(3 * min(height, width) / NATIVE))
    border = np.ones((height, width), dtype=bool)
    border[edge:-edge, edge:-edge] = False
    if np.median(pixels[border, 3]) < 0.5:
        return world.Background(CLEAR), np.ones((height, width, 3), dtype=np.float32)
    seen = pixels[border, :3]
    best = None
    for kind, across, mix in patterns(height, width):
        m = mix[border]
        design = np.stack([1 - m, m], axis=1) if kind != PLAIN else np.ones((len(m), 1), dtype=np.float32)
        ends = np.linalg.lstsq(design, seen, rcond=None)[0]
        error = np.abs(design @ ends - seen).mean()
        first, second = ends[0], ends[-1]
        error += 0.004 if kind != PLAIN else 0.0  # the simpler answer wins a tie
        if best is None or error < best[0]:
            best = error, kind, across, mix, first, second
    _, kind, across, mix, first, second = best
    a, b = nearest_colour(first), nearest_colour(second)
    if a == b:
        kind, across = PLAIN, False
    return world.Background(kind, a, b, across), first + (second - first) * mix[..., None]


@lru_cache(maxsize=32)
def patterns(height: int, width: int) -> list[tuple[int, bool, np.ndarray]]:
    """Every kind of background with its mixture of two colours, (height, width)."""
    out = []
    for kind, across in ((PLAIN, False), (GRADIENT, False), (GRADIENT, True), (STRIPES, False), (STRIPES, True)):
        flags = [torch.full((1, 1, 1), float(value)) for value in (kind, across)]
        out.append((kind, across, world.pattern(*flags, height, width).expand(1, height, width)[0].numpy()))
    return out


def nearest_colour(rgb: np.ndarray) -> int:
    return int(np.square(PALETTE - rgb).sum(axis=1).argmin())


def components(mask: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """4-connected components: labels from 1 (int32, 0 is outside) and their areas. Row runs joined by union-find."""
    padded = np.zeros((mask.shape[0], mask.shape[1] + 2), dtype=np.int8)
    padded[:, 1:-1] = mask
    step = np.diff(padded, axis=1)
    rows, starts = np.nonzero(step == 1)
    ends = np.nonzero(step == -1)[1]
    parent = list(range(len(rows)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first = np.searchsorted(rows, np.arange(mask.shape[0] + 1))
    for row in range(1, mask.shape[0]):
        above, here = first[row - 1], first[row]
        while above < first[row] and here < first[row + 1]:
            if starts[above] < ends[here] and starts[here] < ends[above]:
                parent[root(here)] = root(int(above))
            if ends[above] < ends[here]:
                above += 1
            else:
                here += 1
    names: dict[int, int] = {}
    areas: list[int] = []
    labels = np.zeros(mask.shape, dtype=np.int32)
    for i, (row, start, end) in enumerate(zip(rows, starts, ends)):
        label = names.setdefault(root(i), len(names) + 1)
        if label > len(areas):
            areas.append(0)
        areas[label - 1] += int(end - start)
        labels[row, start:end] = label
    return labels, areas


def _read_thing(pixels: np.ndarray, behind: np.ndarray, labels: np.ndarray, label: int, background: world.Background, unit: float) -> ReadThing:
    height, width = labels.shape
    ys, xs = np.nonzero(labels == label)
    reach = int(2 * unit) + 2
    box = np.s_[max(0, ys.min() - reach) : ys.max() + reach + 1, max(0, xs.min() - reach) : xs.max() + reach + 1]
    own, rgb = labels[box] == label, pixels[box][..., :3]
    inner = own & shrunk(own, max(1, round(1.5 * unit)))
    colour = np.median(rgb[inner if inner.sum() > 8 else own], axis=0)
    if background.kind == CLEAR:
        cover = pixels[box][..., 3]
    else:
        away = colour - behind[box]
        cover = ((rgb - behind[box]) * away).sum(-1) / np.maximum(np.square(away).sum(-1), 1e-3)
    cover = np.where(own | (labels[box] == 0), cover.clip(0, 1), 0).astype(np.float32)
    cover[cover < 0.08] = 0  # noise of the background
    total = cover.sum()
    cy = float(((np.arange(cover.shape[0]) + 0.5) * cover.sum(1)).sum() / total) + box[0].start
    cx = float(((np.arange(cover.shape[1]) + 0.5) * cover.sum(0)).sum() / total) + box[1].start
    fits = _fit(_window(cover, cx - box[1].start, cy - box[0].start, unit), cx, cy, width, height, unit)
    likeness = [fit[0] for fit in fits]
    best = int(np.argmax(likeness))
    _, x, y, radius = fits[best]
    place = 3 * _nearest(CENTRES, y) + _nearest(CENTRES, x)
    return ReadThing(best if likeness[best] >= LEAST_LIKENESS else None, nearest_colour(colour), _nearest(RADII, radius), place, tuple(fits))


def _nearest(values, value: float) -> int:
    return int(np.abs(np.asarray(values) - value).argmin())


def shrunk(mask: np.ndarray, pixels: int) -> np.ndarray:
    """The mask without the rim of so many pixels."""
    padded = np.pad(mask, pixels)
    out = mask.copy()
    for shift in (-pixels, pixels):
        out &= np.roll(padded, shift, axis=0)[pixels:-pixels, pixels:-pixels]
        out &= np.roll(padded, shift, axis=1)[pixels:-pixels, pixels:-pixels]
    return out


def _window(cover: np.ndarray, cx: float, cy: float, unit: float) -> np.ndarray:
    """Coverage around (cx, cy) at the scale of a 256-pixel picture, (96 * 96,)."""
    half = WINDOW / 2 * unit
    margin = int(np.ceil(half)) + 2
    canvas = Image.fromarray(np.pad(cover, margin))
    box = (cx + margin - half, cy + margin - half, cx + margin + half, cy + margin + half)
    return np.asarray(canvas.resize((WINDOW, WINDOW), Image.Resampling.BILINEAR, box=box)).reshape(-1)


@lru_cache(maxsize=1)
def templates() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Masks (shapes, radii, 96 * 96) whose centroids are the centre, their squared norms, and the centroids' offsets from the shapes' centres in radii (shapes, 2)."""
    fine = (torch.arange(400) + 0.5) / 200 - 1
    y, x = torch.meshgrid(fine, fine, indexing="ij")
    insides = [(d < 0).float() for d in world.distances(x, y)]
    offsets = torch.stack([torch.stack([(m * x).sum(), (m * y).sum()]) / m.sum() for m in insides])
    grid = torch.arange(WINDOW) + 0.5 - WINDOW / 2
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    masks = torch.empty(len(SHAPES), len(TEMPLATE_RADII), WINDOW * WINDOW)
    for j, radius in enumerate(TEMPLATE_RADII.tolist()):
        for shape, (ox, oy) in enumerate(offsets.tolist()):
            d = world.distances(x / radius + ox, y / radius + oy)[shape]
            masks[shape, j] = torch.clamp(0.5 - d * radius, 0, 1).reshape(-1)
    masks = masks.numpy()
    return masks, np.square(masks).sum(-1), offsets.numpy()


def _fit(window: np.ndarray, cx: float, cy: float, width: int, height: int, unit: float) -> list[tuple[float, float, float, float]]:
    """For each shape the likeness (Tanimoto, 0..1), x, y and radius of its best mask."""
    masks, norms, offsets = templates()
    product = masks.reshape(-1, WINDOW * WINDOW) @ window
    likeness = (product / (norms.reshape(-1) + np.square(window).sum() - product)).reshape(norms.shape)
    fits = []
    for shape, row in enumerate(likeness):
        j = int(row.argmax())
        radius = float(TEMPLATE_RADII[j])
        ox, oy = offsets[shape] * radius * unit
        fits.append((float(row[j]), float((cx - ox) / width), float((cy - oy) / height), radius))
    return fits


# ---------------------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Verdict:
    """Each attribute is right or wrong for each thing that was asked for, in the scene's order; `alone` says that nothing else is there."""

    place: tuple[bool, ...]
    colour: tuple[bool, ...]
    shape: tuple[bool, ...]
    size: tuple[bool, ...]
    background: bool
    alone: bool

    ATTRIBUTES = ("place", "colour", "shape", "size")

    def thing(self, index: int) -> bool:
        return all(getattr(self, name)[index] for name in self.ATTRIBUTES)

    @property
    def all_right(self) -> bool:
        return self.background and self.alone and all(self.thing(i) for i in range(len(self.place)))


def same_background(a: world.Background, b: world.Background) -> bool:
    if a.kind != b.kind or a.kind == CLEAR:
        return a.kind == b.kind
    if a.kind == STRIPES:
        return a.across == b.across and {a.first, a.second} == {b.first, b.second}
    return (a.first, a.second, a.across) == (b.first, b.second, b.across)


def match(reading: Reading, scene: Scene) -> list[ReadThing | None]:
    """What was read for each thing of the scene: what stands at its place, else whatever is left over, in reading order."""
    left = list(reading.things)
    found: list[ReadThing | None] = []
    for thing in scene.things:
        at = next((r for r in left if r.place == thing.place), None)
        found.append(at)
        if at:
            left.remove(at)
    return [r if r else (left.pop(0) if left else None) for r in found]


def judge(reading: Reading, scene: Scene) -> Verdict:
    pairs = list(zip(match(reading, scene), scene.things))
    right = {name: tuple(r is not None and getattr(r, name) == getattr(t, name) for r, t in pairs) for name in Verdict.ATTRIBUTES}
    return Verdict(**right, background=same_background(reading.background, scene.background), alone=len(reading.things) == len(scene.things))


def alpha_iou(rgba: np.ndarray, reading: Reading, scene: Scene) -> float:
    """Overlap of the picture's alpha with the shapes that were asked for, each laid where and as large as it fits best near where it was read.

    The search takes one step at a time while the overlap grows, from two pixels at 256 down to a quarter, and goes no farther than REACH.
    """
    height, width = rgba.shape[:2]
    unit = min(height, width) / NATIVE
    got = rgba[..., 3] > 127
    things = []
    for r, t in zip(match(reading, scene), scene.things):
        _, x, y, radius = r.fits[t.shape] if r else (0, t.x, t.y, t.radius)
        things.append(replace(t, x=x, y=y, radius=radius))

    rows, columns = torch.arange(height)[:, None] + 0.5, torch.arange(width) + 0.5

    def shape(thing: world.Thing) -> np.ndarray:
        d = world.distance(torch.tensor(thing.shape), columns - thing.x * width, rows - thing.y * height, torch.tensor(thing.radius * unit))
        return d.numpy() < 0

    start, masks = list(things), [shape(thing) for thing in things]
    best = _overlap(masks, got)
    for step in (2.0, 1.0, 0.5, 0.25):  # less than a pixel may move no pixel of a mask
        grew = True
        while grew:
            grew = False
            for index, (sign, axis) in product(range(len(things)), product((step, -step), np.eye(3))):
                x, y, radius = sign * axis * (unit / width, unit / height, 1)
                thing = replace(things[index], x=things[index].x + x, y=things[index].y + y, radius=things[index].radius + radius)
                if _distance(thing, start[index], width / unit, height / unit) > REACH:
                    continue
                mask = shape(thing)
                found = _overlap([*masks[:index], mask, *masks[index + 1 :]], got)
                if found > best:
                    best, things[index], masks[index], grew = found, thing, mask, True
    return best


def _distance(a: world.Thing, b: world.Thing, width: float, height: float) -> float:
    """Pixels at 256 by which place or radius differ most."""
    return max(abs(a.x - b.x) * width, abs(a.y - b.y) * height, abs(a.radius - b.radius))


def _overlap(masks: Sequence[np.ndarray], got: np.ndarray) -> float:
    """Intersection over union of all `masks` together and `got`."""
    wanted = np.logical_or.reduce(masks)
    return float((wanted & got).sum() / max(1, (wanted | got).sum()))
