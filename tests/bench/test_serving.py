"""The load generator against a small server of its own."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
from PIL import Image

from headrace.bench.client import base_url
from headrace.bench.options import LoadOptions
from headrace.bench.pictures import PictureFeatures, Pictures, SentPictures
from headrace.bench.serving import is_loopback, run
from headrace.errors import ConfigError, EngineError
from headrace.multimodal.feature_file import read_features


class Server:
    """Speaks just enough HTTP: a model list, and streams of ``tokens`` events, ``gap`` seconds apart."""

    def __init__(self, *, tokens: int = 3, gap: float = 0.0, fail_every: int = 0) -> None:
        self.tokens, self.gap, self.fail_every = tokens, gap, fail_every
        self.bodies: list[dict[str, Any]] = []
        self.uploads: dict[str, bytes] = {}
        self.deleted: list[str] = []
        self.now = self.most = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = await reader.readexactly(length)
                method, path, _ = line.decode().split()
                if path.startswith("/v1/features"):
                    await self.features(method, path, body, writer)
                    continue
                await self.answer(path, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            return await self.send(writer, 200, json.dumps({"data": [{"id": "tiny"}]}))
        self.bodies.append(json.loads(body))
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return await self.send(writer, 429, '{"error": {"message": "full"}}')
        self.now += 1
        self.most = max(self.most, self.now)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(self.tokens):
            await asyncio.sleep(self.gap)
            self.event(writer, {"choices": [{"index": 0, "delta": {"content": "x"}}]})
        self.now -= 1
        self.event(writer, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": self.tokens}})
        self.chunk(writer, "data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def features(self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if method == "DELETE":
            self.deleted.append(path.rpartition("/")[2])
        else:
            self.uploads[f"feat_{len(self.uploads)}"] = body
        await self.send(writer, 200, json.dumps({"id": [*self.uploads][-1]}))

    def event(self, writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
        self.chunk(writer, f"data: {json.dumps(data)}\n\n")

    @staticmethod
    def chunk(writer: asyncio.StreamWriter, text: str) -> None:
        writer.write(f"{len(text):x}\r\n{text}\r\n".encode())

    @staticmethod
    async def send(writer: asyncio.StreamWriter, status: int, text: str) -> None:
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    handle = await asyncio.start_server(server, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{handle.sockets[0].getsockname()[1]}"
    finally:
        handle.close()


PROMPTS = ("a", "b")


def measure(server: Server, sent: SentPictures | None = None, **settings: Any) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with listening(server) as url:
            return await run(load(url, **settings), PROMPTS, sent, tell=lambda text: None)

    return asyncio.run(main())


def load(url: str, **settings: Any) -> LoadOptions:
    plain: dict[str, Any] = {"model": None, "api_key": None, "max_tokens": 3, "num_requests": 8}
    return LoadOptions(url=url, **(plain | {"duration": 20.0} | settings))


def test_closed_loop() -> None:
    server = Server(gap=0.01)
    report = measure(server, concurrency=3)
    assert report["requests"] == {"sent": 8, "succeeded": 8, "failed": 0, "dropped": 0}
    assert server.most == 3
    assert (report["input_tokens"], report["output_tokens"]) == (56, 24)
    assert report["milliseconds"]["first token"]["p50"] >= 10
    assert report["milliseconds"]["between events"]["p50"] >= 9
    assert report["milliseconds"]["whole request"]["p50"] >= 30
    body = server.bodies[0]
    assert body["model"] == "tiny" and body["stream"] and body["max_tokens"] == 3 and "ignore_eos" not in body
    assert {entry["messages"][0]["content"] for entry in server.bodies} == {"a", "b"}


def test_processes_share_the_load() -> None:
    server = Server(gap=0.1)
    report = measure(server, concurrency=5, num_requests=11, processes=2)
    assert report["requests"] == {"sent": 11, "succeeded": 11, "failed": 0, "dropped": 0}
    assert server.most == 5
    assert report["output_tokens"] == 33
    assert report["load_generator"]["processes"] == 2 and report["load_generator"]["max_busy"] > 0


def test_a_busy_client_process_shows() -> None:
    def busy(text: str) -> None:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass

    async def main() -> dict[str, Any]:
        async with listening(Server(gap=0.01)) as url:
            return await run(load(url, concurrency=1, num_requests=2), PROMPTS, tell=busy)

    report = asyncio.run(main())
    assert report["load_generator"]["max_busy"] * report["seconds"] >= 0.19


def test_shares_add_up() -> None:
    closed = load("http://x", concurrency=7, num_requests=10, processes=3).shares()
    assert [(part.clients, part.num_requests, part.processes) for part in closed] == [(3, 4, 1), (2, 3, 1), (2, 3, 1)]
    opened = load("http://x", rate=8.0, num_requests=10, processes=4, max_in_flight=6, seed=5).shares()
    assert [(part.rate, part.num_requests, part.max_in_flight, part.seed) for part in opened] == [
        (2.0, 3, 2, 5),
        (2.0, 3, 2, 6),
        (2.0, 2, 1, 7),
        (2.0, 2, 1, 8),
    ]


def test_each_process_needs_a_client() -> None:
    with pytest.raises(ConfigError, match="client"):
        load("http://x", concurrency=2, processes=3)


def test_open_loop_does_not_wait_for_answers() -> None:
    server = Server(tokens=1, gap=0.3)
    report = measure(server, rate=100.0, ignore_eos=True)
    assert report["requests"]["succeeded"] == 8
    assert server.most > 3
    assert server.bodies[0]["ignore_eos"] is True


def test_open_loop_is_bounded_in_flight() -> None:
    server = Server(tokens=1, gap=0.3)
    report = measure(server, rate=500.0, max_in_flight=2)
    assert server.most <= 2
    assert report["requests"]["dropped"] == 8 - report["requests"]["sent"] > 0


def test_time_is_bounded() -> None:
    server = Server(tokens=1, gap=5.0)
    report = measure(server, concurrency=1, duration=0.2)
    assert report["requests"] == {"sent": 1, "succeeded": 0, "failed": 1, "dropped": 0}
    assert report["seconds"] < 2


def test_failures_are_counted_by_their_words() -> None:
    report = measure(Server(fail_every=4), concurrency=1)
    assert report["requests"]["failed"] == 2
    assert list(report["errors"].values()) == [2] and "429" in next(iter(report["errors"]))


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(EngineError, match="cannot reach http"):
        asyncio.run(run(load("http://127.0.0.1:9", concurrency=1), PROMPTS, tell=lambda text: None))


FEATURES = PictureFeatures(6, 16, (1, 4, 6), "bfloat16", deepstack_layers=2)


def media_of(server: Server) -> list[dict[str, Any]]:
    """The part of each request that is not text."""
    contents = [body["messages"][0]["content"] for body in server.bodies]
    assert all(text["type"] == "text" and text["text"] in PROMPTS for _, text in contents)
    return [part for part, _ in contents]


@pytest.mark.parametrize("form", ["png", "jpeg"])
def test_pictures_are_sent_as_data_urls(form: Literal["png", "jpeg"]) -> None:
    server = Server()
    report = measure(server, SentPictures(Pictures(40, 30), form), image_size="40x30", image_form=form, concurrency=2)
    urls = [part["image_url"]["url"] for part in media_of(server)]
    assert len(set(urls)) == report["requests"]["succeeded"] == 8, "no two are alike"
    heads, data = zip(*(url.split(",") for url in urls), strict=True)
    assert set(heads) == {f"data:image/{form};base64"}
    files = [base64.b64decode(each) for each in data]
    image = Image.open(io.BytesIO(files[0]))
    assert (image.size, image.format) == ((40, 30), form.upper())
    assert report["pictures"] == {"size": "40x30", "form": form, "bytes_each": round(sum(map(len, files)) / 8)}


@pytest.mark.parametrize("form", ["features", "upload"])
def test_features_are_sent_or_uploaded_before(form: Literal["features", "upload"]) -> None:
    server = Server(fail_every=3)
    sent = SentPictures(Pictures(40, 30, encoded=True, features=FEATURES), form)
    report = measure(server, sent, image_size="40x30", image_form=form, image_model="m", concurrency=1)
    parts = [part["image_embeds"] for part in media_of(server)]
    if form == "upload":
        assert [part["ref"] for part in parts] == server.deleted == [*server.uploads] == [f"feat_{i}" for i in range(8)]
        files = [*server.uploads.values()]
        assert report["pictures"]["upload_seconds"] > 0
    else:
        files = [base64.b64decode(part["data"]) for part in parts]
        assert not server.uploads
    assert len(set(files)) == 8 and report["requests"]["failed"] == 2
    features = read_features(files[0], "image", "data")
    assert (features.rows.dtype, features.rows.shape, features.grid) == ("bfloat16", (6, 16), (1, 4, 6))
    assert features.deepstack is not None and features.deepstack.shape == (2, 6, 16)


def test_processes_have_pictures_of_their_own() -> None:
    server = Server()
    sent = SentPictures(Pictures(8, 8, encoded=True, features=FEATURES), "upload")
    report = measure(
        server, sent, image_size="8x8", image_form="upload", image_model="m", concurrency=2, num_requests=3, processes=2
    )
    assert report["requests"]["succeeded"] == len(set(server.uploads.values())) == 3
    assert sorted(server.deleted) == sorted(server.uploads)
    assert [share.max_bytes for share in sent.shares([2, 1])] == [sent.max_bytes // 2] * 2


def test_two_loads_have_other_pictures() -> None:
    first, second = (next(SentPictures(Pictures(8, 8), "png").files(1, lambda text: None)) for _ in range(2))
    assert first != second


def test_pictures_fit_into_memory() -> None:
    server = Server()
    with pytest.raises(ConfigError, match="held at once") as caught:
        measure(server, SentPictures(Pictures(40, 30), "png", max_bytes=5000), image_size="40x30", concurrency=1)
    assert caught.value.param == "--num-requests" and not server.bodies


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"image_form": "png"}, "--image-form"),
        ({"image_model": "m"}, "--image-model"),
        ({"image_size": "8x8", "image_form": "upload"}, "--image-model"),
        ({"image_size": "8x8", "image_model": "m"}, "--image-model"),
        ({"seed": 1}, "--seed"),
        ({"concurrency": 1, "max_in_flight": 1}, "--max-in-flight"),
        ({"rate": 1.0, "concurrency": 1}, "--rate"),
        ({"rate": 0.0}, "rate"),
        ({"concurrency": 1, "duration": 0.0}, "duration"),
    ],
)
def test_a_load_must_make_sense(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("http://127.0.0.1:1", **settings)
    assert caught.value.param == param


def test_addresses() -> None:
    assert all(is_loopback(url) for url in ("http://localhost:1", "http://127.0.0.5:1", "https://[::1]:8000/v1"))
    assert not any(is_loopback(url) for url in ("http://10.0.0.1", "http://example.com", "http://localhost.example.com"))
    with pytest.raises(ConfigError, match="not an http"):
        asyncio.run(run(load("ftp://localhost"), PROMPTS, tell=lambda text: None))
    assert base_url("http://localhost:1/v1/") == "http://localhost:1"
