"""The engine in a process of its own: killed, stopped, crashed and started again."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.engine.fakes import fake_process, said

from headrace.errors import ConfigError, EngineDeadError, EngineError, RequestError
from headrace.frontend.async_llm import AsyncLLM
from headrace.processes import supervisor
from headrace.processes.messages import Fatal
from headrace.processes.supervisor import Death
from processes.async_engine import Shared, collect, idle, params, run, until


def test_kill_under_load_answers_everyone_and_restarts(
    shared: Shared, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is refused for it. These deaths are not a crash loop, though nothing was served between them."""
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 2)

    async def work() -> None:
        llm = shared.llm
        for _ in (1, 2):
            tasks = [asyncio.create_task(collect(llm.generate("a", params(200), str(i)))) for i in range(20)]
            await until(lambda: llm.stats.num_running == 8)
            call = asyncio.create_task(llm.drain())
            await asyncio.sleep(0.02)
            llm._draining = False
            old = llm.engine_pid
            os.kill(old, signal.SIGKILL)
            outputs = await asyncio.gather(*tasks)
            assert all(output.finished for output in outputs)
            assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
            assert all("SIGKILL" in (output.error or "") for output in outputs)
            assert all(output.engine_died for output in outputs), "503: what failed may be sent again"
            with pytest.raises(EngineDeadError):
                await call
            assert not llm.health().ok and "SIGKILL" in llm.health().reason
            assert llm.stats.num_running == 0
            with pytest.raises(EngineDeadError):
                await collect(llm.generate("a", params(5)))
            await until(lambda: llm.health().ok)
            assert llm.engine_pid != old
        assert not llm._quarantine
        assert (await collect(llm.generate("a", params(5)))).outputs[0].text == "The m"
        await idle(llm)

    with caplog.at_level(logging.ERROR, "headrace"):
        shared.run(work())
    assert any("in flight: 0, 1, 2" in record.getMessage() for record in caplog.records), "logs carry request ids"


class Client:
    """Sends its request until it is served or refused, as one that honours Retry-After does."""

    def __init__(self, llm: AsyncLLM, prompt: str, tokens: int = 20) -> None:
        self.llm, self.prompt, self.tokens = llm, prompt, tokens
        self.num_failed = 0
        self.refused = ""
        """Reason for a refusal with 400."""

    async def run(self) -> None:
        while True:
            try:
                output = await collect(self.llm.generate(self.prompt, params(self.tokens)))
            except RequestError as error:
                self.refused = error.message
                return
            except EngineDeadError:
                output = None
            if output is not None and output.error is None:
                assert output.outputs[0].token_ids == list(said(0, self.tokens))
                return
            if output is not None and not output.engine_died:
                self.refused = output.error or ""
                return
            self.num_failed += 1
            await asyncio.sleep(0.05)


KILLS = 50


async def kill_under(clients: list[Client], kills: int) -> None:
    """Kills the engine of retrying clients each time that it has their requests."""
    llm = clients[0].llm
    tasks = [asyncio.create_task(client.run()) for client in clients]
    for _ in range(kills):
        await until(lambda: llm.health().ok and llm.stats.num_running > 0)
        os.kill(llm.engine_pid, signal.SIGKILL)
        await until(lambda: not llm.health().ok)
    await asyncio.gather(*tasks)


@pytest.mark.slow
def test_kills_from_outside_refuse_nobody(shared: Shared) -> None:
    async def work() -> None:
        llm = shared.llm
        clients = [Client(llm, f"client {number}", 240) for number in range(22)]
        await kill_under(clients, KILLS)
        assert not any(client.refused for client in clients)
        assert sum(client.num_failed for client in clients) >= 8 * KILLS
        assert not llm._quarantine
        await idle(llm)

    shared.run(work(), 1200)


@pytest.mark.slow
def test_an_idle_engine_that_is_killed_from_outside_is_in_no_crash_loop(shared: Shared) -> None:
    one = shared.llm._supervisor
    state = one._state, one._reason
    for _ in range(2 * supervisor.MAX_DEATHS):
        assert one._after(Death("killed by SIGKILL", "killed"), []) == 0.0
        assert one.state == "restarting"
    one._set(*state)


@pytest.mark.parametrize(
    ("fatal", "status", "kind"),
    [
        (None, -signal.SIGKILL, "killed"),
        (None, -signal.SIGHUP, "killed"),
        (None, -signal.SIGSEGV, "crash"),
        (None, -signal.SIGABRT, "crash"),
        (None, 1, "crash"),
        (Fatal("killed", "rank 1 ended with signal 9", None, ""), 1, "killed"),
        (Fatal("engine", "rank 1 ended with signal 11", None, ""), 1, "crash"),
        (Fatal("resources", "CUDA out of memory", None, ""), 1, "crash"),
    ],
)
def test_what_an_engine_does_itself_is_told_from_what_is_done_to_it(
    shared: Shared, fatal: Fatal | None, status: int, kind: str
) -> None:
    one = shared.llm._supervisor
    one._fatal = fatal
    assert one._cause(status).kind == kind
    one._fatal = None


