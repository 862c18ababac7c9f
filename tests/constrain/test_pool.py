"""Clients have the compiling threads in turns: what one of them sends holds up no other."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from headrace.constrain import factory as factory_module
from headrace.constrain.checker import Checked
from headrace.constrain.pool import CompilePools
from headrace.core.request import Constraint
from headrace.errors import QueueFullError, RequestError
from headrace.option_groups import StructuredOutputsConfig
from headrace.sampling_params import StructuredOutputsParams

from .test_grammars import make

ONE_THREAD = StructuredOutputsConfig(compile_threads=1)


def test_slow_work_holds_up_no_other() -> None:
    pools, opened = CompilePools(1), threading.Event()
    slow = [pools.submit("", opened.wait, slow=True) for _ in range(3)]
    assert pools.submit("", lambda: "quick", slow=False).result(10) == "quick"
    assert not any(future.done() for future in slow)
    opened.set()
    assert all(future.result(10) for future in slow)
    pools.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[str]]:
    """The checks of constraints wait for the event; the list has those that were begun."""
    opened, begun = threading.Event(), []
    check = factory_module.GrammarFactory._checked

    def checked(self: Any, params: StructuredOutputsParams, plan: None, slow: bool) -> Checked | None:
        begun.append(params.regex or params.json)
        assert opened.wait(20)
        return check(self, params, plan, slow)

    monkeypatch.setattr(factory_module.GrammarFactory, "_checked", checked)
    return opened, begun


def test_one_clients_constraints_are_checked_beside_those_of_another(held: tuple[threading.Event, list[str]]) -> None:
    opened, begun = held
    factory, compiler = make(ONE_THREAD)

    async def run() -> None:
        tasks = [
            asyncio.create_task(factory.prepare(StructuredOutputsParams(regex=f"m{index}"), None, "many"))
            for index in range(40)
        ]
        await asyncio.sleep(0)
        mine = asyncio.create_task(factory.prepare(StructuredOutputsParams(regex="mine"), None, "few"))
        await asyncio.sleep(0)
        opened.set()
        constraint = await mine
        assert "mine" in begun[:3]
        compiling = [compiler.compile(await task, "many")[0] for task in tasks]
        theirs = compiler.compile(constraint, "few")[0]
        assert theirs.result(20) is not None and all(future.result(20) for future in compiling)

    asyncio.run(run())


def test_requests_with_equal_constraints_wait_for_one_check_and_get_errors_of_their_own(
    held: tuple[threading.Event, list[str]],
) -> None:
    opened, begun = held
    factory, _ = make(ONE_THREAD)

    async def run() -> list[Any]:
        params = StructuredOutputsParams(json={"type": "object", "not": {}})
        tasks = [asyncio.create_task(factory.prepare(params, None, name)) for name in ("a", "b", "a")]
        await asyncio.sleep(0)
        tasks[0].cancel()
        opened.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, *errors = asyncio.run(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [(type(error), error.param) for error in errors] == [(RequestError, "structured_outputs.json")] * 2
    assert errors[0] is not errors[1]
    assert begun == [json.dumps({"type": "object", "not": {}})]


def test_constraints_of_requests_that_are_dropped_are_not_checked(held: tuple[threading.Event, list[str]]) -> None:
    """A client that sends and leaves would occupy the processes that check for as long as it likes."""
    opened, begun = held
    factory, _ = make(ONE_THREAD)

    async def run() -> None:
        tasks = [asyncio.create_task(factory.prepare(StructuredOutputsParams(regex=f"gone{index}"))) for index in range(40)]
        shared = asyncio.create_task(factory.prepare(StructuredOutputsParams(regex="gone7")))
        while not begun:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        gone = await asyncio.gather(*tasks, return_exceptions=True)
        opened.set()
        assert all(isinstance(each, asyncio.CancelledError) for each in gone)
        assert (await shared).kind == "regex"
        assert (await factory.prepare(StructuredOutputsParams(regex="gone8"))).kind == "regex"
        assert factory._pending == {} and not factory._waiters

    asyncio.run(run())
    assert begun == ["gone0", "gone7", "gone8"]


def test_what_a_client_waits_for_is_bounded(held: tuple[threading.Event, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    opened, _ = held
    monkeypatch.setattr(factory_module, "_WAITING_BYTES", 1000)
    factory, _ = make(ONE_THREAD)

    async def run() -> None:
        async def ask(letter: str, tenant: str) -> Constraint:
            return await factory.prepare(StructuredOutputsParams(regex=letter * 1500), None, tenant)

        first = asyncio.create_task(ask("a", "one"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await ask("b", "one")
        other = asyncio.create_task(ask("b", "other"))
        await asyncio.sleep(0)
        opened.set()
        await asyncio.gather(first, other)
        assert (await ask("c", "one")).kind == "regex"
        assert factory._waiting == {} and factory._pending == {}

    asyncio.run(run())


def test_the_constraints_of_one_client_leave_those_of_another_in_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory_module, "_CACHED", 8)
    factory, compiler = make(StructuredOutputsConfig(cache_bytes=700_000))
    checked: list[str | None] = []
    check = factory_module.GrammarFactory._checked

    def counted(self: Any, params: StructuredOutputsParams, plan: None, slow: bool) -> Checked | None:
        checked.append(params.regex)
        return check(self, params, plan, slow)

    monkeypatch.setattr(factory_module.GrammarFactory, "_checked", counted)

    async def compiled(pattern: str, tenant: str) -> bool:
        """Whether it was compiled before."""
        constraint = await factory.prepare(StructuredOutputsParams(regex=pattern), None, tenant)
        future, known = compiler.compile(constraint, tenant)
        assert not isinstance(future.result(20), str)
        return known

    async def run() -> None:
        assert not await compiled("mine", "few")
        for number in range(20):
            assert not await compiled(f"m{number}", "many")
        assert checked.count("mine") == 1
        assert await compiled("mine", "few"), "it was compiled again"
        assert checked.count("mine") == 1, "it was checked again"
        assert not await compiled("m0", "many")

    asyncio.run(run())
