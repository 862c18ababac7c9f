"""Group: the collectives of tensor-parallel ranks. An object that is passed to the modules that need it.

Sums on the CPU are float32 in the order of the ranks, so that the threads of a test and processes over gloo give the same bits
for any number of rows.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headrace.kernels.linear.fp8_reference import Activations
from headrace.kernels.norm import ResidualNorm
from headrace.parallel.peers import MOST_BYTES, ONE_SHOT_BYTES, SIZES, PeerMemory

logger = logging.getLogger("headrace.engine")

_TRIED = 1024
"""Channels of a sum that is tried."""
_TIMEOUT = timedelta(days=1)
"""Timeout of a collective. A lost rank is noticed by whoever started the ranks; idle ranks may wait for days."""


class Group(Protocol):
    """All ranks call the same methods in the same order, with tensors of one shape and dtype."""

    rank: int
    size: int
    transport: tuple[str, str]
    """Transport of sums and the reason for it, for reports."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks; ``x`` may be overwritten."""
        return ordered_sum(self.all_gather(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[...] -> [size, ...]``: every rank's, by rank."""
        ...

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm) -> tuple[Activations, torch.Tensor]:
        """``norm.add`` of the sum over all ranks. ``x`` may be overwritten; the residual is the same on every rank."""
        return norm.add(self.all_reduce(x), residual)

    def check(self) -> None:
        """Raises EngineError if a sum that was launched has not been made. It does not wait for the device."""
        return None


class Alone(Group):
    """One rank."""

    rank = 0
    size = 1
    transport = "none", "there is one rank"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)


ALONE = Alone()


def gather_columns(group: Group, x: torch.Tensor, width: int) -> torch.Tensor:
    """``[N, columns] -> [N, width]``: the ranks' columns side by side, without padding at the end."""
    if group.size == 1:
        return x
    return group.all_gather(x).transpose(0, 1).flatten(1)[:, :width].contiguous()


def ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """``[size, ...] -> [...]``: the sum in float32 from the first to the last, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


class ThreadGroup(Group):
    """One of several ranks that are threads of this process, for tests and debugging.

    ``ThreadGroup.make(size)`` makes all of them. ``abort`` ends the waiting of the others where one has failed.
    """

    transport = "threads", "all ranks are in this process"

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

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._places[self.rank] = x
        self._barrier.wait()
        gathered = torch.stack([place for place in self._places if place is not None])
        self._barrier.wait()
        return gathered

    def abort(self) -> None:
        self._barrier.abort()


class GlooGroup(Group):
    """Ranks that are processes of this machine, on CPUs."""

    transport = "gloo", "the ranks are processes on CPUs"

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank = rank
        self.size = size
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout = _TIMEOUT
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        if x.numel():
            self._group.allgather([list(gathered)], [x.contiguous()]).wait()
        return gathered


class NcclGroup(Group):
    """Ranks that are processes with a GPU each. The current stream waits for collectives, which may be captured with it."""

    def __init__(self, rank: int, size: int, store: Any, *, ordered: bool = False, peers: bool = True) -> None:
        """``peers``: small sums go through memory that the GPUs share, if they can share it."""
        self.rank = rank
        self.size = size
        self._ordered = ordered
        self._device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
        self._group: Any = dist.group.WORLD
        self._peers: PeerMemory | None = None
        # The communicator is made by the first collective, which must not be one that is captured.
        self.all_gather(torch.zeros(1, device=self._device))
        self.all_reduce(torch.zeros(1, device=self._device))
        if not peers:
            self.transport = "NCCL", "disable_custom_all_reduce"
        elif size not in SIZES:
            self.transport = "NCCL", f"symmetric memory sums are for {', '.join(map(str, SIZES))} ranks"
        else:
            self.transport = self._try_peers()

    def _try_peers(self) -> tuple[str, str]:
        """Uses symmetric memory from now on if it gives every rank the sums of NCCL."""
        peers, failure = None, "another rank cannot map the memory of its peers"
        try:
            peers = PeerMemory(self._group, self._device)
        except Exception as error:
            failure = f"symmetric memory cannot be used: {type(error).__name__}: {str(error).splitlines()[0]}"
        # A kernel waits for those of its peers, so none is launched unless all have mapped the memory.
        if not self._everywhere(peers is not None) or peers is None:
            return "NCCL", failure
        peers.patient = False
        if not all(
            self._everywhere(self._agree(peers, rows)) for rows in (1, peers.most_rows(_TRIED), MOST_BYTES // 4 // _TRIED)
        ):
            return "NCCL", "sums through symmetric memory are wrong on this machine"
        peers.patient = True
        self._peers = peers
        return (
            f"symmetric memory up to {(ONE_SHOT_BYTES[self.size] if self._ordered else MOST_BYTES) >> 10} KiB, then NCCL",
            "the GPUs map each other's memory, and its sums are NCCL's",
        )

    def _agree(self, peers: PeerMemory, rows: int) -> bool:
        """Whether both sum whole numbers alike."""
        numbers = torch.arange(rows * _TRIED, device=self._device) % 1021 * (self.rank + 1)
        x = numbers.float().view(rows, _TRIED)
        expected = self.all_reduce(x.clone())
        try:
            return torch.equal(peers.all_reduce(x), expected)
        except Exception as error:  # The others must hear of it.
            logger.warning("a sum through symmetric memory failed", exc_info=error)
            return False

    def _everywhere(self, flag: bool) -> bool:
        return bool(self.all_gather(torch.tensor([flag], dtype=torch.int32, device=self._device)).all())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._peers is not None and self._peers.takes(x, ordered=self._ordered):
            return self._peers.all_reduce(x)
        if self._ordered:
            return ordered_sum(self.all_gather(x))
        x = x.contiguous()
        if x.numel():
            self._group.allreduce([x]).wait()
        return x

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm) -> tuple[Activations, torch.Tensor]:
        if self._peers is not None and self._peers.fuses(x, residual, norm):
            normed, total = self._peers.add_norm(x, residual, norm)
            return norm.rounded(normed), total
        return super().add_norm(x, residual, norm)

    def check(self) -> None:
        if self._peers is not None:
            self._peers.check()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        if x.numel():
            self._group._allgather_base(gathered, x.contiguous()).wait()
        return gathered


def join_group(rank: int, size: int, store: Path, device: str, *, ordered: bool = False, peers: bool = True) -> Group:
    """Waits for all ranks.

    Args:
        store: a file that does not exist yet, in a folder of this user's alone, the same for all ranks.
        device: cpu or cuda.
        ordered: on GPUs too, sums are those of the ranks in their order. NCCL's own order depends on the number of rows.
        peers: on GPUs, small sums go through symmetric memory if it works.
    """
    file: Any = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
    return NcclGroup(rank, size, file, ordered=ordered, peers=peers) if device == "cuda" else GlooGroup(rank, size, file)
