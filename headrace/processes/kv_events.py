"""Listeners of the prefix cache: a publisher for programs outside, and reports to the router in front of replicas."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from headrace.config import EngineArgs
from headrace.engine.core import EngineCore
from headrace.errors import ConfigError
from headrace.kv import KVCacheManager
from headrace.kv.events import EventBatch, events_of
from headrace.kv.prefix_cache import Change
from headrace.option_groups import KVEventsConfig
from headrace.processes.messages import CacheChanged, FromEngine
from headrace.routing import CacheReporter

logger = logging.getLogger("headrace.engine")

_END = (-1).to_bytes(8, "big", signed=True)
"""Message in place of a number: nothing more is sent again."""
_JOIN_SECONDS = 1.0

Changes = Sequence[Change]


class EventPublisher:
    """Publishes batches of events as ``[topic, number, payload]``, with numbers that rise by one, as vLLM does.

    A REQ or DEALER socket that sends a number to the replay socket gets the batches from there on, and a last one numbered -1.
    A thread owns the sockets and encodes: a step only hands over what has changed. Nothing here blocks a step; what a
    subscriber misses it sees by the numbers.
    """

    def __init__(self, config: KVEventsConfig, kv: KVCacheManager, replica: int = 0) -> None:
        """Raises: ConfigError: an address cannot be used."""
        self._kv = kv
        self._replica = replica
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[int, float, Changes]] = queue.Queue(config.max_queue_size)
        self._next = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._events, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        # A frame on it says that the queue has grown; an empty one ends the thread.
        self._wake, self._woken = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        try:
            self._events.set_hwm(config.hwm)
            endpoint = _shifted(config.endpoint, replica)
            binds = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp:")
            _open(self._events.bind if binds else self._events.connect, endpoint, "endpoint")
            if config.replay_endpoint is not None:
                _open(self._replay.bind, _shifted(config.replay_endpoint, replica), "replay_endpoint")
            self._wake.set_hwm(0)
            self._woken.set_hwm(0)
            self._woken.bind("inproc://wake")
            self._wake.connect("inproc://wake")
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def changed(self, changes: Changes) -> None:
        number, self._next = self._next, self._next + 1
        try:
            self._queue.put_nowait((number, time.time(), changes))
            self._wake.send(b"changed")
        except queue.Full:
            logger.debug("batch %d of KV events is dropped: %d batches wait", number, self._queue.maxsize)

    def close(self) -> None:
        if not self._wake.closed:
            self._wake.send(b"")
            self._thread.join(_JOIN_SECONDS)
            self._wake.close(linger=0)
            if not self._thread.is_alive():
                # Sockets are closed in the background, and their addresses are taken until then.
                self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._woken, self._replay):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._replay in ready:
                self._send_again()
            if self._woken in ready:
                if not self._woken.recv():
                    break
                self._publish(*self._queue.get())
        for socket in (self._events, self._replay, self._woken):
            socket.close(linger=int(_JOIN_SECONDS * 1e3))

    def _publish(self, number: int, at: float, changes: Changes) -> None:
        events = events_of(changes, self._kv.block_size, self._kv.groups)
        payload = self._encode(EventBatch(at, events, self._replica))
        self._kept.append((number, payload))
        self._events.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _send_again(self) -> None:
        *address, start = self._replay.recv_multipart()
        if len(start) != 8:
            logger.warning("a request for KV events must be a number of 8 bytes, not %d", len(start))
            return
        first = int.from_bytes(start, "big")
        for number, payload in (kept for kept in self._kept if kept[0] >= first):
            # A subscriber that does not read loses them: ROUTER drops what its queue has no room for.
            self._replay.send_multipart((*address, number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((*address, _END, b""))


def _shifted(endpoint: str, replica: int) -> str:
    """The endpoint of a replica."""
    if replica == 0:
        return endpoint
    if endpoint.startswith("tcp://"):
        address, _, port = endpoint.rpartition(":")
        return f"{address}:{int(port) + replica}"
    return f"{endpoint}_dp{replica}"


def _open(attach: Callable[[str], Any], endpoint: str, name: str) -> None:
    try:
        attach(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{name} {endpoint} cannot be used: {error}", "kv_events_config") from error


def publish_events(core: EngineCore, args: EngineArgs, replica: int = 0) -> None:
    """Publishes the engine's KV events if the arguments say so. Raises: ConfigError: an address cannot be used."""
    if args.kv_events_config.enabled:
        core.listen(EventPublisher(args.kv_events_config, core.scheduler.kv, replica))


class RoutingReports:
    """Sends changes of the prefix cache to the router in front of the replicas."""

    def __init__(self, kv: KVCacheManager, send: Callable[[FromEngine], None]) -> None:
        self._reporter = CacheReporter(kv)
        self._send = send

    def changed(self, changes: Changes) -> None:
        if (report := self._reporter.report(changes)) is not None:
            self._send(CacheChanged(report))

    def close(self) -> None:
        pass
