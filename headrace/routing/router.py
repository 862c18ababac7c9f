"""Router: the queues in front of the replicas, and the book of what each of them runs."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.core.request import Request
from headrace.errors import EngineDeadError, QueueFullError, RequestError
from headrace.routing.loads import Capacity, Loads
from headrace.routing.policies import Policy, PrefixPolicy, RoutedRequest
from headrace.routing.prefix_index import CacheReport, RoutedPrefixes, key_stride, prefix_keys


def state_places(request: Request, grid: int) -> tuple[int, ...]:
    """Places among the keys of a prompt, one for every ``grid`` tokens, at which its computation leaves a snapshot: the ends of
    turns, and the last one within the prompt."""
    found = set()
    for count in (*request.boundaries, len(request.prompt_token_ids) - 1):
        count -= count % grid
        while count > 0 and not request.cache_identity.uncut(count):
            count -= grid
        if count > 0:
            found.add(count // grid - 1)
    return tuple(sorted(found))


class RoutedStates:
    """Keys by replica: those of the snapshots that it reports, and those that requests which were not computed will leave."""

    def __init__(self, num_replicas: int) -> None:
        self._cached: list[set[bytes]] = [set() for _ in range(num_replicas)]
        self._pending: list[Counter[bytes]] = [Counter() for _ in range(num_replicas)]
        """Per replica, key -> number of requests that will leave it, once they are computed."""
        self._computing: list[Counter[bytes]] = [Counter() for _ in range(num_replicas)]
        """Counts like ``_pending``, of the requests that were sent to the replica."""

    def start(self, replica: int) -> None:
        """The replica's cache is empty."""
        self._cached[replica].clear()

    def changed(self, replica: int, report: CacheReport) -> None:
        if report.cleared:
            self._cached[replica].clear()
        self._cached[replica] |= set(report.states_stored)
        self._cached[replica] -= set(report.states_removed)

    def reach(self, replica: int, keys: Sequence[bytes], *, sent: bool) -> int:
        """Returns how many of the leading keys a request on the replica continues from: those up to its last state.

        ``sent``: without the states of requests that still wait.
        """
        cached, expected = self._cached[replica], (self._computing if sent else self._pending)[replica]
        return next((count for count in range(len(keys), 0, -1) if (key := keys[count - 1]) in cached or key in expected), 0)

    def add(self, replica: int, keys: Sequence[bytes]) -> None:
        """A request that will leave states at these keys waits for the replica."""
        self._pending[replica].update(keys)

    def send(self, replica: int, keys: Sequence[bytes]) -> None:
        self._computing[replica].update(keys)

    def remove(self, replica: int, keys: Sequence[bytes], *, sent: bool) -> None:
        """A request ends, waits no more, or has its prompt computed."""
        for counts in (self._pending[replica], *([self._computing[replica]] if sent else ())):
            counts.subtract(keys)
            for key in keys:
                if not counts[key]:
                    del counts[key]


_KEPT_DECISIONS = 256


class Binding(NamedTuple):
    """A request that is sent to a replica now."""

    request: Request
    replica: int


@dataclasses.dataclass(slots=True)
class RoutingDecision:
    """The reason why a request went to its replica."""

    request_id: str
    replica: int
    scores: list[float]
    """Score of each replica when the request arrived; infinite: it was down."""
    moved: bool
    """Whether it waited for another replica before, which was busier."""
    waited: float
    """Seconds in the router's queue."""
    expected_hit: int
    """Prompt tokens that the replica was expected to have cached."""
    true_hit: int | None = None
    """Prompt tokens that the replica had cached; None: not known yet."""


@dataclasses.dataclass(slots=True)
class RouterStats:
    """Counters of one replica. They rise when the replica accepts a request, not when it is sent."""

    accepted: int = 0
    expected_hit_tokens: int = 0
    true_hit_tokens: int = 0
    wrong_hit_tokens: int = 0
    """Sum of the differences between expected and true hits."""


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    """A request that waits for a replica, or that a replica has."""

    order: tuple[int, float, int]
    """Position in the queue: priority, time of arrival, number."""
    request: Request
    queued_at: float
    keys: tuple[bytes, ...]
    states: tuple[bytes, ...] = ()
    """The keys at which its prompt leaves snapshots of states."""
    replica: int = -1
    scores: list[float] = dataclasses.field(default_factory=list)
    moved: bool = False
    hit: int = 0
    """Prompt tokens that the replica is expected to have cached."""
    prefill: int = 0
    """The others, as long as they are to be computed."""
    prompt: int = 0
    """Prompt tokens that take room in the cache of the replica, once it was sent the request."""
    open: dict[int, int] = dataclasses.field(default_factory=dict)
    """Sample -> its output tokens, for those that have not ended. Empty until the request is sent."""
    started: bool = False
    """The first token has arrived."""
    decision: RoutingDecision | None = None
    """None until the request is sent."""

    def __lt__(self, other: _Entry) -> bool:
        return self.order < other.order

    @property
    def rows(self) -> int:
        return self.request.sampling.n


