"""python -m qwen21.tiny.evaluate: how well a checkpoint paints the tiny world, as a table and a contact sheet.

Prompts are unseen (own seeds), 20 steps, no guidance. What is in a picture is read back by `reader`; the same reader's score on the
generator's own pictures and on shuffled captions stands beside, as its ceiling and its floor.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter

from . import MODEL, world
from .grammar import COMPOSITIONS, EDITS, TRANSPARENT_HEAD, TRANSPARENT_TAIL, Task, draw_task
from .reader import Verdict, alpha_iou, judge, read

STEPS = 20
SIZES = ((128, 128), (192, 192), (160, 384), (320, 192), (256, 384), (384, 256), (320, 320), (384, 384), (512, 512), (128, 256))  # (width, height)
CHANGES_BACKGROUND = ("background", "clear", "transplant", "backdrop", "gather", "gather three", "nothing")
UNTOUCHED_MARGIN = 12  # pixels at 256 around what may change


@dataclass(frozen=True)
class Job:
    """One picture to paint. References are 256 x 256."""

    group: str
    task: Task
    seed: int
    width: int = world.NATIVE
    height: int = world.NATIVE

    @property
    def references(self) -> list[Image.Image]:
        return [world.picture(scene) for scene in self.task.references]


Painter = Callable[[Sequence[Job]], list[np.ndarray]]  # uint8 RGBA (height, width, 4)


def draw_jobs(scale: float = 1.0, seed: int = 20_000_000) -> list[Job]:
    """The evaluation's prompts, 1.5 thousand at scale 1."""
    jobs = []

    def group(name: str, kind: str, count: int, sizes=((world.NATIVE, world.NATIVE),), **options) -> None:
        count = max(2, round(count * scale))
        for index in range(count):
            number = seed + len(jobs)
            jobs.append(Job(name, draw_task(random.Random(number), kind, **options), number, *sizes[index % len(sizes)]))

    group("text to image", "t2i", 500, language="en", full=True)
    group("held-out pairs", "t2i", 150, language="en", full=True, held_out=True)
    group("Chinese", "t2i", 150, language="zh", full=True)
    group("transparent", "t2i", 150, language="en", full=True, clear=1.0)
    group("other sizes", "t2i", 150, language="en", full=True, sizes=SIZES)
    for kind in EDITS:
        group(f"edit: {kind}", kind, 48, language="en")
    for kind in COMPOSITIONS:
        group(f"compose: {kind}", kind, 40, language="en")
    for kind in EDITS:
        group("edits in Chinese", kind, 12, language="zh")
    return jobs


# ---------------------------------------------------------------------------------------------------------------- scoring


def asked_right(verdict: Verdict, task: Task) -> bool:
    """The asked change is there: what was named has every attribute right, everything else is in its place, nothing came or went."""
    ground = verdict.background or task.kind not in CHANGES_BACKGROUND
    kept = all(verdict.colour) if task.kind == "nothing" else True
    return verdict.alone and all(verdict.place) and all(verdict.thing(i) for i in task.focus) and ground and kept


def over_white(rgba: np.ndarray) -> np.ndarray:
    alpha = rgba[..., 3:].astype(np.float32) / 255
    return rgba[..., :3] * alpha + 255 * (1 - alpha)


def untouched_error(rgba: np.ndarray, task: Task) -> float | None:
    """Mean difference from the reference, in 1/255, where an edit should leave it alone; None if that is nowhere."""
    before, after = (np.asarray(world.picture(scene, *rgba.shape[:2])) for scene in (task.references[0], task.target))
    before, after = over_white(before), over_white(after)
    changed = Image.fromarray((np.abs(before - after).max(-1) > 2).astype(np.uint8) * 255)
    changed = np.asarray(changed.filter(ImageFilter.MaxFilter(2 * UNTOUCHED_MARGIN + 1))) > 0
    if changed.mean() > 0.9:
        return None
    return float(np.abs(over_white(rgba) - before).mean(-1)[~changed].mean())


