"""Bringing results back without waiting for the device."""

from __future__ import annotations

import torch


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
