"""Group: the collectives of tensor-parallel ranks. An object that is passed to the modules that need it.

Sums on the CPU are float32 in the order of the ranks, so that the threads of a test and processes over gloo give the same bits
for any number of rows.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(days=1)
"""Of a collective. A lost rank is noticed by whoever started the ranks; idle ranks may wait for days."""


class Group(Protocol):
    """All ranks call the same methods in the same order, with tensors of one shape and dtype."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks; ``x`` may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[...] -> [size, ...]``: every rank's, by rank."""
        ...


class Alone:
    """One rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)


ALONE = Alone()


def gather_columns(group: Group, x: torch.Tensor, width: int) -> torch.Tensor:
    """``[N, columns] -> [N, width]``: the ranks' columns side by side, without padding at the end."""
    if group.size == 1:
        return x
    parts = group.all_gather(x)
    out = x.new_empty(len(x), width)
    for rank in range(group.size):
        start = rank * x.shape[1]
        own = out[:, start : start + x.shape[1]]
        own.copy_(parts[rank, :, : own.shape[1]])
    return out


def ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """``[size, ...] -> [...]``: the sum in float32 from the first to the last, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


class ThreadGroup:
    """One of several ranks that are threads of this process, for tests and debugging.

    ``ThreadGroup.make(size)`` makes all of them. ``abort`` ends the waiting of the others where one has failed.
    """

    def __init__(self, rank: int, places: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(places)
        self._places = places
        self._barrier = barrier

    @classmethod
    def make(cls, size: int) -> list[ThreadGroup]:
        places: list[torch.Tensor | None] = [None] * size
        barrier = threading.Barrier(size)
        return [cls(rank, places, barrier) for rank in range(size)]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return ordered_sum(self.all_gather(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._places[self.rank] = x
        self._barrier.wait()
        gathered = torch.stack([place for place in self._places if place is not None])
        self._barrier.wait()
        return gathered

    def abort(self) -> None:
        self._barrier.abort()


class GlooGroup:
    """Ranks that are processes of this machine, on CPUs."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank = rank
        self.size = size
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout = _TIMEOUT
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return ordered_sum(self.all_gather(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        if x.numel():
            self._group.allgather([list(gathered)], [x.contiguous()]).wait()
        return gathered


class NcclGroup:
    """Ranks that are processes with a GPU each. The current stream waits for collectives, which may be captured with it."""

    def __init__(self, rank: int, size: int, store: Any, *, ordered: bool = False) -> None:
        self.rank = rank
        self.size = size
        self._ordered = ordered
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        # The communicator is made by the first collective, which must not be one that is captured.
        self.all_gather(torch.zeros(1, device="cuda"))
        self.all_reduce(torch.zeros(1, device="cuda"))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._ordered:
            return ordered_sum(self.all_gather(x))
        x = x.contiguous()
        if x.numel():
            self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        if x.numel():
            self._group._allgather_base(gathered, x.contiguous()).wait()
        return gathered


def join_group(rank: int, size: int, store: Path, device: str, *, ordered: bool = False) -> Group:
    """Waits for all ranks.

    Args:
        store: a file that does not exist yet, in a folder of this user's alone, the same for all ranks.
        device: cpu or cuda.
        ordered: on GPUs too, sums are those of the ranks in their order. NCCL's own order depends on the number of rows.
    """
    file: Any = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
    return NcclGroup(rank, size, file, ordered=ordered) if device == "cuda" else GlooGroup(rank, size, file)
