"""A small checkpoint with published head sizes, once as a folder and once as single files."""

import shutil
from pathlib import Path

import pytest
from formats.files import FILES, make_small


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """The folder in the diffusers layout."""
    return make_small(tmp_path_factory.mktemp("formats") / "small")


@pytest.fixture
def singles(small, tmp_path) -> dict[str, Path]:
    """Part -> a single file without a config, the tokenizer beside the text encoder's."""
    files = {part: tmp_path / "models" / part / f"{part}.safetensors" for part in FILES}
    for part, path in files.items():
        path.parent.mkdir(parents=True)
        shutil.copy(small / FILES[part], path)
    shutil.copy(small / "processor/tokenizer.json", files["text_encoder"].parent)
    return files