def test_a_request_that_crashes_the_engine_is_refused_and_no_other(shared: Shared) -> None:
    """It takes its neighbours along once. Then suspects run alone, and it is alone when the engine crashes again."""

    async def work() -> None:
        llm = shared.llm
        innocent = [Client(llm, f"client {number}") for number in range(5)]
        poison = Client(llm, "poison")
        early = Client(llm, "early", 200)
        task = asyncio.create_task(early.run())
        await until(lambda: llm.stats.num_running == 1)
        await asyncio.gather(*(client.run() for client in (*innocent, poison)))
        await task
        assert "2 times with this request in flight" in poison.refused
        assert not any(client.refused for client in (*innocent, early)) and early.num_failed
        await until(lambda: llm.health().ok)
        before = llm.engine_pid
        with pytest.raises(RequestError) as caught:
            await collect(llm.generate("poison", params(20, seed=7)))
        assert caught.value.code == "quarantined" and llm.engine_pid == before
        assert len(llm._quarantine) == 1
        await idle(llm)

    shared.run(work())


@pytest.mark.slow
def test_a_suspect_that_waits_can_be_aborted(shared: Shared) -> None:
    async def work() -> None:
        llm = shared.llm
        suspect = llm.inputs.request("suspect", params(200), request_id="suspect")
        llm._quarantine.crashed([suspect, llm.inputs.request("other", params(5), request_id="other")])
        running = asyncio.create_task(collect(llm.generate("a", params(240))))
        await until(lambda: llm.stats.num_running == 1)
        waiting = asyncio.create_task(llm.add(suspect))
        held = asyncio.create_task(llm.add(llm.inputs.request("held", params(5), request_id="held")))
        await until(lambda: len(llm.pending()) == 3)
        assert not waiting.done() and not held.done()
        await llm.abort("suspect")
        deltas = [delta async for delta in await waiting]
        assert [delta.finish_reason for delta in deltas] == ["abort"]
        assert "".join([delta.text async for delta in await held]) == "The m", "no suspect waits any more"
        assert (await running).finished
        await idle(llm)

    shared.run(work())


@pytest.mark.slow
def test_a_stopped_engine_is_found_out_and_replaced(make: Callable[..., AsyncLLM], caplog: pytest.LogCaptureFixture) -> None:
    """An idle one is not."""

    async def work() -> None:
        async with make(seconds=0.01, step_timeout=0.6) as llm:
            pid = llm.engine_pid
            await asyncio.sleep(1.2)
            assert llm.health().ok
            assert (await collect(llm.generate("a", params(5)))).finished
            assert llm.engine_pid == pid
            task = asyncio.create_task(collect(llm.generate("a", params(240), "stuck-one")))
            await until(lambda: llm.stats.num_running == 1)
            time.sleep(1.0)  # Our own standing still is not the engine's.
            await asyncio.sleep(0.05)
            assert llm.health().ok
            os.kill(llm.engine_pid, signal.SIGSTOP)
            await until(lambda: not llm.health().ok)
            assert "no step finished" in llm.health().reason
            output = await task
            assert "no step finished" in (output.error or "")
            await until(lambda: llm.health().ok)
            assert (await collect(llm.generate("a", params(5)))).outputs[0].text == "The m"

    with caplog.at_level(logging.ERROR, "headrace"):
        run(work())
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "stuck-one" in logged and "stacks of the engine" in logged
    assert "fake_process.py" in logged, "the stacks say where it was"


@pytest.mark.slow
def test_a_long_pause_is_not_a_stuck_engine(make: Callable[..., AsyncLLM]) -> None:
    async def work() -> None:
        async with make(seconds=0.01, step_timeout=0.6) as llm:
            pid = llm.engine_pid
            task = asyncio.create_task(collect(llm.generate("a", params(60))))
            await until(lambda: llm.stats.num_running == 1)
            await llm.weights.pause("keep")
            await asyncio.sleep(3 * 0.6)
            assert llm.health().ok and llm.engine_pid == pid and not task.done()
            await llm.weights.resume()
            assert (await task).finished and llm.engine_pid == pid

    run(work())


@pytest.mark.slow
def test_a_step_that_computes_for_many_timeouts_is_not_stuck(make: Callable[..., AsyncLLM]) -> None:
    async def work() -> None:
        async with make("prompts", step_timeout=0.6) as llm:
            pid = llm.engine_pid
            assert (await collect(llm.generate("labour", params(5)))).outputs[0].text == "The m"
            assert llm.health().ok and llm.engine_pid == pid

    run(work())


