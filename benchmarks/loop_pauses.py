"""The longest answer of /live beside expensive requests: a pause of the server's event loop is part of it.

    python benchmarks/loop_pauses.py

Starts a server on the embedded model with one thread, so that on two idle cores the loop has one of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from e2e.pauses import cases
from support.server.running import start_server, stop_server

PING = """
import sys, time, httpx
with httpx.Client(timeout=60) as client:
    while True:
        began = time.monotonic()
        client.get(sys.argv[1] + "/live")
        print(began, time.monotonic() - began, flush=True)
        time.sleep(0.004)
"""


def main() -> None:
    server = start_server(Path(tempfile.mkdtemp()) / "log", "--num-threads", "1")
    try:
        server.wait_healthy()
        measure(server.url)
    finally:
        stop_server(server)


def measure(url: str) -> None:
    ping = subprocess.Popen([sys.executable, "-c", PING, url], stdout=subprocess.PIPE, text=True)
    answers: list[list[float]] = []
    assert ping.stdout is not None
    lines = ping.stdout
    threading.Thread(target=lambda: answers.extend([*map(float, line.split())] for line in lines), daemon=True).start()
    time.sleep(2)
    try:
        with httpx.Client(timeout=300) as client:
            for name, (path, body) in cases(2048).items():
                data, began = json.dumps(body).encode(), time.monotonic()
                status = client.post(url + path, content=data, headers={"Content-Type": "application/json"}).status_code
                ended = time.monotonic()
                taken = [seconds for start, seconds in answers if began <= start <= ended]
                longest = max(taken, default=0) * 1e3
                print(
                    f"{name:45} {status} {ended - began:6.2f} s, {len(taken):5} answers, the longest {longest:5.1f} ms",
                    flush=True,
                )
    finally:
        ping.kill()


if __name__ == "__main__":
    main()
