"""Fixtures: a ComfyUI with the pack in it, once as a server and once as a process that runs checks inside."""

from pathlib import Path

import pytest
from comfyui.install import ABSENT, Install, find_install, write_base
from comfyui.server import Server
from comfyui.worker import Worker
from formats.files import write_singles

from qwen21.random_model import make_random


@pytest.fixture(scope="session")
def comfyui() -> Install:
    """Skips the test where there is no ComfyUI."""
    install = find_install()
    if install is None:
        pytest.skip(ABSENT)
    return install


@pytest.fixture(scope="session")
def base(comfyui, tmp_path_factory) -> Path:
    """The base directory of server and worker."""
    base = write_base(tmp_path_factory.mktemp("comfyui") / "base", make_random)
    write_singles(base / "models")
    return base


@pytest.fixture(scope="session")
def comfy_server(comfyui, base):
    server = Server(comfyui, base)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def worker(comfyui, base):
    worker = Worker(comfyui, base)
    yield worker
    worker.stop()
