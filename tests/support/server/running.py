"""A real server on the embedded model, as ``headrace serve`` starts it, for tests that use it as a client would."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

START_TIMEOUT = 240.0


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def serving_process(self) -> psutil.Process:
        """The process that answers, a child of the command's own."""
        [found] = psutil.Process(self.process.pid).children()
        return found

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, over its labels; 0 where none of them has occurred."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, flags=re.MULTILINE)
        if not values and f"# TYPE {name} " not in text:
            raise KeyError(f"no metric {name} in:\n{text}")
        return sum(map(float, values))

    def wait_healthy(self, timeout: float = START_TIMEOUT) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise TimeoutError(f"not healthy after {timeout} s:\n{self.log.read_text()[-4000:]}")


def start_server(log: Path, *arguments: str, temporary: Path | None = None) -> Server:
    """``temporary``: the folder of its temporary files."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "headrace.cli", "serve", "--port", str(port), *arguments]
    with log.open("wb") as output:
        environment = os.environ | ({} if temporary is None else {"TMPDIR": str(temporary)})
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment)
    return Server(process, f"http://127.0.0.1:{port}", log)


def stop_server(server: Server) -> int:
    """Asks the server to drain; returns its exit status."""
    server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(60)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
        raise
