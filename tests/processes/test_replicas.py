"""Several engines behind one client: routing, calls to all, deaths of some."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Collection, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine.fakes import fake_process, said
from support.engine.info import engine_info

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.core.weights import WeightStatus
from headrace.errors import ConfigError, EngineDeadError, RequestError
from headrace.frontend.async_llm import AsyncLLM
from headrace.metrics.stats import EngineStats
from headrace.outputs import OutputDelta
from headrace.processes import replicas as module
from headrace.processes.messages import (
    Abort,
    Accepted,
    AddRequest,
    Control,
    ControlReply,
    FromEngine,
    Ready,
    Rejected,
    Stats,
    StepDeltas,
)
from headrace.processes.quarantine import Quarantine
from headrace.processes.replicas import ReplicaSet, capacity_of
from headrace.processes.supervisor import Health
from headrace.sampling_params import SamplingParams
from processes.async_engine import until

INFO = engine_info(max_num_seqs=2, block_size=16, num_blocks=[101])


class StubSupervisor:
    """Records what is sent to a replica."""

    made: list[StubSupervisor] = []

    def __init__(self, args: EngineArgs, client: Any, **options: Any) -> None:
        self.args, self.client, self.options = args, client, options
        self.sent: list[Any] = []
        self.origin, self.pid, self.failed, self.state = 0.0, None, False, "running"
        self.reason = "starting"
        self.weights = WeightStatus()
        self.made.append(self)

    def ready(self, **facts: Any) -> None:
        self.reason = ""
        self.client.on_message(Ready(INFO, EngineStats(**facts)))

    def die(self) -> None:
        self.reason = "the engine died"
        self.client.on_lost(self.reason, died=True)

    def health(self) -> Health:
        return Health(not self.reason, self.reason)

    def send(self, message: Any) -> None:
        if self.reason:
            raise EngineDeadError(self.reason)
        self.sent.append(message)

    def requests(self) -> list[str]:
        return [message.request.request_id for message in self.sent if isinstance(message, AddRequest)]

    def say(self, request_id: str, tokens: list[int], finish: Any = None, **fields: Any) -> None:
        delta = OutputDelta(request_id=request_id, token_ids=tokens, finish_reason=finish, **fields)
        self.client.on_message(StepDeltas([delta]))


class StubClient:
    """Records what the set reports to its client."""

    def __init__(self) -> None:
        self.messages: list[FromEngine] = []
        self.lost: list[tuple[str, bool, list[str] | None]] = []

    def on_message(self, message: FromEngine) -> None:
        self.messages.append(message)

    def on_lost(self, reason: str, *, died: bool, request_ids: Collection[str] | None = None) -> None:
        if request_ids is None or request_ids:
            self.lost.append((reason, died, None if request_ids is None else list(request_ids)))

    def pending(self) -> list[str]:
        return []

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[ReplicaSet, StubClient, list[StubSupervisor]]]]:
    monkeypatch.setattr(module, "EngineSupervisor", StubSupervisor)

    def make(count: int = 2, **args: Any) -> tuple[ReplicaSet, StubClient, list[StubSupervisor]]:
        StubSupervisor.made = []
        client = StubClient()
        one = ReplicaSet(EngineArgs(data_parallel_size=count, **args), client, command=(), quarantine=Quarantine(600.0))
        for supervisor in StubSupervisor.made:
            supervisor.ready()
        client.messages.clear()
        return one, client, StubSupervisor.made

    yield make


def request(name: str, prompt: list[int] | None = None, n: int = 1) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt or [1], sampling=SamplingParams(n=n), max_tokens=4, seed=0)


def test_a_dead_replica_takes_only_its_own_along(stubs: Any) -> None:
    one, client, (first, second) = stubs()
    for number in range(4):
        one.send(AddRequest(request(f"r{number}")))
    assert first.requests() == ["r0", "r2"] and second.requests() == ["r1", "r3"]
    assert one.pending_at(first.client) == ["r0", "r2"]
    first.die()
    assert [(died, ids) for _, died, ids in client.lost] == [(True, ["r0", "r2"])]
    assert client.lost[0][0].startswith("replica 0: the engine died")
    assert one.health().ok and "1 of 2 replicas are up; replica 0: the engine died" in one.health().reason
    one.send(AddRequest(request("r4")))
    assert second.requests() == ["r1", "r3", "r4"]
    second.say("r1", [5], "stop")
    first.ready()
    one.send(AddRequest(request("r5")))
    assert first.requests() == ["r0", "r2", "r5"]


def test_replicas_lack_weights_where_they_all_run_and_none_serves(stubs: Any) -> None:
    one, _, (first, second) = stubs()
    first.weights = WeightStatus(state="torn", reason="the weights are torn")
    assert not one.health().lacks_weights, "one serves"
    second.weights = first.weights
    assert one.health().lacks_weights and not one.health().ok
    second.die()
    assert not one.health().lacks_weights, "no update reaches it"


def test_the_last_replica_takes_those_that_wait_along(stubs: Any) -> None:
    one, client, (first, second) = stubs()
    for number in range(8):
        one.send(AddRequest(request(f"r{number}")))
    assert one.stats.num_waiting == 2
    second.die()
    assert one.stats.num_waiting == 2 and client.lost.pop()[2] == ["r1", "r3", "r5"]
    first.die()
    assert [(died, ids) for _, died, ids in client.lost] == [(True, ["r0", "r2", "r4"]), (False, ["r6", "r7"])]
    with pytest.raises(EngineDeadError, match="0 of 2 replicas are up"):
        one.send(AddRequest(request("r9")))


def test_aborts_go_where_the_request_is(stubs: Any) -> None:
    one, client, (first, second) = stubs()
    for number in range(7):
        one.send(AddRequest(request(f"r{number}", n=2 if number == 6 else 1)))
    one.send(Abort(["r1", "r6", "unknown"]))
    assert second.sent[-1] == Abort(["r1"]) and not [m for m in first.sent if isinstance(m, Abort)]
    assert client.of(Accepted) == [Accepted("r6")], "its caller waits for that"
    (deltas,) = client.of(StepDeltas)
    assert [(d.request_id, d.index, d.finish_reason) for d in deltas.deltas] == [("r6", 0, "abort"), ("r6", 1, "abort")]
    assert one.stats.num_waiting == 0


def test_the_queue_of_the_front_is_bounded(stubs: Any) -> None:
    one, client, (first, _) = stubs(max_queue_len=1)
    assert first.args.max_queue_len > 10**6, "the replicas' own queues are not"
    for number in range(8):
        one.send(AddRequest(request(f"r{number}")))
    ((refused, kind, text, _),) = [(m.request_id, m.error, m.message, m.param) for m in client.of(Rejected)]
    assert (refused, kind) == ("r7", "queue_full") and "at most 1" in text


def test_requests_that_wait_too_long_are_refused(stubs: Any) -> None:
    async def work() -> None:
        one, client, _ = stubs(dp_queue_timeout=0.05)
        for number in range(7):
            one.send(AddRequest(request(f"r{number}")))
        while not client.of(Rejected):
            await asyncio.sleep(0.01)
        assert [(m.request_id, m.error) for m in client.of(Rejected)] == [("r6", "queue_full")]
        assert "0.05 s" in client.of(Rejected)[0].message and not one.stats.num_waiting

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_time_limit_for_one_engine_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        EngineArgs(dp_queue_timeout=1.0)
    assert refused.value.param == "dp_queue_timeout"


def test_calls_are_answered_once_all_have_answered(stubs: Any) -> None:
    one, client, (first, second) = stubs()
    one.send(Control(1, "reset_prefix_cache"))
    first.client.on_message(ControlReply(1, True))
    assert not client.of(ControlReply)
    second.client.on_message(ControlReply(1, False))
    assert client.of(ControlReply) == [ControlReply(1, False)]
    one.send(Control(2, "check_integrity"))
    first.client.on_message(ControlReply(2, False, "bad"))
    second.die()
    assert client.of(ControlReply)[1:] == [ControlReply(2, False, "replica 0: bad")], "the dead one has nothing to answer"
    one.send(Control(3, "check_integrity"))
    assert first.sent[-1] == Control(3, "check_integrity") and Control(3, "check_integrity") not in second.sent


def test_a_drain_waits_for_the_queue_and_for_requests_that_moved(stubs: Any) -> None:
    one, client, (first, second) = stubs()
    for number in range(7):
        one.send(AddRequest(request(f"r{number}")))
    one.send(Control(1, "drain"))
    assert Control(1, "drain") not in first.sent
    first.say("r0", [1], "stop")
    assert first.sent[-1] == second.sent[-1] == Control(1, "drain") and one.stats.num_waiting == 0
    second.client.on_message(ControlReply(1))
    second.say("r1", [1], "stop")
    one.send(AddRequest(request("again")))  # as if it had been lost with a replica
    first.client.on_message(ControlReply(1))
    assert not client.of(ControlReply) and second.sent.count(Control(1, "drain")) == 2


def test_one_replica_is_drained_while_others_serve(stubs: Any) -> None:
    async def work() -> None:
        one, client, (first, second) = stubs()
        for number in range(8):
            one.send(AddRequest(request(f"r{number}")))
        assert one.stats.num_waiting == 2
        draining = asyncio.create_task(one.drain(0))
        await asyncio.sleep(0)
        assert "1 of 2 replicas are up; replica 0: it is drained" in one.health().reason and one.health().ok
        for name in ("r0", "r2"):
            first.say(name, [1], "stop")
        await asyncio.sleep(0)
        assert not draining.done() and first.requests() == ["r0", "r2", "r4"], "it gets nothing, and ends what it has"
        first.say("r4", [1], "stop")
        await draining
        second.say("r1", [1], "stop")
        second.say("r3", [1], "stop")
        assert second.requests() == ["r1", "r3", "r5", "r6", "r7"] and not client.lost
        with pytest.raises(RequestError, match="no replica but 1"):
            await one.drain(1)
        one.send(Control(1, "check_integrity"))
        assert first.sent[-1] == second.sent[-1] == Control(1, "check_integrity"), "calls reach it"
        first.die()
        first.ready()
        second.say("r5", [1], "stop")
        one.send(AddRequest(request("r8")))
        assert second.requests()[-1] == "r8", "it stays drained"
        one.resume(0)
        assert not one.health().reason
        one.send(AddRequest(request("r9")))
        assert first.requests()[-1] == "r9"

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_drain_ends_when_the_replica_dies_or_is_resumed(stubs: Any) -> None:
    async def work() -> None:
        one, _, (first, _) = stubs()
        for end in (first.die, lambda: one.resume(0)):
            one.send(AddRequest(request("a")))
            one.send(AddRequest(request("b")))
            draining = asyncio.create_task(one.drain(0))
            await asyncio.sleep(0)
            assert not draining.done()
            end()
            await draining
            first.ready()
            one.resume(0)
            for supervisor in StubSupervisor.made:
                supervisor.client.on_lost("again", died=True)
                supervisor.ready()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_sums_of_statistics_never_fall(stubs: Any) -> None:
    one, _, (first, second) = stubs()
    first.client.on_message(Stats(EngineStats(num_running=2, generation_tokens=10, finished={"stop": 1}, kv_blocks_total=7)))
    second.client.on_message(Stats(EngineStats(num_running=1, generation_tokens=5, finished={"length": 2}, kv_blocks_total=7)))
    assert (one.stats.num_running, one.stats.generation_tokens, one.stats.kv_blocks_total) == (3, 15, 14)
    assert one.stats.finished == {"stop": 1, "length": 2}
    first.die()
    assert (one.stats.num_running, one.stats.generation_tokens, one.stats.kv_blocks_total) == (1, 15, 7)
    first.ready(generation_tokens=1)
    assert one.stats.generation_tokens == 16
    reports = one.reported()
    assert [report.stats.generation_tokens for report in reports] == [1, 5] and all(report.up for report in reports)


def test_counters_rise_on_acceptance(stubs: Any) -> None:
    one, _, (first, second) = stubs()
    one.send(AddRequest(request("a")))
    one.send(AddRequest(request("b")))
    assert [report.accepted for report in one.reported()] == [0, 0]
    first.client.on_message(Accepted("a"))
    second.client.on_message(Rejected("b", "request", "no", None))
    assert [report.accepted for report in one.reported()] == [1, 0]
    assert one.pending() == ["a"]


def test_what_is_sent_to_a_replica_that_stands_still_is_lost_with_it(stubs: Any) -> None:
    one, client, (first, second) = stubs(dp_routing_policy="round-robin")
    one.send(AddRequest(request("a")))
    first.reason = "no step finished for 1 s"  # The watchdog has noticed, and the process lives until its stacks are read.
    one.send(AddRequest(request("b")))
    one.send(AddRequest(request("c")))
    one.send(Control(1, "check_integrity"))
    one.send(Abort(["a"]))
    assert first.requests() == ["a"] and second.requests() == ["b"]
    first.client.on_lost(first.reason, died=True)
    assert client.lost[0][2] == ["a", "c"]
    second.client.on_message(ControlReply(1))
    assert client.of(ControlReply) == [ControlReply(1)]


def test_capacity_counts_what_a_token_needs_of_each_group() -> None:
    assert capacity_of(INFO) == (2, 64, 1600, 0)


# Real processes


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 240))


class FakeLLM(AsyncLLM):
    command = fake_process(seconds=0.02)


class PoisonLLM(AsyncLLM):
    command = fake_process("prompts", 0.02)


async def text_of(llm: AsyncLLM, name: str, tokens: int, seen: Callable[[], None] = lambda: None, prompt: str = "hello") -> str:
    """The text of a request, or its error."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    text = ""
    async for output in llm.generate(prompt, params, request_id=name):
        text = output.error or output.outputs[0].text
        seen()
    return text


