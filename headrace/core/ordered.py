"""OrderedSequences: the container of the waiting queue and of the running set; and the order of both by each policy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

from headrace.choices import Policy
from headrace.core.sequence import Sequence, Status


class OrderedSequences:
    """Sequences sorted by a key that must not change while they are members.

    Insertion and removal find the position in O(log n), then shift a list.
    """

    def __init__(self, key: Callable[[Sequence], tuple[Any, ...]]) -> None:
        self._key = key
        self._keys: list[tuple[Any, ...]] = []
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    def __contains__(self, seq: Sequence) -> bool:
        place = bisect_left(self._keys, self._key(seq))
        return place < len(self._sequences) and self._sequences[place] is seq

    def snapshot(self) -> list[Sequence]:
        """A copy to iterate over while members are added and removed."""
        return self._sequences.copy()

    def add(self, seq: Sequence) -> None:
        key = self._key(seq)
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self._sequences.insert(place, seq)

    def remove(self, seq: Sequence) -> None:
        """Raises KeyError if the sequence is not a member."""
        place = bisect_left(self._keys, self._key(seq))
        if place == len(self._sequences) or self._sequences[place] is not seq:
            raise KeyError(seq)
        del self._keys[place]
        del self._sequences[place]


def running_order(policy: Policy, seq: Sequence) -> tuple[int, int]:
    """Sort key of running sequences: the last one is the first to be preempted."""
    return _priority(policy, seq), seq.seq_id


def waiting_order(policy: Policy, seq: Sequence) -> tuple[int, bool, int]:
    """Sort key of waiting sequences: a preempted one comes back before all others of its priority."""
    return _priority(policy, seq), seq.status is not Status.PREEMPTED, seq.seq_id


def _priority(policy: Policy, seq: Sequence) -> int:
    """A lower value goes first and is preempted last, whatever the order of arrival."""
    return seq.request.priority if policy == "priority" else 0
