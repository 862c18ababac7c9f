"""Token bitmasks over logits. Reference: ``headrace.kernels.sampling.reference``."""

from __future__ import annotations

import torch
import triton.language as tl

from headrace.kernels.sampling.triton_vocabulary import CHUNK
from headrace.kernels.support import cdiv
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options


@launched
def _apply_masks(
    logits, masks, which, row_stride: tl.int64, WORDS: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(which + row).to(tl.int64)
    if mask >= 0:
        token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        word = tl.load(masks + mask * WORDS + token // 32, mask=token < VOCAB, other=-1)
        banned = (word >> (token % 32)) & 1 == 0
        tl.store(logits + row * row_stride + token, tl.full((CHUNK,), float("-inf"), tl.float32), mask=banned)


def apply_masks(logits: torch.Tensor, masks: torch.Tensor, which: torch.Tensor) -> None:
    """Kernel version of ``headrace.kernels.sampling.apply_masks``."""
    rows, vocab = logits.shape
    if rows:
        _apply_masks[(rows, cdiv(vocab, CHUNK))](
            logits, masks, which, logits.stride(0), WORDS=masks.shape[1], VOCAB=vocab, CHUNK=CHUNK, **options(logits.device)
        )
