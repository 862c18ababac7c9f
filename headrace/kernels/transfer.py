"""Asynchronous copies of small arrays to the device."""

from __future__ import annotations

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
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Records the event after all launched work."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Waits until the device has passed the last recorded event, if any."""
        if self._event is not None:
            self._event.synchronize()
