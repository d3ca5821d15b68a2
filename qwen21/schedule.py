"""Sigmas: which noise levels are visited. float32 throughout, in the order of the reference's operations, so that they are equal to the bit."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from .config import ScheduleConfig
from .errors import UsageError

SCHEDULES = ("auto", "dynamic", "turbo")
DEFAULT_STEPS = 40
# The published Turbo checkpoint's own steps (its `model_index.json`), which its distillation was made for.
TURBO_SIGMAS = (1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568)
TURBO_SCHEDULE = ScheduleConfig(use_dynamic_shifting=False, shift_terminal=0.0)


def sigmas(kind: str, steps: int | None, target_tokens: int, config: ScheduleConfig, own: Sequence[float] = ()) -> torch.Tensor:
    """The schedule for a picture of `target_tokens` latent tokens: float32 (steps + 1,), falling from 1 to 0.

    `kind` "auto" takes the checkpoint's `own` sigmas if it brings some, else spreads `steps` (None: 40) by its `config`; "dynamic" always
    does the latter, with the published shift if `config` has none; "turbo" takes `own`, else the published Turbo sigmas.
    Raises UsageError when `steps` contradicts sigmas that are fixed.
    """
    config, own = resolve(kind, config, own)
    if not own:
        return dynamic_sigmas(config, steps or DEFAULT_STEPS, target_tokens)
    if steps not in (None, len(own)):
        raise UsageError(f"steps is {steps}, but these sigmas are fixed at {len(own)} steps: leave steps out, or choose the dynamic schedule")
    return shifted_sigmas(config, own, target_tokens)


def resolve(kind: str, config: ScheduleConfig, own: Sequence[float] = ()) -> tuple[ScheduleConfig, Sequence[float]]:
    """The config, and the fixed sigmas if there are any, that a `kind` of schedule comes to (see `sigmas`)."""
    if kind == "dynamic":
        return config if config.use_dynamic_shifting else ScheduleConfig(), ()
    if kind == "turbo" and not own:
        return TURBO_SCHEDULE, TURBO_SIGMAS
    return config, own


def mu(config: ScheduleConfig, target_tokens: int) -> float:
    """The logarithm of the shift for a picture of `target_tokens` latent tokens."""
    return dynamic_mu(config, target_tokens) if config.use_dynamic_shifting else math.log(config.shift)


def dynamic_mu(config: ScheduleConfig, target_tokens: int) -> float:
    """The exponential shift for a picture of `target_tokens` latent tokens (references do not count). Extrapolates, never clamps."""
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    return target_tokens * slope + (config.base_shift - slope * config.base_image_seq_len)


def dynamic_sigmas(config: ScheduleConfig, steps: int, target_tokens: int) -> torch.Tensor:
    """`steps` + 1 falling sigmas, float32, from 1 to 0, spread evenly before the checkpoint's shift. One step is [1, 0]."""
    if steps < 1:
        raise UsageError(f"steps is {steps}, expected at least 1")
    return shifted_sigmas(config, np.linspace(1.0, 1 / steps, steps), target_tokens)


def shifted_sigmas(config: ScheduleConfig, sigmas, target_tokens: int) -> torch.Tensor:
    """`sigmas` (falling, without the final 0) shifted and stretched as `config` asks (Turbo's asks for nothing): float32, with the 0 appended."""
    s = np.asarray(sigmas, dtype=np.float32)
    if config.use_dynamic_shifting:
        e = math.exp(dynamic_mu(config, target_tokens))
        s = e / (e + (1 / s - 1))
    else:
        s = config.shift * s / (1 + (config.shift - 1) * s)
    if config.shift_terminal and len(s) > 1:  # the stretch divides by 1 - s[-1], which is 0 for a single step
        away = 1 - s
        s = 1 - away / (away[-1] / (1 - config.shift_terminal))
    return torch.cat([torch.from_numpy(s).to(torch.float32), torch.zeros(1)])