def test_a_replica_is_killed_under_load(tiny_folder: Path) -> None:
    """Real processes: only what it had streamed is lost, the rest runs elsewhere, and it comes back."""

    async def work() -> None:
        options: Any = {"load_format": "dummy", "device": "cpu", "dp_routing_policy": "round-robin"}
        args = EngineArgs(model=str(tiny_folder), data_parallel_size=2, **options)
        async with FakeLLM(args) as llm:
            replicas = llm.replicas
            assert replicas is not None
            await until(lambda: not llm.health().reason)
            assert [status.state for status in replicas.status()] == ["running", "running"]
            pids = [status.pid for status in replicas.status()]
            assert len(set(pids)) == 2

            streamed: set[str] = set()
            tasks = {}
            for name in ("a", "b"):
                tasks[name] = asyncio.create_task(text_of(llm, name, 100, functools.partial(streamed.add, name)))
                await until(lambda name=name: name in streamed)
            # In one turn of the loop: nothing of this one can have been streamed when its replica dies.
            os.kill(pids[0], signal.SIGSTOP)
            tasks["c"] = asyncio.create_task(text_of(llm, "c", 12))
            await until(lambda: "c" in replicas.pending())
            assert replicas._router.replica_of("c") == 0
            os.kill(pids[0], signal.SIGKILL)
            lost = await tasks["a"]
            assert "replica 0" in lost and "SIGKILL" in lost
            assert await tasks["c"] == said(0, 12).decode(), "it ran on the other replica"
            assert await tasks["b"] == said(0, 100).decode(), "the other replica notices nothing"
            assert await text_of(llm, "d", 5) == said(0, 5).decode()
            await until(lambda: not llm.health().reason)
            assert replicas.status()[0].pid not in pids and replicas.status()[1].pid == pids[1]
            assert llm.stats.generation_tokens >= 100

            assert await llm.reset_prefix_cache() is True
            await llm.check_integrity()
            ending = asyncio.create_task(text_of(llm, "e", 28))
            await until(lambda: "e" in replicas.pending())
            await llm.drain()
            assert ending.done() or replicas.pending() == []
            assert await ending == said(0, 28).decode()

    run(work())


