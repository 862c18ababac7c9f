"""StepBuilder builds the plan of a step; InFlightStep is a launched step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as Listing
from itertools import islice
from typing import NamedTuple

import msgspec

from headrace.core.budget import StepBudget
from headrace.core.items import encoder_cost
from headrace.core.plan import LayerRange, NewSequence, Row, StepPlan, pack_tokens
from headrace.core.sequence import Sequence, Status
from headrace.kv import SequenceBlocks
from headrace.kv.manager import Move, NewBlocks
from headrace.kv.states import Save, StateOps


class ConstrainedRow(NamedTuple):
    """A row that samples under a constraint. It needs a mask for the next token, and one behind each draft."""

    seq: Sequence
    drafts: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class InFlightStep:
    """A launched step."""

    step: int
    continuing: dict[int, Sequence]
    """seq_id -> sequences whose row computes the last token and samples the next: only these can end."""
    others: dict[int, Sequence]
    """seq_id -> sequences of all other rows."""
    constrained: list[ConstrainedRow]
    num_paced: int
    """Tokens, if the step's time tells that of prefill: it has some, and no encoder runs in it; else 0."""
    saves: list[tuple[Sequence, Save]]
    """Snapshots of states that the step takes."""


class StepBuilder:
    """Collects the rows of one step and subtracts their cost from its budget."""

    def __init__(self, budget: StepBudget, moves: Listing[Move] = (), no_blocks: NewBlocks = ((),)) -> None:
        """``no_blocks``: what a row appends to the block tables whose sequence has all of its blocks."""
        self.budget = budget
        self._no_blocks = no_blocks
        self.continuing: dict[int, Sequence] = {}
        self.others: dict[int, Sequence] = {}
        self.constrained: list[ConstrainedRow] = []
        self._moves = moves
        """Moves of KV blocks so far; the list grows while the step is built."""
        self._moves_before: dict[int, int] = {}
        """seq_id -> number of moves made before its row was added, whose effect the row's blocks show. Rows without blocks are
        not there."""
        self._new: list[NewSequence] = []
        self._new_blocks: list[SequenceBlocks] = []
        """Blocks of each new sequence."""
        self._decode: list[Row] = []
        self._prefill: list[Row] = []
        self._sparse: list[Row] = []
        """Prefill rows that attend sparsely."""
        self._piece: list[Row] = []
        """The row that computes only ``layers``, if there is one."""
        self.layers: LayerRange | None = None
        self.saves: list[tuple[Sequence, Save]] = []

    def __bool__(self) -> bool:
        return bool(self.continuing or self.others)

    def __contains__(self, seq: Sequence) -> bool:
        """Whether the sequence has a row. Then it is not preempted in this step."""
        return seq.seq_id in self.continuing or seq.seq_id in self.others

    def add_new(self, seq: Sequence) -> None:
        """Adds the full state of a sequence that takes its slot in this step."""
        request, sampling = seq.request, seq.request.sampling
        if sampling.prompt_logprobs is not None and seq.prompt_logprobs is None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        self._new_blocks.append(seq.blocks)
        needed = [index for index in range(len(request.media)) if request.items[index].end > seq.num_computed]
        self._new.append(
            NewSequence(
                seq_id=seq.seq_id,
                slot=seq.slot,
                token_ids=pack_tokens(seq.token_ids),
                prompt_len=seq.num_prompt,
                sampling=sampling,
                seed=request.seed,
                sample_index=seq.index,
                eos_token_ids=request.eos_token_ids,
                bad_words=request.bad_words,
                constrained=request.constraint is not None,
                items=tuple(request.items[index] for index in needed),
                media=tuple(request.media[index] for index in needed),
                rope=request.rope,
                sparse=None if seq.sparse is None else seq.sparse.decision or b"",
                state=seq.blocks.states.live,
                pooling=request.pooling,
                adapter=None if request.adapter is None else request.adapter.digest,
            )
        )

    def add_next_tokens(self, sequences: Iterator[Sequence]) -> Sequence | None:
        """Adds the rows of decoding sequences that have room for their last token, and need nothing else.

        Most rows are such. The result is that of ``add_row``, at a fraction of its cost.

        Returns:
            The first sequence that needs more, for which nothing was done; None: no sequence or no budget is left.
        """
        continuing, budget, no_blocks = self.continuing, self.budget, self._no_blocks
        add_row, before, seq = self._decode.append, len(continuing), None
        for seq in islice(sequences, budget.tokens):
            start = seq.num_computed
            end = start + 1
            if (
                start < seq.prefill_len
                or end >= seq.continues_until
                or end > seq.blocks.capacity
                or seq.drafts
                or seq.status is not Status.RUNNING
            ):
                break
            seq_id = seq.seq_id
            add_row(Row(seq_id, seq.slot, start, 1, 1, no_blocks))
            continuing[seq_id] = seq
            seq.num_computed = end
            seq.num_placeholders += 1
            seq.num_in_flight += 1
        else:
            seq = None
        added = len(continuing) - before
        budget.tokens -= added
        budget.reserved = max(0, budget.reserved - added)
        return seq

    def layers_of(self, seq: Sequence, num_tokens: int, total: int) -> int:
        """Returns how many more layers of the sequence's piece of ``num_tokens`` tokens the step can hold; the model has
        ``total``."""
        left = total - seq.num_layers
        if not self and not self.budget.reserved:
            return left  # No other sequence waits for the end of the step.
        return self.budget.layers(num_tokens, left, total) if self.layers is None else 0

    def add_row(self, seq: Sequence, num_tokens: int, new_blocks: NewBlocks, layers: LayerRange | None = None) -> None:
        """Adds a row and advances the sequence over it.

        Args:
            layers: that the row computes, of a piece; the sequence advances over its tokens with the last one. None: all.
        """
        start, end, decoding = seq.num_computed, seq.num_computed + num_tokens, seq.decoding
        cost = num_tokens
        if layers is not None:
            self.layers, cost = layers, layers.share(num_tokens)
            seq.num_layers = 0 if layers.last else layers.end
            end = end if layers.last else start
        num_logits = 0 if seq.pooled else max(0, end - seq.num_tokens + 1)
        seq.drafts = seq.drafts[: max(0, num_logits - 1)]
        row = Row(seq.seq_id, seq.slot, start, num_tokens, num_logits, new_blocks, seq.drafts)
        if layers is not None:
            self._piece.append(row)
        else:
            (self._decode if decoding else self._sparse if seq.is_sparse(start) else self._prefill).append(row)
        if num_logits and seq.request.constraint is not None:
            self.constrained.append(ConstrainedRow(seq, seq.drafts))
        continues = decoding and num_tokens == num_logits == 1 and end < seq.continues_until
        (self.continuing if continues else self.others)[seq.seq_id] = seq
        self._moves_before[seq.seq_id] = len(self._moves)
        self.budget.spend(cost, decoding=decoding, whole=seq.whole(start))
        if seq.items and start < seq.num_prompt:
            self.budget.encoder_tokens -= encoder_cost(start, end, seq.items, seq.num_encoded)
            seq.num_encoded = end
        seq.num_computed = end
        seq.num_placeholders += num_logits
        seq.num_in_flight += 1

    def build(
        self, step: int, released: tuple[int, ...], moves: tuple[Move, ...] = (), state_ops: StateOps = ((), ())
    ) -> StepPlan:
        """``state_ops``: those before and behind the rows, which name blocks as they are after the moves."""
        rows, new = self._decode + self._prefill + self._sparse + self._piece, self._new
        if moves:
            rows = [self._moved(row, moves) for row in rows]
            new = [
                seq if seq.state == blocks.states.live else msgspec.structs.replace(seq, state=blocks.states.live)
                for seq, blocks in zip(new, self._new_blocks, strict=True)
            ]
        return StepPlan(step, released, tuple(new), tuple(rows), len(self._decode), moves, self.layers, *state_ops)

    def _moved(self, row: Row, moves: tuple[Move, ...]) -> Row:
        """Applies to a row's blocks the moves made after the row was added."""
        if row.seq_id not in self._moves_before:
            return row
        tables = [list(blocks) for blocks in row.new_blocks]
        for group, source, target in moves[self._moves_before[row.seq_id] :]:
            if group == len(tables):
                continue  # A state block.
            tables[group] = [target if block == source else block for block in tables[group]]
        return msgspec.structs.replace(row, new_blocks=tuple(map(tuple, tables)))
