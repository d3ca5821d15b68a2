"""Where a test runs: on the CPU, and on a CUDA device if there is one; or in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def printed(script: str, **environment: str) -> str:
    """What `script` prints in a process of its own, in which Triton compiles kernels and does not interpret them."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run([sys.executable, "-"], input=script, env=environment, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    return done.stdout
