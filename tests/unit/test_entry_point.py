"""What ComfyUI, comfy-cli and pytest read of the pack before any node is imported."""

import asyncio
import importlib.util
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize("version", ["0.3.75", "0.32.9", "0"])
def test_an_older_comfyui_is_told_which_version_it_takes(entry_point, monkeypatch, version):
    monkeypatch.setitem(sys.modules, "comfyui_version", SimpleNamespace(__version__=version))
    with pytest.raises(RuntimeError, match=f"this is ComfyUI {version}, .* need {entry_point.NEEDS_COMFYUI} or newer"):
        asyncio.run(entry_point.comfy_entrypoint())


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1-nightly", "0.38.1", "1.0"])
def test_a_newer_comfyui_is_not_refused(entry_point, monkeypatch, version):
    monkeypatch.setitem(sys.modules, "comfyui_version", SimpleNamespace(__version__=version))
    entry_point._check_version()


def test_both_files_name_the_same_version(entry_point):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["comfy"]["requires-comfyui"] == f">={entry_point.NEEDS_COMFYUI}"


def test_requirements_pin_nothing_of_the_users():
    lines = [line for line in (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert lines and not any(line.startswith("torch") or "==" in line for line in lines)
