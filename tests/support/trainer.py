"""A trainer's side of a group: rank 0, which broadcasts weights over gloo."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta

import msgspec
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from headrace.core.weights import GroupSpec
from headrace.weights.transport.nccl import DirectGroup


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Trainer:
    """Must be joined in a thread while the engine joins: ``beside`` starts work in one."""

    def __init__(self, world_size: int, prefixes: tuple[str, ...] = ("weights",), seconds: float = 30.0) -> None:
        self.port = free_port()
        self.world_size = world_size
        self._prefixes = prefixes
        self.packs = len(prefixes) == 1
        """The group is of vLLM's kind, whose tensors come in packs."""
        self._timeout = timedelta(seconds=seconds)
        self._thread: threading.Thread | None = None
        self.errors: list[Exception] = []

    def join(self) -> None:
        libuv = len(self._prefixes) > 1
        store = TCPStore("127.0.0.1", self.port, self.world_size, True, self._timeout, multi_tenant=libuv, use_libuv=libuv)
        for prefix in self._prefixes:
            store = PrefixStore(prefix, store)
        self._group = dist.ProcessGroupGloo(store, 0, self.world_size, self._timeout)

    @property
    def spec(self) -> GroupSpec:
        """With which an engine joins."""
        return GroupSpec(
            name="g",
            address="127.0.0.1",
            port=self.port,
            rank_offset=1,
            world_size=self.world_size,
            protocol="vllm" if self.packs else "torch",
            backend="gloo",
        )

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()

    def send(self, weights: Mapping[str, torch.Tensor], most: int | None = None) -> None:
        """Sends tensors one by one; ``most``: in packs, each as soon as it has more bytes."""
        pack: list[torch.Tensor] = []
        for tensor in weights.values():
            if most is None:
                self.broadcast(tensor.contiguous())
                continue
            pack.append(tensor.contiguous().view(-1).view(torch.uint8))
            if sum(map(len, pack)) > most:
                self.broadcast(torch.cat(pack))
                pack = []
        if pack:
            self.broadcast(torch.cat(pack))

    def beside(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                self.errors.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        assert self._thread is not None
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.errors:
            raise self.errors[0]

    def close(self) -> None:
        self._group.abort()


class NcclTrainer(Trainer):
    """Over NCCL, on the GPU behind those of the engine's ranks."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.world_size - 1)

    @functools.cached_property
    def spec(self) -> GroupSpec:
        uid = torch.cuda.nccl.unique_id() if self.packs else b""
        return msgspec.structs.replace(super().spec, backend="nccl", unique_id=uid)

    def join(self) -> None:
        if self.packs:
            self._direct = DirectGroup(self.spec, None, 0, self.device, 30.0)
            return
        store: Store = TCPStore("127.0.0.1", self.port, self.world_size, True, self._timeout, multi_tenant=True, use_libuv=True)
        for prefix in self._prefixes:
            store = PrefixStore(prefix, store)
        self._group = dist.ProcessGroupNCCL(store, 0, self.world_size, dist.ProcessGroupNCCL.Options())

    def broadcast(self, tensor: torch.Tensor) -> None:
        held = tensor.to(self.device)
        if self.packs:
            self._direct.broadcast(held)
        else:
            self._group.broadcast([held], dist.BroadcastOptions()).wait()
            torch.cuda.synchronize(self.device)
