"""Training of denoiser and text encoder together, by the official objective: the velocity of a flow from noise to latents.

The prefix (text and references) is modulated at t = 0 and computed once; a task with references is trained at several noise levels
against the same prefix. The VAE is frozen, its latents are computed once.
"""

import functools
import itertools
import math
import multiprocessing
import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from ..checkpoint import Checkpoint
from ..config import ScheduleConfig, VAEConfig, read_json
from ..sampling import initial_noise
from ..schedule import dynamic_sigmas
from ..vae import QwenImage21VAE
from . import world
from .batched import PLAIN_BLOCKS, Compiler, Denoiser, TextEncoder, repeated
from .data import Samples, Store, collate, fill, processes, to_patches, to_tokens
from .evaluate import STEPS, Job, contact_sheet, draw_jobs, format_table, score_all, summarize
from .layout import GRIDS, REFERENCE_TOKENS, ROOMS, Layouter
from .models import new_text_encoder, new_transformer
from .muon import Muon
from .reader import templates
from .run import MovingAverage, Run, clip, flat_gradient
from .tokens import load_tokenizer
from .train_vae import new_vae

# Samples kept, by room, in each process.
COUNTS = {"t2i": 90_000, "edit": 60_000, "compose": 16_000, "large": 4_000}


class Portion(NamedTuple):
    """What a step trains of one room: prompts, noise levels a prompt, weight of the loss; every `period` steps, beginning with `first`."""

    prompts: int
    levels: int
    weight: float
    period: int = 1
    first: int = 0


PORTIONS = {"t2i": Portion(192, 1, 0.4), "edit": Portion(128, 2, 0.45), "compose": Portion(32, 2, 0.4, 3), "large": Portion(24, 1, 0.3, 3, 1)}
SHIFT = 0.5  # mu of the schedule at 256 x 256


def draw_sigmas(count: int, device) -> torch.Tensor:
    """Noise levels: half as the schedule visits them, half from the middle."""
    u = torch.rand(count, device=device).clamp(1e-4, 1 - 1e-4)
    visited = math.e**SHIFT / (math.e**SHIFT + 1 / u - 1)
    middle = torch.sigmoid(SHIFT + torch.randn(count, device=device))
    return torch.where(torch.rand(count, device=device) < 0.5, visited, middle)


def load_vae(folder: Path, device):
    """The VAE that the `vae` stage left in `folder`, or that of a checkpoint folder; and its latents' mean and standard deviation, (1, 64, 1, 1)."""
    if (folder / "vae" / "config.json").is_file():
        config = VAEConfig.from_dict(read_json(folder / "vae" / "config.json"))
        vae = QwenImage21VAE(config)
        stored = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
        vae.load_state_dict({key: stored[key].float().view(value.shape) for key, value in vae.state_dict().items()})
        statistics = {"mean": torch.tensor(config.latents_mean), "std": torch.tensor(config.latents_std)}
    else:
        vae = new_vae(0)
        vae.load_state_dict(Run.load("vae_encoder", folder) | Run.load("vae_decoder", folder))
        statistics = Run.load("vae_statistics", folder)
    mean, std = (statistics[key].to(device).view(1, 64, 1, 1) for key in ("mean", "std"))
    return vae.to(device, memory_format=torch.channels_last).requires_grad_(False), mean, std


