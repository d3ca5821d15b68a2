"""The world of the tiny model: pictures of one to three coloured shapes on simple backgrounds, drawn by signed distance.

A scene is size-free: places are fractions of the sides, radii are pixels of a picture whose shorter side is 256. `render` draws a batch
of scenes at one size on any device, antialiased, as straight-alpha RGBA in [-1, 1].
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

NATIVE = 256
SHAPES = ("circle", "square", "triangle", "diamond", "star", "heart", "ring", "cross", "moon", "hexagon")
COLOURS = {
    "red": (220, 40, 40), "orange": (245, 140, 30), "yellow": (245, 215, 50), "green": (50, 170, 70), "cyan": (60, 205, 220), "blue": (45, 85, 215),
    "purple": (140, 60, 190), "pink": (245, 140, 190), "brown": (130, 80, 45), "black": (25, 25, 25), "white": (245, 245, 245), "gray": (135, 135, 135),
}  # fmt: skip
COLOUR_NAMES = tuple(COLOURS)
OBJECT_COLOURS = 10  # white and gray are for backgrounds only
SIZES = ("small", "medium", "large")
RADII = (22.0, 30.0, 38.0)
PLACES = ("top left", "top center", "top right", "middle left", "center", "middle right", "bottom left", "bottom center", "bottom right")
CENTRES = (46 / 256, 0.5, 210 / 256)  # of the three columns, and of the three rows
POSITION_JITTER = 2.0  # pixels at 256
RADIUS_JITTER = 0.04
GAP = 3.0  # pixels at 256 between the circles around two objects
PERIOD = 32.0  # pixels at 256 of a pair of stripes
PLAIN, GRADIENT, STRIPES, CLEAR = range(4)
CONTRAST = 0.33  # least distance in RGB (0..1 each) between an object's colour and any colour of its background
WHITE = COLOUR_NAMES.index("white")
# Pairs of shape and colour that training never shows: the evaluation asks for them.
HELD_OUT = frozenset((shape, (3 * shape + 1) % OBJECT_COLOURS) for shape in (0, 2, 4, 6, 8))


def palette(device=None) -> torch.Tensor:
    """(12, 3) in [-1, 1]."""
    return torch.tensor(list(COLOURS.values()), dtype=torch.float32, device=device) / 127.5 - 1


@dataclass(frozen=True)
class Thing:
    """One object. `shape`, `colour`, `size` and `place` index the names above; x, y are fractions of the sides, radius is pixels at 256."""

    shape: int
    colour: int
    size: int
    place: int
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Background:
    """`across` turns a gradient (top to bottom) and stripes (lying) by a quarter: left to right, standing. Of CLEAR, `first` lies unseen under alpha 0."""

    kind: int
    first: int = WHITE
    second: int = WHITE
    across: bool = False

    @property
    def colours(self) -> tuple[int, ...]:
        return () if self.kind == CLEAR else (self.first, self.second)


@dataclass(frozen=True)
class Scene:
    things: tuple[Thing, ...]
    background: Background


def _rgb(colour: int) -> tuple[float, ...]:
    return tuple(c / 255 for c in COLOURS[COLOUR_NAMES[colour]])


def _legible(colour: int, background: Background) -> bool:
    """Whether an object of this colour stands out everywhere: from both colours, and from what a gradient passes through."""
    if background.kind == CLEAR:
        return True
    c, a, b = (_rgb(i) for i in (colour, background.first, background.second))
    steps = (0.0, 1.0) if background.kind != GRADIENT else [i / 8 for i in range(9)]
    return all(math.dist(c, [p + t * (q - p) for p, q in zip(a, b)]) >= CONTRAST for t in steps)


_READABLE = {
    (kind, first, second): tuple(c for c in range(OBJECT_COLOURS) if _legible(c, Background(kind, first, second)))
    for kind in (PLAIN, GRADIENT, STRIPES)
    for first in range(len(COLOURS))
    for second in range(len(COLOURS))
}


def readable_colours(background: Background) -> tuple[int, ...]:
    """Object colours that stand out on `background`."""
    return tuple(range(OBJECT_COLOURS)) if background.kind == CLEAR else _READABLE[background.kind, background.first, background.second]


def draw_background(rng: random.Random, clear: float = 0.2) -> Background:
    """`clear` is the probability of transparency; the rest is half plain, a quarter gradients, a quarter stripes."""
    if rng.random() < clear:
        return Background(CLEAR)
    kind = rng.choice((PLAIN, PLAIN, GRADIENT, STRIPES))
    while True:
        first, second = rng.sample(range(len(COLOURS)), 2)
        if kind == PLAIN:
            return Background(PLAIN, first, first)
        background = Background(kind, first, second, rng.random() < 0.5)
        if math.dist(_rgb(first), _rgb(second)) >= CONTRAST and len(readable_colours(background)) >= 4:
            return background


def draw_thing(rng: random.Random, shape: int, colour: int, size: int, place: int) -> Thing:
    """A thing with a little freedom in position and radius."""
    spread = lambda: rng.uniform(-1, 1)
    return Thing(
        shape, colour, size, place,
        x=CENTRES[place % 3] + spread() * POSITION_JITTER / NATIVE, y=CENTRES[place // 3] + spread() * POSITION_JITTER / NATIVE,
        radius=RADII[size] * (1 + RADIUS_JITTER * spread()),
    )  # fmt: skip


def apart(a: Thing, b: Thing) -> bool:
    """Whether the circles around two things keep their distance in a square picture (the tightest)."""
    return a.place != b.place and math.dist((a.x, a.y), (b.x, b.y)) * NATIVE >= a.radius + b.radius + GAP


def draw_things(rng: random.Random, background: Background, count: int, others: tuple[Thing, ...] = (), held_out: bool = False) -> tuple[Thing, ...]:
    """`count` new things beside `others`: no two of one shape or one colour, none overlapping, held-out pairs only for the first if asked."""
    while True:
        things: list[Thing] = []
        for index in range(count):
            near = (*others, *things)
            colours = [c for c in readable_colours(background) if c not in {t.colour for t in near}]
            shapes = [s for s in range(len(SHAPES)) if s not in {t.shape for t in near}]
            places = [p for p in range(len(PLACES)) if p not in {t.place for t in near}]
            wanted = held_out and index == 0
            pairs = [(s, c) for s in shapes for c in colours if ((s, c) in HELD_OUT) == wanted]
            if not pairs:
                break
            for _ in range(20):
                thing = draw_thing(rng, *rng.choice(pairs), rng.randrange(len(SIZES)), rng.choice(places))
                if all(apart(thing, other) for other in near):
                    things.append(thing)
                    break
        if len(things) == count:
            return tuple(things)
        if held_out:  # this background may allow none of the held-out pairs
            return ()


def draw_scene(rng: random.Random, count: int | None = None, clear: float = 0.2, held_out: bool = False) -> Scene:
    """A random scene of `count` things (else 1, 2 or 3); `held_out` makes its first thing one of the held-out pairs."""
    count = count or rng.choice((1, 2, 2, 3))
    while True:
        background = draw_background(rng, clear)
        if len(readable_colours(background)) >= count:
            things = draw_things(rng, background, count, held_out=held_out)
            if things:
                return Scene(things, background)


# ---------------------------------------------------------------------------------------------------------------- drawing


def pack(scenes: Sequence[Scene], slots: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """What `render` draws: things (batch, slots, 5) of shape (-1: none), colour, x, y, radius; backgrounds (batch, 4). float32."""
    things = np.full((len(scenes), slots, 5), 1, dtype=np.float32)
    things[..., 0] = -1
    for row, scene in zip(things, scenes):
        for slot, t in zip(row, scene.things):
            slot[:] = t.shape, t.colour, t.x, t.y, t.radius
    backgrounds = np.array([(b.kind, b.first, b.second, b.across) for b in (s.background for s in scenes)], dtype=np.float32)
    return torch.from_numpy(things), torch.from_numpy(backgrounds)


def distances(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Signed distances to the ten shapes, each inside the unit circle; y points down. Exact near the edge, which is all that drawing needs."""
    ax, ay = x.abs(), y.abs()
    r = torch.sqrt(x * x + y * y + 1e-9)
    circle = r - 0.92
    square = torch.maximum(ax, ay) - 0.80
    triangle = torch.maximum(y - 0.56, 0.8944 * ax - 0.4472 * y - 0.4472)
    diamond = 0.8192 * ax + 0.5736 * ay - 0.5736
    return [circle, square, triangle, diamond, _star(ax, y), _heart(ax, y), (r - 0.69).abs() - 0.25, _cross(ax, ay), _moon(x, y, r), _hexagon(ax, ay)]


