"""Timeline: consecutive phases that cover a start-up from the start of the first process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from headrace.engine.info import Progress, StartupPhase
from headrace.host.clock import clock


class Phase:
    """A phase of a start-up, while it lasts."""

    def __init__(self, name: str, tell: Callable[[Progress], None]) -> None:
        self.detail = ""
        """Text behind the phase's name in the timeline."""
        self._name = name
        self._tell = tell
        self._told = 0.0

    def progress(self, fraction: float | None = None, detail: str = "") -> None:
        """``fraction``: done of the phase, 0 to 1."""
        self._tell(Progress(self._name, fraction, detail))

    def bytes(self, done: int, total: int) -> None:
        """Reports progress at most once per percent: there may be very many tensors."""
        fraction = done / total if total else 1.0
        if fraction >= self._told + 0.01 or fraction >= 1.0 > self._told:
            self._told = fraction
            self.progress(fraction, f"{done:,} of {total:,} bytes")


class Timeline:
    """Each phase begins where the one before it ended: their sum is the time from ``origin`` to the end of the last."""

    def __init__(self, on_progress: Callable[[Progress], None] | None = None, origin: float | None = None) -> None:
        self.phases: list[StartupPhase] = []
        self.tell = on_progress or (lambda progress: None)
        self._end = clock() if origin is None else origin

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        phase = Phase(name, self.tell)
        phase.progress()
        yield phase
        self.mark(name, phase.detail)

    def mark(self, name: str, detail: str = "", at: float | None = None) -> None:
        """Ends a phase, now or at a time of ``clock``."""
        now = max(self._end, clock() if at is None else at)
        self.phases.append(StartupPhase(name, now - self._end, detail))
        self._end = now