@pytest.mark.parametrize(
    "trouble", [pytest.param("scarce", marks=pytest.mark.slow), pytest.param("still", marks=pytest.mark.slow)]
)
def test_a_restart_that_lacks_something_is_tried_until_it_is_there(
    trouble: str,
    make: Callable[..., AsyncLLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More often than a crash loop's worth. First the process cannot be made, then it cannot start."""
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 1)
    mark = tmp_path / "mark"

    def no_descriptor(name: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def work() -> None:
        async with make(f"{trouble}:{mark}", start_timeout=1.0) as llm:
            mark.touch()
            with monkeypatch.context() as patch:
                patch.setattr("headrace.processes.spawn.memory_file", no_descriptor)
                task = asyncio.create_task(collect(llm.generate("a", params(200))))
                await until(lambda: llm.stats.num_running == 1)
                os.kill(llm.engine_pid, signal.SIGKILL)
                assert "SIGKILL" in ((await task).error or "")
                await until(lambda: llm._supervisor._failed_starts > 1)
                assert "cannot be started" in llm.health().reason and "Too many open files" in llm.health().reason
            reason = {
                "scarce": "No space left",
                "still": "it stood still while it started: it has hardly used the processor for 1 s",
            }[trouble]
            await until(lambda: reason in llm.health().reason)
            mark.unlink()
            await until(lambda: llm.health().ok)
            assert (await collect(llm.generate("a", params(5)))).outputs[0].text == "The m"

    with caplog.at_level(logging.ERROR, "headrace"):
        run(work())
    assert "cannot be started" in caplog.text


@pytest.mark.slow
def test_a_first_start_that_stands_still_is_tried_again(make: Callable[..., AsyncLLM], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()

    async def work() -> None:
        llm = make(f"still:{mark}", start_timeout=1.0)
        start = asyncio.create_task(llm.start())
        await until(lambda: "stood still" in llm.health().reason)
        mark.unlink()
        await start
        assert (await collect(llm.generate("a", params(5)))).outputs[0].text == "The m"
        await llm.close()

    run(work())


@pytest.mark.slow
def test_a_stuck_engine_that_dies_over_its_stacks_was_stuck(make: Callable[..., AsyncLLM]) -> None:
    async def work() -> None:
        async with make(seconds=0.01, step_timeout=0.6) as llm:
            task = asyncio.create_task(collect(llm.generate("a", params(240))))
            await until(lambda: llm.stats.num_running == 1)
            engine = psutil.Process(llm.engine_pid)
            engine.send_signal(signal.SIGSTOP)
            await until(lambda: engine.status() == psutil.STATUS_STOPPED)
            # Waits until it goes on, as it does to tell its stacks.
            engine.send_signal(signal.SIGSEGV)
            assert "no step finished" in ((await task).error or "")
            await until(lambda: llm.health().ok)

    run(work())


@pytest.mark.slow
def test_a_crash_loop_stops(make: Callable[..., AsyncLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 2)

    async def work() -> None:
        async with make(f"once:{tmp_path / 'mark'}") as llm:
            os.kill(llm.engine_pid, signal.SIGKILL)
            assert not llm.failed
            await until(lambda: "2 times" in llm.health().reason)
            assert llm.failed
            assert "only the first start works" in llm.health().reason
            assert llm.engine_pid is None
            with pytest.raises(EngineDeadError, match="2 times"):
                await collect(llm.generate("a", params(5)))

    run(work())


@pytest.mark.slow
def test_crashes_again_and_again_without_serving_are_a_crash_loop(
    make: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 2)

    async def work() -> None:
        async with make() as llm:
            for _ in range(2):
                await until(lambda: llm.health().ok)
                os.kill(llm.engine_pid, signal.SIGSEGV)
                await until(lambda: not llm.health().ok)
            await until(lambda: "2 times" in llm.health().reason)

    run(work())


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [pytest.param("config", ConfigError, "cannot work", marks=pytest.mark.slow), ("load", EngineError, "out of luck")],
)
def test_a_first_start_that_fails_says_why(make: Callable[..., AsyncLLM], mode: str, error: type, words: str) -> None:
    async def work() -> None:
        llm = make(mode)
        with pytest.raises(error, match=words) as caught:
            await llm.start()
        assert mode == "load" or caught.value.param == "dtype"
        assert not llm.health().ok and llm.engine_pid is None
        await llm.close()

    run(work())


@pytest.mark.slow
def test_a_model_that_is_not_there_leaves_no_process(make: Callable[..., AsyncLLM]) -> None:
    async def work() -> None:
        llm = make(tokenizer="/nowhere/at/all")
        with pytest.raises(ConfigError):
            await llm.start()
        assert llm.engine_pid is None

    before = set(psutil.Process().children())
    run(work())
    assert set(psutil.Process().children()) <= before


def test_the_engine_dies_with_its_client(tiny_folder: Path, tmp_path: Path) -> None:
    """Also when the client is killed, which leaves it no time to say goodbye."""
    script = f"""
import asyncio, os, sys
sys.path[:0] = {sys.path!r}
from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.processes import supervisor
from headrace.frontend.async_llm import AsyncLLM

async def main():
    llm = AsyncLLM(EngineArgs(model={str(tiny_folder)!r}, load_format="dummy"))
    llm._supervisor._command = {fake_process(seconds=0.01)!r}
    await llm.start()
    print(llm.engine_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        pid = client.stdout.readline()
        assert psutil.pid_exists(int(pid))
        client.kill()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine outlived its client"
        time.sleep(0.02)
