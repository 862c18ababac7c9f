"""Clients that read streams in a process of their own: what its parent does does not show in their times."""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import time
from array import array
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

from headrace.bench.transport import StreamTransport

_EVENT = b"\ndata: {"
"""Where an event begins: a line feed is none of the JSON text's characters."""


class Arrivals(NamedTuple):
    times: list[array[float]]
    """Of each client's events, by ``time.monotonic()``; NaN before the first of a stream."""
    busy: float
    """Processor time of the process by the time that it read."""


class StreamReader:
    """Each of ``clients`` sends the body again and again and reads the stream, from ``__enter__`` to ``stop``."""

    def __init__(self, url: str, body: dict[str, Any], clients: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, self._theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(self._theirs, url, body, clients), daemon=True)

    def __enter__(self) -> Self:
        self.process.start()
        self._theirs.close()
        self._connection.recv()
        return self

    def stop(self) -> Arrivals:
        """Raises: EOFError, OSError: a client has failed; the process has said how."""
        self._connection.send(None)
        arrivals: Arrivals = self._connection.recv()
        return arrivals

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()
        self.process.kill()
        self.process.join()


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