def load_start(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of text encoder and denoiser that the `joint` stage left in `folder`, or those of a checkpoint folder."""
    if (folder / "model_index.json").is_file():
        checkpoint, where = Checkpoint(folder), (torch.device("cpu"), torch.float32)
        return checkpoint.text_encoder(*where).model.state_dict(), checkpoint.transformer(*where).state_dict()
    return Run.load("text_encoder", folder), Run.load("transformer", folder)


class BatchPainter:
    """Paints evaluation jobs many at a time with the batched forwards: the core's own schedule, noise and Euler steps."""

    def __init__(self, encoder: TextEncoder, denoiser: Denoiser, vae, mean, std, run: Run):
        self.encoder, self.denoiser, self.vae, self.mean, self.std, self.run = encoder, denoiser, vae, mean, std, run
        self.layouter = Layouter(load_tokenizer())

    @torch.no_grad()
    def __call__(self, jobs: list[Job], chunk: int = 128) -> list[np.ndarray]:
        out: list[np.ndarray | None] = [None] * len(jobs)
        by_room: dict[tuple[str, int], list[int]] = {}
        for index, job in enumerate(jobs):
            grid = GRIDS.index((job.height // 16, job.width // 16))
            name = ("t2i", "edit", "compose", "compose")[len(job.task.references)]
            by_room.setdefault(("large" if not job.task.references and math.prod(GRIDS[grid]) > 256 else name, grid), []).append(index)
        for (name, grid), indices in by_room.items():
            for start in range(0, len(indices), chunk):
                part = indices[start : start + chunk]
                for index, picture in zip(part, self._paint([jobs[i] for i in part], name, grid)):
                    out[index] = picture
        return out

    def _paint(self, jobs: list[Job], name: str, grid: int) -> list[np.ndarray]:
        room, device = ROOMS[name], self.run.device
        layouts = [self.layouter(job.task.prompt, [0] * len(job.task.references), grid, room) for job in jobs]
        fits = [i for i, layout in enumerate(layouts) if layout]
        batch = type(collated := collate([layouts[i] for i in fits], room))(*(x.to(device) for x in collated))
        if room.references:
            pixels = world.render(
                *(x.to(device) for x in world.pack([scene for i in fits for scene in jobs[i].task.references])), 256, 256, world.palette(device)
            )
            pixels = (pixels * 127.5 + 127.5).round() / 127.5 - 1
            latents = torch.cat([(self.vae.encode(x) - self.mean) / self.std for x in pixels.split(64)])
            slots = [row * room.references + i for row, job in enumerate(fits) for i in range(len(jobs[job].task.references))]
            batch.patches.flatten(0, 1)[slots] = to_patches(pixels)
            batch.reference_latents.flatten(0, 1)[slots] = to_tokens(latents, REFERENCE_TOKENS)
        rows, columns = GRIDS[grid]
        x = to_tokens(torch.cat([initial_noise(jobs[i].seed, rows, columns) for i in fits]).to(device), room.target)
        sigmas = dynamic_sigmas(ScheduleConfig(), STEPS, rows * columns).tolist()
        with self.run.autocast():
            prefix = self.denoiser.prefill(self.encoder(batch, PLAIN_BLOCKS), batch, PLAIN_BLOCKS)
            for now, after in itertools.pairwise(sigmas):
                x = x + (after - now) * self.denoiser.denoise(x, x.new_full((len(x),), now), batch.target_grid, prefix, PLAIN_BLOCKS).float()
        latents = x[:, : rows * columns].transpose(1, 2).reshape(-1, 64, rows, columns) * self.std + self.mean
        made = torch.cat([self.vae.decode(z) for z in latents.split(32)])
        levels = (made.permute(0, 2, 3, 1) * 127.5 + 127.5).round().clamp(0, 255).byte().cpu().numpy()
        blank = np.zeros_like(levels[0])
        return [levels[fits.index(i)] if i in fits else blank for i in range(len(jobs))]


def train(
    out: Path, vae: Path, seconds: float, seed: int = 0, rate: float = 2e-3, matrix_rate: float = 0.02, fall: float = 0.5, start: Path | None = None,
    data: float = 1.0, batch: float = 1.0, evaluate: float = 1.0, end_at: float = 0.0, tables: int = 0,
) -> None:  # fmt: skip
    """Train for `seconds`, the last fraction `fall` with a falling rate. `vae` is the folder of that stage, `start` one of this stage to go on from.

    `end_at` (unix time) takes the place of `seconds`, so that compilation counts too. `data` and `batch` scale the number of samples kept and
    trained on in a step, `evaluate` that of the prompts scored at the end (0: none); `tables` is the number of smaller tables on the way.
    """
    torch.set_num_threads(1)  # a forked process hangs in OpenMP if its parent has used it
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether there is a GPU must not wake CUDA before the forks
    templates()  # before the workers are forked, so that they share them
    pool = multiprocessing.get_context("fork").Pool(processes())
    counts = {name: max(8, round(count * data)) for name, count in COUNTS.items()}
    stores = {name: Store(name, count) for name, count in counts.items()}
    rank = int(os.environ.get("RANK", "0"))

    def new_encoder():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
        autoencoder, mean, std = load_vae(vae, device)

        def encode(pixels: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                return (autoencoder.encode(pixels.contiguous(memory_format=torch.channels_last)).float() - mean) / std

        return encode, device

    # This, too, must be forked before CUDA is used here.
    arguments = (stores, 1 + 100 * seed + rank, processes(), new_encoder, max(8, round(250 * min(1.0, 10 * data))))
    filler = multiprocessing.get_context("fork").Process(target=fill, args=arguments)
    filler.start()
    run = Run("joint", out, seed, seconds=seconds, end_at=end_at, rate=rate, matrix_rate=matrix_rate, fall=fall, start=str(start or ""), counts=counts,
              portions=PORTIONS, batch=batch)  # fmt: skip
    torch._dynamo.config.cache_size_limit = 64
    autoencoder, mean, std = load_vae(vae, run.device)
    samples = {name: Samples(store, run.device) for name, store in stores.items()}

    torch.manual_seed(seed)
    text_model, transformer = new_text_encoder(load_tokenizer()), new_transformer()
    if start:
        encoder_state, transformer_state = load_start(start)
        missing = text_model.load_state_dict(encoder_state, strict=False).missing_keys
        if set(missing) - {"language_model.norm.weight"}:
            raise ValueError(f"{start} lacks {missing} of the text encoder")
        transformer.load_state_dict(transformer_state)
    text_model, transformer = text_model.to(run.device), transformer.to(run.device)
    encoder, denoiser = TextEncoder(text_model, run.device), Denoiser(transformer, run.device)
    named = [(name, p) for name, p in [*text_model.named_parameters(), *transformer.named_parameters()] if name != "language_model.norm.weight"]
    parameters = [p for _, p in named]
    matrices = [p for name, p in named if p.ndim == 2 and ("transformer_blocks." in name or "language_model.layers." in name)]
    chosen = {id(p) for p in matrices}
    pace = torch.ones((), device=run.device)  # factor of all rates
    others_rate = torch.zeros((), device=run.device)
    others = torch.optim.AdamW(
        [p for p in parameters if id(p) not in chosen], lr=others_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=run.cuda, capturable=run.cuda
    )
    muon = Muon(matrices, matrix_rate)
    average = MovingAverage(parameters, 0.9985)
    run.same_weights(parameters)
    gradient = flat_gradient(parameters)
    bad, norms = torch.zeros((), device=run.device), torch.zeros((), device=run.device)
    losses = {name: torch.zeros((), device=run.device) for name in PORTIONS}
    torch.manual_seed(1000 * seed + 7 + run.rank)
    blocks = Compiler(*(run.compile(function) for function in PLAIN_BLOCKS[:3]), PLAIN_BLOCKS.last_prefix_block)  # the last is small

    def pull() -> bool:
        """Take what has become ready of every room; whether that is all."""
        done = [s.pull() for s in samples.values()]
        return all(done)

    def add_gradient(name: str) -> None:
        prompts, levels, share_of_loss, *_ = PORTIONS[name]
        with torch.no_grad():
            b = samples[name].random(max(1, round(prompts * batch)))
            clean = repeated(b.target.float(), levels)
            sigma, noise = draw_sigmas(len(clean), run.device), torch.randn_like(clean)
            s = sigma[:, None, None]
            noisy, wanted = (1 - s) * clean + s * noise, noise - clean
            weight = repeated(denoiser.valid(b.target_grid, clean.shape[1]), levels)[..., None].float()
        with run.autocast():
            prefix = denoiser.prefill(encoder(b, blocks), b, blocks)
            velocity = denoiser.denoise(noisy, sigma, b.target_grid, prefix, blocks)
        loss = ((velocity.float() - wanted).square() * weight).sum() / (weight.sum() * 64)
        (loss * share_of_loss).backward()
        losses[name] += loss.detach()

    def update() -> None:
        norm = clip(gradient)
        bad.add_(~norm.isfinite())
        norms.add_(norm.nan_to_num(0, 0, 0))
        others_rate.copy_(rate * pace)
        others.step()
        muon.step(pace)
        gradient.zero_()
        average.update()

    def forget() -> None:
        """Momentum and the like, but no weight."""
        muon.reset()
        for state in others.state.values():
            for value in state.values():
                value.zero_()

    def keep() -> None:
        run.save("transformer", transformer.state_dict())
        run.save("text_encoder", text_model.state_dict())

    def judge(event: str, scale: float) -> None:
        """Keep and score the averages; the first process alone."""
        if run.rank:
            return
        average.swap()
        keep()
        jobs = draw_jobs(scale)
        pictures = BatchPainter(encoder, denoiser, autoencoder, mean, std, run)(jobs)
        average.swap()
        scores = score_all(jobs, pictures, pool)
        table = summarize(jobs, scores)
        run.log(event, step=step, table=table)
        print(format_table(table), flush=True)
        contact_sheet(jobs, pictures, scores).save(run.out / "sheet.png", optimize=True)

    while any(store.ready < min(store.count, 256) for store in stores.values()):
        if not filler.is_alive() and filler.exitcode:
            raise RuntimeError("the process that makes the data failed")
        time.sleep(0.1)
    pull()
    pace.zero_()
    learn = {name: run.capture(functools.partial(add_gradient, name)) for name in PORTIONS}
    gradient.zero_()
    step_all = run.capture(update)
    forget()
    for counter in (average.steps, bad, norms, *losses.values()):
        counter.zero_()
    run.log("compiled", parameters=sum(p.numel() for p in parameters), samples={name: s.pulled for name, s in samples.items()},
            gigabytes=round(torch.cuda.max_memory_allocated() / 1e9, 1) if run.cuda else 0)  # fmt: skip
    complete = pull()
    begun, step, share, slower = time.time(), 0, 0.0, 1.0
    if end_at:
        seconds = run.agree(end_at - begun)
    next_line, next_table, skipped, logged = 0.02, 1 / (tables + 1), 0, 0
    trained = dict.fromkeys(PORTIONS, 0)  # steps since the last line of the log
    while True:
        if step % run.rhythm == 0:
            share = run.agree((time.time() - begun) / seconds)
        if share >= 1:
            break
        for name, portion in PORTIONS.items():
            if step % portion.period == portion.first:
                learn[name]()
                trained[name] += 1
        run.average(gradient)
        pace.fill_(slower * min(1.0, (step + 1) / 200) * min(1.0, max(0.02, (1 - share) / fall)))
        step_all()
        step += 1
        if step % run.rhythm == 0:
            if bad.item() >= run.rhythm:  # gradients have stopped being finite: go back to the averages, at half the rate
                slower /= 2
                with torch.no_grad():
                    torch._foreach_copy_(parameters, average.values)
                forget()
                run.log("recovered", step=step, slower=slower)
            skipped += int(bad.item())
            bad.zero_()
        if not complete and step % 100 == 0:
            complete = pull()
            if complete:
                run.log("data complete", step=step)
        if share > next_line:
            means = {name: round(losses[name].item() / trained[name], 4) for name in PORTIONS if trained[name]}
            norm = norms.item() / max(1, step - logged)
            run.log("step", step=step, share=round(share, 3), seconds=round(time.time() - begun, 1), **means, norm=round(norm, 3), skipped=skipped)
            for counter in (norms, *losses.values()):
                counter.zero_()
            trained, logged = dict.fromkeys(PORTIONS, 0), step
            next_line = max(next_line + 0.02, share)
        if share > next_table and tables:
            paused = time.time()
            judge("table", 0.15 * evaluate)
            begun += 0 if end_at else run.agree(time.time() - paused)
            next_table += 1 / (tables + 1)
    run.log("done", step=step, seconds=round(time.time() - begun), processes=run.size)
    average.swap()
    keep()
    average.swap()
    filler.terminate()
    if evaluate:
        judge("final", evaluate)
    run.close()
    pool.terminate()
