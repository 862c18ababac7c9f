"""Clients that read streams in processes of their own: what their parent does does not show in their times."""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import time
from array import array
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

from headrace.bench.transport import StreamTransport

_EVENT = b"\ndata: {"
"""Beginning of an event: a line feed is none of the JSON text's characters."""
_PROCESSES = 4
"""They share the clients, so that each is far from busy: an event takes about 40 microseconds of a slow core."""


class Arrivals(NamedTuple):
    times: list[array[float]]
    """Times of each client's events, by ``time.monotonic()``; NaN before the first of a stream."""
    busy: float
    """Processor time of a process by the time that it read: the largest."""


class StreamReader:
    """Each of ``clients`` sends the body again and again and reads the stream, from ``__enter__`` to ``stop``."""

    def __init__(self, url: str, body: dict[str, Any], clients: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._theirs: list[Connection] = []
        for number in range(min(clients, _PROCESSES)):
            ours, theirs = context.Pipe()
            share = len(range(number, clients, _PROCESSES))
            self.processes.append(context.Process(target=_main, args=(theirs, url, body, share), daemon=True))
            self._connections.append(ours)
            self._theirs.append(theirs)

    def __enter__(self) -> Self:
        for process, theirs in zip(self.processes, self._theirs, strict=True):
            process.start()
            theirs.close()
        for connection in self._connections:
            connection.recv()
        return self

    def stop(self) -> Arrivals:
        """Raises: EOFError, OSError: a client has failed; its process has said how."""
        for connection in self._connections:
            connection.send(None)
        parts: list[Arrivals] = [connection.recv() for connection in self._connections]
        return Arrivals([own for part in parts for own in part.times], max(part.busy for part in parts))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process, connection in zip(self.processes, self._connections, strict=True):
            connection.close()
            process.kill()
            process.join()


def _main(connection: Connection, url: str, body: dict[str, Any], clients: int) -> None:
    connection.send(asyncio.run(_read(connection, url, body, clients)))


async def _read(connection: Connection, url: str, body: dict[str, Any], clients: int) -> Arrivals:
    times = [array("d") for _ in range(clients)]
    async with httpx.AsyncClient(transport=StreamTransport(), timeout=600) as client:
        connection.send(None)
        start, busy = time.monotonic(), time.process_time()
        reading = asyncio.gather(*(read_streams(client, f"{url}/v1/completions", body, own) for own in times))
        asyncio.get_running_loop().add_reader(connection.fileno(), reading.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        busy = (time.process_time() - busy) / (time.monotonic() - start)
    return Arrivals(times, busy)


async def read_streams(client: httpx.AsyncClient, url: str, body: dict[str, Any], times: array[float]) -> None:
    """Sends the body and reads the stream until it is cancelled. Appends to ``times`` as in ``Arrivals``."""
    while True:
        times.append(math.nan)
        async with client.stream("POST", url, json=body) as response:
            response.raise_for_status()
            rest = b"\n"
            async for data in response.aiter_raw():
                now, data = time.monotonic(), rest + data
                for _ in range(data.count(_EVENT)):
                    times.append(now)
                rest = data[1 - len(_EVENT) :]
