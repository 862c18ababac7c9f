"""Tensor parallelism of a trainer: several processes have a part of every layer each, and run one engine in step.

Megatron's layers exchange what they need, in the trainer's own process groups. The engines beside them must therefore take
the same steps: they are given the same requests, hold as many KV blocks, and forget their caches together. All that is
decided by what differs between processes (memory, weights, what a caller passes) is agreed on here.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

_WORDS = 4


class Ranks:
    """The processes that share a model's layers.

    Args:
        group: Megatron's tensor-parallel group.
        device: of the model: where the group exchanges tensors.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.size = dist.get_world_size(group)

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return -self.least(-int(flag)) > 0

    def least(self, number: int) -> int:
        """The least number of all processes."""
        if self.size == 1:
            return number
        tensor = torch.tensor([number], dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return int(tensor.item())

    def alike(self, value: bytes) -> bool:
        """Whether all processes have the same. Each of them is told the same."""
        if self.size == 1:
            return True
        digest = hashlib.sha256(value).digest()
        words = [int.from_bytes(digest[i * 8 : i * 8 + 8], "little", signed=True) for i in range(_WORDS)]
        least = torch.tensor(words, dtype=torch.int64, device=self._device)
        most = least.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return torch.equal(least, most)
