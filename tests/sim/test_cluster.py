"""The simulator: determinism, exact times, failures, routing, and a runner that sleeps."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from support.engine.clock import VirtualTime
from support.engine.fakes import FakeRunner
from support.models.tiny_llama import write_config
from support.sim.examples import SHAPE, SHARED, TIMES, config, run, sleeping_process, slower, traffic

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.engine.outputs import OutputProcessor
from headrace.frontend.async_llm import AsyncLLM
from headrace.sim.cluster import Simulation
from headrace.sim.config import Lengths, ReplicaFailure
from headrace.sim.step_time import GraphSizes, StepTimeModel
from headrace.sim.traffic import generate, make_request


def test_the_same_seed_gives_the_same_report_byte_for_byte(tmp_path: Path) -> None:
    settings = config(
        replicas=3, traffic=msgspec.structs.replace(SHARED, requests=120), seed=5, failures=[ReplicaFailure(1, 0.8, 1.0)]
    )
    report = json.dumps(run(settings).report())
    assert report == json.dumps(run(settings).report())
    assert report != json.dumps(run(msgspec.structs.replace(settings, seed=6)).report())
    # In another process the hashes of strings differ.
    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode(settings))
    command = [sys.executable, "-m", "headrace.cli", "simulate", "--config", str(file), "--json"]
    printed = subprocess.run(command, capture_output=True, check=True, env=os.environ | {"PYTHONHASHSEED": "77"}).stdout
    assert json.dumps(json.loads(printed)) == report


def test_the_times_of_one_request_are_those_of_its_steps() -> None:
    times = msgspec.structs.replace(TIMES, host_start=0.003, host_end=0.002)
    simulation = Simulation(config({"pipeline_depth": 1}, times, message_seconds=0.25))
    simulation.run([make_request(0, 10.0, list(range(100)), 3)])
    (exchange,) = simulation.exchanges.values()
    mixed = TIMES.mixed.base(100) + TIMES.mixed.prefill_context * 5050
    host = TIMES.host_step + TIMES.host_row
    assert exchange.first_token == pytest.approx(0.5 + mixed + host + 0.003)
    second, third = (TIMES.decode.base(1) + TIMES.decode.context * tokens + host for tokens in (101, 102))
    assert exchange.between_tokens == pytest.approx([second, third + 0.002])
    assert exchange.whole == pytest.approx(0.5 + mixed + second + third + host + 0.005) and exchange.error is None


def test_the_host_overlaps_with_the_device_in_a_pipeline() -> None:
    slow_host = msgspec.structs.replace(TIMES, host_step=0.006)
    seconds = {}
    for depth in (1, 2):
        simulation = Simulation(config({"pipeline_depth": depth}, slow_host))
        simulation.run([make_request(0, 0.0, [1], 101)])
        seconds[depth] = simulation.now
    assert seconds[1] == pytest.approx(101 * 0.014, rel=0.02) and seconds[2] == pytest.approx(101 * 0.008, rel=0.02)


def test_the_device_runs_an_eager_step_while_the_host_launches_it() -> None:
    """A long prompt alone: its first token comes when the slower one of both is done."""
    graphs = GraphSizes((1, 2, 4), (0, 4), (16,), 16)
    firsts = []
    for launch in (0.0, 0.020, 0.300):
        times = msgspec.structs.replace(TIMES, host_step=0.0, host_row=0.0, host_eager=launch, graphs=graphs)
        simulation = Simulation(config({"pipeline_depth": 1}, times, message_seconds=0.0))
        simulation.run([make_request(0, 0.0, [1] * 1000, 3)])
        firsts.append(next(iter(simulation.exchanges.values())).first_token)
    mixed = TIMES.mixed.base(1000) + TIMES.mixed.prefill_context * 500_500
    assert firsts == pytest.approx([mixed, mixed, 0.3])


def test_one_engine_has_no_router_before_it() -> None:
    """All requests wait in the engine, and too many are refused there. The first begins at once."""
    simulation = Simulation(config({"max_num_seqs": 4}, max_queue_len=30))
    simulation.run([make_request(number, 0.0, [number], 3) for number in range(50)])
    report = simulation.report()
    assert report["requests"] == {"sent": 50, "succeeded": 31, "failed": 19}
    assert all("queue" in error for error in report["errors"]) and not simulation.router.num_queued


def test_everything_ends_and_is_counted() -> None:
    simulation = run(config(replicas=2, traffic=traffic(300)))
    report = simulation.report()
    assert report["requests"] == {"sent": 300, "succeeded": 300, "failed": 0} and not report["errors"]
    assert sum(replica["requests"] for replica in report["by_replica"]) == 300
    assert report["output_tokens"] == sum(exchange.output_tokens for exchange in simulation.exchanges.values())
    assert all(len(one.between_tokens) == one.output_tokens - 1 for one in simulation.exchanges.values())
    for replica in simulation.replicas:
        replica.scheduler.check_integrity()
        assert not replica.scheduler.kv.num_used
    assert not simulation.router.num_queued and simulation.router.loads.rows == [0, 0]


def test_a_dead_replica_loses_only_what_it_had_streamed() -> None:
    settings = config(replicas=3, traffic=traffic(300, rate=150.0), failures=[ReplicaFailure(1, 0.8, 0.5)])
    simulation = run(settings)
    report = simulation.report()
    lost = report["errors"].get("replica 1 died", 0)
    assert lost and report["requests"]["failed"] == lost and simulation.num_retried > 0
    assert all(one.first_token is not None for one in simulation.exchanges.values())
    assert report["by_replica"][1]["requests"] > 50, "it came back"


def test_requests_for_no_replica_are_refused() -> None:
    simulation = run(config(traffic=traffic(40, rate=40.0), failures=[ReplicaFailure(0, 0.5, 0.2)]))
    errors = simulation.report()["errors"]
    assert errors["no replica is up"] >= 1 and simulation.report()["requests"]["succeeded"] >= 20


def test_prefixes_and_load_decide_better_than_turns() -> None:
    reports = {policy: run(config(replicas=4, routing=policy, traffic=SHARED)).report() for policy in ("prefix", "round-robin")}
    tail = {policy: report["milliseconds"]["first token"]["p99"] for policy, report in reports.items()}
    assert tail["prefix"] <= 0.5 * tail["round-robin"], tail
    rates = {policy: sum(one["prefix_hit_rate"] for one in report["by_replica"]) for policy, report in reports.items()}
    assert rates["prefix"] > rates["round-robin"]


def sleeping(times: StepTimeModel, depth: int, clock: VirtualTime) -> tuple[EngineCore, FakeRunner]:
    """A real engine whose runner sleeps."""
    shape = msgspec.structs.replace(SHAPE, pipeline_depth=depth)
    executor = FakeRunner(times.device_seconds, clock)
    return EngineCore(
        Scheduler(shape.scheduler(), shape.cache()), executor, OutputProcessor(None), pipeline_depth=depth
    ), executor


@pytest.mark.parametrize("depth", [1, 2])
def test_a_runner_that_sleeps_takes_the_same_steps(depth: int) -> None:
    """All requests come at once, so what runs beside what does not depend on the machine's speed."""
    times = msgspec.structs.replace(TIMES, host_step=0.0, host_row=0.0)
    requests = [make_request(number, 0.0, [number] * (20 + 40 * number), 3 + number % 9) for number in range(40)]
    simulation = Simulation(config({"pipeline_depth": depth}, times, message_seconds=0.0))
    # The router would hold some back, and the order of messages decide.
    for request in requests:
        simulation.replicas[0].inbox.append(request)
    end = 0.0
    while simulation.replicas[0].has_work():
        end = simulation.replicas[0].step(end).end
    clock = VirtualTime()
    core, executor = sleeping(times, depth, clock)
    for request in requests:
        core.add(request)
    while core.has_work():
        core.step()
    simulated = simulation.replicas[0]
    assert len(executor.plans) == simulated.num_steps
    assert sum(len(plan.rows) for plan in executor.plans) == simulated.num_rows
    assert clock.now() == pytest.approx(end)


