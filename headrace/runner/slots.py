"""SlotTables: what the runner knows of every sequence, in the place it keeps as long as it lives.

A step's batch is an index into these tables, so that nothing moves when rows are reordered, preempted or dropped. Tokens
and counters are on the device, where each step's own outcome advances them. The host's mirrors follow the plans, and check
them: upper bounds, which a result that brings fewer tokens than its row has logits rows corrects.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.config import EngineConfig
from headrace.core.plan import NewSequence, StepPlan
from headrace.errors import EngineError
from headrace.kernels.transfer import upload

Ints = npt.NDArray[np.int64]

FREE = -1
UNKNOWN = -1


class StagedTable:
    """``tensor [rows, width]`` int32, zeros at first. Between two ``apply`` a cell may be staged once."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.tensor = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.width = width
        self._starts: list[int] = []
        self._runs: list[Sequence[int]] = []

    def stage(self, row: int, start: int, values: Sequence[int]) -> None:
        """``tensor[row, start : start + len(values)] = values``, later."""
        self._starts.append(row * self.width + start)
        self._runs.append(values)

    def clear(self, rows: torch.Tensor) -> None:
        """Zeros whole rows, at once."""
        self.tensor.index_fill_(0, rows, 0)

    def apply(self) -> None:
        """Does what was staged."""
        if not self._runs:
            return
        lengths = np.fromiter(map(len, self._runs), dtype=np.int64, count=len(self._runs))
        total = int(lengths.sum())
        first = np.array(self._starts, dtype=np.int64) - (np.cumsum(lengths) - lengths)
        places = np.repeat(first, lengths) + np.arange(total)
        values = np.empty(total, dtype=np.int32)
        end = 0
        for run in self._runs:
            start, end = end, end + len(run)
            values[start:end] = run
        device = self.tensor.device
        self.tensor.view(-1).index_copy_(0, upload(places, device), upload(values, device))
        self._starts.clear()
        self._runs.clear()


class RowArrays:
    """The rows of a plan as arrays. Index space: row, ``[R]``."""

    def __init__(self, plan: StepPlan) -> None:
        rows = plan.rows
        fields = [(row.seq_id, row.slot, row.num_computed, row.num_tokens, row.num_logits) for row in rows]
        array = np.array(fields, dtype=np.int64).reshape(len(rows), 5)
        self.seq_ids, self.slots, self.starts, self.counts, self.num_logits = np.ascontiguousarray(array.T)
        self.ends: Ints = self.starts + self.counts
        self.sampled: Ints = np.flatnonzero(self.num_logits)
        """The rows that have logits, ascending."""
        self.logits_start: Ints = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(self.num_logits, out=self.logits_start[1:])
        """``[R + 1]``: row -> its first logits row."""
        self.num_logits_rows = int(self.logits_start[-1])
        self.num_decode_rows = plan.num_decode_rows
        self.decode: npt.NDArray[np.bool_] = np.arange(len(rows)) < plan.num_decode_rows
        self.unfinished: npt.NDArray[np.bool_] = np.zeros(len(rows), dtype=np.bool_)
        """Rows of which layers are left for later steps."""
        if plan.layers is not None:
            self.unfinished[-1] = not plan.layers.last

    def __len__(self) -> int:
        return len(self.slots)

    @functools.cached_property
    def row_of(self) -> Ints:
        """``[N]``: logits row -> row."""
        return np.repeat(np.arange(len(self)), self.num_logits)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Sizes of a step's rows that the host knows: exact, or upper bounds for all steps that replay a captured one."""

    num_decode_rows: int
    query_start: Ints
    """``[R + 1]``: row -> its first token in the packed batch."""
    seq_lens: Ints
    """``[R]``: tokens of the row once the step is done."""
    captured: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])

    @functools.cached_property
    def max_queries(self) -> int:
        return max(int(np.diff(self.query_start).max()), 1)

    @property
    def single(self) -> bool:
        """Whether each row has one token."""
        return self.max_queries == 1 and self.num_tokens == self.num_rows

    @classmethod
    def of(cls, rows: RowArrays) -> Bounds:
        return cls(rows.num_decode_rows, np.concatenate(([0], np.cumsum(rows.counts))), rows.ends)