def score(job: Job, rgba: np.ndarray) -> dict[str, float]:
    """Numbers for one picture; attributes are means over its things."""
    task, reading = job.task, read(rgba)
    verdict = judge(reading, task.target)
    out = {name: float(np.mean(getattr(verdict, name))) for name in Verdict.ATTRIBUTES}
    out["background"] = float(verdict.background)
    out["mean"] = float(np.mean(list(out.values())))
    out["all right"] = float(verdict.all_right)
    if task.target.background.kind == world.CLEAR:
        out["alpha IoU"] = alpha_iou(rgba, reading, task.target)
    if task.references:
        out["asked"] = float(asked_right(verdict, task))
    if len(task.references) == 1:
        error = untouched_error(rgba, task)
        if error is not None:
            out["untouched"] = error
    return out


def _score(pair: tuple[Job, np.ndarray]) -> dict[str, float]:
    torch.set_num_threads(1)
    return score(*pair)


def score_all(jobs: Sequence[Job], pictures: Sequence[np.ndarray], pool=None) -> list[dict[str, float]]:
    """`pool` is anything with a `map` (multiprocessing.Pool, say); without, one after another."""
    pairs = list(zip(jobs, pictures))
    return list(pool.map(_score, pairs, chunksize=8)) if pool else [score(*pair) for pair in pairs]


