"""Routing policies: which replica gets a request."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.choices import RoutingPolicy
from headrace.routing.loads import Loads

_DOWN = float("inf")
_POINTS = 64
"""Points of each replica on the circle of the policy ``session``."""


class RoutedRequest(NamedTuple):
    """The properties of a request that a policy sees."""

    num_prompt: int
    rows: int
    """Samples."""
    hits: Sequence[tuple[int, int]] = ()
    """(replica, tokens) of cached prefixes."""
    session: str | None = None

    def new_tokens(self, cached: int) -> int:
        """Returns the prompt tokens that are computed if ``cached`` are cached; the last one always is computed."""
        return max(1, self.num_prompt - cached)


class ReplicaChoice(NamedTuple):
    replica: int
    scores: Sequence[float] = ()
    """Score of each replica, the lowest wins; infinite: it is down. Empty: the policy has no scores."""


class Policy(Protocol):
    """Chooses a replica for a request when it arrives, and decides whether it changes to an idler one while it waits."""

    def choose(self, request: RoutedRequest, loads: Loads, now: float) -> ReplicaChoice:
        """One of the replicas that are up, of which there is one."""
        ...

    def moves(self, request: RoutedRequest, source: int, target: int, loads: Loads) -> bool:
        """Whether a request that waits for ``source`` goes to ``target``, which has room and whose own queue is empty."""
        ...


class _Lowest(Policy):
    """The lowest score wins; of equal ones the next in turn, so that ties do not always fall on the first replica."""

    def __init__(self) -> None:
        self._turn = 0

    def scores(self, request: RoutedRequest, loads: Loads) -> list[float]:
        raise NotImplementedError

    def choose(self, request: RoutedRequest, loads: Loads, now: float) -> ReplicaChoice:
        scores = self.scores(request, loads)
        best = min(scores)
        turn = self._turn if self._turn < len(scores) else 0
        try:
            replica = scores.index(best, turn)
        except ValueError:
            replica = scores.index(best)
        self._turn = replica + 1
        return ReplicaChoice(replica, scores)


class PrefixPolicy(_Lowest):
    """Prompt tokens that the replica then has to compute, times the sequences that it then has (LMetric).

    A cached prefix lowers the first factor, load raises both: no weight has to be tuned. Tokens that another replica has cached
    count twice, since computed again they displace as many of another prefix, which will have to be computed again too.
    """

    def scores(self, request: RoutedRequest, loads: Loads) -> list[float]:
        most, rows = _most_cached(request, loads), request.rows
        new = request.num_prompt + most
        scores = [
            (prefill + new) * (running + rows) if up else _DOWN
            for prefill, running, up in zip(loads.prefill, loads.rows, loads.up, strict=True)
        ]
        for replica, cached in request.hits:
            if loads.up[replica]:
                new = loads.prefill[replica] + request.new_tokens(cached) + most - cached
                scores[replica] = new * (loads.rows[replica] + rows)
        return scores

    def moves(self, request: RoutedRequest, source: int, target: int, loads: Loads) -> bool:
        cached = dict(request.hits).get(target, 0)
        # The source's load contains the request.
        stays = loads.prefill[source] * loads.rows[source]
        new = loads.prefill[target] + request.new_tokens(cached) + _most_cached(request, loads) - cached
        return new * (loads.rows[target] + request.rows) < stays


def _most_cached(request: RoutedRequest, loads: Loads) -> int:
    """Returns the tokens of the longest cached prefix on one replica that is up."""
    return max((cached for replica, cached in request.hits if loads.up[replica]), default=0)


class LeastTokensPolicy(_Lowest):
    """Tokens held, and prompt tokens to compute: two requests may differ tenfold."""

    def scores(self, request: RoutedRequest, loads: Loads) -> list[float]:
        return [
            context + prefill if up else _DOWN
            for context, prefill, up in zip(loads.context, loads.prefill, loads.up, strict=True)
        ]

    def moves(self, request: RoutedRequest, source: int, target: int, loads: Loads) -> bool:
        return True


class RoundRobinPolicy(Policy):
    """The next replica in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RoutedRequest, loads: Loads, now: float) -> ReplicaChoice:
        self._turn = next(
            place % len(loads) for place in range(self._turn, self._turn + len(loads)) if loads.up[place % len(loads)]
        )
        self._turn += 1
        return ReplicaChoice(self._turn - 1)

    def moves(self, request: RoutedRequest, source: int, target: int, loads: Loads) -> bool:
        return True


class RandomPolicy(Policy):
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, request: RoutedRequest, loads: Loads, now: float) -> ReplicaChoice:
        return ReplicaChoice(self._random.choice([replica for replica, up in enumerate(loads.up) if up]))

    def moves(self, request: RoutedRequest, source: int, target: int, loads: Loads) -> bool:
        return True


class SessionPolicy(Policy):
    """All requests of a session go to one replica by consistent hashing, those without a session to the least loaded.

    A session moves only while its replica is down.
    """

    def __init__(self, num_replicas: int) -> None:
        self._others = LeastTokensPolicy()
        points = [(_place(f"{replica}/{point}"), replica) for replica in range(num_replicas) for point in range(_POINTS)]
        points.sort()
        self._places = [place for place, _ in points]
        self._replicas = [replica for _, replica in points]

    def choose(self, request: RoutedRequest, loads: Loads, now: float) -> ReplicaChoice:
        if request.session is None:
            return self._others.choose(request, loads, now)
        first, count = bisect_right(self._places, _place(request.session)), len(self._replicas)
        around = (self._replicas[(first + step) % count] for step in range(count))
        return ReplicaChoice(next(replica for replica in around if loads.up[replica]))

    def moves(self, request: RoutedRequest, source: int, target: int, loads: Loads) -> bool:
        return request.session is None


def _place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def make_policy(name: RoutingPolicy, num_replicas: int, seed: int = 0) -> Policy:
    match name:
        case "prefix":
            return PrefixPolicy()
        case "least-tokens":
            return LeastTokensPolicy()
        case "round-robin":
            return RoundRobinPolicy()
        case "random":
            return RandomPolicy(seed)
        case "session":
            return SessionPolicy(num_replicas)
