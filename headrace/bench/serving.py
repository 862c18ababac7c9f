"""Load on a server over HTTP: closed loop (each of a number of clients sends its next request when the last is answered) or
open loop (requests arrive at random times at a mean rate, whether the server keeps up or not)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec

from headrace.bench.client import (
    CONNECT_SECONDS,
    authorization,
    base_url,
    chat_events,
    delete_features,
    first_model,
    upload_features,
)
from headrace.bench.options import IN_FLIGHT, LoadOptions
from headrace.bench.pictures import SentPictures
from headrace.bench.report import facts, load_average
from headrace.bench.transport import StreamTransport
from headrace.errors import EngineError, RequestError
from headrace.host.child import ChildProcess, python
from headrace.metrics.exchanges import Exchange, summary


def is_loopback(url: str) -> bool:
    """True if the address can only be this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def run(
    load: LoadOptions, prompts: Sequence[str], pictures: SentPictures | None = None, *, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Sends the load and returns the report.

    Args:
        pictures: each request brings one of them.

    Raises:
        ConfigError: the load names no server, or its pictures take too much memory.
        EngineError: the server cannot be reached before the first request.
        RequestError: it refuses the upload of features.
    """
    load_before, base = load_average(), base_url(load.url)
    async with _http_client(load) as client:
        model = load.model or await first_model(client, base)
        if load.processes == 1:
            sent = await _send(client, load, prompts, pictures, model, tell)
        else:
            tell(f"{load.processes} processes send the load")
            sent = await asyncio.to_thread(_send_from_processes, load, prompts, pictures, model)
    report = report_of(load, model, sent) | facts(load_before)
    if pictures is None:
        return report
    described = {"size": load.image_size, "form": pictures.form, "bytes_each": round(sent.picture_bytes / load.num_requests)}
    return report | {"pictures": described | ({"upload_seconds": round(sent.upload_seconds, 3)} if sent.upload_seconds else {})}


@dataclasses.dataclass
class Sent:
    """Outcome of a load."""

    exchanges: list[Exchange]
    dropped: int
    seconds: float
    picture_bytes: int = 0
    """Bytes of all pictures, or of features in their place."""
    upload_seconds: float = 0.0
    """Time of all uploads of features, before the load."""
    busy: float = 0.0
    """Processor time of the client process by the time of the load: the largest, of several."""


class Share(msgspec.Struct, frozen=True):
    """Share of a load that one client process sends."""

    load: LoadOptions
    prompts: Sequence[str]
    pictures: SentPictures | None
    model: str


def _http_client(load: LoadOptions) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        headers=authorization(load.api_key),
        transport=StreamTransport(),
        timeout=httpx.Timeout(2 * load.duration, connect=CONNECT_SECONDS),
    )


async def _send(
    client: httpx.AsyncClient,
    load: LoadOptions,
    prompts: Sequence[str],
    pictures: SentPictures | None,
    model: str,
    tell: Callable[[str], None],
    ready: Callable[[], object] = lambda: None,
) -> Sent:
    """``ready`` is called before the first request, when all pictures are made."""
    async with _prepared(client, load, pictures, tell) as made:
        sender = _Sender(client, load, prompts, made.parts, model, tell)
        ready()
        start, busy = time.perf_counter(), time.process_time()
        await (sender.closed_loop() if load.clients else sender.open_loop())
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
    return Sent(sender.exchanges, sender.dropped, seconds, made.num_bytes, made.upload_seconds, busy / seconds)


class _Prepared(NamedTuple):
    parts: list[dict[str, Any]]
    """Parts of the message of each request; empty: requests have text alone."""
    num_bytes: int = 0
    upload_seconds: float = 0.0


@contextlib.asynccontextmanager
async def _prepared(
    client: httpx.AsyncClient, load: LoadOptions, pictures: SentPictures | None, tell: Callable[[str], None]
) -> AsyncIterator[_Prepared]:
    """Makes the pictures of a load; uploads features first where it refers to them, and deletes them behind it."""
    if pictures is None:
        yield _Prepared([])
        return
    base = base_url(load.url)
    parts: list[dict[str, Any]] = []
    uploads: list[str] = []
    num_bytes, seconds = 0, 0.0
    try:
        for file in pictures.files(load.num_requests, tell):
            num_bytes += len(file)
            if pictures.form != "upload":
                parts.append(pictures.part(file))
                continue
            start = time.perf_counter()
            uploads.append(await upload_features(client, base, file))
            seconds += time.perf_counter() - start
            parts.append({"type": "image_embeds", "image_embeds": {"ref": uploads[-1]}})
        yield _Prepared(parts, num_bytes, seconds)
    finally:
        for identity in uploads:
            with contextlib.suppress(RequestError, EngineError):
                await delete_features(client, base, identity)


def _send_from_processes(load: LoadOptions, prompts: Sequence[str], pictures: SentPictures | None, model: str) -> Sent:
    """Each process sends its share; all begin when the last is ready. Raises: EngineError: one has failed."""
    shares = load.shares()
    own = [None] * len(shares) if pictures is None else pictures.shares([share.num_requests for share in shares])
    children: list[ChildProcess] = []
    try:
        for share, shown in zip(shares, own, strict=True):
            children.append(ChildProcess(python("headrace.bench.client_process"), "a client process"))
            children[-1].send(msgspec.msgpack.encode(Share(share, prompts, shown, model)))
        for child in children:
            child.receive()
        for child in children:
            child.send(b"begin")
        parts = [msgspec.msgpack.decode(child.receive(), type=Sent) for child in children]
    except EOFError as error:
        raise EngineError("a client process failed") from error
    finally:
        for child in children:
            child.end()
    return Sent(
        [exchange for part in parts for exchange in part.exchanges],
        sum(part.dropped for part in parts),
        max(part.seconds for part in parts),
        sum(part.picture_bytes for part in parts),
        max(part.upload_seconds for part in parts),
        max(part.busy for part in parts),
    )


async def send_share(share: Share, wait: Callable[[], object]) -> Sent:
    """Sends the share of a client process, once ``wait`` returns."""
    async with _http_client(share.load) as client:
        return await _send(client, share.load, share.prompts, share.pictures, share.model, lambda text: None, wait)


@dataclasses.dataclass
class _Sender:
    """Sends the requests of one load and records each exchange."""

    client: httpx.AsyncClient
    load: LoadOptions
    prompts: Sequence[str]
    parts: Sequence[dict[str, Any]]
    """Parts of the message of each request; empty: requests have text alone."""
    model: str
    tell: Callable[[str], None]
    exchanges: list[Exchange] = dataclasses.field(default_factory=list)
    dropped: int = 0

    def __post_init__(self) -> None:
        self._base = base_url(self.load.url)
        self._deadline = time.perf_counter() + self.load.duration

    async def closed_loop(self) -> None:
        numbers = iter(range(self.load.num_requests))
        count = min(self.load.clients or 1, self.load.num_requests)
        await self._finish([asyncio.create_task(self._client_loop(numbers)) for _ in range(count)])

    async def _client_loop(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            if time.perf_counter() >= self._deadline:
                return
            await self._exchange(number)

    async def open_loop(self) -> None:
        tasks: list[asyncio.Task[None]] = []
        arrivals = random.Random(self.load.seed or 0)
        arrival = time.perf_counter()
        for number in range(self.load.num_requests):
            arrival += arrivals.expovariate(self.load.rate or 1.0)
            if arrival >= self._deadline:
                break
            await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
            if sum(not task.done() for task in tasks) >= (self.load.max_in_flight or IN_FLIGHT):
                self.dropped += 1
                continue
            tasks.append(asyncio.create_task(self._exchange(number)))
        await self._finish(tasks)

    async def _finish(self, tasks: list[asyncio.Task[None]]) -> None:
        """Waits for requests in flight up to the duration of the load, then cancels them."""
        if not tasks:
            return
        remaining = max(0.0, self._deadline - time.perf_counter()) + self.load.duration
        _, late = await asyncio.wait(tasks, timeout=remaining)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _exchange(self, number: int) -> None:
        exchange = Exchange(error="not finished in time")
        self.exchanges.append(exchange)
        start = time.perf_counter()
        try:
            await self._stream(self._body(number), exchange, start)
            exchange.error = None
        except (RequestError, EngineError) as error:
            exchange.error = str(error)
        exchange.whole = time.perf_counter() - start
        self.tell(f"{sum(e.whole is not None for e in self.exchanges)} answered")

    def _body(self, number: int) -> dict[str, Any]:
        content: Any = self.prompts[number % len(self.prompts)]
        if self.parts:
            content = [self.parts[number], {"type": "text", "text": content}]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.load.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # An extra of vLLM's and ours: other servers refuse or ignore it.
        return body | ({"ignore_eos": True} if self.load.ignore_eos else {})

    async def _stream(self, body: dict[str, Any], exchange: Exchange, start: float) -> None:
        last = start
        async for events in chat_events(self.client, self._base, body):
            now = time.perf_counter()
            for event in events:
                if any(choice.delta is not None and choice.delta.content for choice in event.choices):
                    if exchange.first_token is None:
                        exchange.first_token = now - start
                    else:
                        exchange.between_tokens.append(now - last)
                    last = now
                if event.usage is not None:
                    exchange.input_tokens, exchange.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens


def report_of(load: LoadOptions, model: str, sent: Sent) -> dict[str, Any]:
    """Times of the requests that succeeded; the others are counted by error."""
    measured = summary(sent.exchanges, sent.seconds, "between events")
    return measured | {
        "benchmark": "serve",
        "url": load.url,
        "model": model,
        "loop": {"closed": {"concurrency": load.clients}} if load.clients else {"open": {"rate": load.rate}},
        "requests": measured["requests"] | {"dropped": sent.dropped},
        "load_generator": {"processes": load.processes, "max_busy": round(sent.busy, 3)},
    }
