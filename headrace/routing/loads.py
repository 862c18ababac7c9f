"""Loads: the work that each replica has, as the front knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.options import INT32_MAX

RUNWAY_SHARE = 16
"""A replica is sent this part of its rows beyond them: about what ends in one step."""


class Capacity(NamedTuple):
    """Amounts of work that one replica runs at once."""

    rows: int
    """Sequences that run at once."""
    step_tokens: int
    """Tokens that one step computes."""
    kv_tokens: int
    """Tokens whose KV the cache holds."""
    state_grid: int = 0
    """Tokens between snapshots of states; 0: the model has no state layers."""

    @classmethod
    def of(cls, rows: int, step_tokens: int, block_size: int, num_blocks: Sequence[int], state_grid: int = 0) -> Capacity:
        """``num_blocks``: of each cache group, null block included. They share the memory: a token needs a part of a block of
        each."""
        block_shares = sum(1 / max(1, count - 1) for count in num_blocks)
        return cls(rows, step_tokens, int(block_size / block_shares) if block_shares else INT32_MAX, state_grid)

    @property
    def max_rows(self) -> int:
        """Sequences that the replica is sent: its rows, and a runway so that a row that ends has a successor at once."""
        return self.rows + max(1, self.rows // RUNWAY_SHARE)

    @property
    def max_prefill(self) -> int:
        """Prompt tokens outstanding from which on nothing more is sent: those of the current step and of the next."""
        return 2 * self.step_tokens


NO_CAPACITY = Capacity(0, 0, 0)


class Loads:
    """Parallel lists over the replicas, exact for all requests of this front.

    A request that waits for a replica is *queued*, then *sent*. ``prefill`` alone needs a correction: the front sees a prompt's
    first token, not the chunks before it. Statistics of the replica count the prompt tokens that it has computed (``observe``).
    """

    def __init__(self, num_replicas: int) -> None:
        self.capacity = [NO_CAPACITY] * num_replicas
        self.up = [False] * num_replicas
        self.num_up = 0
        self.rows = [0] * num_replicas
        """Unfinished sequences, queued and sent."""
        self.prefill = [0] * num_replicas
        """Prompt tokens to compute, of queued and sent requests."""
        self.context = [0] * num_replicas
        """Tokens of unfinished sequences that were sent, without the cached ones of their prompts."""
        self.open = [False] * num_replicas
        """Whether the replica is sent requests: it is up and not held, and its budgets have room."""
        self.num_open = 0
        self._held = [False] * num_replicas
        """The replica is up, and is to be sent nothing for a moment."""
        self._queued_rows = [0] * num_replicas
        self._queued_prefill = [0] * num_replicas
        self._outstanding = [0] * num_replicas
        """Prompt tokens of sent requests whose first token has not been seen."""
        self._credited = [0] * num_replicas
        """Computed prompt tokens that belong to requests whose first token has been seen."""
        self._computed = [0] * num_replicas
        """Computed prompt tokens by the last statistics."""

    def __len__(self) -> int:
        return len(self.up)

    def start(self, replica: int, capacity: Capacity) -> None:
        """The replica takes requests; none have been sent."""
        self.capacity[replica] = capacity
        self.num_up += not self.up[replica]
        self.up[replica] = True
        self._held[replica] = False
        self._outstanding[replica] = self._credited[replica] = self._computed[replica] = 0
        self._update(replica)

    def stop(self, replica: int) -> None:
        """The replica takes no more requests. If it is gone, what it had is removed as if it had ended."""
        self.num_up -= self.up[replica]
        self.up[replica] = False
        self._update(replica)

    def resume(self, replica: int) -> None:
        """The replica takes requests again, beside those that it has."""
        self.num_up += not self.up[replica]
        self.up[replica] = True
        self._update(replica)

    def hold(self, replica: int, held: bool) -> None:
        """The replica is sent nothing, and what waits for it goes on waiting, until it is held no longer."""
        self._held[replica] = held
        self._update(replica)

    def queue(self, replica: int, rows: int, prefill: int) -> None:
        self.rows[replica] += rows
        self._queued_rows[replica] += rows
        self._queued_prefill[replica] += prefill
        self.prefill[replica] += prefill

    def unqueue(self, replica: int, rows: int, prefill: int) -> None:
        self.queue(replica, -rows, -prefill)

    def send(self, replica: int, rows: int, prefill: int) -> None:
        """Moves a request from the queue to the replica. ``prefill``: the part of its prompt that is not cached."""
        self._queued_rows[replica] -= rows
        self._queued_prefill[replica] -= prefill
        self._outstanding[replica] += prefill
        self.context[replica] += prefill
        self._update(replica)

    def prefilled(self, replica: int, expected: int, computed: int) -> None:
        """A request's prompt is computed: ``expected`` tokens of it were outstanding, ``computed`` really were computed."""
        self._outstanding[replica] -= expected
        self._credited[replica] += computed
        self._update(replica)

    def remove(self, replica: int, rows: int, prefill: int, context: int) -> None:
        """Sequences that were sent have ended."""
        self.rows[replica] -= rows
        self.context[replica] -= context
        self._outstanding[replica] -= prefill
        self._update(replica)

    def generated(self, replica: int, tokens: int) -> None:
        self.context[replica] += tokens
        if self.open[replica] and self.context[replica] >= self.capacity[replica].kv_tokens:
            self._update(replica)

    def observe(self, replica: int, computed_prompt_tokens: int) -> None:
        """Corrects ``prefill`` by what the replica says that it has computed of prompts since its start."""
        self._computed[replica] = computed_prompt_tokens
        self._update(replica)

    def _update(self, replica: int) -> None:
        outstanding = self._outstanding[replica]
        if outstanding == 0:
            # Aborted prompts were computed in part: the difference starts again from nothing.
            self._credited[replica] = self._computed[replica]
        progress = self._computed[replica] - self._credited[replica]
        sent = outstanding - min(max(progress, 0), outstanding)
        self.prefill[replica] = sent + self._queued_prefill[replica]
        capacity, rows = self.capacity[replica], self.rows[replica] - self._queued_rows[replica]
        # An idle replica takes any request, whatever the budgets say.
        room = rows < capacity.max_rows and sent < capacity.max_prefill and self.context[replica] < capacity.kv_tokens
        is_open = self.up[replica] and not self._held[replica] and (rows == 0 or room)
        self.num_open += is_open - self.open[replica]
        self.open[replica] = is_open
