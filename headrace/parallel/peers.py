"""PeerMemory: sums of small tensors in memory that the GPUs of all ranks map."""

from __future__ import annotations

import importlib
from typing import Any

import torch

ONE_SHOT_BYTES = 512 * 1024
"""Up to here every rank reads everything of all others; beyond, each sums its part and reads the others' sums."""
MOST_BYTES = 4 * 1024 * 1024
"""Larger tensors are NCCL's."""
SIZES = (2, 4, 8)
"""Numbers of ranks that the kernels are compiled for."""
_ALIGNMENT = 16
_DTYPES = (torch.bfloat16, torch.float32)


class PeerMemory:
    """All-reduce with torch's symmetric memory: one kernel a rank, on a buffer whose address never changes, so that a captured
    graph may contain it. NVLink multicast is not used. Elements are summed in the order of the ranks, whatever the size.

    A kernel waits for those of the other ranks, and none may overtake: all of them run on one stream.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        """``group``: a ``torch.distributed.ProcessGroup``, whose ranks all come here.

        Raises:
            RuntimeError, AttributeError, ImportError: the GPUs cannot map each other's memory, or PyTorch lacks an operation.
        """
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        self._ops: Any = torch.ops.symm_mem
        for name in ("one_shot_all_reduce_copy_out", "two_shot_all_reduce_"):
            getattr(self._ops, name)
        self._name = group.group_name
        self._buffer = memory.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        memory.rendezvous(self._buffer, self._name)

    @staticmethod
    def takes(x: torch.Tensor) -> bool:
        nbytes = x.numel() * x.element_size()
        return 0 < nbytes <= MOST_BYTES and nbytes % _ALIGNMENT == 0 and x.dtype in _DTYPES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: one that it ``takes``; it is overwritten if it is contiguous."""
        x = x.contiguous()
        if x.data_ptr() % _ALIGNMENT:
            x = x.clone()
        nbytes = x.numel() * x.element_size()
        shared = self._buffer[:nbytes].view(x.dtype).view(x.shape)
        if nbytes <= ONE_SHOT_BYTES:
            self._ops.one_shot_all_reduce_copy_out(shared, x, "sum", self._name, x)
        else:
            shared.copy_(x)
            self._ops.two_shot_all_reduce_(shared, "sum", self._name)
            x.copy_(shared)
        return x
