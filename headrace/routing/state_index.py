"""RoutedStates: at which prefixes which replica has the states of a hybrid model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headrace.core.request import Request
from headrace.routing.prefix_index import CacheReport


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
