"""PeerMemory: sums of small tensors in memory that the GPUs of all ranks map."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from headrace.errors import EngineError
from headrace.kernels.norm import ResidualNorm
from headrace.kernels.peer_sum import kernels

ONE_SHOT_BYTES = {2: 2 << 20, 4: 512 << 10, 8: 256 << 10}
"""Largest one-shot sum, by the number of ranks: up to it every rank sends all of its part to all others, in one kernel with the
operation that follows the sum; beyond, each sums a share and reads the others' sums."""
MOST_BYTES = 8 << 20
"""Largest tensor that is summed through memory of the peers; larger ones are NCCL's."""
SIZES = tuple(ONE_SHOT_BYTES)
"""Numbers of ranks that the kernels are compiled for."""
_ALIGNMENT = 16
_DTYPES = (torch.bfloat16, torch.float32)
_TRIES = 1 << 29
"""Looks at memory that a kernel takes before it gives up its peers, several minutes in all: whoever started the ranks has then
long noticed that one is gone, or is gone as well."""
_FEW_TRIES = 1 << 25
"""Looks that take some ten seconds."""


class PeerMemory:
    """All-reduce in torch's symmetric memory: one kernel a rank, on buffers whose addresses never change, so that a captured
    graph may contain it. NVLink multicast is not used. One-shot sums are float32 sums in the order of the ranks.

    A kernel waits for those of the other ranks, and none may overtake: all of them run on one stream.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        """``group``: a ``torch.distributed.ProcessGroup``, whose ranks all come here, and wait for each other before they sum.

        Raises:
            RuntimeError, AttributeError, ImportError: the GPUs cannot map each other's memory, or PyTorch lacks an operation.
        """
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        nbytes = kernels.nbytes(group.size())  # Imports the kernels, before the ranks wait for each other.
        self._ops: Any = torch.ops.symm_mem
        self._ops.two_shot_all_reduce_  # noqa: B018
        self._name, self.size = group.group_name, group.size()
        self._buffer = memory.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        memory.rendezvous(self._buffer, self._name)
        self._places = memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._places.fill_(kernels.EMPTY_BYTE)
        handle = memory.rendezvous(self._places, self._name)
        self._alarm = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._buffers = kernels.PeerBuffers(
            rank=group.rank(),
            ranks=[handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(self.size)],
            turns=torch.zeros(kernels.ROWS, dtype=torch.int32, device=device),
            failed=torch.zeros(1, dtype=torch.int32, device=device),
            alarm=self._alarm,
        )
        self.patient = True
        """Kernels wait for peers that take minutes."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def takes(self, x: torch.Tensor, *, ordered: bool) -> bool:
        """``ordered``: elements are float32 sums in the order of the ranks."""
        nbytes = x.numel() * x.element_size()
        fits = 0 < nbytes <= MOST_BYTES and nbytes % _ALIGNMENT == 0 and x.dtype in _DTYPES
        return fits and (not ordered or self._one_shot(x))

    def fuses(self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm) -> bool:
        """Whether ``add_norm`` takes x, ``[T, n]``."""
        same = residual.shape == x.shape and residual.dtype == norm.weight.dtype == x.dtype
        same = same and (norm.first is None or norm.first.dtype == x.dtype)
        return same and self.takes(x, ordered=True)

    def most_rows(self, width: int) -> int:
        """Returns the most rows of ``width`` float32 that one kernel sums."""
        return min(kernels.ROWS, ONE_SHOT_BYTES[self.size] // (4 * width))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: one that it ``takes``; it is overwritten if it is contiguous."""
        x = _straight(x)
        if self._one_shot(x):
            return kernels.peer_sum(x.view(-1, x.shape[-1]), self._buffers, self._tries).view(x.shape)
        shared = self._buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        shared.copy_(x)
        self._ops.two_shot_all_reduce_(shared, "sum", self._name)
        return x.copy_(shared)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """``norm.add`` of the sum over ranks, of what it ``fuses``."""
        return kernels.peer_sum_norm(_straight(x), residual.contiguous(), norm, self._buffers, self._tries)

    def check(self) -> None:
        """Raises EngineError if a kernel has given up waiting."""
        if self._alarm.item():
            raise EngineError("a rank waited for another's part of a sum in vain")

    def _one_shot(self, x: torch.Tensor) -> bool:
        width, nbytes = x.shape[-1], x.numel() * x.element_size()
        rows = x.numel() // width
        small = nbytes <= ONE_SHOT_BYTES[self.size] and rows <= kernels.ROWS
        return small and width * x.element_size() <= kernels.ROW_BYTES and width * x.element_size() % _ALIGNMENT == 0

    @property
    def _tries(self) -> int:
        return _TRIES if self.patient else _FEW_TRIES


def _straight(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy whose elements lie one behind the other from an address that kernels read in whole words."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x
