"""Runs every `check_*` function of inside/ in ComfyUI's own Python, where nodes, models and latents are objects that can be compared."""

import ast
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "inside").glob("check_*.py"))


def checks(file: Path) -> list[str]:
    """Read without importing: they need ComfyUI."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [f"{file.stem}:{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


@pytest.mark.parametrize("check", [check for file in FILES for check in checks(file)])
def test_inside(worker, check):
    failure = worker.run(check)
    if failure is not None:
        pytest.fail(failure, pytrace=False)