class Router:
    """Binds requests to replicas as late as possible.

    The policy chooses a replica when a request arrives. It is sent there when the replica's budgets admit it and waits until
    then, in the order of priority, then of arrival. While it waits it may move to a replica that has room and whose queue is
    empty. Every event of a request must be reported here.
    """

    def __init__(
        self, policy: Policy, num_replicas: int, block_size: int, *, by_priority: bool = False, max_queue_len: int = 2**31 - 1
    ) -> None:
        """``block_size``: of the replicas' KV caches."""
        self.loads = Loads(num_replicas)
        self.stats = [RouterStats() for _ in range(num_replicas)]
        self.decisions: deque[RoutingDecision] = deque(maxlen=_KEPT_DECISIONS)
        """The latest, newest last."""
        self.num_queued = 0
        """Sequences that wait."""
        self._policy = policy
        self._index = RoutedPrefixes(num_replicas) if isinstance(policy, PrefixPolicy) else None
        self._states = RoutedStates(num_replicas)
        self._grid = 0
        """``state_grid`` of the replicas."""
        self._block_size = block_size
        self._tokens_per_key = key_stride(block_size) * block_size
        self._by_priority = by_priority
        self._max_queue_len = max_queue_len
        self._queues: list[list[_Entry]] = [[] for _ in range(num_replicas)]
        self._entries: dict[str, _Entry] = {}
        self._num_arrived = 0

    # Facts

    @property
    def queued(self) -> list[str]:
        """Requests that wait, by replica."""
        return [entry.request.request_id for queue in self._queues for entry in queue]

    def replica_of(self, request_id: str) -> int | None:
        """The replica that was sent the request. None: it waits, or is unknown."""
        entry = self._entries.get(request_id)
        return None if entry is None or entry.decision is None else entry.replica

    def sent_to(self, replica: int) -> list[str]:
        return [name for name, entry in self._entries.items() if entry.replica == replica and entry.decision is not None]

    # Replicas

    def start(self, replica: int, capacity: Capacity) -> None:
        """The replica takes requests, with an empty cache."""
        self.loads.start(replica, capacity)
        if capacity.state_grid:
            self._grid = self._tokens_per_key = capacity.state_grid
        self._states.start(replica)
        if self._index is not None:
            self._index.start(replica)

    def stop(self, replica: int) -> list[str]:
        """The replica is gone. Returns the requests that it had, which are forgotten here; those that wait for it move on.

        If it was the last one, those that wait are returned too.
        """
        self.loads.stop(replica)
        lost = self.sent_to(replica)
        for request_id in lost:
            self._end(request_id)
        self._states.start(replica)
        if self._index is not None:
            self._index.start(replica)
        return lost + self._move_on(replica)

    def pause(self, replica: int) -> list[str]:
        """The replica is sent no more requests and goes on with those that it has; those that wait for it move on.

        If it was the last one, those that wait are forgotten and returned.
        """
        self.loads.stop(replica)
        return self._move_on(replica)

    def resume(self, replica: int) -> None:
        """Undoes ``pause``."""
        self.loads.resume(replica)

    def _move_on(self, replica: int) -> list[str]:
        lost = []
        for entry in self._queues[replica].copy():
            self._leave_queue(entry)
            if self.loads.num_up:
                self._enter_queue(entry, *self._choose(entry))
            else:
                del self._entries[entry.request.request_id]
                lost.append(entry.request.request_id)
        return lost

    def cache_changed(self, replica: int, report: CacheReport) -> None:
        if self._index is not None:
            self._index.changed(replica, report)
            self._states.changed(replica, report)

    # Requests

    def add(self, request: Request, now: float) -> None:
        """Queues a request; ``bind`` sends it.

        Raises:
            EngineDeadError: no replica is up.
            QueueFullError: too many sequences wait.
            RequestError: it has more samples than the queue may hold.
        """
        if not self.loads.num_up:
            raise EngineDeadError("no replica is up")
        rows = request.sampling.n
        if rows > self._max_queue_len:
            raise RequestError(f"n is {rows}, and the queue holds at most {self._max_queue_len} sequences (max_queue_len)", "n")
        if self.num_queued + rows > self._max_queue_len:
            raise QueueFullError(
                f"{self.num_queued} sequences wait in a queue of at most {self._max_queue_len}; try again later"
            )
        self._num_arrived += 1
        order = (request.priority if self._by_priority else 0, request.arrival_time, self._num_arrived)
        keys = prefix_keys(request, self._block_size, self._grid) if self._index is not None else ()
        states = tuple(keys[place] for place in state_places(request, self._grid)) if keys and self._grid else ()
        entry = _Entry(order, request, now, keys, states)
        self._entries[request.request_id] = entry
        self._enter_queue(entry, *self._choose(entry))

    def bind(self, now: float) -> Iterator[Binding]:
        """Sends requests for as long as replicas have room for them. Must be read to its end."""
        bound = self.num_queued > 0
        while bound:
            bound = False
            for replica, is_open in enumerate(self.loads.open):
                if is_open and self.loads.open[replica] and (entry := self._next(replica)) is not None:
                    bound = True
                    self._send(entry, now)
                    yield Binding(entry.request, replica)

    def _next(self, replica: int) -> _Entry | None:
        """Returns the next entry for an open replica: the head of its queue, or of the longest queue of a busy replica if it
        moves."""
        if self._queues[replica]:
            return self._queues[replica][0]
        if not self.num_queued:
            return None
        longest = max(range(len(self._queues)), key=lambda other: 0 if self.loads.open[other] else len(self._queues[other]))
        if self.loads.open[longest] or not self._queues[longest]:
            return None
        entry = self._queues[longest][0]
        routed = self._routed(entry)
        if not self._policy.moves(routed, entry.replica, replica, self.loads):
            return None
        self._leave_queue(entry)
        entry.moved = True
        self._enter_queue(entry, replica, routed, entry.scores)
        return entry

    def _routed(self, entry: _Entry) -> RoutedRequest:
        request = entry.request
        found = self._index.hits(entry.keys) if self._index is not None and self._cacheable(request) else ()
        hits = [(replica, self._reach(entry, replica, num_keys)) for replica, num_keys in found]
        return RoutedRequest(len(request.prompt_token_ids), entry.rows, hits, request.session)

    def _reach(self, entry: _Entry, replica: int, num_keys: int, *, sent: bool = False) -> int:
        """Prompt tokens that the replica need not compute if it has the KV of ``num_keys`` of the request's keys. For a model
        with state layers, they end at the last snapshot, as the replica itself will find."""
        if not self._grid:
            return num_keys * self._tokens_per_key
        most = min(num_keys, (len(entry.request.prompt_token_ids) - 1) // self._grid)
        return self._states.reach(replica, entry.keys[:most], sent=sent) * self._grid

    @staticmethod
    def _cacheable(request: Request) -> bool:
        """Prompt logprobs need every token computed."""
        return request.sampling.prompt_logprobs is None

    def _choose(self, entry: _Entry) -> tuple[int, RoutedRequest, list[float]]:
        routed = self._routed(entry)
        choice = self._policy.choose(routed, self.loads, entry.queued_at)
        return choice.replica, routed, list(choice.scores)

    def _enter_queue(self, entry: _Entry, replica: int, routed: RoutedRequest, scores: list[float]) -> None:
        entry.replica, entry.scores = replica, scores
        cached = next((tokens for holder, tokens in routed.hits if holder == replica), 0)
        self._expect(entry, cached)
        if self._index is not None:
            # From now on other requests with this prefix are routed here too.
            self._index.add(replica, entry.keys)
            self._states.add(replica, entry.states)
        self.loads.queue(replica, entry.rows, entry.prefill)
        insort(self._queues[replica], entry)
        self.num_queued += entry.rows

    def _expect(self, entry: _Entry, cached: int) -> None:
        """Whole blocks, and never the last token."""
        num_prompt = len(entry.request.prompt_token_ids)
        entry.hit = min(cached, num_prompt - 1) // self._block_size * self._block_size
        entry.prefill = num_prompt - entry.hit

    def _leave_queue(self, entry: _Entry) -> None:
        queue = self._queues[entry.replica]
        del queue[bisect_left(queue, entry)]
        self.num_queued -= entry.rows
        self.loads.unqueue(entry.replica, entry.rows, entry.prefill)
        if self._index is not None:
            self._index.remove(entry.replica, entry.keys, sent=False)
            self._states.remove(entry.replica, entry.states, sent=False)

    def _send(self, entry: _Entry, now: float) -> None:
        queue = self._queues[entry.replica]
        del queue[bisect_left(queue, entry)]
        self.num_queued -= entry.rows
        if self._index is not None:
            # The cache may have changed while the request waited.
            queued, found = entry.prefill, self._index.send(entry.replica, entry.keys)
            reached = self._reach(entry, entry.replica, found, sent=True)
            self._states.send(entry.replica, entry.states)
            self._expect(entry, reached if self._cacheable(entry.request) else 0)
            self.loads.queue(entry.replica, 0, entry.prefill - queued)
        self.loads.send(entry.replica, entry.rows, entry.prefill)
        entry.prompt = entry.prefill
        entry.open = dict.fromkeys(range(entry.rows), 0)
        entry.decision = RoutingDecision(
            entry.request.request_id, entry.replica, entry.scores, entry.moved, now - entry.queued_at, entry.hit
        )
        self.decisions.append(entry.decision)

    def accepted(self, request_id: str) -> None:
        """The replica took the request."""
        if (replica := self.replica_of(request_id)) is not None:
            self.stats[replica].accepted += 1

    def rejected(self, request_id: str) -> None:
        """The replica refused the request: its budgets are as if it had never been sent."""
        if self.replica_of(request_id) is not None:
            self._end(request_id)

    def progress(self, request_id: str, index: int, tokens: int, cached: int, finished: bool) -> None:
        """A delta of one sample arrived; ``cached``: how many tokens of the prompt came from the cache, if it is the first."""
        entry = self._entries.get(request_id)
        if entry is None or index not in entry.open:
            return
        if tokens:
            if not entry.started:
                self._started(entry, cached)
            entry.open[index] += tokens
            self.loads.generated(entry.replica, tokens)
        if finished:
            if len(entry.open) == 1:
                self._end(request_id)
            else:
                self.loads.remove(entry.replica, 1, 0, entry.open.pop(index))

    def _started(self, entry: _Entry, cached: int) -> None:
        """The first token is there, so the prompt is computed."""
        entry.started = True
        self.loads.prefilled(entry.replica, entry.prefill, len(entry.request.prompt_token_ids) - cached)
        entry.prefill = 0
        if entry.decision is not None:
            entry.decision.true_hit = cached
        stats = self.stats[entry.replica]
        stats.expected_hit_tokens += entry.hit
        stats.true_hit_tokens += cached
        stats.wrong_hit_tokens += abs(cached - entry.hit)
        if self._index is not None:
            self._index.remove(entry.replica, entry.keys, sent=True, computed=True)
            self._states.remove(entry.replica, entry.states, sent=True)

    def remove(self, request_id: str) -> Request | None:
        """Takes a request out of the queue. None: it is not there."""
        entry = self._entries.get(request_id)
        if entry is None or entry.decision is not None:
            return None
        self._leave_queue(entry)
        del self._entries[request_id]
        return entry.request

    def expired(self, before: float) -> list[str]:
        """Takes requests out of the queue that were queued at ``before`` or earlier."""
        late = [entry.request.request_id for queue in self._queues for entry in queue if entry.queued_at <= before]
        for request_id in late:
            self.remove(request_id)
        return late

    def oldest(self) -> float | None:
        """Returns the time at which the longest-waiting request was queued."""
        return min((entry.queued_at for queue in self._queues for entry in queue), default=None)

    def _end(self, request_id: str) -> None:
        """A request that was sent has ended."""
        entry = self._entries.pop(request_id)
        self.loads.remove(entry.replica, len(entry.open), entry.prefill, entry.prompt + sum(entry.open.values()))
        if self._index is not None and not entry.started:
            self._index.remove(entry.replica, entry.keys, sent=True)
            self._states.remove(entry.replica, entry.states, sent=True)
