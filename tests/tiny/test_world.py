"""The world, its captions and its reader belong together: what is drawn can be said, and what is said can be read back."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from qwen21.tiny import evaluate, grammar, layout, reader, tokens, world
from qwen21.tiny.world import CLEAR, HELD_OUT


def scenes(count, seed=0, **options):
    rng = random.Random(seed)
    return [world.draw_scene(rng, **options) for _ in range(count)]


def test_scenes_are_seeded_and_legible():
    assert scenes(20) == scenes(20)
    assert scenes(20) != scenes(20, seed=1)
    for scene in scenes(300):
        things = scene.things
        assert 1 <= len(things) <= 3
        for attribute in ("shape", "colour", "place"):
            assert len({getattr(t, attribute) for t in things}) == len(things)
        assert all(world.apart(a, b) for i, a in enumerate(things) for b in things[:i])
        assert all(t.colour in world.readable_colours(scene.background) for t in things)
        assert not any((t.shape, t.colour) in HELD_OUT for t in things)


def test_held_out_pairs_come_only_when_asked():
    assert all((s.things[0].shape, s.things[0].colour) in HELD_OUT for s in scenes(50, held_out=True))


def test_render_is_antialiased_rgba():
    scene = world.draw_scene(random.Random(0), count=1, clear=1.0)
    pixels = world.render(*world.pack([scene]), 256, 256, world.palette())
    alpha = pixels[0, 3]
    assert pixels.shape == (1, 4, 256, 256)
    assert pixels.abs().max() <= 1 + 1e-6
    assert alpha.min() == -1 and alpha.max() == 1
    assert 0.001 < ((alpha > -0.99) & (alpha < 0.99)).float().mean() < 0.03


@pytest.mark.parametrize("shape", range(len(world.SHAPES)))
def test_distances_have_unit_slope_near_the_edge(shape):
    """What antialiasing needs; a shape whose distance is scaled gets blurred or jagged edges."""
    side = torch.linspace(-1.1, 1.1, 600)
    y, x = torch.meshgrid(side, side, indexing="ij")
    d = world.distances(x, y)[shape]
    dy, dx = torch.gradient(d, spacing=(float(side[1] - side[0]),) * 2)
    slope = (dx.square() + dy.square()).sqrt()[d.abs() < 0.02]
    assert slope.median() == pytest.approx(1, abs=0.01)
    assert (slope > 1.05).float().mean() < 0.02


@pytest.mark.parametrize("size", [(256, 256), (128, 128), (192, 320)])
def test_reader_reads_the_generator(size):
    drawn = scenes(40, seed=5)
    pictures = [np.asarray(world.picture(s, *size)) for s in drawn]
    readings = [reader.read(p) for p in pictures]
    assert np.mean([reader.judge(r, s).all_right for r, s in zip(readings, drawn)]) >= 0.99
    others = drawn[1:] + drawn[:1]
    attributes = [np.mean([*(np.mean(getattr(v, a)) for a in v.ATTRIBUTES), v.background]) for v in map(reader.judge, readings, others)]
    assert np.mean(attributes) <= 0.25
    overlaps = [reader.alpha_iou(p, r, s) for p, r, s in zip(pictures, readings, drawn) if s.background.kind == CLEAR]
    assert min(overlaps) > 0.95


@pytest.mark.parametrize("shape", range(len(world.SHAPES)))
@pytest.mark.parametrize("off", [-3.0, -1.5, 1.5, 3.0])
def test_overlap_is_found_from_pixels_away(shape, off):
    """Where an edge runs along the pixels, a smaller step than one of them changes nothing."""
    drawn, ground = world.Thing(shape, 0, 1, 4, 0.5, 0.5, 30.0), world.Background(CLEAR)
    asked = world.Scene((replace(drawn, x=0.5 + 1 / 256, radius=30.0 + off),), ground)
    picture = np.asarray(world.picture(world.Scene((drawn,), ground)))
    assert reader.alpha_iou(picture, reader.Reading(ground, ()), asked) > 0.95


def test_reader_sees_each_mistake():
    """One attribute changed is that attribute wrong, and no other."""
    thing = world.Thing(4, 0, 2, 4, 0.5, 0.5, 38.0)
    ground = world.Background(world.PLAIN, 5, 5)
    asked = world.Scene((thing,), ground)
    wrong = {
        "shape": world.Thing(1, 0, 2, 4, 0.5, 0.5, 38.0), "colour": world.Thing(4, 2, 2, 4, 0.5, 0.5, 38.0),
        "size": world.Thing(4, 0, 0, 4, 0.5, 0.5, 22.0), "place": world.Thing(4, 0, 2, 0, 46 / 256, 46 / 256, 38.0),
    }  # fmt: skip
    for name, other in wrong.items():
        verdict = reader.judge(reader.read(np.asarray(world.picture(world.Scene((other,), ground)))), asked)
        assert {a for a in verdict.ATTRIBUTES if not getattr(verdict, a)[0]} == {name}
        assert verdict.background and verdict.alone and not verdict.all_right
    stripes = world.Scene((thing,), world.Background(world.STRIPES, 5, 10))
    assert not reader.judge(reader.read(np.asarray(world.picture(stripes))), asked).background


def test_components_are_four_connected():
    mask = np.array([[1, 1, 0, 1], [0, 1, 0, 1], [1, 0, 0, 1], [1, 0, 1, 1]], dtype=bool)
    labels, areas = reader.components(mask)
    assert sorted(areas) == [2, 3, 5]
    assert labels[0, 0] == labels[1, 1] != labels[2, 0]
    assert labels[0, 3] == labels[3, 2]


@pytest.mark.parametrize("kind", ("t2i",) + grammar.EDITS + grammar.COMPOSITIONS)
def test_tasks(kind):
    rng, prompts = random.Random(3), set()
    for _ in range(40):
        task = grammar.draw_task(rng, kind)
        prompts.add(task.prompt)
        count = 0 if kind == "t2i" else 1 if kind in grammar.EDITS else 3 if kind == "gather three" else 2
        assert len(task.references) == count
        assert all(f"<image{i + 1}>" in task.prompt for i in range(count)) or kind in grammar.EDITS
        assert all(i < len(task.target.things) for i in task.focus)
        assert all(t.colour in world.readable_colours(task.target.background) for t in task.target.things)
        assert (task.language == "zh") == any(ord(c) > 0x2E80 for c in task.prompt)
        if kind in grammar.EDITS:
            same = task.references[0].things == task.target.things and task.references[0].background.kind == task.target.background.kind
            assert same == (kind == "nothing") or kind == "background"
    assert len(prompts) > (3 if kind == "nothing" else 7)


def test_the_first_prompt_of_the_readme_can_be_said():
    rng = random.Random(0)
    scene = world.Scene((world.Thing(4, 0, 2, 4, 0.5, 0.5, 38.0),), world.Background(world.PLAIN, 5, 5))
    assert (4, 0) not in HELD_OUT
    said = {grammar.caption(scene, grammar.Speaker(rng, "en")) for _ in range(300)}
    assert "a large red star in the center on a plain blue background" in said


def test_prompts_fit_their_rooms_and_come_back_from_the_tokenizer():
    tokenizer, rng = tokens.load_tokenizer(), random.Random(8)
    layouter = layout.Layouter(tokenizer)
    assert tokenizer.decode(tokenizer.encode("把<image1>里的红色五角星, please").ids) == "把<image1>里的红色五角星, please"
    fits = [layouter(grammar.draw_task(rng, "t2i").prompt, [], 0, layout.ROOMS["t2i"]) is not None for _ in range(100)]
    assert np.mean(fits) > 0.95
    assert {(h // 16, w // 16) for w, h in evaluate.SIZES} <= set(layout.GRIDS)


def test_asked_right_and_untouched():
    rng = random.Random(4)
    for kind in grammar.EDITS:
        task = grammar.draw_task(rng, kind)
        job = evaluate.Job("x", task, 0)
        done, undone = (np.asarray(world.picture(scene)) for scene in (task.target, task.references[0]))
        right = evaluate.score(job, done)
        assert right["asked"] == right["all right"] == 1 and right.get("untouched", 0) < 0.5
        if kind != "nothing":
            assert evaluate.score(job, undone)["asked"] == 0
