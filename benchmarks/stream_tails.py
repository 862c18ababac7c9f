"""Gaps between the tokens of streams over HTTP, behind an engine that takes exactly a step's time:

    python benchmarks/stream_tails.py [--clients 256] [--step-ms 10] [--tokens 200]

The server is headrace's own, in a process of its own, over an engine that hands every request a token a step, as the engine's
process does: all deltas of a step in one message. The clients are another process. Reports percentiles of the gaps, counted
from token to token, in units of a step, and the server's processor time for each token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import psutil
from support.server.fakes import FakeLLM, Health

from headrace.core.request import Request
from headrace.frontend.streams import Inbox, OutputStream
from headrace.outputs import OutputDelta
from headrace.processes.messages import StepDeltas, decode_from_engine, encode
from headrace.server.app import build_app
from headrace.server.listen import listen
from headrace.server.run import run_app
from headrace.server.settings import ServerSettings


class StepLLM(FakeLLM):
    """A token a step for every request."""

    def __init__(self, step: float = 0.0) -> None:
        super().__init__(step=step, max_queue=4096)
        self.left: dict[str, int] = {}
        """Tokens that the running requests still get."""
        self._inboxes: dict[str, Inbox] = {}

    async def add(self, *requests: Request) -> Any:
        inbox = Inbox(requests)
        for request in requests:
            self._inboxes[request.request_id], self.left[request.request_id] = inbox, request.max_tokens
        return OutputStream(inbox, lambda names: None)

    def step(self) -> None:
        deltas = []
        for name in [*self.left]:
            self.left[name] -= 1
            finish = None if self.left[name] else "length"
            deltas.append(OutputDelta(request_id=name, index=0, text="word ", token_ids=[7], finish_reason=finish))
            if finish is not None:
                del self.left[name]
        message = decode_from_engine(encode(StepDeltas(deltas)))
        assert isinstance(message, StepDeltas)
        for delta in message.deltas:
            self._inboxes[delta.request_id].put(delta)
            if delta.finish_reason is not None:
                del self._inboxes[delta.request_id]


class SteadyLLM(StepLLM):
    """All steps have the same length."""

    async def start(self) -> None:
        self._health = Health(True, "")
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due, time.perf_counter() - self.step_seconds) + self.step_seconds
            await asyncio.sleep(due - time.perf_counter())
            self.step()


def serve(port: int, step: float) -> None:
    llm: Any = SteadyLLM(step)
    settings = ServerSettings(port=port, log_requests=False)
    run_app(build_app(llm, settings), listen(settings))


async def stream(port: int, tokens: int, gaps: list[float], start: asyncio.Event) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await start.wait()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    last = None
    while data := await reader.read(65536):
        now = time.perf_counter()
        for _ in range(data.count(b"word ")):
            if last is not None:
                gaps.append(now - last)
            last = now
        if b"data: [DONE]" in data:
            break
    writer.close()


async def load(port: int, clients: int, tokens: int) -> list[float]:
    gaps: list[float] = []
    start = asyncio.Event()
    tasks = [asyncio.create_task(stream(port, tokens, gaps, start)) for _ in range(clients)]
    await asyncio.sleep(1)
    start.set()
    await asyncio.gather(*tasks)
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.step_ms / 1e3)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(port), "--step-ms", str(given.step_ms)], stdout=subprocess.DEVNULL
    )
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        asyncio.run(load(port, given.clients, 20))
        before, began = psutil.Process(server.pid).cpu_times(), time.perf_counter()
        gaps = sorted(asyncio.run(load(port, given.clients, given.tokens)))
        after, seconds = psutil.Process(server.pid).cpu_times(), time.perf_counter() - began - 1
    finally:
        server.terminate()
        server.wait()
    cpu = after.user + after.system - before.user - before.system
    step = given.step_ms / 1e3
    report = {
        "clients": given.clients,
        "step_ms": given.step_ms,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "seconds": round(seconds, 2),
        "gap_p50_steps": round(statistics.median(gaps) / step, 2),
        "gap_p99_steps": round(gaps[int(0.99 * len(gaps))] / step, 2),
        "gap_max_steps": round(gaps[-1] / step, 2),
        "server_cpu_us_per_token": round(1e6 * cpu / max(1, len(gaps)), 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
