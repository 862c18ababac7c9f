"""Asynchronous copies to the device, and a second stream of its work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copies the array to the device; on a CPU the two share memory, so the array must not be changed afterwards."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Mark:
    """An event in the device's current stream that the host can wait for; a no-op on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Records the event after all launched work."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Waits until the device has passed the last recorded event, if any."""
        if self._event is not None:
            self._event.synchronize()


class SideStream:
    """Work of the device beside that of its current stream; on a CPU, the work is done where it is launched."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Launches the block's work on the side stream, which runs it without waiting for the current stream.

        It must read nothing that the current stream has yet to write.
        """
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def join(self, tensors: Iterable[torch.Tensor]) -> None:
        """Lets the current stream, not the host, wait for what was launched. ``tensors``: of it, and used in the current
        stream from now on: their memory is not reused before that has passed the point where they are freed."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(current)
