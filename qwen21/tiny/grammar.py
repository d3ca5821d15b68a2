"""What is said about the world: captions and instructions in English and Chinese, and the tasks they belong to.

`draw_task` gives a prompt, the scenes of its references and the scene that answers it. Shapes, colours and places of a scene are all
different, so that "the star" or "the shape in the top left" names one thing.
"""

import random
from dataclasses import dataclass, replace

from .world import (
    CLEAR,
    COLOUR_NAMES,
    GRADIENT,
    HELD_OUT,
    PLACES,
    PLAIN,
    Background,
    Scene,
    Thing,
    apart,
    draw_background,
    draw_scene,
    draw_thing,
    draw_things,
    readable_colours,
)  # fmt: skip

TRANSPARENT_HEAD = "This is an RGBA image with transparency. "
TRANSPARENT_TAIL = " The image has alpha channel and the background is transparent."

# Words, the commonest first.
SHAPE_WORDS = {
    "en": (("circle", "disk"), ("square",), ("triangle",), ("diamond", "rhombus"), ("star", "five-pointed star"), ("heart",), ("ring",), ("cross", "plus sign"),
           ("moon", "crescent", "crescent moon"), ("hexagon",)),
    "zh": (("圆形", "圆"), ("正方形", "方块"), ("三角形",), ("菱形",), ("五角星", "星形", "星星"), ("心形", "爱心"), ("圆环",), ("十字", "十字形"), ("月亮", "月牙"), ("六边形",)),
}  # fmt: skip
COLOUR_WORDS = {"en": COLOUR_NAMES, "zh": ("红色", "橙色", "黄色", "绿色", "青色", "蓝色", "紫色", "粉色", "棕色", "黑色", "白色", "灰色")}
SIZE_WORDS = {
    "en": (("small", "little", "tiny"), ("medium", "medium-sized"), ("large", "big", "huge")),
    "zh": (("小的", "小号的", "很小的"), ("中等大小的", "中号的"), ("大的", "大号的", "很大的")),
}
PLACE_WORDS = {
    "en": (
        ("in the top left", "in the top left corner", "at the top left", "in the upper left corner"), ("in the top center", "at the top", "at the top center"),
        ("in the top right", "in the top right corner", "at the top right", "in the upper right corner"), ("in the middle left", "on the left", "on the left side"),
        ("in the center", "in the middle", "at the center"), ("in the middle right", "on the right", "on the right side"),
        ("in the bottom left", "in the bottom left corner", "at the bottom left", "in the lower left corner"), ("in the bottom center", "at the bottom", "at the bottom center"),
        ("in the bottom right", "in the bottom right corner", "at the bottom right", "in the lower right corner"),
    ),
    "zh": (("左上角", "左上方"), ("顶部中间", "上方"), ("右上角", "右上方"), ("左侧", "左边"), ("中央", "中间", "正中间"), ("右侧", "右边"),
           ("左下角", "左下方"), ("底部中间", "下方"), ("右下角", "右下方")),
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """`focus` indexes the things of `target` that were asked for by name; `kind` "t2i" has no references."""

    kind: str
    language: str
    prompt: str
    references: tuple[Scene, ...]
    target: Scene
    focus: tuple[int, ...] = ()


EDITS = ("recolour", "remove", "add", "move", "resize", "background", "clear", "nothing")
COMPOSITIONS = ("transplant", "insert", "backdrop", "gather", "gather three")


class Speaker:
    """Words for things in one language. With `full`, captions name every attribute; else some are left out."""

    def __init__(self, rng: random.Random, language: str, full: bool = False):
        self.rng, self.language, self.full = rng, language, full
        self.english = language == "en"

    def pick(self, words):
        """The first two times out of three, else any."""
        return words[0] if self.rng.random() < 0.6 else self.rng.choice(words)

    def shape(self, thing: Thing) -> str:
        return self.pick(SHAPE_WORDS[self.language][thing.shape])

    def colour(self, colour: int) -> str:
        return COLOUR_WORDS[self.language][colour]

    def size(self, size: int) -> str:
        return self.pick(SIZE_WORDS[self.language][size])

    def place(self, place: int) -> str:
        return self.pick(PLACE_WORDS[self.language][place])

    def spot(self, place: int) -> str:
        """A place as a noun: "the top left", not "in the top left"."""
        return self.place(place).split(" ", 1)[1] if self.english else self.place(place)

    def thing(self, thing: Thing, certain: bool = False) -> str:
        """A new thing: "a large red star in the center". `certain` leaves nothing out."""
        keep = lambda chance: certain or self.full or self.rng.random() < chance
        size = self.size(thing.size) if keep(0.88) else ""
        colour = self.colour(thing.colour) if keep(0.95) else ""
        place = self.place(thing.place) if keep(0.9) else ""
        if self.english:
            words = " ".join(w for w in (size, colour, self.shape(thing), place) if w)
            return ("an " if words[0] in "aeiou" else "a ") + words
        what = f"一个{size}{colour}{self.shape(thing)}"
        return f"{place}有{what}" if place else what

    def named(self, thing: Thing) -> str:
        """A thing that is there: "the red star"."""
        chance = self.rng.random()
        if self.english:
            if chance < 0.1:
                return f"the {self.pick(('shape', 'object'))} {self.place(thing.place)}"
            return f"the {self.shape(thing)}" if chance < 0.55 else f"the {self.colour(thing.colour)} {self.shape(thing)}"
        if chance < 0.1:
            return f"{self.place(thing.place)}的{self.pick(('图形', '物体'))}"
        return self.shape(thing) if chance < 0.55 else f"{self.colour(thing.colour)}{self.shape(thing)}"

    def things(self, things: tuple[Thing, ...]) -> str:
        parts = [self.thing(t) for t in things]
        self.rng.shuffle(parts)
        if not self.english:
            return "，".join(parts)
        return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + self.pick((" and ", ", and ")) + parts[-1]

    def background(self, background: Background) -> str:
        """With its article: "a plain blue background"."""
        kind, first, second = background.kind, self.colour(background.first), self.colour(background.second)
        if kind == CLEAR:
            return "a transparent background" if self.english else "透明背景"
        across = background.across
        if self.english:
            article = "an" if first[0] in "aeiou" else "a"
            if kind == PLAIN:
                return self.pick((f"a plain {first} background", f"{article} {first} background", f"a solid {first} background"))
            if kind == GRADIENT:
                way = "horizontal" if across else "vertical"
                ends = f"{first} on the left to {second} on the right" if across else f"{first} at the top to {second} at the bottom"
                return self.pick(
                    (
                        f"{article} {first} to {second} {way} gradient background",
                        f"a {way} gradient background from {first} to {second}",
                        f"a gradient background from {ends}",
                    )
                )
            way = "vertical" if across else "horizontal"
            return self.pick(
                (
                    f"{article} {first} and {second} {way} striped background",
                    f"a background of {way} {first} and {second} stripes",
                    f"a {way} striped background in {first} and {second}",
                )
            )
        if kind == PLAIN:
            return self.pick((f"纯{first}背景", f"{first}背景", f"{first}的纯色背景"))
        if kind == GRADIENT:
            way = "水平" if across else "垂直"
            ends = f"从左侧{first}到右侧{second}的渐变背景" if across else f"从顶部{first}到底部{second}的渐变背景"
            return self.pick((f"{first}到{second}的{way}渐变背景", f"从{first}到{second}的{way}渐变背景", ends))
        way = "竖" if across else "横"
        return self.pick((f"{first}和{second}的{way}条纹背景", f"{first}{second}相间的{way}条纹背景"))

    def sentence(self, text: str) -> str:
        """As said, or written out with a capital and a full stop."""
        if self.rng.random() < 0.7:
            return text
        return text[0].upper() + text[1:] + "." if self.english else text + "。"


def transparent(text: str) -> str:
    """The model's own wording for pictures with an alpha channel."""
    text = text[0].upper() + text[1:]
    return TRANSPARENT_HEAD + text + ("" if text[-1] in ".。" else ".") + TRANSPARENT_TAIL


def caption(scene: Scene, speaker: Speaker) -> str:
    things, chance = speaker.things(scene.things), speaker.rng.random()
    if scene.background.kind == CLEAR and (speaker.full or chance < 0.8):
        return transparent(things)
    ground = speaker.background(scene.background)
    if speaker.english:
        if chance < 0.5:
            return speaker.sentence(f"{things} on {ground}")
        bare = ground.split(" ", 1)[1]
        return speaker.rng.choice((
            f"a picture of {things} on {ground}", f"{ground} with {things}", f"draw {things} on {ground}", speaker.sentence(f"an image showing {things}, on {ground}"),
            f"{things}, {bare}", f"{things[0].upper()}{things[1:]}. {ground[0].upper()}{ground[1:]}.",
        ))  # fmt: skip
    if chance < 0.5:
        return speaker.sentence(f"{ground}，{things}")
    return speaker.rng.choice(
        (
            f"{things}，{ground}",
            f"一张图片，{things}，背景是{ground}",
            f"在{ground}上，{things}",
            f"画面{things}，{ground}。",
            f"请画出{ground}上的图形：{things}",
        )
    )


def _recolour(scene, rng, say):
    index = rng.randrange(len(scene.things))
    thing, taken = scene.things[index], {t.colour for t in scene.things}
    colours = [c for c in readable_colours(scene.background) if c not in taken and (thing.shape, c) not in HELD_OUT]
    if not colours:
        return None
    colour = rng.choice(colours)
    what, word = say.named(thing), say.colour(colour)
    if say.english:
        text = rng.choice(
            (f"make {what} {word}", f"change the color of {what} to {word}", f"recolor {what} to {word}", f"paint {what} {word}", f"turn {what} {word}")
        )
    else:
        text = rng.choice((f"把{what}变成{word}", f"将{what}改成{word}", f"把{what}的颜色改为{word}", f"把{what}涂成{word}"))
    return _replaced(scene, index, replace(thing, colour=colour)), (index,), text


def _remove(scene, rng, say):
    if len(scene.things) < 2:
        return None
    index = rng.randrange(len(scene.things))
    what = say.named(scene.things[index])
    text = rng.choice(
        (f"remove {what}", f"erase {what}", f"delete {what}", f"take away {what}")
        if say.english
        else (f"去掉{what}", f"删除{what}", f"移除{what}", f"把{what}去掉")
    )
    return replace(scene, things=scene.things[:index] + scene.things[index + 1 :]), (), text


def _add(scene, rng, say):
    if len(scene.things) > 2 or len(readable_colours(scene.background)) <= len(scene.things):
        return None
    new = draw_things(rng, scene.background, 1, scene.things)[0]
    what = say.thing(new, certain=True)
    if say.english:
        text = rng.choice(("add ", "put ", "draw ", "place ")) + what
    else:
        place, rest = what.split("有", 1)
        text = rng.choice((f"在{place}添加{rest}", f"在{place}画{rest}", f"在{place}加上{rest}"))
    return replace(scene, things=(*scene.things, new)), (len(scene.things),), text


def _move(scene, rng, say):
    index = rng.randrange(len(scene.things))
    thing, others = scene.things[index], scene.things[:index] + scene.things[index + 1 :]
    place = rng.choice([p for p in range(len(PLACES)) if p not in {t.place for t in scene.things}])
    moved = replace(draw_thing(rng, thing.shape, thing.colour, thing.size, place), radius=thing.radius)
    if not all(apart(moved, other) for other in others):
        return None
    what, spot = say.named(thing), say.spot(place)
    if say.english:
        text = rng.choice((f"move {what} to {spot}", f"put {what} {say.place(place)}", f"shift {what} to {spot}"))
    else:
        text = rng.choice((f"把{what}移到{spot}", f"将{what}移动到{spot}", f"把{what}放到{spot}"))
    return _replaced(scene, index, moved), (index,), text


def _resize(scene, rng, say):
    index = rng.randrange(len(scene.things))
    thing, others = scene.things[index], scene.things[:index] + scene.things[index + 1 :]
    size = rng.choice([s for s in range(3) if s != thing.size])
    grown = replace(thing, size=size, radius=draw_thing(rng, thing.shape, thing.colour, size, thing.place).radius)
    if not all(apart(grown, other) for other in others):
        return None
    what, word = say.named(thing), say.size(size)
    step = size - thing.size
    if abs(step) == 1 and rng.random() < 0.4:
        if say.english:
            text = rng.choice((f"make {what} {'bigger' if step > 0 else 'smaller'}", f"{'enlarge' if step > 0 else 'shrink'} {what}"))
        else:
            text = f"把{what}{'放大' if step > 0 else '缩小'}一点"
    elif say.english:
        text = rng.choice((f"make {what} {word}", f"change the size of {what} to {word}", f"resize {what} to {word}"))
    else:
        text = rng.choice((f"把{what}变成{word}", f"把{what}的大小改为{word}"))
        text = text.removesuffix("的")
    return _replaced(scene, index, grown), (index,), text


def _background(scene, rng, say):
    background = draw_background(rng, clear=0)
    if background == scene.background or any(t.colour not in readable_colours(background) for t in scene.things):
        return None
    ground = say.background(background)
    if say.english:
        text = rng.choice((f"change the background to {ground}", f"replace the background with {ground}", f"put it on {ground}"))
    else:
        text = rng.choice((f"把背景换成{ground}", f"将背景改为{ground}", f"背景换成{ground}"))
    return replace(scene, background=background), (), text


def _clear(scene, rng, say):
    if scene.background.kind == CLEAR:
        return None
    if say.english:
        text = rng.choice(("make the background transparent", "remove the background", "clear the background", "give it a transparent background"))
    else:
        text = rng.choice(("把背景变成透明", "去掉背景", "移除背景", "换成透明背景"))
    return replace(scene, background=Background(CLEAR)), (), transparent(text) if rng.random() < 0.4 else text


def _nothing(scene, rng, say):
    if say.english:
        text = rng.choice(("keep the picture as it is", "change nothing", "do not change anything", "leave the image unchanged", "return the same picture"))
    else:
        text = rng.choice(("保持图片不变", "什么都不要改", "不做任何修改", "原样返回这张图片"))
    return scene, (), text


def _replaced(scene: Scene, index: int, thing: Thing) -> Scene:
    return replace(scene, things=(*scene.things[:index], thing, *scene.things[index + 1 :]))


_EDITORS = dict(zip(EDITS, (_recolour, _remove, _add, _move, _resize, _background, _clear, _nothing)))


def draw_edit(rng: random.Random, kind: str, say: Speaker) -> Task:
    """One reference, one instruction."""
    while True:
        scene = draw_scene(rng, clear=0.2)
        made = _EDITORS[kind](scene, rng, say)
        if made:
            target, focus, text = made
            text = text if text.startswith(TRANSPARENT_HEAD) else say.sentence(text)
            return Task(kind, say.language, text, (_foreign(scene, rng),), _clean(target), focus)


def _foreign(scene: Scene, rng: random.Random) -> Scene:
    """A reference: under its alpha 0 may lie black (what resizing leaves) or grey instead of white."""
    if scene.background.kind != CLEAR or rng.random() < 0.5:
        return scene
    return replace(scene, background=Background(CLEAR, rng.choice((COLOUR_NAMES.index("black"), COLOUR_NAMES.index("gray")))))


def _clean(scene: Scene) -> Scene:
    return replace(scene, background=Background(CLEAR)) if scene.background.kind == CLEAR else scene


def draw_composition(rng: random.Random, kind: str, say: Speaker) -> Task:
    """Things and backgrounds of two or three references in one picture. The last reference's background is used, or one that is described."""
    while True:
        count = 3 if kind == "gather three" else 2
        scenes = [draw_scene(rng, clear=0.3 if i < count - 1 else 0.1) for i in range(count)]
        tags = [f"<image{i + 1}>" for i in range(count)]
        ground = scenes[-1].background
        chosen = [rng.choice(scene.things) for scene in scenes]

        def of(i: int, chosen=chosen, tags=tags) -> str:
            return f"{say.named(chosen[i])} of {tags[i]}" if say.english else f"{tags[i]}里的{say.named(chosen[i])}"

        if kind == "transplant":
            things, focus = (chosen[0],), (0,)
            text = rng.choice(
                (f"put {of(0)} on the background of {tags[1]}", f"place {of(0)} on the background of {tags[1]}", f"{of(0)} on the background of {tags[1]}")
                if say.english else (f"把{of(0)}放到{tags[1]}的背景上", f"将{of(0)}放在{tags[1]}的背景上")
            )  # fmt: skip
        elif kind == "insert":
            things, focus = (chosen[0], *scenes[1].things), (0,)
            text = rng.choice(
                (f"add {of(0)} to {tags[1]}", f"copy {of(0)} into {tags[1]}") if say.english else (f"把{of(0)}加到{tags[1]}里", f"将{of(0)}复制到{tags[1]}中")
            )
        elif kind == "backdrop":
            things, focus = scenes[0].things, ()
            text = rng.choice(
                (f"use the background of {tags[1]} for {tags[0]}", f"put everything of {tags[0]} on the background of {tags[1]}", f"give {tags[0]} the background of {tags[1]}")
                if say.english else (f"把{tags[0]}的背景换成{tags[1]}的背景", f"把{tags[0]}里的所有图形放到{tags[1]}的背景上")
            )  # fmt: skip
        elif kind == "gather":
            things, focus, ground = tuple(chosen), (0, 1), draw_background(rng, clear=0.2)
            where = say.background(ground)
            text = (
                rng.choice((f"put {of(0)} and {of(1)} on {where}", f"combine {of(0)} and {of(1)} on {where}"))
                if say.english else rng.choice((f"把{of(0)}和{of(1)}放在{where}上", f"把{of(0)}和{of(1)}合到{where}上"))
            )  # fmt: skip
        else:
            things, focus = tuple(chosen[:2]), (0, 1)
            text = (
                rng.choice((f"put {of(0)} and {of(1)} on the background of {tags[2]}", f"place {of(0)} and {of(1)} on the background of {tags[2]}"))
                if say.english else f"把{of(0)}和{of(1)}放到{tags[2]}的背景上"
            )  # fmt: skip
        fits = all(apart(a, b) and a.shape != b.shape and a.colour != b.colour for i, a in enumerate(things) for b in things[:i])
        if fits and len(things) <= 3 and all(t.colour in readable_colours(ground) for t in things):
            references = tuple(_foreign(scene, rng) for scene in scenes)
            return Task(kind, say.language, say.sentence(text), references, _clean(Scene(things, ground)), focus)


def draw_task(rng: random.Random, kind: str, language: str | None = None, full: bool = False, held_out: bool = False, clear: float = 0.2) -> Task:
    """`kind` is "t2i", one of EDITS or one of COMPOSITIONS. A third of the prompts are Chinese unless `language` says."""
    say = Speaker(rng, language or ("zh" if rng.random() < 0.33 else "en"), full)
    if kind == "t2i":
        scene = draw_scene(rng, clear=clear, held_out=held_out)
        return Task(kind, say.language, caption(scene, say), (), scene, tuple(range(len(scene.things))))
    return draw_edit(rng, kind, say) if kind in EDITS else draw_composition(rng, kind, say)
