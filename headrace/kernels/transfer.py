"""Small arrays on their way to the device, which nothing waits for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device; on a CPU the two share memory, so the array must not be changed afterwards."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Mark:
    """A place in the device's current stream that the host can wait for; on a CPU, where nothing runs behind, no more."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Here, behind all that was launched."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the device has passed the place where it was set last, if it ever was."""
        if self._event is not None:
            self._event.synchronize()
