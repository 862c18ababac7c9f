"""Slots: allocates the runner's per-sequence state slots. AdapterSlots: which sequences may run, by their adapters."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from headrace.core.sequence import Sequence
from headrace.errors import EngineError

PATIENCE = 4
"""Steps for which a sequence is passed over, until an adapter makes room for its own."""


class Slots:
    """Allocates slots ``0 .. count - 1``, lowest first, so that few sequences use few slots."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        """Frees a slot. It can be taken again in the same plan, which applies ``released`` before ``new``."""
        heapq.heappush(self._free, slot)
        self._released.append(slot)

    def take_released(self) -> tuple[int, ...]:
        """Returns the slots released since the last call, for the next plan."""
        released = tuple(self._released)
        self._released.clear()
        return released


class AdapterSlots:
    """Counts running sequences by adapter, of which there are at most ``count``.

    A waiting sequence whose adapter has no room is passed over, and does not hold up those behind it. Once it has waited for
    ``PATIENCE`` steps, one adapter is drained for it: the one with the fewest running sequences gets no more of those behind
    it, until it has none left. So the wait is bounded by the time that running sequences take.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._running: Counter[str] = Counter()

    def take(self, seq: Sequence) -> None:
        """The sequence begins to run."""
        if seq.request.adapter is not None:
            self._running[seq.request.adapter.digest] += 1
            seq.passed_over = None

    def release(self, seq: Sequence) -> None:
        """The sequence does not run any more."""
        if seq.request.adapter is not None:
            digest = seq.request.adapter.digest
            self._running[digest] -= 1
            if not self._running[digest]:
                del self._running[digest]

    def first(self, waiting: Iterable[Sequence], step: int) -> Sequence | None:
        """Returns the first sequence that is ready and has room for its adapter. ``step``: number of the last step."""
        drained: set[str] = set()
        for seq in waiting:
            if not seq.ready:
                continue
            if seq.request.adapter is None:
                return seq
            digest = seq.request.adapter.digest
            held = digest in self._running
            if digest not in drained and (held or len(self._running) < self._count):
                return seq
            if seq.passed_over is None:
                seq.passed_over = step
            if not held and not drained and step - seq.passed_over >= PATIENCE:
                drained.add(min(self._running, key=lambda other: (self._running[other], other)))
        return None


def check_places(
    slots: Slots, running: list[Sequence], waiting: list[Sequence], requests: dict[str, list[Sequence]], num_unfinished: int
) -> None:
    """Raises EngineError unless each running sequence has a slot, and each unfinished one a place in a queue."""
    taken = sorted(seq.slot for seq in running)
    if len(set(taken)) != len(running) or len(taken) + slots.num_free != slots.count:
        raise EngineError(f"slots {taken} of {len(running)} running sequences, {slots.num_free} free")
    known = {seq.seq_id for sequences in requests.values() for seq in sequences}
    placed = [seq.seq_id for seq in (*running, *waiting)]
    placed += [sibling.seq_id for seq in (*running, *waiting) for sibling in seq.siblings]
    if len(placed) != num_unfinished or set(placed) != known:
        raise EngineError(f"{num_unfinished} unfinished sequences {sorted(known)}, but queues hold {sorted(placed)}")
