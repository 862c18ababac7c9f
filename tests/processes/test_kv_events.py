"""Publishing of KV events, read by a subscriber that knows vLLM's messages alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from support.engine.fakes import fake_process, make_core

from headrace import LLM, SamplingParams
from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.engine.core import EngineCore
from headrace.errors import ConfigError
from headrace.frontend.async_llm import AsyncLLM
from headrace.option_groups import KVEventsConfig
from headrace.processes.kv_events import EventPublisher


def free_port() -> int:
    """The first of two ports that are free, and that the system gives to no connection."""
    while True:
        first = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in (first, first + 1):
                stack.enter_context(socket.create_server(("", port)))
            return first


class Subscriber:
    """Frames ``[topic, number, payload]``; a payload is ``[time, [events], rank]``."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.socket.connect(endpoint)

    def next(self, seconds: float = 20.0) -> tuple[str, int, list[Any]]:
        assert self.socket.poll(int(seconds * 1e3)), "nothing was published"
        topic, number, payload = self.socket.recv_multipart()
        return topic.decode(), int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def until_connected(self, core: EngineCore) -> None:
        """A subscription takes a moment, and what is published before is missed."""
        while not self.socket.poll(20):
            core.reset_prefix_cache()
        while self.socket.poll(100):
            self.socket.recv_multipart()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)


def replayed(endpoint: str, first: int) -> list[tuple[int, list[Any]]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(endpoint)
        client.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while client.poll(20_000):
            _, number, payload = client.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
    raise AssertionError("the end was not sent")


def generate(core: EngineCore, name: str, prompt: list[int], tokens: int = 4) -> None:
    sampling = SamplingParams(ignore_eos=True)
    core.add(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, max_tokens=tokens, seed=0))
    while core.has_work():
        core.step()


@contextlib.contextmanager
def publishing(replica: int = 0, **config: Any) -> Iterator[tuple[EngineCore, str, str]]:
    port, replay = free_port(), free_port()
    config |= {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay}"}
    core = make_core(None)
    core.listen(EventPublisher(KVEventsConfig(enable_kv_cache_events=True, **config), core.scheduler.kv, replica))
    yield core, f"tcp://127.0.0.1:{port + replica}", f"tcp://127.0.0.1:{replay + replica}"
    core.close()


def test_events_are_published_and_sent_again() -> None:
    with publishing(topic="kv") as (core, endpoint, replay), Subscriber(endpoint, "kv") as subscriber:
        subscriber.until_connected(core)
        generate(core, "a", list(range(40, 60)))
        topic, number, (at, events, rank) = subscriber.next()
        assert topic == "kv" and rank == 0 and abs(time.time() - at) < 60
        (stored,) = events
        assert stored["type"] == "BlockStored" and stored["token_ids"] == list(range(40, 56))
        assert stored["parent_block_hash"] is None and len(stored["block_hashes"]) == 2
        assert (stored["block_size"], stored["medium"], stored["group_idx"]) == (8, "GPU", 0)
        core.reset_prefix_cache()
        later = subscriber.next()
        while later[2][1][0]["type"] == "BlockStored":
            later = subscriber.next()
        assert later[2][1] == [{"type": "AllBlocksCleared"}]
        again = replayed(replay, number)
        assert [place for place, _ in again] == list(range(number, later[1] + 1)), "no number is missing"
        assert again[0][1][1] == events
        assert replayed(replay, later[1] + 1) == []


def test_the_buffer_of_replay_is_bounded() -> None:
    with publishing(buffer_steps=3) as (core, _, replay):
        for _ in range(10):
            core.reset_prefix_cache()
        while not (kept := replayed(replay, 0)) or kept[-1][0] < 9:
            time.sleep(0.01)
        assert [number for number, _ in kept] == [7, 8, 9]
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger = 0
            client.connect(replay)
            client.send_multipart([b"", b"what"])
        assert [number for number, _ in replayed(replay, 9)] == [9]


