"""TokenMasks: bans the tokens that the masks of a step's SamplePlan do not allow. Constrained: which sequences need masks."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.plan import NewSequence, SamplePlan
from headrace.errors import EngineError
from headrace.kernels.sampling import apply_masks
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

    which: npt.NDArray[np.int32]
    masks: npt.NDArray[np.int32]

    @classmethod
    def of(cls, plan: SamplePlan, seq_ids: Indices, vocab_size: int) -> HostMasks | None:
        """The masks of a plan; None if it has none.

        Args:
            seq_ids: ``[N]``: the sequence of each logits row.

        Raises:
            EngineError: a mask is missing, or its size does not match the vocabulary.
        """
        if not plan:
            return None
        words = -(-vocab_size // 32)
        if plan.masks.nbytes != 4 * words * len(plan.seq_ids):
            nbytes = plan.masks.nbytes / len(plan.seq_ids)
            raise EngineError(f"a token mask has {nbytes:.6g} bytes; a vocabulary of {vocab_size} needs {4 * words}")
        owners = np.array(plan.seq_ids)
        by_owner, by_seq = np.argsort(owners, kind="stable"), np.argsort(seq_ids, kind="stable")
        places = by_seq[np.isin(seq_ids[by_seq], owners)]
        if not np.array_equal(seq_ids[places], owners[by_owner]):
            counts = [(seq, int((seq_ids == seq).sum()), plan.seq_ids.count(seq)) for seq in plan.seq_ids]
            seq, rows, masks = next(count for count in counts if count[1] != count[2])
            raise EngineError(f"sequence {seq} has {rows} logits rows in step {plan.step}, but {masks} token masks")
        which = np.full(len(seq_ids), -1, dtype=np.int32)
        which[places] = by_owner
        return cls(which, np.frombuffer(plan.masks, dtype="<i4").reshape(-1, words))

    @property
    def allows_nothing(self) -> bool:
        """Whether one of the masks bans every token."""
        beginning = self.masks[:, :64].any(axis=1)
        return not beginning.all() and not self.masks[~beginning].any(axis=1).all()

    def upload(self, device: torch.device) -> TokenMasks:
        sent = self._joined(len(self.which), device).to(device, non_blocking=True)
        rows = len(self.which)
        return TokenMasks(sent[rows:].view(self.masks.shape), sent[:rows], self.which)

    def copy_to(self, buffer: torch.Tensor, rows: int) -> None:
        """Writes the masks into a buffer whose first ``rows`` numbers are ``which``: -1 where there is no logits row."""
        joined = self._joined(rows, buffer.device)
        buffer[: len(joined)].copy_(joined, non_blocking=True)

    def _joined(self, rows: int, device: torch.device) -> torch.Tensor:
        """Returns ``which`` and the masks in memory that the device can read."""
        host = torch.empty(rows + self.masks.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        padding = np.full(rows - len(self.which), -1, dtype=np.int32)
        np.concatenate([self.which, padding, self.masks.reshape(-1)], out=host.numpy())
        return host


class Constrained(Feature):
    """Sequences under a constraint. Their rows are never sampled without a mask: a missing one would allow every token."""

    def add(self, slot: int, seq: NewSequence) -> bool:
        if seq.constrained:
            self.use(slot)
        return seq.constrained

    def holds(self, slots: Indices) -> npt.NDArray[np.bool_]:
        """Returns for each slot whether it has a constrained sequence."""
        return self._uses[slots]

    def check(self, rows: LogitsRows, masks: TokenMasks | None) -> None:
        """Raises: EngineError: a row of a constrained sequence has no mask."""
        users = self.users(rows)
        if len(users) and (masks is None or (masks.host_which[users] < 0).any()):
            raise EngineError(f"no token mask for the constrained sequences in slots {rows.slots[users].tolist()}")
