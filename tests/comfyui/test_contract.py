"""What ComfyUI's own tool says of the pack and its workflows."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from comfyui.install import REPOSITORY

WORKFLOWS = sorted(file for folder in ("workflows", "workflows/api") for file in (REPOSITORY / folder).glob("*.json"))
NAMED_BY_WORKFLOWS = "tiny"


@pytest.fixture(scope="module")
def comfy() -> str:
    """The `comfy` command."""
    beside = Path(sys.executable).parent / "comfy"
    command = str(beside) if beside.is_file() else shutil.which("comfy")
    if not command:
        pytest.skip("comfy-cli is not installed: install the test extra")
    return command


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120, check=False, **options)


def test_pack_validates(comfy):
    result = run(comfy, "--skip-prompt", "--no-enable-telemetry", "node", "validate", cwd=REPOSITORY)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def object_info(comfy_server, tmp_path_factory) -> Path:
    """What the server offers, and the checkpoint that the workflows name."""
    information = comfy_server.get("/object_info")
    information["Qwen21Loader"]["input"]["required"]["checkpoint"][1]["options"].append(NAMED_BY_WORKFLOWS)
    file = tmp_path_factory.mktemp("information") / "object_info.json"
    file.write_text(json.dumps(information))
    return file


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_workflow_validates(comfy, object_info, file):
    result = run(comfy, "--skip-prompt", "--json", "workflow", "validate", "--workflow", file, "--input", object_info)
    assert result.returncode == 0, result.stdout + result.stderr
