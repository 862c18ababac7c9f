"""Moving small arrays to the device and results back without waiting for it."""

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


class Download:
    """Copies of device tensors on the host, complete once ``wait`` returns. Made on the stream that computes them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = None if device.type == "cpu" else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Read only after ``wait``. On a CPU it is the tensor itself."""
        if self._event is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def sent(self) -> None:
        """No more copies follow."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
