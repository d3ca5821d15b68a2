"""Sigmas and timesteps equal the reference's to the bit."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_shift, retrieve_timesteps
from oracle.reference import reference_velocity

from qwen21.checkpoint import Checkpoint
from qwen21.schedule import sigmas

TOKENS = [4, 36, 256, 45 * 66, 64 * 64, 128 * 128, 150 * 112]


def our_sigmas(checkpoint, steps, tokens):
    return sigmas("auto", steps, tokens, checkpoint.schedule, checkpoint.index.sample_sigmas)


def reference_sigmas(folder, base, tokens):
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    config = scheduler.config
    mu = calculate_shift(tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
    retrieve_timesteps(scheduler, len(base), "cpu", sigmas=base, mu=mu)
    return scheduler.sigmas


@pytest.mark.parametrize("tokens", TOKENS)
def test_dynamic_sigmas(model_folder, checkpoint, tokens):
    for steps in range(2, 51):
        ours = our_sigmas(checkpoint, steps, tokens)
        assert torch.equal(ours, reference_sigmas(model_folder, np.linspace(1.0, 1 / steps, steps), tokens)), steps


def test_forty_steps_unless_told(checkpoint):
    assert torch.equal(our_sigmas(checkpoint, None, 4096), our_sigmas(checkpoint, 40, 4096))


@pytest.mark.parametrize("tokens", TOKENS)
def test_turbo_sigmas(turbo_folder, tokens):
    checkpoint = Checkpoint(turbo_folder)
    ours = our_sigmas(checkpoint, None, tokens)
    assert torch.equal(ours, reference_sigmas(turbo_folder, list(checkpoint.index.sample_sigmas), tokens))
    assert len(ours) == 9


@pytest.mark.parametrize("tokens", TOKENS)
def test_one_step_goes_from_one_to_zero(checkpoint, tokens):
    assert our_sigmas(checkpoint, 1, tokens).tolist() == [1.0, 0.0]


def test_bfloat16_timesteps_are_rounded_twice_as_in_the_reference(checkpoint, reference):
    """Both models are watched where the timestep enters their embedding."""
    ours = checkpoint.transformer(torch.device("cpu"), torch.bfloat16)
    theirs = type(reference.transformer).from_config(reference.transformer.config).to(torch.bfloat16).eval()
    seen = {ours: [], theirs: []}
    for model, record in seen.items():
        model.time_text_embed.register_forward_pre_hook(lambda module, arguments, record=record: record.append(arguments[0][0].item()))
    context, target = torch.zeros(1, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 64, 2, 2, dtype=torch.bfloat16)
    prefix = ours.prefill(context)
    seen[ours].clear()  # the prefix's own t = 0
    schedule = our_sigmas(checkpoint, None, 4096)[:-1]
    for sigma in schedule:
        ours.denoise(target, sigma, prefix)
        reference_velocity(theirs, context, [], [], target, sigma.item())
    assert seen[ours] == seen[theirs]
    rounded_once = schedule.to(torch.bfloat16).tolist()
    assert sum(a != b for a, b in zip(seen[ours], rounded_once)) >= 10  # so that this test can tell
