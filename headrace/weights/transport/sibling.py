"""A replica's weights as they lie in memory, for a replica of the same model that has lost its own."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence

import msgspec
import torch

from headrace.errors import ConfigError
from headrace.weights.transport.source import OpenSource
from headrace.weights.update import TensorFacts

_CHUNK = 2**25
"""Bytes that are copied at a time."""
_RETRY_SECONDS = 0.01


def send_weights(path: str, tensors: Sequence[torch.Tensor], seconds: float) -> None:
    """Waits for one receiver at a socket of this path, and sends it all tensors.

    Raises:
        OSError: none came in time, or it went away.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(seconds)
        listener.bind(path)
        listener.listen(1)
        receiver, _ = listener.accept()
    with receiver:
        receiver.settimeout(seconds)
        storages = _storages(tensors)
        sizes = msgspec.json.encode([len(one) for one in storages])
        receiver.sendall(len(sizes).to_bytes(8, "little") + sizes)
        buffer = torch.empty(_CHUNK, dtype=torch.uint8)
        for piece in _pieces(storages):
            held = buffer[: len(piece)].copy_(piece)
            receiver.sendall(held.numpy().data)


class OpenSibling(OpenSource):
    """All weights of the replica that sends them at a path. They are not tensors of a checkpoint: ``copy`` writes them."""

    facts: list[TensorFacts] = []

    def __init__(self, path: str, seconds: float) -> None:
        self._path, self._seconds = path, seconds

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Writes the sibling's tensors to those of this rank, which are the same ones in the same order.

        Raises:
            OSError, ConfigError: the sibling does not send, stopped, or has another model.
        """
        storages = _storages(tensors)
        with self._connected() as sender:
            length = int.from_bytes(_read(sender, torch.empty(8, dtype=torch.uint8)).numpy().tobytes(), "little")
            sizes = msgspec.json.decode(_read(sender, torch.empty(length, dtype=torch.uint8)).numpy().tobytes())
            if sizes != [len(one) for one in storages]:
                raise ConfigError("the replica that sends its weights has others than this one", "path")
            buffer = torch.empty(_CHUNK, dtype=torch.uint8)
            for piece in _pieces(storages):
                piece.copy_(_read(sender, buffer[: len(piece)]))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        deadline = time.monotonic() + self._seconds
        with socket.socket(socket.AF_UNIX) as sender:
            sender.settimeout(self._seconds)
            while True:
                try:
                    sender.connect(self._path)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_RETRY_SECONDS)
            yield sender

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def close(self) -> None:
        pass


def _storages(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of each storage, ``[n]`` uint8, each once."""
    found = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return [torch.empty(0, dtype=torch.uint8, device=one.device).set_(one) for address, one in found.items() if address]


def _pieces(storages: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for storage in storages:
        yield from torch.split(storage, _CHUNK)


def _read(sender: socket.socket, into: torch.Tensor) -> torch.Tensor:
    left = into.numpy().data
    while left:
        if not (count := sender.recv_into(left)):
            raise ConnectionError("the replica that sends its weights stopped")
        left = left[count:]
    return into
