"""PromptLogprobs: measures the tokens of prompts whose requests ask for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.core.plan import NewSequence, Row
from headrace.kernels.transfer import upload
from headrace.models.interface import Model
from headrace.runner.slots import RowArrays
from headrace.sampling.logprobs import Measured, measure_in_slices

_LOGITS_BYTES = 64 * 2**20
"""The most that the logits of prompt tokens take at a time."""


class PromptLogprobs:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._most = max(1, _LOGITS_BYTES // (4 * model.spec.vocab_size))
        """Positions whose logits are in memory at a time."""
        self._sequences: dict[int, NewSequence] = {}
        """slot -> its sequence, where that wants logprobs of its prompt."""

    def add(self, seq: NewSequence) -> None:
        if seq.sampling.prompt_logprobs is not None:
            self._sequences[seq.slot] = seq

    def remove(self, slot: int) -> None:
        self._sequences.pop(slot, None)

    def wanted(self, rows: RowArrays) -> bool:
        """Whether a row has prompt tokens to measure."""
        return bool(self._sequences) and not self._sequences.keys().isdisjoint(rows.slots[~rows.decode].tolist())

    def measure(self, rows: Sequence[Row], hidden: torch.Tensor) -> dict[int, list[Measured]]:
        """seq_id -> logprobs of the prompt tokens after those of its chunk. ``hidden [T, width]``: of all rows."""
        if not self._sequences:
            return {}
        measured = {}
        start = 0
        for row in rows:
            seq = self._sequences.get(row.slot)
            if seq is not None:
                last = min(row.num_computed + row.num_tokens, seq.prompt_len - 1)
                known = np.array(seq.token_ids[row.num_computed + 1 : last + 1], dtype=np.int64)
                tokens = upload(known, hidden.device)
                own = hidden[start : start + len(tokens)]
                count = seq.sampling.prompt_logprobs or 0
                parts = measure_in_slices(self._model.logits, own, tokens, count, self._most)
                measured[row.seq_id] = [part.to_host() for part in parts]
            start += row.num_tokens
        return measured
