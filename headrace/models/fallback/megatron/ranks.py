"""Tensor parallelism of a trainer: several processes hold a part of every layer and run one engine each, in lockstep.

Megatron's layers communicate in the trainer's own process groups. The engines must therefore take the same steps: they get
the same requests, hold equally many KV blocks, and clear their caches together. Decisions that depend on what differs
between processes (memory, weights, arguments) go through this agreement.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from headrace.parallel.agreement import Agreement

_WORDS = 4


class MegatronRanks(Agreement):
    """Agreement between the processes that share a model's layers.

    Args:
        group: Megatron's tensor-parallel group.
        device: of the model: where the group exchanges tensors.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.size = dist.get_world_size(group)

    def least(self, number: int) -> int:
        tensor = torch.tensor([number], dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return int(tensor.item())

    def alike(self, value: bytes) -> bool:
        digest = hashlib.sha256(value).digest()
        words = [int.from_bytes(digest[i * 8 : i * 8 + 8], "little", signed=True) for i in range(_WORDS)]
        least = torch.tensor(words, dtype=torch.int64, device=self._device)
        most = least.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return torch.equal(least, most)
