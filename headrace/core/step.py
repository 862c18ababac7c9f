"""A step under construction, and a launched one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Listing
from typing import NamedTuple

import msgspec

from headrace.core.plan import NewSequence, Row, StepPlan
from headrace.core.sequence import Sequence
from headrace.kv.manager import Move, NewBlocks


class FlightRow(NamedTuple):
    """What the scheduler remembers of a row until its step is collected."""

    seq: Sequence
    incarnation: int
    start: int
    end: int
    samples: bool


@dataclasses.dataclass(slots=True)
class Flight:
    """A launched step."""

    step: int
    rows: list[FlightRow]


class StepBuilder:
    """Collects the rows of one step against its token budget."""

    def __init__(self, budget: int, reserved: int, moves: Listing[Move] = ()) -> None:
        self.budget = budget
        """Tokens not yet spent."""
        self.reserved = reserved
        """Of these, kept for decode rows whose turn has not come: a long prompt ahead of them must not stop them."""
        self.flight: list[FlightRow] = []
        self.scheduled: set[int] = set()
        """seq_ids that have a row; those are not preempted in this step."""
        self.short_of_blocks = False
        """A running sequence waits for blocks: nobody new is let in."""
        self._moves = moves
        """Of KV blocks, up to now: the list grows while the step is built."""
        self._moves_before: dict[int, int] = {}
        """seq_id -> how many moves its row's blocks have been through."""
        self._new: list[NewSequence] = []
        self._decode: list[Row] = []
        self._prefill: list[Row] = []

    def __bool__(self) -> bool:
        return bool(self.flight)

    @property
    def spendable(self) -> int:
        """Tokens a prefill chunk may take now: one at least, lest many decoding sequences stop one that goes before them."""
        return max(self.budget - self.reserved, min(self.budget, 1))

    def add_new(self, seq: Sequence) -> None:
        """The sequence takes its slot in this step."""
        request, sampling = seq.request, seq.request.sampling
        if sampling.prompt_logprobs is not None and seq.prompt_logprobs is None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        self._new.append(
            NewSequence(
                seq_id=seq.seq_id,
                slot=_slot_of(seq),
                token_ids=seq.token_ids.copy(),
                prompt_len=seq.num_prompt,
                sampling=sampling,
                seed=request.seed,
                sample_index=seq.index,
                eos_token_ids=request.eos_token_ids,
                bad_words=request.bad_words,
            )
        )

    def add_row(self, seq: Sequence, num_tokens: int, new_blocks: NewBlocks) -> None:
        """Adds a row and advances the sequence over it."""
        start, end = seq.num_computed, seq.num_computed + num_tokens
        samples = end == seq.num_tokens
        row = Row(seq.seq_id, _slot_of(seq), start, num_tokens, samples, new_blocks)
        (self._decode if seq.decoding else self._prefill).append(row)
        self.flight.append(FlightRow(seq, seq.incarnation, start, end, samples))
        self.scheduled.add(seq.seq_id)
        self._moves_before[seq.seq_id] = len(self._moves)
        self.budget -= num_tokens
        seq.num_computed = end
        seq.num_placeholders += samples
        seq.num_in_flight += 1

    def build(self, step: int, released: tuple[int, ...], moves: tuple[Move, ...] = ()) -> StepPlan:
        rows = self._decode + self._prefill
        if moves:
            rows = [self._moved(row, moves) for row in rows]
        return StepPlan(step, released, tuple(self._new), tuple(rows), len(self._decode), moves)

    def _moved(self, row: Row, moves: tuple[Move, ...]) -> Row:
        """The row with the numbers that its blocks have after the moves that were made for rows behind it."""
        tables = [list(blocks) for blocks in row.new_blocks]
        for group, source, target in moves[self._moves_before[row.seq_id] :]:
            tables[group] = [target if block == source else block for block in tables[group]]
        return msgspec.structs.replace(row, new_blocks=tuple(map(tuple, tables)))


def _slot_of(seq: Sequence) -> int:
    if seq.slot is None:
        raise ValueError(f"{seq!r} has no slot")
    return seq.slot
