"""The number of a process's threads does not depend on what it is asked."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from headrace.errors import EngineError
from headrace.host.worker_threads import WorkerThreads


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_all_threads_start_with_the_first_job() -> None:
    pool = WorkerThreads(3, "wheel")
    assert named("wheel") == []
    assert pool.submit(int, "7").result() == 7
    assert len(named("wheel")) == 3
    jobs = [pool.submit(time.sleep, 0.01) for _ in range(12)]
    assert len(named("wheel")) == 3
    assert [job.result() for job in jobs] == [None] * 12
    pool.close(wait=True)
    assert named("wheel") == []


def test_threads_have_their_names_and_are_initialized() -> None:
    started: list[int] = []
    pool = WorkerThreads(1, "mill-with-a-long-name", initializer=lambda: started.append(threading.get_native_id()))
    thread = pool.submit(threading.get_native_id).result()
    assert Path(f"/proc/self/task/{thread}/comm").read_text().strip() == "mill-with-a-lon"
    assert started == [thread]
    pool.close(wait=True)


def test_a_cancelled_job_is_never_done() -> None:
    pool, done, gate = WorkerThreads(1, "race"), [], threading.Event()

    async def run() -> None:
        first = asyncio.create_task(pool.run(gate.wait, 10))
        second = asyncio.create_task(pool.run(done.append, 1))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        gate.set()
        assert await first
        await pool.run(int)

    asyncio.run(run())
    assert done == []
    pool.close(wait=True)


def test_without_threads_in_the_system_the_job_fails_and_a_later_one_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = threading.Thread.start, [2]

    def start(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    pool = WorkerThreads(3, "sluice")
    with pytest.raises(EngineError, match="the 3 threads of sluice cannot be started"):
        pool.submit(int)
    left[0] = 3
    assert pool.submit(int, "7").result() == 7
    left[0] = 0
    assert [pool.submit(int, "7").result() for _ in range(5)] == [7] * 5
    pool.close(wait=True)
    assert named("sluice") == []


def test_the_end_of_a_generator_reaches_who_waits() -> None:
    pool = WorkerThreads(1, "sluice")
    with pytest.raises(RuntimeError, match="end was not expected"):
        asyncio.run(asyncio.wait_for(pool.run(next, iter(())), timeout=60))
    pool.close(wait=True)