class SlotTables:
    """Index space of everything here: slot, ``[S]``."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.num_slots = config.scheduler.max_num_seqs
        self.max_len = config.scheduler.max_model_len
        self.block_size = config.cache.block_size
        self.device = device
        self._num_blocks = config.cache.num_blocks
        self._max_blocks = -(-self.max_len // self.block_size)
        slots = self.num_slots
        # One place more than the longest sequence has, for the token sampled at its end.
        self.token_ids = StagedTable(slots, self.max_len + 1, device)
        """Prompt and outputs."""
        self.block_tables = [StagedTable(slots, self._max_blocks, device) for _ in config.cache.groups]
        """Per cache group, ``[S, max_blocks]``; 0 past a sequence's end."""
        # Of a group that shares its memory with others: block -> block, the identity but while blocks move.
        counts = self._num_blocks[: len(self.block_tables)] if config.cache.shared else ()
        self._renamed = [torch.arange(count, dtype=torch.int32, device=device) for count in counts]
        self.num_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(slots, dtype=torch.int64, device=device)
        # Mirrors on the host.
        self.seq_id: Ints = np.full(slots, FREE, dtype=np.int64)
        self.prompt_len: Ints = np.zeros(slots, dtype=np.int64)
        self.prefill_len: Ints = np.zeros(slots, dtype=np.int64)
        """Tokens known when the sequence took the slot: to compute those is prefill."""
        self.pooled: npt.NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)
        """Slots of prompts that are pooled, whose rows have no logits."""
        self.host_num_tokens: Ints = np.zeros(slots, dtype=np.int64)
        self.host_num_computed: Ints = np.full(slots, UNKNOWN, dtype=np.int64)
        """Unknown until a new sequence's first row, which gives the end of its cached prefix."""
        self._corrected: Ints = np.zeros(slots, dtype=np.int64)
        """Tokens taken off the mirrors by results that the plans so far may not have known of."""
        self._block_counts = np.zeros((len(self.block_tables), slots), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        tables = [self.token_ids.tensor, *(table.tensor for table in self.block_tables), *self._renamed]
        return sum(table.nbytes for table in tables) + self.num_tokens.nbytes + self.num_computed.nbytes

    @property
    def idle(self) -> bool:
        return bool((self.seq_id == FREE).all())

    def release(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots or self.seq_id[slot] == FREE:
            raise EngineError(f"the plan releases slot {slot}, which holds no sequence")
        self.seq_id[slot] = FREE

    def take(self, new: Sequence[NewSequence]) -> None:
        """Writes new sequences to their slots, over all that was there."""
        for seq in new:
            self._take(seq)
        slots = np.array([seq.slot for seq in new], dtype=np.int64)
        slots_device = upload(slots, self.device)
        for table in self.block_tables:
            table.clear(slots_device)
        self.num_tokens.index_copy_(0, slots_device, upload(self.host_num_tokens[slots], self.device))

    def _take(self, seq: NewSequence) -> None:
        slot, length = seq.slot, len(seq.token_ids)
        if not 0 <= slot < self.num_slots:
            raise EngineError(f"sequence {seq.seq_id} is to take slot {slot} of {self.num_slots}")
        if self.seq_id[slot] != FREE:
            raise EngineError(f"sequence {seq.seq_id} is to take slot {slot}, which sequence {self.seq_id[slot]} holds")
        if not 0 < length <= self.max_len or not 0 < seq.prompt_len <= length:
            raise EngineError(
                f"sequence {seq.seq_id} has {length} tokens, {seq.prompt_len} of them its prompt; at most {self.max_len} fit"
            )
        self.seq_id[slot] = seq.seq_id
        self.prompt_len[slot] = seq.prompt_len
        self.prefill_len[slot] = self.host_num_tokens[slot] = length
        self.pooled[slot] = seq.pooling is not None
        self.host_num_computed[slot] = UNKNOWN
        self._corrected[slot] = 0
        self._block_counts[:, slot] = 0
        self.token_ids.stage(slot, 0, seq.token_ids)

    def rename(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Blocks (group, from, to) have moved, one after the other: tables get the new numbers."""
        for group, (table, names) in enumerate(zip(self.block_tables, self._renamed, strict=True)):
            own = [(source, target) for moved, source, target in moves if moved == group]
            if not own:
                continue
            ends: dict[int, int] = {}
            for source, target in reversed(own):
                ends[source] = ends.get(target, target)
            old = upload(np.array(list(ends), dtype=np.int64), self.device)
            names.index_copy_(0, old, upload(np.array(list(ends.values()), dtype=np.int32), self.device))
            table.tensor.copy_(names[table.tensor])
            names.index_copy_(0, old, old.to(torch.int32))

    def begin(self, plan: StepPlan, rows: RowArrays) -> list[list[int]]:
        """Checks the rows against what is known, appends their blocks, and brings the device up to date.

        Returns:
            Per cache group, the blocks that hold nothing of use yet: new ones that are not from the prefix cache.

        Raises:
            EngineError: the plan breaks the contract between scheduler and runner.
        """
        self._check_sequences(rows)
        fresh_blocks = self._append_blocks(plan)
        self._check_blocks(rows)
        if rows.num_logits_rows > len(rows.sampled):
            self._stage_drafts(plan)
        fresh = np.flatnonzero(self.host_num_computed[rows.slots] == UNKNOWN)
        if len(fresh):
            slots, starts = rows.slots[fresh], rows.starts[fresh]
            self.host_num_computed[slots] = starts
            self.num_computed.index_copy_(0, upload(slots, self.device), upload(starts, self.device))
        self.token_ids.apply()
        for table in self.block_tables:
            table.apply()
        return fresh_blocks

    def end(self, rows: RowArrays) -> None:
        """Advances the host mirrors by the plan: upper bounds, as if every sampled token were kept."""
        self.host_num_computed[rows.slots] += rows.counts
        self.host_num_tokens[rows.slots] += rows.num_logits

    def append(
        self, rows: RowArrays, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor | None
    ) -> None:
        """Stores the token sampled in each logits row of ``slots [N]`` at ``positions [N]``.

        Args:
            counts: ``[rows with logits]``: how many tokens of each row are kept, from its first; None: all. Drafts behind the
                last but one that is kept are to be computed again.
        """
        places = slots * self.token_ids.width + positions
        self.token_ids.tensor.view(-1).index_copy_(0, places, tokens.to(torch.int32))
        if counts is None and rows.num_logits_rows == len(rows.sampled):
            self.num_tokens.index_copy_(0, slots, positions + 1)
            return
        first = upload(rows.logits_start[rows.sampled], self.device)
        kept = upload(rows.num_logits[rows.sampled], self.device) if counts is None else counts
        own, ends = slots[first], positions[first] + kept
        self.num_tokens.index_copy_(0, own, ends)
        self.num_computed.index_copy_(0, own, ends - 1)

    def correct(self, rows: RowArrays, counts: Ints) -> None:
        """Corrects the lengths of a collected step's rows with logits: ``counts`` tokens were kept. Skips sequences that have
        left."""
        slots = rows.slots[rows.sampled]
        excess = np.where(self.seq_id[slots] == rows.seq_ids[rows.sampled], rows.num_logits[rows.sampled] - counts, 0)
        for mirror in (self.host_num_tokens, self.host_num_computed):
            mirror[slots] -= excess
        self._corrected[slots] += excess

    # ------------------------------------------------------------------ checks

    def _check_sequences(self, rows: RowArrays) -> None:
        outside = (rows.slots < 0) | (rows.slots >= self.num_slots)
        if outside.any():
            raise _broken(rows, outside, f"is in a slot that does not exist ({self.num_slots} do)")
        held = self.seq_id[rows.slots]
        _check(rows, held == rows.seq_ids, "is in a slot that holds sequence", held)
        if len(set(rows.slots.tolist())) != len(rows):
            raise EngineError("the plan has two rows for one slot")
        known, computed = self.host_num_tokens[rows.slots], self.host_num_computed[rows.slots]
        # How far the plan's bounds are above the mirrors'.
        ahead = (rows.starts - computed) * (computed != UNKNOWN)
        fine = (ahead >= 0) & (ahead <= self._corrected[rows.slots])
        _check(rows, fine, "does not start at its num_computed,", computed)
        self._corrected[rows.slots] = ahead
        known = known + ahead
        drafts = np.maximum(rows.num_logits - 1, 0)
        inside = (rows.starts >= 0) & (rows.counts > drafts) & (rows.ends - drafts <= known)
        _check(rows, inside, "is not of its tokens, of which there are", known)
        ends = (rows.num_logits > 0) == ((rows.ends - drafts == known) & ~rows.unfinished & ~self.pooled[rows.slots])
        _check(rows, ends, "must sample if and only if it ends at token", known)
        prefill = self.prefill_len[rows.slots]
        past = rows.starts >= prefill
        _check(rows, past == rows.decode, "is out of order: decode rows come first, and it decodes from token", prefill)
        _check(rows, rows.ends <= self.max_len, "is longer than the longest sequence,", np.full(len(rows), self.max_len))

    def _append_blocks(self, plan: StepPlan) -> list[list[int]]:
        fresh: list[list[int]] = [[] for _ in self.block_tables]
        for row in plan.rows:
            if len(row.new_blocks) != len(self.block_tables):
                raise EngineError(
                    f"sequence {row.seq_id} has blocks for {len(row.new_blocks)} cache groups, not {len(self.block_tables)}"
                )
            for group, blocks in enumerate(row.new_blocks):
                if blocks:
                    count = self._append(group, row.seq_id, row.slot, blocks)
                    fresh[group] += blocks[max(0, row.num_computed // self.block_size - count) :]
        return fresh

    def _stage_drafts(self, plan: StepPlan) -> None:
        for row in plan.rows:
            if row.drafts:
                if len(row.drafts) != row.num_logits - 1:
                    raise EngineError(f"sequence {row.seq_id} has {len(row.drafts)} drafts for {row.num_logits} logits rows")
                self.token_ids.stage(row.slot, row.num_computed + row.num_tokens - len(row.drafts), row.drafts)

    def _append(self, group: int, seq_id: int, slot: int, blocks: tuple[int, ...]) -> int:
        """Returns how many blocks there were before."""
        count = int(self._block_counts[group, slot])
        if count + len(blocks) > self._max_blocks:
            raise EngineError(f"sequence {seq_id} has {count + len(blocks)} blocks in group {group}; {self._max_blocks} fit")
        if not 0 <= min(blocks) <= max(blocks) < self._num_blocks[group]:
            raise EngineError(f"sequence {seq_id} has blocks {blocks} in group {group}, which has {self._num_blocks[group]}")
        self.block_tables[group].stage(slot, count, blocks)
        self._block_counts[group, slot] += len(blocks)
        return count

    def _check_blocks(self, rows: RowArrays) -> None:
        for group, counts in enumerate(self._block_counts):
            room = counts[rows.slots] * self.block_size
            _check(rows, rows.ends <= room, f"has too few blocks in group {group}: they hold", room)


def _check(rows: RowArrays, fine: npt.NDArray[np.bool_], complaint: str, value: Ints) -> None:
    if not fine.all():
        row = int(np.argmin(fine))
        raise _broken(rows, ~fine, f"{complaint} {value[row]}")


def _broken(rows: RowArrays, bad: npt.NDArray[np.bool_], complaint: str) -> EngineError:
    row = int(np.argmax(bad))
    where = f"row {row} of the plan, tokens [{rows.starts[row]}, {rows.ends[row]}) of sequence {rows.seq_ids[row]}"
    return EngineError(f"{where} in slot {rows.slots[row]}, {complaint}")