def test_a_runner_that_sleeps_takes_the_same_time() -> None:
    """Requests that arrive one after the other have their first tokens when the simulation says."""
    slowed = slower(4.0)
    settings = config({"pipeline_depth": 1}, slowed, message_seconds=0.0, traffic=traffic(120, rate=12.0), seed=3)
    assert settings.traffic is not None
    requests = list(generate(settings.traffic, 3, SHAPE.max_model_len))
    simulation = Simulation(settings)
    simulation.run(requests)
    clock = VirtualTime()
    core, _ = sleeping(slowed, 1, clock)
    waiting, first, tokens = list(requests), {}, 0
    while waiting or core.has_work():
        while waiting and waiting[0].arrival_time <= clock.now():
            core.add(waiting.pop(0))
        if not core.has_work():
            clock.sleep(waiting[0].arrival_time - clock.now())
            continue
        for delta in core.step():
            first.setdefault(delta.request_id, clock.now())
            tokens += len(delta.token_ids)
    assert tokens == simulation.report()["output_tokens"]
    assert clock.now() == pytest.approx(simulation.now)
    for request in requests:
        simulated = simulation.exchanges[request.request_id].first_token
        assert first[request.request_id] - request.arrival_time == pytest.approx(simulated)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["prefix", "round-robin"])