def test_what_the_thread_has_no_room_for_shows_as_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is not held up, and the subscriber knows that it missed something."""
    holding: list[Any] = []
    publish = EventPublisher._publish

    def slow(self: EventPublisher, *batch: Any) -> None:
        holding.append(batch)
        while len(holding) == 1 and self._next < 20:
            time.sleep(0.001)
        publish(self, *batch)

    monkeypatch.setattr(EventPublisher, "_publish", slow)
    with publishing(max_queue_size=2) as (core, _, replay):
        core.reset_prefix_cache()
        while not holding:
            time.sleep(0.001)
        for _ in range(19):
            core.reset_prefix_cache()
        while len(kept := replayed(replay, 0)) < 3:
            time.sleep(0.01)
        assert [number for number, _ in kept] == [0, 1, 2]
        core.reset_prefix_cache()
        while not (kept := replayed(replay, 3)):
            time.sleep(0.01)
        assert [number for number, _ in kept] == [20]


def test_each_replica_has_its_port() -> None:
    with publishing(replica=1) as (core, endpoint, _), Subscriber(endpoint) as subscriber:
        subscriber.until_connected(core)
        core.reset_prefix_cache()
        assert subscriber.next()[2][2] == 1


def test_wrong_configurations_are_refused() -> None:
    for wrong, param in [
        ({"endpoint": "udp://*:1"}, "kv_events_config.endpoint"),
        ({"replay_endpoint": "tcp://*"}, "kv_events_config.replay_endpoint"),
        ({"publisher": "kafka"}, "kv_events_config.publisher"),
        ({"steps": 1}, "kv_events_config.steps"),
    ]:
        with pytest.raises(Exception) as refused:
            EngineArgs(kv_events_config=wrong)
        assert getattr(refused.value, "param", None) == param, wrong
    on = {"enable_kv_cache_events": True}
    with pytest.raises(ConfigError) as refused:
        EngineArgs(kv_events_config=on, enable_prefix_caching=False)
    assert refused.value.param == "kv_events_config"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = KVEventsConfig(
            **on, endpoint="ipc:///no/such/folder", replay_endpoint=f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        )
        with pytest.raises(ConfigError, match="endpoint"):
            EventPublisher(config, make_core(None).scheduler.kv)


def test_llm_publishes(tiny_folder: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    events = {"enable_kv_cache_events": True, "endpoint": endpoint.replace("127.0.0.1", "*")}
    with (
        LLM(str(tiny_folder), load_format="dummy", num_kv_blocks=16, kv_events_config=events) as llm,
        Subscriber(endpoint) as subscriber,
    ):
        subscriber.until_connected(llm._engine.core)
        llm.generate({"prompt_token_ids": [5] * 40}, SamplingParams(max_tokens=1))
        assert subscriber.next()[2][1][0]["token_ids"] == [5] * 32
    EventPublisher(KVEventsConfig(endpoint=events["endpoint"]), make_core(None).scheduler.kv).close()


def test_the_router_knows_the_caches_of_its_replicas(tiny_folder: Path) -> None:
    """Real processes report to the front; answers are known too, and what was reset is not."""

    class FakeLLM(AsyncLLM):
        command = fake_process()

    async def work() -> None:
        args = EngineArgs(model=str(tiny_folder), load_format="dummy", data_parallel_size=2, block_size=8, device="cpu")
        async with FakeLLM(args) as llm:
            while llm.health().reason:
                await asyncio.sleep(0.01)
            assert llm.replicas is not None
            params = SamplingParams(max_tokens=80, ignore_eos=True)
            outputs = [output async for output in llm.generate({"prompt_token_ids": [7] * 100}, params)]
            conversation = {"prompt_token_ids": [7] * 100 + list(outputs[-1].outputs[0].token_ids) + [9]}
            for expected in (128, 0):
                async for _ in llm.generate(conversation, SamplingParams(max_tokens=1)):
                    pass
                decision = llm.replicas.decisions()[-1]
                assert decision.expected_hit == expected and (decision.true_hit or 0) >= expected
                await llm.reset_prefix_cache()

    asyncio.run(asyncio.wait_for(work(), 120))
