"""GGUF blocks of every type that is read, with contents drawn at random."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Type = GGMLQuantizationType
HALVES: dict[Type, tuple[int, ...]] = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.MXFP4: (),
}
"""Places of the half floats in a block; every other byte may have any value."""


def random_blocks(kind: Type, rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """``[rows, bytes of a row]``, whose weights are of the size that weights have."""
    rng = np.random.default_rng(seed)
    values, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    for place in HALVES[kind]:
        halves = rng.uniform(0.001, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)
    if kind == Type.MXFP4:
        blocks[..., 0] = rng.integers(117, 123, blocks.shape[:2])
    return blocks.reshape(rows, -1)
