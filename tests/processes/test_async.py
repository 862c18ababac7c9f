"""Requests to an engine in a process of its own: streams, and clients that leave them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from typing import Any

import psutil
import pytest
from support.engine.fakes import SCRIPT, said

from headrace.core.request import Request
from headrace.engine.info import Progress
from headrace.errors import EngineDeadError, EngineError, QueueFullError, RequestError
from headrace.frontend.async_llm import AsyncLLM
from headrace.kv import Item
from processes.async_engine import Shared, aborted, collect, idle, params, run, until


def test_generate_and_stream(make: Callable[..., AsyncLLM]) -> None:
    async def work() -> None:
        seen: list[Progress] = []
        llm = make(on_progress=seen.append)
        assert not llm.health().ok
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()
        async with llm:
            assert llm.health().ok and llm.info.model == "fake"
            assert seen == [Progress("weights", 0.5, "some")]
            assert "visible_index" in vars(llm.tokenizer.token_bytes), "a first request would wait for it"
            output = await collect(llm.generate("hello", params(12, n=2, logprobs=1)))
            assert [sample.text for sample in output.outputs] == [said(0, 12).decode(), said(1, 12).decode()]
            assert output.prompt == "hello" and output.prompt_token_ids == list(b"hello")
            assert output.outputs[0].logprobs is not None and len(output.outputs[0].logprobs) == 12
            request = llm.inputs.request({"prompt_token_ids": [1, 2]}, params(5), request_id="x")
            texts = [delta.text async for delta in await llm.add(request)]
            assert "".join(texts) == "The m" and len(texts) == 5
            assert await llm.reset_prefix_cache() is True
            await idle(llm)
            assert llm.stats.generation_tokens == 29
        assert llm.health()[:2] == (False, "the engine was closed")

    run(work())


def test_refusals_come_before_the_first_delta(make: Callable[..., AsyncLLM]) -> None:
    async def work() -> None:
        async with make(seconds=0.02, max_queue_len=2) as llm:
            request = llm.inputs.request("a", params(100), request_id="x")
            stream = await llm.add(request)
            with pytest.raises(RequestError) as caught:
                await llm.add(request)
            assert caught.value.param == "request_id"
            with pytest.raises(RequestError) as caught:
                beyond = (Item(0, 10**6, True, False, "x"),)
                await llm.add(
                    Request(request_id="y", prompt_token_ids=[1], sampling=params(), max_tokens=1, seed=0, items=beyond)
                )
            assert caught.value.param == "items"
            streams = [stream]
            with pytest.raises(QueueFullError):
                for number in range(40):
                    streams.append(await llm.add(llm.inputs.request("a", params(100), request_id=str(number))))
            for stream in streams:
                await stream.aclose()
            await idle(llm)

    run(work())


def test_explicit_abort_ends_the_stream(shared: Shared) -> None:
    async def work() -> None:
        llm = shared.llm
        before = aborted(llm)
        stream = await llm.add(llm.inputs.request("a", params(200, n=2), request_id="x"))
        await anext(stream)
        await llm.abort("x")
        await llm.abort("unknown")
        last = [delta async for delta in stream][-2:]
        assert {delta.finish_reason for delta in last} == {"abort"} and stream.finished
        await idle(llm)
        assert aborted(llm) - before == 2

    shared.run(work())


@pytest.mark.parametrize("leave", ["break", "drop", "cancel", "aclose"])
def test_whoever_leaves_frees_the_blocks(shared: Shared, leave: str) -> None:
    async def work() -> None:
        llm = shared.llm
        before, tokens = aborted(llm), llm.stats.generation_tokens
        if leave == "break":
            async with contextlib.aclosing(llm.generate("a", params(200))) as outputs:
                async for _ in outputs:
                    break
        elif leave == "drop":
            async for _ in await llm.add(llm.inputs.request("a", params(200), request_id="x")):
                break
        elif leave == "cancel":
            task = asyncio.create_task(collect(llm.generate("a", params(200))))
            await until(lambda: llm.stats.num_running > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = await llm.add(llm.inputs.request("a", params(200), request_id="x"))
            await stream.aclose()
        await idle(llm)
        # How many of the 200 were made until then is a matter of how busy the machine is.
        assert aborted(llm) - before == 1 and llm.stats.generation_tokens - tokens < 200

    shared.run(work())


def test_cancelled_while_it_is_being_added(shared: Shared) -> None:
    async def work() -> None:
        llm = shared.llm
        first = asyncio.create_task(collect(llm.generate("a", params(3))))
        await until(lambda: llm.stats.num_running > 0)
        late = asyncio.create_task(llm.add(llm.inputs.request("a", params(200), request_id="late")))
        await asyncio.sleep(0)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert (await first).finished
        await idle(llm)

    shared.run(work())


def test_sixty_four_streams_a_third_of_which_leave(shared: Shared) -> None:
    async def work() -> None:
        llm = shared.llm
        before = llm.stats.finished

        async def client(number: int) -> None:
            outputs = llm.generate(f"prompt {number}", params(40, n=1 + number % 2), request_id=str(number))
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    if number % 3 == 0 and len(output.outputs[0].token_ids) > 5:
                        return
            assert output.finished and output.error is None
            assert [sample.token_ids for sample in output.outputs] == [list(said(i, 40)) for i in range(1 + number % 2)]

        await asyncio.gather(*(client(number) for number in range(64)))
        await idle(llm)
        assert sum(llm.stats.finished.values()) - sum(before.values()) == sum(1 + number % 2 for number in range(64))
        assert llm.stats.finished["length"] - before.get("length", 0) >= sum(
            1 + number % 2 for number in range(64) if number % 3
        )

    shared.run(work())


def test_an_engine_belongs_to_one_event_loop_and_one_process(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = shared.llm
    calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        lambda: collect(llm.generate("a", params(5))),
        llm.reset_prefix_cache,
        lambda: llm.abort("x"),
        llm.close,
    ]
    for call in calls:
        with pytest.raises(EngineError, match="event loop that started it"):
            asyncio.run(asyncio.wait_for(call(), 10))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        for call in calls:
            with pytest.raises(EngineError, match="after a fork"):
                shared.run(call())
    shared.run(idle(llm))


def test_drain_waits_for_those_in_flight_and_takes_no_more(make: Callable[..., AsyncLLM]) -> None:
    """And a closed engine answers everyone."""

    async def work() -> None:
        llm = make(seconds=0.01)
        await llm.start()
        pid = llm.engine_pid
        task = asyncio.create_task(collect(llm.generate("a", params(20))))
        await until(lambda: llm.stats.num_running == 1)
        drained = asyncio.create_task(llm.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="draining"):
            await collect(llm.generate("a", params(5)))
        await drained
        assert (await task).outputs[0].finish_reason == "length"
        llm._draining = False
        task = asyncio.create_task(collect(llm.generate("a", params(200))))
        await until(lambda: llm.stats.num_running == 1)
        await llm.close()
        assert (await task).error == "the engine was closed"
        assert not psutil.pid_exists(pid)
        await llm.close()

    run(work())


def test_deltas_of_a_slow_reader_wait_for_it(shared: Shared) -> None:
    async def work() -> None:
        llm = shared.llm
        stream = await llm.add(llm.inputs.request("a", params(len(SCRIPT)), request_id="x"))
        await until(lambda: stream.finished)
        assert not llm.pending()
        assert "".join([delta.text async for delta in stream]) == SCRIPT.decode()

    shared.run(work())
