"""StateSchedule: what the scheduler does for sequences with state blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from headrace.config import CacheConfig, SchedulerConfig
from headrace.core.plan import StepResult
from headrace.core.points import MERGE, ChunkGrid, snapshot_points
from headrace.core.sequence import Sequence
from headrace.core.step import StepBuilder
from headrace.errors import ConfigError
from headrace.kv import Hit, KVCacheManager
from headrace.kv.states import Save, StateBlocks
from headrace.metrics.stats import EngineStats
from headrace.outputs import FinishReason, PrefixReport

logger = logging.getLogger("headrace.engine")

_SHARE = 10
"""Periodic snapshots of a prompt take at most a tenth of its KV."""
_WARNING_SECONDS = 60.0
_LEAST_PERIOD, _LONGEST_PERIOD = 8_192, 32_768


class StateSchedule:
    """Chooses where snapshots of states are taken, and adds their copies to plans.

    Raises:
        ConfigError: rows may have drafts, which a state cannot forget.
    """

    def __init__(
        self, kv: KVCacheManager, states: StateBlocks, cache: CacheConfig, config: SchedulerConfig, clock: Callable[[], float]
    ) -> None:
        if config.decode_tokens > 1:
            raise ConfigError("drafts are for models without state layers: a state cannot be cut back to fewer tokens")
        self._kv, self._states = kv, states
        self.period = snapshot_period(cache)
        """Tokens between snapshots of a prompt that are taken for no other reason."""
        self._num_found = 0
        self._limits = {"attention": 0, "state": 0}
        """Prompts, by what ended the prefix that they reused."""
        self._missed = MissedStates(clock)

    def plan(self, seq: Sequence, start: int, hit: Hit | None) -> None:
        """Decides where the chunks of a waiting sequence end, which would start at ``start``."""
        identity, states, length = seq.blocks.identity, self._states, len(seq.token_ids)
        kept = [self._kv.fork_boundary(seq.blocks, seq.num_prompt)] if seq.siblings else []
        others: tuple[int, ...] = ()

        def boundary(count: int) -> int:
            return states.boundary(count, identity.uncut)

        if states.most:
            turns, last = seq.request.boundaries, [seq.num_prompt - 1]
            # Only this prompt has what follows a branch: no later point can replace it.
            branch = [hit.attention_tokens] if hit is not None and hit.attention_tokens - start >= MERGE else []
            kept += [*turns, *branch]
            periodic = range(self.period, length, self.period)
            own = seq.blocks.states
            own.turns = tuple(count for turn in turns if (count := boundary(turn)))
            for point, counts in (("period", periodic), ("branch", branch), ("prompt", last), ("turn", turns)):
                own.points |= dict.fromkeys(map(boundary, counts), point)
            others = (*last, *periodic)
        points = snapshot_points(kept, others, start, length, boundary)
        seq.chunks = ChunkGrid(states.grid, points)
        found = start if hit is None else hit.attention_tokens
        why = "" if found == start else self._why(start, found, boundary(found), points)
        seq.cache = PrefixReport(attention=found, reused=start, points=list(points), why=why)

    def _why(self, reused: int, found: int, nearest: int, points: tuple[int, ...]) -> str:
        """Says why fewer tokens were reused than found. ``nearest``: a snapshot could lie here at the latest."""
        if nearest <= reused:
            return f"snapshots of the states are taken at multiples of {self._states.grid} tokens"
        taken = next((point for point in points if reused < point <= found), None)
        if taken is not None:
            saved = f"one is taken now at {taken:,}"
        elif self._states.most:
            saved = f"a branch is worth one from {MERGE} tokens on"
        else:
            saved = "state_snapshot_bytes leaves no room for one"
        return f"there is no snapshot of the states between {reused + 1:,} and {found:,} tokens: {saved}"

    def started(self, seq: Sequence, start: int) -> None:
        """Called when the sequence has its state block: other samples of its request are to start from its state."""
        if seq.cache is not None and seq.index == 0 and seq.num_outputs == 0:
            self._num_found += seq.cache.attention
            self._limits["state" if start < seq.cache.attention else "attention"] += 1
            self._missed.add(seq.cache.attention, start)
        if seq.siblings:
            self._states.expect_fork(seq.blocks, start, self._kv.fork_boundary(seq.blocks, seq.num_prompt))

    def row(self, seq: Sequence, num_tokens: int, step: StepBuilder) -> None:
        """Called when a row of the sequence has been added: adds copies of its state before the row, and behind it."""
        start, end = seq.num_computed - num_tokens, seq.num_computed
        if start >= seq.prefill_len:
            # Rows that begin a block come here: all others have room for their token.
            if start % self._states.grid == 0:
                self._states.shade(seq.blocks, start)
        elif seq.chunks is not None and end in seq.chunks.points:
            save = self._states.save(seq.blocks, end)
            if save is not None:
                step.saves.append((seq, save))

    def collected(self, saves: Iterable[tuple[Sequence, Save]], result: StepResult) -> None:
        """Publishes the snapshots of a step, except those of sequences that have failed."""
        for seq, save in saves:
            failed = seq.finish_reason == "error" or seq.seq_id in result.errors
            self._states.saved(save, fine=not failed)

    def leaves(self, seq: Sequence, reason: FinishReason | None) -> None:
        """Called before a running sequence loses its blocks. None: it is preempted."""
        if reason != "error":
            self._states.publish_shadow(seq.blocks, seq.num_collected)

    def count(self, stats: EngineStats) -> EngineStats:
        """Returns the statistics with those of states."""
        states = self._states
        return msgspec.structs.replace(
            stats,
            state_blocks=states.num_live,
            state_snapshots=len(states.pool.index),
            state_snapshots_saved=states.num_saved.copy(),
            state_snapshots_skipped=states.skipped.copy(),
            prefix_attention_tokens=self._num_found,
            prefix_limits=self._limits.copy(),
        )


class MissedStates:
    """Warns once a minute if KV of prompts was found, and for lack of states none was reused."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._prompts = self._found = self._reused = 0

    def add(self, found: int, reused: int) -> None:
        """Counts a prompt's tokens whose KV was found, and those that were reused."""
        now = self._clock()
        if now - self._since >= _WARNING_SECONDS:
            if self._found and not self._reused:
                logger.warning(
                    "no prompt token of the last %.0f s was reused, although the KV of %s in %d prompts was found: no snapshot "
                    "of the states was behind them (state_snapshot_bytes bounds snapshots)",
                    now - self._since,
                    f"{self._found:,}",
                    self._prompts,
                )
            self._since, self._prompts, self._found, self._reused = now, 0, 0, 0
        self._prompts += found > 0
        self._found += found
        self._reused += reused


def snapshot_period(cache: CacheConfig) -> int:
    """Returns the tokens whose KV is ten times as large as a state block, within limits, as a multiple of the grid."""
    size = 0 if cache.states is None else cache.states.block_bytes
    per_token = sum(group.bytes_per_token for group in cache.groups)
    tokens = min(max(_SHARE * size // per_token, _LEAST_PERIOD), _LONGEST_PERIOD)
    return -(-tokens // cache.state_grid) * cache.state_grid