def _star(ax: torch.Tensor, y: torch.Tensor, outer: float = 1.0, inner: float = 0.5) -> torch.Tensor:
    """Five points, fat enough for 16-pixel latents. Folded into one tenth by two reflections, then the distance to one edge."""
    cosine, sine = math.cos(math.pi / 5), math.sin(math.pi / 5)
    px, py = ax, -y
    d = 2 * torch.clamp(cosine * px - sine * py, min=0)
    px, py = px - d * cosine, py + d * sine
    d = 2 * torch.clamp(-cosine * px - sine * py, min=0)
    px, py = (px + d * cosine).abs(), py + d * sine - outer
    ex, ey = inner * sine, inner * cosine - outer
    t = torch.clamp((px * ex + py * ey) / (ex * ex + ey * ey), 0, 1)
    qx, qy = px - ex * t, py - ey * t
    return torch.sqrt(qx * qx + qy * qy + 1e-9) * torch.sign(py * ex - px * ey)


def _heart(ax: torch.Tensor, y: torch.Tensor, scale: float = 1.62) -> torch.Tensor:
    px, py = ax / scale, 0.55 - y / scale
    lobe = torch.sqrt((px - 0.25) ** 2 + (py - 0.75) ** 2 + 1e-9) - math.sqrt(2) / 4
    m = 0.5 * torch.clamp(px + py, min=0)
    tip = torch.sqrt(torch.minimum(px**2 + (py - 1) ** 2, (px - m) ** 2 + (py - m) ** 2) + 1e-9) * torch.sign(px - py)
    return torch.where(px + py > 1, lobe, tip) * scale


