"""Checkpoints in every layout people have, made from the small ones."""

import numpy as np


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Bytes of whole GGUF blocks, uint8 (rows, bytes a row): random integers, and finite scales of about 0.01."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    packed = random.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for offset in HALVES.get(kind, (0,)):
        scales = (random.random(len(packed)) * 0.01 + 0.005).astype(np.float16)
        packed[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return packed.reshape(rows, -1)


# Where a block holds half-precision numbers, if not at its beginning.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ2_0": (64,)}
