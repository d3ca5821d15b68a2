"""Loading a single file holds no second copy of its weights, and weights in fewer bits stay in fewer bits."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from formats import files
from safetensors.torch import save_file

from qwen21.config import TransformerConfig
from qwen21.transformer import QwenImage21Transformer

REPOSITORY = Path(__file__).parents[2]
CONFIG = TransformerConfig(num_layers=4, num_attention_heads=8, context_in_dim=files.WIDTH)  # 64 million parameters
MEASURE = """
import json, sys, threading, time
from pathlib import Path
import torch
from qwen21.checkpoint import Checkpoint

def private():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

checkpoint = Checkpoint(sys.argv[1], transformer=Path(sys.argv[2]))
before, peak, done = private(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, private())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
model = checkpoint.transformer(torch.device("cpu"), getattr(torch, sys.argv[3]))
done = True
watcher.join()
loading = peak - before
with torch.inference_mode():
    model.prefill(torch.zeros(1, 4, 256, dtype=getattr(torch, sys.argv[3])))
print(json.dumps({"loading": loading, "weights": sum(weight.nbytes for weight in model.parameters())}))
"""


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = QwenImage21Transformer(CONFIG)
    return {name: torch.zeros(weight.shape, dtype=torch.bfloat16) for name, weight in model.named_parameters()}


def measured(small: Path, path: Path, dtype: str) -> dict[str, int]:
    """Bytes of private memory at the peak of loading, and of the weights as they are after they were used."""
    command = [sys.executable, "-c", MEASURE, str(small), str(path), dtype]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def gguf(tensors: dict, path: Path) -> None:
    blocks = {
        name: (np.zeros((value.shape[0], value.shape[1] // 32 * 34), dtype=np.uint8), "Q8_0")
        for name, value in tensors.items()
        if name in files.matrices(tensors)
    }
    files.write_gguf(path, tensors | blocks)


LAYOUTS = {  # -> how it is written, the dtype to compute in, weights kept and private memory taken as shares of bfloat16's bytes
    "as stored": (lambda tensors, path: save_file(tensors, path), "bfloat16", 1.0, 0.1),
    "fused, as stored": (lambda tensors, path: save_file(files.fused(tensors), path), "bfloat16", 1.0, 0.1),
    "fused, cast": (lambda tensors, path: save_file(files.fused(tensors), path), "float32", 2.0, 2.6),
    "8-bit floats": (lambda tensors, path: save_file(files.cast8(files.fused(tensors)), path), "bfloat16", 0.56, 0.1),
    "scaled 8-bit floats": (lambda tensors, path: save_file(files.scaled8(tensors, rows=True), path), "bfloat16", 0.56, 0.2),
    "GGUF": (gguf, "bfloat16", 0.6, 0.2),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured as Linux reports it")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_second_copy(small, tensors, tmp_path, layout):
    write, dtype, kept, private = LAYOUTS[layout]
    if layout == "GGUF":
        pytest.importorskip("gguf")
    path = tmp_path / ("x.gguf" if layout == "GGUF" else "x.safetensors")
    write(tensors, path)
    found, whole = measured(small, path, dtype), sum(value.nbytes for value in tensors.values())
    print(layout, {name: round(value / whole, 3) for name, value in found.items()})  # pytest -s shows it
    assert found["weights"] < (kept + 0.02) * whole and found["loading"] < private * whole
