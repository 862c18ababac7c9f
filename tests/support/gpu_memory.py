"""A GPU that is not there, as PyTorch would tell of its memory."""

from __future__ import annotations

import pytest
import torch

from support.resolving import GIB

TOTAL, OTHERS, HELD, PEAK = 80 * GIB, 3 * GIB, 7 * GIB, 11 * GIB


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers for PyTorch as if there were one GPU, of which other processes have 3 GiB."""
    cuda = {
        "memory_allocated": HELD,
        "max_memory_allocated": PEAK,
        "memory_reserved": 9 * GIB,
        "mem_get_info": (TOTAL - OTHERS - 9 * GIB, TOTAL),
    }
    for name, answer in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
