"""Bringing results back without waiting for the device."""

from __future__ import annotations

import torch

from headrace.kernels.transfer import Mark


class Download:
    """Copies of device tensors on the host, complete once ``wait`` returns. Made on the stream that computes them."""

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type == "cpu"
        self._mark = Mark(device)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Read only after ``wait``. On a CPU it is the tensor itself."""
        if self._on_host:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def sent(self) -> None:
        """No more copies follow."""
        self._mark.set()

    def wait(self) -> None:
        self._mark.wait()
