"""PromptResults: what is made of the hidden states of prompts: logprobs of their tokens, and pooled results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.core.plan import NewSequence, Row
from headrace.errors import EngineError
from headrace.kernels.transfer import upload
from headrace.models.interface import Model, ScoringModel
from headrace.outputs import Failure
from headrace.pooling_params import PoolingParams
from headrace.runner.part import StepHandle
from headrace.runner.slots import RowArrays
from headrace.sampling.device import to_host
from headrace.sampling.logprobs import Measured, measure_in_slices

POOLED_NOT_FINITE = Failure("the model computed an embedding or a score that is not finite")
_LOGITS_BYTES = 64 * 2**20
"""The most that the logits of prompt tokens take at a time."""
_ONE = 2.0**24
"""The number 1 in sums of hidden states, which are integers: the order of their terms does not matter."""


class PromptResults:
    """Results of the prompts whose requests ask for more than a next token."""

    def __init__(self, model: Model) -> None:
        self._logprobs, self._pooled = PromptLogprobs(model), PooledPrompts(model)

    @property
    def nbytes(self) -> int:
        return self._pooled.nbytes

    def add(self, seq: NewSequence) -> None:
        self._logprobs.add(seq)
        self._pooled.add(seq)

    def remove(self, slot: int) -> None:
        self._logprobs.remove(slot)
        self._pooled.remove(slot)

    def wanted(self, rows: RowArrays) -> bool:
        """Whether the hidden states of a row's prompt tokens are needed: the step then runs eagerly, since a captured one keeps
        those of logits rows alone."""
        return self._logprobs.wanted(rows) or self._pooled.wanted(rows)

    def add_to(self, step: StepHandle, rows: Sequence[Row], hidden: torch.Tensor) -> None:
        """Adds the results of a step's rows to it. ``hidden [T, width]``: of all of them."""
        step.prompt_logprobs |= self._logprobs.measure(rows, hidden)
        step.pooled += self._pooled.measure(rows, hidden)


class PooledPrompts:
    """Pools the hidden states of prompts. What is kept of a prompt between its chunks is a sum of integers, so that it does not
    depend on where the chunks end."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sequences: dict[int, NewSequence] = {}
        """slot -> its sequence, where the prompt is pooled."""
        self._sums: dict[int, torch.Tensor] = {}
        """slot -> ``[width]`` int64: the sum of hidden states so far, in units of 1 / ``_ONE``."""

    @property
    def nbytes(self) -> int:
        return sum(total.nbytes for total in self._sums.values())

    def add(self, seq: NewSequence) -> None:
        if seq.pooling is not None and seq.pooling.method != "attention":
            self._sequences[seq.slot] = seq

    def remove(self, slot: int) -> None:
        self._sequences.pop(slot, None)
        self._sums.pop(slot, None)

    def wanted(self, rows: RowArrays) -> bool:
        """Whether the hidden states of a row are summed, or end its prompt."""
        if not self._sequences:
            return False
        pooled = ((self._sequences.get(slot), end) for slot, end in zip(rows.slots.tolist(), rows.ends.tolist(), strict=True))
        return any(seq is not None and (_averages(seq) or end == seq.prompt_len) for seq, end in pooled)

    def measure(self, rows: Sequence[Row], hidden: torch.Tensor) -> list[tuple[list[int], torch.Tensor]]:
        """Returns sequences whose prompt ends with its row, and their results ``[len(sequences), numbers]`` on the host.
        ``hidden [T, width]``: of all rows."""
        if not self._sequences:
            return []
        ended: dict[PoolingParams, list[tuple[int, torch.Tensor]]] = {}
        start = 0
        for row in rows:
            seq, end = self._sequences.get(row.slot), start + row.num_tokens
            if seq is not None and seq.pooling is not None:
                if _averages(seq):
                    self._sum(seq, seq.pooling.start - row.num_computed, hidden[start:end])
                if row.num_computed + row.num_tokens == seq.prompt_len:
                    pooled = self._mean(seq, seq.pooling) if _averages(seq) else hidden[end - 1].float()
                    kind = PoolingParams(head=seq.pooling.head, token_ids=seq.pooling.token_ids)
                    ended.setdefault(kind, []).append((row.seq_id, pooled))
            start = end
        return [
            ([seq_id for seq_id, _ in own], to_host(self._results(kind, torch.stack([pooled for _, pooled in own]), hidden)))
            for kind, own in ended.items()
        ]

    def _sum(self, seq: NewSequence, skipped: int, hidden: torch.Tensor) -> None:
        """Adds a chunk's hidden states, but for those of its first ``skipped`` tokens, to the sum of its sequence."""
        terms = (hidden[max(0, skipped) :].double() * _ONE).round().long().sum(0)
        before = self._sums.get(seq.slot)
        self._sums[seq.slot] = terms if before is None else before + terms

    def _mean(self, seq: NewSequence, pooling: PoolingParams) -> torch.Tensor:
        return (self._sums[seq.slot].double() / (_ONE * (seq.prompt_len - pooling.start))).float()

    def _results(self, kind: PoolingParams, pooled: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, width] -> [N, numbers]`` float32. ``hidden``: of the model's dtype."""
        if kind.head == "none":
            return pooled
        rows = pooled.to(hidden.dtype)
        if isinstance(self._model, ScoringModel):
            return self._model.classes(rows) if kind.head == "classes" else self._model.token_logits(rows, kind.token_ids)
        if kind.head == "classes":
            raise EngineError("the model has no classification head")
        return self._model.logits(rows)[:, list(kind.token_ids)]


def _averages(seq: NewSequence) -> bool:
    return seq.pooling is not None and seq.pooling.method == "mean"


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
