"""The server's processor time for each streamed token, without sockets and clients:

    python benchmarks/stream_cost.py [--clients 256] [--tokens 50] [--chat] [--behind 1] [--profile]

The requests are parsed and answered by the server's own HTTP protocol and app over a transport that throws bytes away; the
engine hands every request a token a step and takes no time; with ``--behind``, that many steps have passed whenever the server
gets to send. Reports the least of several rounds, which another process on the
machine disturbs least.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import statistics
import time
from typing import Any

import uvloop
from stream_tails import StepLLM
from uvicorn.server import ServerState

from headrace.server.app import build_app
from headrace.server.run import uvicorn_config
from headrace.server.settings import ServerSettings

_TURNS = 6
"""Turns of the event loop, in which every client is sent what a step brought."""


class Sink(asyncio.Transport):
    """Counts what is written: tokens, and the answers that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = self.writes = self.ended = 0

    def write(self, data: Any) -> None:
        self.writes += 1
        self.tokens += data.count(b"word ")
        self.ended += data.endswith(b"0\r\n\r\n")

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def is_closing(self) -> bool:
        return False

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        pass


async def rounds(
    clients: int, tokens: int, chat: bool, behind: int, repeat: int, profile: cProfile.Profile | None
) -> list[float]:
    """Microseconds for each token."""
    llm: Any = StepLLM()
    settings = ServerSettings(log_requests=False)
    app = build_app(llm, settings)
    config = uvicorn_config(app, settings)
    config.load()
    app.state.serving.owns_process = True
    await app.state.serving.start()
    common = {"max_tokens": tokens, "stream": True, "ignore_eos": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    body = json.dumps(prompt | common).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    protocols = []
    sink = Sink()
    state = ServerState()
    for _ in range(clients):
        protocol: Any = config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]
        protocol.connection_made(sink)
        protocols.append(protocol)
    found = []
    for _ in range(repeat):
        sink.tokens = sink.ended = sink.writes = 0
        for protocol in protocols:
            protocol.data_received(head.encode() + body)
        while len(llm.left) < clients:
            await asyncio.sleep(0.01)
        began = time.process_time()
        if profile is not None:
            profile.enable()
        for step in range(tokens):
            llm.step()
            if (step + 1) % behind:
                continue
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        while sink.ended < clients:
            await asyncio.sleep(0)
        if profile is not None:
            profile.disable()
        found.append(1e6 * (time.process_time() - began) / sink.tokens)
    await llm.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--chat", action="store_true", help="stream from /v1/chat/completions")
    parser.add_argument("--behind", type=int, default=1, help="steps that pass before the server sends")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    given = parser.parse_args()
    profile = cProfile.Profile() if given.profile else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(rounds(given.clients, given.tokens, given.chat, given.behind, given.repeat, profile))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    least, median = round(min(found), 2), round(statistics.median(found), 2)
    print(json.dumps({"clients": given.clients, "behind": given.behind, "us_per_token": least, "median": median}))


if __name__ == "__main__":
    main()
