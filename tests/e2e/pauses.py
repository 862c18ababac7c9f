"""The longest pause of a bystander's stream beside each expensive request: ``python -m tests.e2e.pauses``."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.server.running import Server, start_server, stop_server

BYSTANDER = """
import json, sys, time, httpx
body = {"prompt": "Once", "ignore_eos": True, "stream": True}
while True:
    print("nan", flush=True)  # waiting in the queue is not a pause of a stream
    with httpx.stream("POST", sys.argv[1] + "/v1/completions", json=body, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                print(time.monotonic(), flush=True)
"""
"""A process of its own: what the expensive requests cost their client must not show in its times."""

BUSY = {"max_tokens": 20, "ignore_eos": True}
TEXT = "The mill stands by the river, and the wheel turns day and night. "
LOGPROBS = {"max_tokens": 1, "prompt_logprobs": 20}


def cases(context: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> path and body. ``context``: the model's, in tokens."""
    long = context * 7 // 8
    return {
        "/tokenize of 4 MB": ("/tokenize", {"prompt": TEXT * 61_500}),
        "/tokenize of 1 MB": ("/tokenize", {"prompt": TEXT * 16_000, "return_token_strs": True}),
        "chat_template_kwargs with a million items": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "chat_template_kwargs": {"x": [0] * 1_000_000}},
        ),
        "1,000 messages": (
            "/v1/chat/completions",
            {"messages": [{"role": ("user", "assistant")[i % 2], "content": "Hi"} for i in range(1000)], "max_tokens": 1},
        ),
        "n = 16": ("/v1/completions", {"prompt": "a", "n": 16, **BUSY}),
        "4 million stop_token_ids, n = 16": (
            "/v1/completions",
            {"prompt": "a", "n": 16, "max_tokens": 20, "stop_token_ids": [9] * 4_000_000},
        ),
        "1,000 stop_token_ids, n = 16": (
            "/v1/completions",
            {"prompt": "a", "n": 16, "max_tokens": 20, "min_tokens": 10, "stop_token_ids": list(range(9, 1009))},
        ),
        "n = 32": ("/v1/completions", {"prompt": "a", "n": 32, **BUSY}),
        "n = 128": ("/v1/completions", {"prompt": "a", "n": 128, **BUSY}),
        "a million allowed_token_ids, n = 32": (
            "/v1/completions",
            {"prompt": "a", "n": 32, "max_tokens": 20, "allowed_token_ids": [*range(40_000)] * 25},
        ),
        "40,000 allowed_token_ids, n = 32": (
            "/v1/completions",
            {"prompt": "a", "n": 32, "max_tokens": 20, "allowed_token_ids": [*range(40_000)]},
        ),
        "prompt_logprobs of 1,000 tokens, n = 128": ("/v1/completions", {"prompt": [9] * 1000, "n": 128, **LOGPROBS}),
        "prompt_logprobs of a long prompt": ("/v1/completions", {"prompt": [*range(9, 9 + long)], **LOGPROBS}),
        "a long prompt": ("/v1/completions", {"prompt": [*range(10, 10 + long)], "max_tokens": 1}),
        "256 prompts of 4,000 characters": ("/v1/completions", {"prompt": [TEXT * 61] * 256, "max_tokens": 1}),
        "16 stop strings of 1,024 characters, n = 128": (
            "/v1/completions",
            {"prompt": "a", "n": 128, "max_tokens": 2, "stop": [chr(97 + i) + "x" * 1023 for i in range(16)]},
        ),
    }


class Pause(NamedTuple):
    status: int
    seconds: float
    """Time until the answer."""
    longest: float
    """Between two tokens of the bystander, in seconds."""
    mebibytes: float
    """Size of the answer."""


class Bystander:
    """A client with one stream."""

    def __init__(self, url: str) -> None:
        self._times = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-c", BYSTANDER, url]
        self._process = subprocess.Popen(command, stdout=self._times, stderr=subprocess.DEVNULL)

    def longest_pause(self, start: float, end: float) -> float:
        self._times.seek(0)
        times = [float(line) for line in self._times.read().split("\n")[:-1]]
        pairs = [(before, after) for before, after in itertools.pairwise(times) if after >= start and before <= end]
        return max((after - before for before, after in pairs), default=end - start)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._times.close()


@contextlib.contextmanager
def bystander(server: Server) -> Iterator[Bystander]:
    client = Bystander(server.url)
    try:
        time.sleep(3)
        yield client
    finally:
        client.close()


def measure(server: Server, client: Bystander, path: str, body: dict[str, Any]) -> Pause:
    data = json.dumps(body).encode()
    time.sleep(0.5)
    start = time.monotonic()
    response = httpx.post(server.url + path, content=data, headers={"Content-Type": "application/json"}, timeout=600)
    end = time.monotonic()
    time.sleep(1.5)
    return Pause(response.status_code, end - start, client.longest_pause(start, end + 1), len(response.content) / 2**20)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "log.txt", *sys.argv[1:])
        try:
            server.wait_healthy()
            with bystander(server) as client:
                start = time.monotonic()
                time.sleep(5)
                print(f"alone: {1000 * client.longest_pause(start, time.monotonic()):.0f} ms")
                print("| request | status | seconds | answer, MiB | longest pause, ms |\n| --- | ---: | ---: | ---: | ---: |")
                (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
                for name, (path, body) in cases(model["max_model_len"]).items():
                    pause = measure(server, client, path, body)
                    numbers = f"{pause.status} | {pause.seconds:.2f} | {pause.mebibytes:.1f} | {1000 * pause.longest:.0f}"
                    print(f"| {name} | {numbers} |", flush=True)
        finally:
            stop_server(server)


if __name__ == "__main__":
    main()
