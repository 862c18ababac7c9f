"""Work that counts as stuck, by a processor time of the test's own."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from headrace.processes.watchdog import LEAST_SHARE, Watchdog, busy_timeouts, thread_times

TIMEOUT = 120.0


class Machine:
    """Threads with the processor time that they have used."""

    def __init__(self, threads: int = 2) -> None:
        self.times = {(1, thread): 5.0 for thread in range(threads)}
        self.reads = 0

    def read(self) -> dict[tuple[int, int], float]:
        self.reads += 1
        return dict(self.times)

    def run(self, share: Callable[[int], float], watchdog: Watchdog, most: float) -> tuple[float, str | None]:
        """Runs until the watchdog finds something. ``share``: of a core, by thread."""
        passed = 0.0
        while passed < most:
            for process, thread in self.times:
                self.times[process, thread] += share(thread)
            passed += 1.0
            if reason := watchdog.look(1.0):
                return passed, reason
        return passed, None


@pytest.mark.parametrize("load", [0, 1, 20, 100])
def test_a_step_that_computes_is_not_stuck_however_busy_the_machine(load: int) -> None:
    """A step of 300 s of processor time, which takes 25 minutes to more than a day."""
    machine = Machine()
    seconds = 300.0 * (load + 1)
    watchdog = Watchdog(TIMEOUT, machine.read, busy_timeouts=busy_timeouts("cpu"))
    assert machine.run(lambda thread: 1.0 / (load + 1), watchdog, seconds) == (seconds, None)
    assert machine.reads < seconds / 10, "reading is not free"


@pytest.mark.parametrize("share", [0.0, LEAST_SHARE / 4])
def test_a_step_that_stands_still_is_stuck_after_the_timeout(share: float) -> None:
    machine = Machine()
    watchdog = Watchdog(TIMEOUT, machine.read, busy_timeouts=busy_timeouts("cpu"))
    passed, reason = machine.run(lambda thread: share, watchdog, 10 * TIMEOUT)
    assert reason is not None and "hardly used the processor for 120 s" in reason
    assert TIMEOUT < passed <= TIMEOUT + 2


def test_a_thread_that_computes_for_ever_is_stuck_on_a_cpu_too() -> None:
    machine = Machine(16)
    watchdog = Watchdog(TIMEOUT, machine.read, busy_timeouts=busy_timeouts("cpu"))
    passed, reason = machine.run(lambda thread: float(thread == 3), watchdog, 100 * TIMEOUT)
    assert reason is not None and "1200 s in one thread" in reason and 10 * TIMEOUT < passed < 11.5 * TIMEOUT


def test_a_host_that_spins_for_a_kernel_is_stuck_after_the_timeout() -> None:
    watchdog = Watchdog(TIMEOUT, (machine := Machine()).read, busy_timeouts=busy_timeouts("cuda"))
    passed, reason = machine.run(lambda thread: float(thread == 0), watchdog, 10 * TIMEOUT)
    assert reason is not None and TIMEOUT < passed < 1.4 * TIMEOUT


def test_new_threads_count_and_ended_ones_do_not_matter() -> None:
    machine = Machine()
    watchdog = Watchdog(TIMEOUT, machine.read)
    for number in range(2, 100):
        machine.times = {(1, number): 3.0}
        for _ in range(10):
            assert watchdog.look(1.0) is None


def test_processor_time_of_this_process_can_be_read_and_of_none_is_empty() -> None:
    times = thread_times([os.getpid()], children=True)
    assert any(process == os.getpid() for process, _ in times) and sum(times.values()) > 0.0
    assert thread_times([2**22 + 1]) == {}
