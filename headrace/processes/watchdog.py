"""Watchdog: tells an engine that is stuck from one that is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import psutil

LEAST_SHARE = 0.01
"""Part of the timeout that processes which get on compute in it at least: a machine may be busy with a hundred others. Threads
that merely poll stay below."""
CPU_TIMEOUTS = 10.0
"""Timeouts for which one thread of an engine on a CPU may compute in a step: one that loops for ever computes, too."""
GPU_TIMEOUTS = 1.0
"""Timeouts for which one thread of an engine on a GPU may compute: the host spins while it waits for a kernel, also for one
that never ends."""
_READS = 8
"""Times that the processor time is read within a timeout."""

ThreadTimes = Mapping[tuple[int, int], float]
"""(process, thread) -> seconds of processor time that it has used."""


def thread_times(pids: Iterable[int], *, children: bool = False) -> ThreadTimes:
    """Processor time of the threads of processes, of those that can be read. ``children``: and of their descendants."""
    times: dict[tuple[int, int], float] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            processes = [process, *process.children(recursive=True)] if children else [process]
        except (psutil.Error, OSError):
            continue
        for one in processes:
            try:
                times |= {(one.pid, thread.id): thread.user_time + thread.system_time for thread in one.threads()}
            except (psutil.Error, OSError):
                continue
    return times


def busy_timeouts(device: str) -> float:
    """Returns the number of timeouts for which one thread may compute within a step."""
    return CPU_TIMEOUTS if device == "cpu" else GPU_TIMEOUTS


class Watchdog:
    """Watches one piece of work, such as a step: make another one for the next.

    The work is stuck once its processes have computed next to nothing (``LEAST_SHARE``) for ``timeout`` seconds, or once one
    of their threads has computed for ``busy_timeouts`` times that long. So a busy machine, on which everything takes longer,
    is no reason, and neither is a piece of work that is large.
    """

    def __init__(self, timeout: float, times: Callable[[], ThreadTimes], *, busy_timeouts: float = float("inf")) -> None:
        self._timeout = timeout
        self._times = times
        self._most_busy = timeout * busy_timeouts
        self._first: ThreadTimes | None = None
        self._last: ThreadTimes = {}
        """Times of the threads when the processes had last computed a share."""
        self._waited = 0.0
        self._unread = 0.0

    def look(self, seconds: float) -> str | None:
        """Called every ``seconds``, as counted by the caller: time for which the caller itself was stopped is not counted.

        Returns:
            Why the work is stuck; None: it is not.
        """
        self._waited += seconds
        self._unread += seconds
        if self._unread < self._timeout / _READS and self._waited <= self._timeout:
            return None
        self._unread = 0.0
        now = self._times()
        if self._first is None:
            self._first = self._last = now
        if sum(_used(self._last, now)) >= LEAST_SHARE * self._timeout:
            self._last, self._waited = now, 0.0
        if max(_used(self._first, now), default=0.0) > self._most_busy:
            return f"has computed for more than {self._most_busy:g} s in one thread"
        return f"has hardly used the processor for {self._timeout:g} s" if self._waited > self._timeout else None


def _used(before: ThreadTimes, now: ThreadTimes) -> list[float]:
    """Seconds of each thread since then."""
    return [seconds - before.get(thread, 0.0) for thread, seconds in now.items()]