def test_a_replica_that_runs_a_suspect_alone_is_sent_nothing_else(stubs: Any) -> None:
    """Queued requests run elsewhere, or wait there if there is no other replica."""
    one, client, (first, second) = stubs()
    first.options["on_turn"](True)
    for number in range(4):
        one.send(AddRequest(request(f"r{number}")))
    assert first.requests() == [] and len(second.requests()) >= 2 and one.health().ok
    second.die()
    assert [ids for _, died, ids in client.lost if not died] == [], "the other one is up"
    first.options["on_turn"](False)
    assert first.requests() and one.stats.num_waiting + len(first.requests()) + len(client.lost[0][2]) == 4
    first.options["on_turn"](True)
    first.die()
    first.ready()
    one.send(AddRequest(request("r9")))
    assert "r9" in first.requests(), "a new engine has no turns of the last one"


@pytest.mark.slow
def test_a_request_that_crashes_replicas_is_refused(tiny_folder: Path) -> None:
    """It runs again elsewhere once, alone; then it is refused, and the third replica lives."""

    async def work() -> None:
        args = EngineArgs(model=str(tiny_folder), load_format="dummy", data_parallel_size=3, dp_routing_policy="round-robin")
        async with PoisonLLM(args) as llm:
            await until(lambda: not llm.health().reason)
            assert llm.replicas is not None
            pids = {status.pid for status in llm.replicas.status()}
            names = [f"client {number}" for number in range(9)]
            # Those that share the replica of the poison run again, unless a part of them was seen.
            texts = asyncio.gather(*(text_of(llm, name, 100) for name in names))
            poison = await text_of(llm, "poison", 5, prompt="poison")
            assert "2 times with this request in flight" in poison
            assert len(pids & {status.pid for status in llm.replicas.status()}) >= 1
            assert all(text == said(0, 100).decode() or "SIGSEGV" in text for text in await texts)
            with pytest.raises(RequestError):
                await text_of(llm, "again", 5, prompt="poison")

    run(work())
