"""A server over a tiny model, as ``headrace serve`` starts it, with an account of what it holds."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from support.models.tiny_llama import write_model
from support.server.running import Server, start_server, stop_server

MEMORY_GROWTH = 96 * 2**20
"""Bytes that a process may hold more at the end than at the start: allocators keep what they once had."""
STORED = 8 * 2**20
"""Bytes of stored responses."""
ENGINE = re.compile(r"headrace\.processes\.(process|rank)\b")
"""In the command of an engine's process, or a rank's."""


@dataclasses.dataclass(frozen=True)
class Holdings:
    """Resources that the processes of a server hold while no request runs."""

    server_memory: int
    engine_memory: int
    descriptors: int
    threads: tuple[str, ...]
    """Their names, which the system knows."""
    processes: int
    blocks: int
    running: int
    waiting: int
    temporary_files: int

    def grown_since(self, before: Holdings) -> list[str]:
        """Describes what grew, a line each; empty: nothing leaks."""
        more = Counter(self.threads) - Counter(before.threads)
        grown = [f"threads: {len(before.threads)} -> {len(self.threads)}, more of {dict(more)}"]
        lines = grown if len(self.threads) > len(before.threads) else []
        for field in dataclasses.fields(self):
            old, new = getattr(before, field.name), getattr(self, field.name)
            if isinstance(new, int) and new > old + (MEMORY_GROWTH if field.name.endswith("memory") else 0):
                lines.append(f"{field.name}: {old:,} -> {new:,}")
        return lines


class SoakedServer:
    """The server under attack."""

    def __init__(self, server: Server, temporary: Path) -> None:
        self.server = server
        self._temporary = temporary
        self.url = server.url
        self._process = server.serving_process()
        self.idle()
        self._engines = len(self.engines())
        assert self._engines, "no process of an engine is found"
        self._first = self.holdings()

    def engines(self) -> list[psutil.Process]:
        """The processes of engines and their ranks; fewer between a death and the restart."""
        found = []
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE and ENGINE.search(" ".join(child.cmdline())):
                    found.append(child)
        return found

    def idle(self, seconds: float = 120.0) -> None:
        """Waits until the server is healthy with all of its engines, and no request runs."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(httpx.HTTPError):
                healthy = httpx.get(f"{self.url}/ready", timeout=10).status_code == 200
                if healthy and not self.server.metric("headrace_requests_running"):
                    return
            assert self.server.process.poll() is None, self.server.log.read_text()[-4000:]
            assert time.monotonic() < deadline, "the server is not idle again"
            time.sleep(0.1)

    def warm(self, workers: int = 0) -> Holdings:
        """Returns the bounds: the memory that it has now, and of everything countable what it had before its first client.

        ``workers``: processes that start with the first requests that need them; the server has a descriptor of each.
        """
        now, first = self.holdings(), self._first
        return dataclasses.replace(
            first,
            server_memory=now.server_memory,
            engine_memory=now.engine_memory,
            processes=first.processes + workers,
            descriptors=first.descriptors + workers,
        )

    def holdings(self) -> Holdings:
        """Counted when the server has come to rest: closed connections take a moment to disappear."""
        self.idle()
        best: Holdings | None = None
        for _ in range(20):
            engines = self.engines()
            assert len(engines) == self._engines
            processes = (self._process, *engines)
            found = Holdings(
                server_memory=self._process.memory_info().rss,
                engine_memory=sum(engine.memory_info().rss for engine in engines),
                descriptors=sum(process.num_fds() for process in processes),
                threads=thread_names(processes),
                processes=len(self._process.children(recursive=True)),
                blocks=int(self.server.metric("headrace_kv_blocks_used")),
                running=int(self.server.metric("headrace_requests_running")),
                waiting=int(self.server.metric("headrace_requests_waiting")),
                temporary_files=len(list(self._temporary.iterdir())),
            )
            if best is not None and found.descriptors >= best.descriptors and len(found.threads) >= len(best.threads):
                return best
            best = found
            time.sleep(0.25)
        return found


def thread_names(processes: Iterable[psutil.Process]) -> tuple[str, ...]:
    tasks = [task for process in processes for task in Path(f"/proc/{process.pid}/task").iterdir()]
    return tuple(sorted((task / "comm").read_text().strip() for task in tasks))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture
def soaked(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SoakedServer]:
    """``request.param``: further options of the command."""
    # Unix sockets are in it, whose paths must be short.
    with tempfile.TemporaryDirectory() as temporary:
        yield from serve(folder, tmp_path / "log.txt", Path(temporary), getattr(request, "param", ()))


def serve(folder: Path, log: Path, temporary: Path, more: Iterable[str]) -> Iterator[SoakedServer]:
    options = ("--device", "cpu", "--dtype", "float32", "--num-kv-blocks", "600", "--responses-store-bytes", str(STORED))
    server = start_server(log, str(folder), *options, *more, temporary=temporary)
    try:
        server.wait_healthy()
        body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        yield SoakedServer(server, temporary)
        assert stop_server(server) == 0
        assert "Traceback" not in server.log.read_text()
    finally:
        if server.process.poll() is None:
            server.process.kill()