def summarize(jobs: Sequence[Job], scores: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Means by group, and over all edits and all pictures made from two references."""
    groups: dict[str, list[dict[str, float]]] = {}
    for job, numbers in zip(jobs, scores):
        groups.setdefault(job.group, []).append(numbers)
        if job.group.startswith("edit: "):
            groups.setdefault("edits", []).append(numbers)
        if job.group.startswith("compose: ") and len(job.task.references) == 2:
            groups.setdefault("two references", []).append(numbers)
    table = {}
    for name, rows in groups.items():
        keys = dict.fromkeys(key for row in rows for key in row)
        table[name] = {"count": len(rows)} | {key: round(float(np.mean([row[key] for row in rows if key in row])), 4) for key in keys}
    return table


def reader_bounds(jobs: Sequence[Job], pool=None) -> dict[str, dict[str, float]]:
    """The reader on the generator's own pictures, with the right captions and with those of other pictures."""
    jobs = [job for job in jobs if job.group == "text to image"]
    pictures = [np.asarray(world.picture(job.task.target, job.height, job.width)) for job in jobs]
    shifted = jobs[1:] + jobs[:1]
    return {
        name: next(iter(summarize(asked, score_all(asked, pictures, pool)).values()))
        for name, asked in (("own pictures", jobs), ("shuffled captions", shifted))
    }


def format_table(table: dict[str, dict[str, float]]) -> str:
    """Percentages, but for counts and the untouched area (1/255), as a Markdown table."""
    keys = ["count", *Verdict.ATTRIBUTES, "background", "mean", "all right", "alpha IoU", "asked", "untouched"]
    lines = ["| | " + " | ".join(keys) + " |", "|" + "---|" * (len(keys) + 1)]
    for name, row in table.items():
        cells = [str(row[k]) if k == "count" else f"{row[k]:.2f}" if k == "untouched" else f"{100 * row[k]:.1f}" for k in keys if k in row]
        cells = iter(cells)
        lines.append(f"| {name} | " + " | ".join(next(cells) if k in row else "" for k in keys) + " |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ contact sheet


def contact_sheet(jobs: Sequence[Job], pictures: Sequence[np.ndarray], scores: Sequence[dict[str, float]], each: int = 8, columns: int = 16) -> Image.Image:
    """The first pictures of every group with their references and prompts; a red frame where something is wrong."""
    tile, text, cells, shown = 112, 40, [], {}
    for job, picture, numbers in zip(jobs, pictures, scores):
        shown[job.group] = shown.get(job.group, 0) + 1
        if shown[job.group] > (3 * each if job.group == "text to image" else each):
            continue
        right = numbers.get("asked", numbers["all right"]) == 1
        cells.extend((reference, f"reference {i}", True) for i, reference in enumerate(job.references, start=1))
        cells.append((Image.fromarray(picture), job.task.prompt.removeprefix(TRANSPARENT_HEAD).removesuffix(TRANSPARENT_TAIL), right))
    font = _font()
    sheet = Image.new("RGB", (columns * tile, -(-len(cells) // columns) * (tile + text)), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (picture, caption, right) in enumerate(cells):
        x, y = index % columns * tile, index // columns * (tile + text)
        small = picture.convert("RGBA")
        small.thumbnail((tile - 6, tile - 6), Image.Resampling.LANCZOS)
        board = Image.new("RGB", small.size, (205, 205, 205))
        for i in range(0, small.width, 8):
            for j in range(0, small.height, 8):
                if (i // 8 + j // 8) % 2:
                    board.paste((235, 235, 235), (i, j, min(i + 8, small.width), min(j + 8, small.height)))
        board.paste(small, mask=small.getchannel("A"))
        if not right:
            draw.rectangle((x, y, x + small.width + 5, y + small.height + 5), fill=(220, 40, 40))
        sheet.paste(board, (x + 3, y + 3))
        wide = any(ord(c) > 0x2E80 for c in caption)
        step = 10 if wide else 20
        for line in range(4):
            draw.text((x + 3, y + tile - 2 + 9 * line), caption[line * step : (line + 1) * step], fill="black", font=font)
    return sheet


def _font():
    from PIL import ImageFont

    for name in ("NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "DejaVuSans.ttf"):
        try:
            return ImageFont.truetype(name, 8)
        except OSError:
            continue
    return ImageFont.load_default()


# ---------------------------------------------------------------------------------------------------------- the core paints


def core_painter(settings: dict[str, str], progress: bool = True) -> Painter:
    """Paints through qwen21.pipeline. `settings` may hold model, device, dtype, kv_cache, kv_device and any field of pipeline.Request (steps, cfg ...)."""
    from dataclasses import fields

    from tqdm import tqdm

    from ..checkpoint import Checkpoint
    from ..pipeline import Pipeline, Report, Request, compute_dtype

    settings = dict(settings)
    device = torch.device(settings.pop("device", "cuda" if torch.cuda.is_available() else "cpu"))
    precision = settings.pop("dtype", None)
    cache = {key: settings.pop(key) for key in ("kv_cache", "kv_device") if key in settings}
    checkpoint = Checkpoint(settings.pop("model", MODEL))
    pipeline = Pipeline(checkpoint, device, compute_dtype(precision, device), keep=True, fp8=precision == "fp8", **cache)
    kinds = {f.name: f.type for f in fields(Request)}
    unknown = set(settings) - set(kinds)
    if unknown:
        raise SystemExit(f"unknown setting {min(unknown)}: choose among model, device, dtype, kv_cache, kv_device, {', '.join(kinds)}")
    options = {"steps": STEPS} | {key: int(v) if v.isdigit() else float(v) if v.replace(".", "", 1).isdigit() else v for key, v in settings.items()}

    def paint(jobs: Sequence[Job]) -> list[np.ndarray]:
        out = []
        for job in tqdm(jobs, disable=not progress):
            request = Request(job.task.prompt, pictures=job.references, width=job.width, height=job.height, **options)
            out.append(np.asarray(next(iter(pipeline.generate(request, [job.seed], Report())))))
        return out

    return paint


def reconstructions(model: Path | str, count: int = 200) -> dict[str, float]:
    """The VAE alone on the world's pictures: PSNR (dB) over white and of alpha, and the reader's score."""
    from ..checkpoint import Checkpoint

    vae = Checkpoint(model).vae(torch.device("cpu"), torch.float32)
    jobs = [Job("VAE", draw_task(random.Random(30_000_000 + i), "t2i", clear=0.3), i) for i in range(count)]
    return reconstruction_scores(vae, jobs)


@torch.inference_mode()
def reconstruction_scores(vae, jobs: Sequence[Job], device="cpu", pool=None) -> dict[str, float]:
    things, backgrounds = (x.to(device) for x in world.pack([job.task.target for job in jobs]))
    pictures, errors, alpha_errors = [], [], []
    for i in range(0, len(jobs), 16):
        pixels = world.render(things[i : i + 16], backgrounds[i : i + 16], world.NATIVE, world.NATIVE, world.palette(device))
        made = vae.decode(vae.encode(pixels))
        flat = [x[:, :3] * (x[:, 3:] * 0.5 + 0.5) + 1 - (x[:, 3:] * 0.5 + 0.5) for x in (made, pixels)]
        errors.append(((flat[0] - flat[1]) / 2).square().flatten(1).mean(1))
        alpha = ((made[:, 3] - pixels[:, 3]) / 2).square().flatten(1).mean(1)
        alpha_errors.append(alpha[backgrounds[i : i + 16, 0] == world.CLEAR])
        pictures.extend((made.permute(0, 2, 3, 1) * 127.5 + 127.5).round().clamp(0, 255).byte().cpu().numpy())
    decibels = lambda e: round(float((-10 * torch.cat(e).clamp(min=1e-10).log10()).mean()), 2)
    (scores,) = summarize(jobs, score_all(jobs, pictures, pool)).values()
    return {"rgb dB": decibels(errors), "alpha dB": decibels(alpha_errors)} | scores


def parse_settings(text: str) -> dict[str, str]:
    """ "steps=8,dtype=bfloat16" as a dict."""
    return dict(part.split("=", 1) for part in text.split(",") if part)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Of two pictures over white, in dB; 78 if nothing differs."""
    return float(10 * np.log10(255**2 / max(np.square(over_white(a) - over_white(b)).mean(), 1e-3)))


def compare(a: str, b: str, jobs: Sequence[Job]) -> str:
    """Accuracy of two settings on the same prompts and seeds, and how far apart their pictures are."""
    results = [core_painter(parse_settings(text))(jobs) for text in (a, b)]
    scores = [score_all(jobs, pictures) for pictures in results]
    lines = []
    for text, rows in zip((a, b), scores):
        lines += [f"**{text or 'defaults'}**", "", format_table(summarize(jobs, rows)), ""]
    decibels = [psnr(*pair) for pair in zip(*results)]
    same = np.mean([np.array_equal(over_white(x), over_white(y)) for x, y in zip(*results)])
    lines.append(f"PSNR between the two: mean {np.mean(decibels):.2f} dB, worst {np.min(decibels):.2f} dB; {100 * same:.1f} % of the pictures are equal.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m qwen21.tiny.evaluate", description="Score a checkpoint on the tiny world.")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the 1500 prompts to use")
    parser.add_argument("--settings", default="", help="key=value,...: model, device, dtype, steps, cfg, kv_cache ...")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help='two settings, such as "" and "dtype=bfloat16"')
    parser.add_argument("--out", type=Path, default=Path("tiny-evaluation"), help="folder for table.md, scores.json and sheet.png")
    arguments = parser.parse_args()
    jobs = draw_jobs(arguments.scale)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.compare:
        report = compare(*arguments.compare, jobs)
    else:
        settings = parse_settings(arguments.settings)
        pictures = core_painter(settings)(jobs)
        scores = score_all(jobs, pictures)
        table = summarize(jobs, scores) | reader_bounds(jobs)
        vae = reconstructions(settings.get("model", MODEL), max(20, round(200 * arguments.scale)))
        contact_sheet(jobs, pictures, scores).save(arguments.out / "sheet.png", optimize=True)
        (arguments.out / "scores.json").write_text(json.dumps({"table": table, "vae": vae}, indent=1) + "\n")
        report = (
            format_table(table)
            + f"\n\nVAE: {vae['rgb dB']} dB over white, {vae['alpha dB']} dB alpha, shape {100 * vae['shape']:.1f} %, alpha IoU {vae['alpha IoU']:.3f}."
        )
    (arguments.out / "table.md").write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    sys.exit(main())
