"""Tenants have threads in turns: what one of them sends holds up no other."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from headrace.errors import RequestError
from headrace.host.turns import TenantThreads


class Gate:
    """Holds the one thread of a pool until it is opened, and notes what is done behind it."""

    def __init__(self, pool: TenantThreads) -> None:
        self.done: list[str] = []
        self.opened = threading.Event()
        pool.submit("first", self.opened.wait)

    def work(self, name: str) -> Callable[[], str]:
        def do() -> str:
            self.done.append(name)
            return name

        return do


def test_tenants_take_turns() -> None:
    pool = TenantThreads(1, "test")
    gate = Gate(pool)
    many = [pool.submit("many", gate.work(f"many {index}")) for index in range(5)]
    few = [pool.submit("few", gate.work(f"few {index}")) for index in range(2)]
    gate.opened.set()
    assert [future.result(10) for future in (*many, *few)] == [*(f"many {i}" for i in range(5)), "few 0", "few 1"]
    assert gate.done == ["many 0", "few 0", "many 1", "few 1", "many 2", "many 3", "many 4"]
    pool.close()


def test_work_that_two_tenants_wait_for_is_done_in_the_first_turn_and_once() -> None:
    pool = TenantThreads(1, "test")
    gate = Gate(pool)
    many = [pool.submit("many", gate.work(str(index))) for index in range(5)]
    pool.share("few", many[-1])
    pool.share("few", many[-1])
    last = pool.submit("few", gate.work("own"))
    gate.opened.set()
    assert last.result(10) == "own" and many[-1].result(10) == "4" and many[-2].result(10) == "3"
    assert gate.done == ["0", "4", "1", "own", "2", "3"]
    pool.share("few", many[0])  # Done long ago.
    pool.close()


def test_cancelled_work_is_not_done_and_leaves_nothing() -> None:
    pool = TenantThreads(1, "test")
    gate = Gate(pool)
    many = [pool.submit("many", gate.work(str(index))) for index in range(5)]
    last = pool.submit("few", gate.work("own"))
    pool.share("few", many[1])
    for future in many[:4]:
        pool.cancel(future)
    left = {*pool._work, *(future for queue in pool._queues.values() for future in queue)}
    gate.opened.set()
    assert left.isdisjoint(many[:4]) and {many[4], last} <= left
    assert last.result(10) == "own" and many[4].result(10) == "4"
    assert gate.done == ["4", "own"] and all(future.cancelled() for future in many[:4])
    pool.cancel(last)  # Done long ago.
    assert pool.submit("many", lambda: 1).result(10) == 1
    pool.close()


def test_errors_reach_who_waits_for_them() -> None:
    pool = TenantThreads(1, "test")
    failed: Future[None] = pool.submit("", lambda: (_ for _ in ()).throw(RequestError("no", "json")))
    assert isinstance(failed.exception(10), RequestError)
    assert pool.submit("", lambda: 1).result(10) == 1
    pool.close()


def test_who_waits_may_leave_and_errors_keep_nothing() -> None:
    """A request that is refused in a thread leaves nothing behind, without the garbage collector."""

    class Body:
        pass

    left: list[weakref.ref[Body]] = []

    def refuse() -> None:
        body = Body()
        left.append(weakref.ref(body))
        raise RequestError("no", "prompt")

    async def run() -> None:
        pool = TenantThreads(1, "test")
        gate = Gate(pool)
        leaving = asyncio.create_task(pool.run("", gate.work("left")))
        staying = asyncio.create_task(pool.run("", gate.work("stayed")))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0)
        gate.opened.set()
        assert await staying == "stayed" and leaving.cancelled() and gate.done == ["stayed"]
        with pytest.raises(RequestError):
            await pool.run("", refuse)
        assert await pool.run("", lambda: 1) == 1
        pool.close()

    gc.disable()
    try:
        asyncio.run(run())
        assert left[0]() is None
    finally:
        gc.enable()


def test_the_end_of_a_generator_reaches_who_waits() -> None:
    pool = TenantThreads(1, "test")
    with pytest.raises(RuntimeError, match="end was not expected"):
        asyncio.run(asyncio.wait_for(pool.run("", lambda: next(iter(()))), timeout=60))
    pool.close()
