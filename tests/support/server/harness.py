"""Servers over the fake engine: in memory through ASGI, and real ones on a free port of 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from headrace.server.app import build_app
from headrace.server.run import uvicorn_config
from headrace.server.settings import ServerSettings
from support.server.fakes import FakeLLM


@contextlib.asynccontextmanager
async def client(llm: FakeLLM, settings: ServerSettings | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """An in-memory client of a started engine. Errors of the app are answers, as over a socket."""
    if not llm.health().ok:
        await llm.start()
    app = build_app(llm, settings)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20) as http:
        yield http


class Api:
    """Blocking calls of the in-memory app, each in an event loop of its own."""

    def __init__(self, llm: FakeLLM, settings: ServerSettings | None = None) -> None:
        self.llm = llm
        self.settings = settings

    def request(self, method: str, path: str, **kwargs) -> httpx.Response:
        async def call() -> httpx.Response:
            async with client(self.llm, self.settings) as http:
                return await http.request(method, path, **kwargs)

        return asyncio.run(call())

    def post(self, path: str, body: object = None, **kwargs) -> httpx.Response:
        return self.request("POST", path, json=body, **kwargs) if body is not None else self.request("POST", path, **kwargs)

    def get(self, path: str, **kwargs) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def chat(self, **fields) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **fields})

    def complete(self, **fields) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "Hi", **fields})


@dataclasses.dataclass
class Running:
    """A uvicorn server in a thread."""

    url: str
    app: FastAPI
    llm: Any
    loop: asyncio.AbstractEventLoop

    def stop(self) -> None:
        """Stops like the server at the end of its drain timeout."""
        self.loop.call_soon_threadsafe(self.app.state.serving.stop)

    def openai(self, **kwargs) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20, **kwargs)

    def async_openai(self, **kwargs) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20, **kwargs)


@contextlib.contextmanager
def running(llm: Any, settings: ServerSettings | None = None) -> Iterator[Running]:
    """Serves over a socket until the block is left."""
    settings = settings or ServerSettings()
    app = build_app(llm, settings)
    config = uvicorn_config(app, settings, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([listener])

    def run() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        serving = app.state.serving
        wait_for(lambda: server.started and (serving.health()[0] or serving.failure is not None), 120)
        yield Running(f"http://127.0.0.1:{port}", app, llm, loops[0])
    finally:
        server.should_exit = True
        thread.join(10)


def answered(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


def post(http: httpx.Client, path: str, body: Any = None, status: int = 200) -> Any:
    return answered(http.post(path) if body is None else http.post(path, json=body), status)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until a condition holds that another thread brings about."""
    pause = threading.Event()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        pause.wait(0.01)
    raise TimeoutError("the condition did not come about")


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream; the last must be [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]