def _cross(ax: torch.Tensor, ay: torch.Tensor, arm: float = 0.33, reach: float = 0.92) -> torch.Tensor:
    return torch.minimum(torch.maximum(ax - reach, ay - arm), torch.maximum(ay - reach, ax - arm))


def _moon(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return torch.maximum(r - 0.97, 0.76 - torch.sqrt((x - 0.5) ** 2 + y**2 + 1e-9))


def _hexagon(ax: torch.Tensor, ay: torch.Tensor) -> torch.Tensor:
    """Points left and right, a little flat: a regular one is a circle at small sizes."""
    return torch.maximum(ay - 0.74, 0.8437 * ax + 0.5369 * ay - 0.8268)


def distance(shape: torch.Tensor, x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Signed distance in pixels to `shape` (broadcastable indices; -1 is far away) of `radius` pixels; x, y are pixels from its centre."""
    x, y = torch.broadcast_tensors(x / radius, y / radius)
    d = torch.full_like(x, 9.0)
    for index, value in enumerate(distances(x, y)):
        d = torch.where(shape == index, value, d)
    return d * radius


def pattern(kind: torch.Tensor, across: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """How much of a background's second colour each pixel holds, (batch, height, width) in [0, 1]; `kind` and `across` are (batch, 1, 1)."""
    unit = min(height, width) / NATIVE
    rows = torch.arange(height, device=kind.device, dtype=torch.float32)[None, :, None] + 0.5
    columns = torch.arange(width, device=kind.device, dtype=torch.float32)[None, None, :] + 0.5
    along = torch.where(across > 0.5, columns, rows)
    ramp = torch.where(across > 0.5, columns / width, rows / height)
    period = PERIOD * unit
    stripes = torch.clamp(((along / period) % 1.0 - 0.5).abs() * -period + period / 4 + 0.5, 0, 1)
    return torch.where(kind == GRADIENT, ramp, torch.where(kind == STRIPES, stripes, torch.zeros_like(ramp)))


def paint(rgb: torch.Tensor, alpha: torch.Tensor, thing: torch.Tensor, colour: torch.Tensor, clear: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One object over rgb (batch, 3, height, width) and alpha (batch, height, width); `thing` (batch, 5), `colour` (batch, 3), `clear` (batch, 1, 1)."""
    height, width = alpha.shape[1:]
    unit = min(height, width) / NATIVE
    rows = torch.arange(height, device=rgb.device, dtype=torch.float32)[None, :, None] + 0.5
    columns = torch.arange(width, device=rgb.device, dtype=torch.float32)[None, None, :] + 0.5
    shape, _, x, y, radius = (value[:, None, None] for value in thing.unbind(-1))
    d = distance(shape, columns - x * width, rows - y * height, radius * unit)
    inside = torch.clamp(0.5 - d, 0, 1)
    painted = torch.clamp(0.5 - (d - 3 * clear), 0, 1)[:, None]
    return rgb * (1 - painted) + colour[:, :, None, None] * painted, alpha * (1 - inside) + inside


def render(things: torch.Tensor, backgrounds: torch.Tensor, height: int, width: int, colours: torch.Tensor, paint=paint) -> torch.Tensor:
    """RGBA (batch, 4, height, width) in [-1, 1] of packed scenes; `colours` is the palette their colour indices mean.

    Where a transparent picture is clear its RGB is the background's first colour, save for a rim of the object's own (no fringe when scaled).
    """
    kind, across = backgrounds[:, 0, None, None], backgrounds[:, 3, None, None]
    mix = pattern(kind, across, height, width)[:, None]
    first, second = (colours[backgrounds[:, i].long()][:, :, None, None] for i in (1, 2))
    rgb = first + (second - first) * mix
    clear = (kind == CLEAR).float()
    alpha = (1 - clear).expand(-1, height, width)
    for slot in range(things.shape[1]):
        rgb, alpha = paint(rgb, alpha, things[:, slot], colours[things[:, slot, 1].long()], clear)
    return torch.cat([rgb, alpha[:, None] * 2 - 1], dim=1)


def picture(scene: Scene, height: int = NATIVE, width: int = NATIVE):
    """The scene as a Pillow RGBA image."""
    from PIL import Image

    pixels = render(*pack([scene]), height, width, palette())[0]
    return Image.fromarray(((pixels.permute(1, 2, 0) * 0.5 + 0.5) * 255).round().byte().numpy(), "RGBA")
