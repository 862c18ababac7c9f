"""TokenMasks: bans the tokens that the masks of a step's SamplePlan do not allow. Constrained: which sequences need masks."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.plan import NewSequence, SamplePlan
from headrace.errors import EngineError
from headrace.kernels.mask import apply_masks
from headrace.sampling.feature import Feature, Indices, LogitsRows


@dataclasses.dataclass(frozen=True)
class TokenMasks:
    """The masks of one step's logits rows."""

    masks: torch.Tensor
    """``[M, ceil(vocab / 32)]`` int32: a set bit allows the token."""
    which: torch.Tensor
    """``[N]`` int32: logits row -> index of its mask, or -1."""
    host_which: npt.NDArray[np.int32]
    """``which`` on the host."""

    @classmethod
    def of(cls, plan: SamplePlan, seq_ids: Indices, vocab_size: int, device: torch.device) -> TokenMasks | None:
        """Uploads the masks of a plan; returns None if it has none.

        Args:
            seq_ids: ``[N]``: the sequence of each logits row.

        Raises:
            EngineError: a mask is missing, or its size does not match the vocabulary.
        """
        if not plan.rows:
            return None
        words = -(-vocab_size // 32)
        which = np.full(len(seq_ids), -1, dtype=np.int32)
        for seq_id, indices in plan.rows.items():
            places = np.flatnonzero(seq_ids == seq_id)
            if not indices or len(places) != len(indices) or not 0 <= min(indices) <= max(indices) < len(plan.masks):
                raise EngineError(f"sequence {seq_id} has {len(places)} logits rows in step {plan.step}, but masks {indices}")
            which[places] = indices
        if any(len(mask) != 4 * words for mask in plan.masks):
            sizes = sorted({len(mask) for mask in plan.masks})
            raise EngineError(f"token masks have {sizes} bytes; a vocabulary of {vocab_size} needs {4 * words}")
        # A single transfer for masks and indices, from memory that the device can read.
        host = torch.empty(words * len(plan.masks) + len(which), dtype=torch.int32, pin_memory=device.type == "cuda")
        np.concatenate([*(np.frombuffer(mask, dtype="<i4") for mask in plan.masks), which], out=host.numpy())
        sent = host.to(device, non_blocking=True)
        count = words * len(plan.masks)
        return cls(sent[:count].view(-1, words), sent[count:], which)

    def apply(self, logits: torch.Tensor) -> None:
        """Bans tokens of ``logits [N, vocab]`` in place."""
        apply_masks(logits, self.masks, self.which)


class Constrained(Feature):
    """Sequences under a constraint. Their rows are never sampled without a mask: a missing one would allow every token."""

    def add(self, slot: int, seq: NewSequence) -> bool:
        if seq.constrained:
            self.use(slot)
        return seq.constrained

    def check(self, rows: LogitsRows, masks: TokenMasks | None) -> None:
        """Raises: EngineError: a row of a constrained sequence has no mask."""
        users = self.users(rows)
        if len(users) and (masks is None or (masks.host_which[users] < 0).any()):
            raise EngineError(f"no token mask for the constrained sequences in slots {rows.slots[users].tolist()}")
