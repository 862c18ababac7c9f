"""WeightGroup: a group of a trainer and the ranks of engines, in which rank 0, the trainer's, broadcasts weights.

The group is built without torch's table of process groups: a rank may be in several.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from headrace.core.weights import GroupSource, GroupSpec
from headrace.errors import ConfigError
from headrace.weights.transport.nccl import DirectGroup
from headrace.weights.transport.source import OpenSource, announced
from headrace.weights.update import TensorFacts

_SENDER = 0
_RETRY_SECONDS = 0.05
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightGroup(Protocol):
    """One rank's membership."""

    spec: GroupSpec
    device: torch.device
    """Device of the tensors that are received."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fills the tensor with that of the trainer. Raises: RuntimeError: it was not sent in time."""
        ...

    def close(self) -> None:
        """Leaves the group. A transfer that is under way fails."""
        ...


def join_group(spec: GroupSpec, rank: int, device: torch.device, seconds: float) -> WeightGroup:
    """Joins the group as ``rank``.

    Args:
        device: of the model, and with nccl of what is received.
        seconds: in which members come together, and each broadcast comes.

    Raises:
        Exception: the members did not come together in time.
    """
    if spec.unique_id:
        return DirectGroup(spec, None, rank, device, seconds)
    libuv, deadline = spec.protocol == "torch", time.monotonic() + seconds
    _await_host(spec, deadline)
    # A client that names no world size is not counted, and the store's host would wait for it in vain.
    left = _until(deadline)
    store = TCPStore(spec.address, spec.port, spec.world_size, False, left, multi_tenant=libuv, use_libuv=libuv)
    store.set_timeout(timedelta(seconds=seconds))
    prefixed = _prefixed(store, spec)
    if spec.backend == "nccl":
        return DirectGroup(spec, prefixed, rank, device, seconds)
    return TorchGroup(spec, prefixed, rank, _until(deadline), timedelta(seconds=seconds))


def _await_host(spec: GroupSpec, deadline: float) -> None:
    """Waits until the store can be reached: ``TCPStore`` itself may take twice its timeout to give up.

    Raises:
        TimeoutError: it cannot.
    """
    while True:
        try:
            with socket.create_connection((spec.address, spec.port), _until(deadline).total_seconds()):
                return
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS >= deadline:
                raise TimeoutError(f"no store was reached at {spec.address}:{spec.port}: {error}") from error
        time.sleep(_RETRY_SECONDS)


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(_RETRY_SECONDS, deadline - time.monotonic()))


class TorchGroup(WeightGroup):
    """A group over PyTorch's gloo."""

    device = torch.device("cpu")

    def __init__(self, spec: GroupSpec, store: Store, rank: int, joining: timedelta, timeout: timedelta) -> None:
        """``joining``: in which members come together. ``timeout``: of each broadcast."""
        self.spec, self._timeout = spec, timeout
        self._group: Any = dist.ProcessGroupGloo(store, rank, spec.world_size, joining)

    def broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = _SENDER, self._timeout
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        self._group.abort()


def _prefixed(store: Store, spec: GroupSpec) -> Store:
    """The store, with the prefixes that the trainer's side gives its keys."""
    if spec.protocol == "vllm":
        return PrefixStore("weights", store) if spec.backend == "gloo" else store
    device = "cpu" if spec.backend == "gloo" else "cuda"
    for prefix in (spec.name, f"{spec.name}/", f"{device}/"):
        store = PrefixStore(prefix, store)
    return store


class OpenBroadcasts(OpenSource):
    """Tensors that the trainer broadcasts, in the order in which it announced them.

    Raises:
        ConfigError: an announced tensor cannot be.
    """

    def __init__(self, group: WeightGroup, source: GroupSource) -> None:
        self._group = group
        self.facts = announced(source.tensors)
        self._most = source.packed_bytes

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pack in self._packs():
            sizes = [math.prod(fact.shape) * fact.dtype.itemsize for fact in pack]
            if self._most is None:
                (fact,) = pack
                received = torch.empty(fact.shape, dtype=fact.dtype, device=self._group.device)
            else:
                received = torch.empty(sum(sizes), dtype=torch.uint8, device=self._group.device)
            # All bits set is NaN in every float type: values that never came are noticed.
            received.view(-1).view(torch.uint8).fill_(255)
            self._group.broadcast(received)
            for fact, part in zip(pack, torch.split(received.view(-1).view(torch.uint8), sizes), strict=True):
                aligned = part if part.storage_offset() % fact.dtype.itemsize == 0 else part.clone()
                if bool((aligned.view(_INTEGERS[fact.dtype.itemsize]) == -1).any()):
                    raise ConfigError(f"values of {fact.name} did not come", "tensors")
                yield fact.name, aligned.view(fact.dtype).view(fact.shape)

    def _packs(self) -> Iterator[list[TensorFacts]]:
        """Tensors are added to a pack until it has more bytes than the limit."""
        pack: list[TensorFacts] = []
        for fact in self.facts:
            pack.append(fact)
            size = sum(math.prod(one.shape) * one.dtype.itemsize for one in pack)
            if self._most is None or size > self._most:
                yield pack
                pack = []
        if pack:
            yield pack

    def close(self) -> None:
        pass
