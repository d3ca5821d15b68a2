"""What ComfyUI, comfy-cli and pytest read of the pack before any node is imported."""

import asyncio
import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def entry_point(monkeypatch):
    spec = importlib.util.spec_from_file_location("the_pack", REPOSITORY / "__init__.py", submodule_search_locations=[str(REPOSITORY)])
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "the_pack", module)
    spec.loader.exec_module(module)
    return module


def test_importing_it_needs_no_comfyui(entry_point):
    assert "comfy_api" not in sys.modules and (REPOSITORY / entry_point.WEB_DIRECTORY / "docs").is_dir()


def test_without_what_it_needs_it_says_which_version_does(entry_point, monkeypatch):
    monkeypatch.setitem(sys.modules, "comfy_api", None)
    with pytest.raises(RuntimeError, match=f"need ComfyUI {entry_point.NEEDS_COMFYUI} or newer"):
        asyncio.run(entry_point.comfy_entrypoint())


def test_both_files_name_the_same_version(entry_point):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["comfy"]["requires-comfyui"] == f">={entry_point.NEEDS_COMFYUI}"


def test_requirements_pin_nothing_of_the_users():
    lines = [line for line in (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert lines and not any(line.startswith("torch") or "==" in line for line in lines)