def test_four_processes_that_sleep_take_no_less_time(policy: str, tmp_path: Path) -> None:
    """The real front, router, processes and schedulers. A busy machine adds to the simulated time, and takes nothing off."""
    settings = config(replicas=4, routing=policy, traffic=msgspec.structs.replace(SHARED, requests=200, rate=20.0), seed=2)
    settings = msgspec.structs.replace(settings, calibration=msgspec.structs.replace(settings.measured, step_times=slower(4.0)))
    assert settings.traffic is not None
    requests = list(generate(settings.traffic, 2, SHAPE.max_model_len))
    simulation = Simulation(settings)
    simulation.run(requests)

    class SleepingLLM(AsyncLLM):
        command = sleeping_process(4.0)

    first: dict[str, float] = {}

    async def follow(llm: AsyncLLM, request: Request) -> int:
        begin, tokens = time.monotonic(), 0
        async with await llm.add(msgspec.structs.replace(request, arrival_time=begin)) as stream:
            async for delta in stream:
                first.setdefault(request.request_id, time.monotonic() - begin)
                tokens += len(delta.token_ids)
        return tokens

    def accepted(llm: AsyncLLM) -> list[int]:
        assert llm.replicas is not None
        return [replica.accepted for replica in llm.replicas.reported()]

    async def work() -> tuple[float, int, list[int]]:
        model = str(write_config(tmp_path))
        args = EngineArgs(model=model, load_format="dummy", data_parallel_size=4, dp_routing_policy=policy)
        async with SleepingLLM(args) as llm:
            while llm.health().reason:
                await asyncio.sleep(0.05)
            start, tasks = time.monotonic(), []
            for request in requests:
                await asyncio.sleep(max(0.0, start + request.arrival_time - time.monotonic()))
                tasks.append(asyncio.create_task(follow(llm, request)))
            tokens = sum(await asyncio.gather(*tasks))
            return time.monotonic() - start, tokens, accepted(llm)

    seconds, tokens, taken = asyncio.run(asyncio.wait_for(work(), 200))
    waits = sorted(first.values())
    measured = {50: waits[100] * 1e3, 90: waits[180] * 1e3, 99: waits[198] * 1e3}
    report = simulation.report()
    simulated = report["milliseconds"]["first token"]
    print(f"{policy}: {seconds:.2f} s, simulated {simulation.now:.2f}; first token {measured}, simulated {simulated}")
    assert tokens == report["output_tokens"]
    assert seconds >= 0.97 * simulation.now
    assert measured[50] >= 0.85 * simulated["p50"]
    assert sum(taken) == len(requests) and min(taken) >= 25


def test_outputs_may_be_as_long_as_the_context() -> None:
    settings = config({"max_model_len": 64}, traffic=traffic(20, output_tokens=Lengths(5000), input_tokens=Lengths(5000)))
    report = run(settings).report()
    assert report["requests"]["succeeded"] == 20 and report["output_tokens"] == 20 * 63
