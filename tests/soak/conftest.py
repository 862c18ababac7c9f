"""A server over a tiny model, as ``headrace serve`` starts it, with an account of what it holds."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from e2e.running import Server, start_server, stop_server
from engine.tiny import write_model

MEMORY_GROWTH = 96 * 2**20
"""Bytes that a process may hold more at the end than at the start: allocators keep what they once had."""


@dataclasses.dataclass(frozen=True)
class Holdings:
    """What the processes of a server hold while no request runs."""

    server_memory: int
    engine_memory: int
    descriptors: int
    threads: int
    processes: int
    blocks: int
    running: int
    waiting: int
    temporary_files: int

    def grown_since(self, before: Holdings) -> list[str]:
        """What grew, a line each; empty: nothing leaks."""
        rows = [(field.name, getattr(before, field.name), getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [
            f"{name}: {old:,} -> {new:,}"
            for name, old, new in rows
            if new > old + (MEMORY_GROWTH if name.endswith("memory") else 0)
        ]


class SoakedServer:
    """The server under attack."""

    def __init__(self, server: Server, temporary: Path) -> None:
        self.server = server
        self._temporary = temporary
        self.url = server.url
        self._process = psutil.Process(server.process.pid)

    def engine(self) -> psutil.Process | None:
        """The engine process; None between its death and its restart."""
        for child in self._process.children():
            with contextlib.suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE and "headrace.engine" in " ".join(child.cmdline()):
                    return child
        return None

    def idle(self, seconds: float = 120.0) -> None:
        """Waits until the server is healthy and no request runs."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(httpx.HTTPError):
                healthy = httpx.get(f"{self.url}/health", timeout=10).status_code == 200
                if healthy and not self.server.metric("headrace_requests_running"):
                    return
            assert self.server.process.poll() is None, self.server.log.read_text()[-4000:]
            assert time.monotonic() < deadline, "the server is not idle again"
            time.sleep(0.1)

    def holdings(self) -> Holdings:
        """Counted when the server has come to rest: closed connections take a moment to disappear."""
        self.idle()
        best: Holdings | None = None
        for _ in range(20):
            engine = self.engine()
            assert engine is not None
            processes = (self._process, engine)
            found = Holdings(
                server_memory=self._process.memory_info().rss,
                engine_memory=engine.memory_info().rss,
                descriptors=sum(process.num_fds() for process in processes),
                threads=sum(process.num_threads() for process in processes),
                processes=len(self._process.children(recursive=True)),
                blocks=int(self.server.metric("headrace_kv_blocks_used")),
                running=int(self.server.metric("headrace_requests_running")),
                waiting=int(self.server.metric("headrace_requests_waiting")),
                temporary_files=len(list(self._temporary.iterdir())),
            )
            if best is not None and (found.descriptors, found.threads) >= (best.descriptors, best.threads):
                return best
            best = found
            time.sleep(0.25)
        return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture
def soaked(folder: Path, tmp_path: Path) -> Iterator[SoakedServer]:
    # Unix sockets are in it, whose paths must be short.
    with tempfile.TemporaryDirectory() as temporary:
        yield from _soaked(folder, tmp_path / "log.txt", Path(temporary))


def _soaked(folder: Path, log: Path, temporary: Path) -> Iterator[SoakedServer]:
    options = ("--device", "cpu", "--dtype", "float32", "--num-kv-blocks", "600")
    server = start_server(log, str(folder), *options, temporary=temporary)
    try:
        server.wait_healthy()
        yield SoakedServer(server, temporary)
        assert stop_server(server) == 0
        assert "Traceback" not in server.log.read_text()
    finally:
        if server.process.poll() is None:
            server.process.kill()
