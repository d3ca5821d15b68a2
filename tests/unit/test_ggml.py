"""GGUF's block types against the package's own dequantisation."""

import numpy as np
import pytest
import torch
from formats.files import random_blocks

from qwen21 import ggml

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", [*ggml.BLOCKS, "TQ2_0", "IQ3_S"])
def test_as_the_package_reads_it(kind):
    packed = random_blocks(kind, 6, 512)
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    found = ggml.dequantize(torch.from_numpy(packed), kind, (6, 512), torch.float32)
    assert np.isfinite(expected).all() and expected.std() > 0
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-7)


def test_dtype_is_what_was_asked_for():
    packed = torch.from_numpy(random_blocks("Q4_K", 2, 256))
    half = ggml.dequantize(packed, "Q4_K", (2, 256), torch.bfloat16)
    assert half.dtype == torch.bfloat16 and torch.equal(half, ggml.dequantize(packed, "Q4_K", (2, 256), torch.float32).to(torch.bfloat16))
