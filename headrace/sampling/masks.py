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
    """The masks of one step's logits rows, on the device."""

    masks: torch.Tensor
    """``[M, ceil(vocab / 32)]`` int32: a set bit allows the token."""
    which: torch.Tensor
    """``[N]`` int32: logits row -> index of its mask, or -1."""
    host_which: npt.NDArray[np.int32]
    """``which`` on the host."""

    def apply(self, logits: torch.Tensor) -> None:
        """Bans tokens of ``logits [N, vocab]`` in place."""
        apply_masks(logits, self.masks, self.which)


@dataclasses.dataclass(frozen=True)
class HostMasks:
    """The masks of one step's logits rows, on the host: ``which`` and then ``masks``, for a single transfer."""

    words: int
    which: npt.NDArray[np.int32]
    masks: tuple[bytes, ...]

    @classmethod
    def of(cls, plan: SamplePlan, seq_ids: Indices, vocab_size: int) -> HostMasks | None:
        """The masks of a plan; None if it has none.

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
        return cls(words, which, plan.masks)

    @property
    def allows_nothing(self) -> bool:
        """Whether one of the masks bans every token."""
        nothing = bytes(4 * self.words)
        return any(mask == nothing for mask in self.masks)

    def upload(self, device: torch.device) -> TokenMasks:
        sent = self._joined(len(self.which), device).to(device, non_blocking=True)
        rows = len(self.which)
        return TokenMasks(sent[rows:].view(-1, self.words), sent[:rows], self.which)

    def copy_to(self, buffer: torch.Tensor, rows: int) -> None:
        """Writes the masks into a buffer whose first ``rows`` numbers are ``which``: -1 where there is no logits row."""
        joined = self._joined(rows, buffer.device)
        buffer[: len(joined)].copy_(joined, non_blocking=True)

    def _joined(self, rows: int, device: torch.device) -> torch.Tensor:
        """In memory that the device can read."""
        host = torch.empty(rows + self.words * len(self.masks), dtype=torch.int32, pin_memory=device.type == "cuda")
        padding = np.full(rows - len(self.which), -1, dtype=np.int32)
        masks = (np.frombuffer(mask, dtype="<i4") for mask in self.masks)
        np.concatenate([self.which, padding, *masks], out=host.numpy())
        return host


class Constrained(Feature):
    """Sequences under a constraint. Their rows are never sampled without a mask: a missing one would allow every token."""

    def add(self, slot: int, seq: NewSequence) -> bool:
        if seq.constrained:
            self.use(slot)
        return seq.constrained

    def holds(self, slots: Indices) -> npt.NDArray[np.bool_]:
        """Which of the slots have a constrained sequence."""
        return self._uses[slots]

    def check(self, rows: LogitsRows, masks: TokenMasks | None) -> None:
        """Raises: EngineError: a row of a constrained sequence has no mask."""
        users = self.users(rows)
        if len(users) and (masks is None or (masks.host_which[users] < 0).any()):
            raise EngineError(f"no token mask for the constrained sequences in slots {rows.slots[users].tolist()}")
