"""Running the command in this process, and checkpoint folders to damage."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.running import Run, stderr_lines

from qwen21.__main__ import main


@pytest.fixture
def run_command(capfd) -> Callable[..., Run]:
    """`run_command(argument, ...)` in this process."""

    def run(*arguments: object) -> Run:
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        stdout, stderr = capfd.readouterr()
        return Run(code, stdout, stderr_lines(stderr))

    return run


@pytest.fixture
def paint(run_command, model_folder, tmp_path) -> Callable[..., Run]:
    """`paint(option, ...)`: one step at 64 x 64 into `out.png` of an empty folder, unless the options, which come later, say otherwise."""
    (tmp_path / "out").mkdir()
    output = tmp_path / "out/out.png"

    def run(*options: object, prompt: str = "a cat", model: Path = model_folder, size: bool = True, steps: bool = True) -> Run:
        small = [*(("--width", 64, "--height", 64, "--resolution", 64) if size else ()), *(("--steps", 1) if steps else ())]
        return run_command("generate", prompt, "-o", output, "--model", model, *small, *options)

    run.output = output
    return run


@pytest.fixture
def damaged(model_folder, tmp_path) -> Path:
    """A checkpoint to damage: its files are links to the session's, so replace them and never write through them."""
    folder = tmp_path / "damaged"
    shutil.copytree(model_folder, folder, copy_function=os.symlink)
    return folder
