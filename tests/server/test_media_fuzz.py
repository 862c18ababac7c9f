"""Malformed and hostile pictures, videos, URLs and features: each is a 4xx that names its part, and nothing stays behind."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from safetensors.numpy import save
from support.feature_files import nan, tensors
from support.media import clip, encoded, noise
from support.server.media import SeeingLLM, loader
from support.site import NOT_PUBLIC, Site, serving

from headrace.multimodal.fetch import Fetcher
from headrace.server.app import build_app

COUNT = 300
ALIVE_EVERY = 50


class World:
    """What cases are made of."""

    def __init__(self, seed: int, site: Site) -> None:
        self.random = random.Random(seed)
        self.site = site
        self.pictures = {kind: encoded(noise(24, 16), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")}
        self.other = {kind: encoded(noise(24, 16), kind) for kind in ("TIFF", "ICO", "PPM", "TGA", "PCX")}
        self.video = clip(6, 32, 32)
        self.bombs = [encoded(Image.new("1", (20_000, 20_000))), encoded(Image.new("L", (1, 60_000)), "PNG")]
        self.features = save(tensors())
        self.asked = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        """rebind.test is at the web site's address when it is asked for first, and elsewhere in this machine then."""
        if host == "rebind.test":
            self.asked += 1
            return ["127.0.0.2" if self.asked % 2 else "127.0.0.1"]
        if host == "private.test":
            return [self.random.choice(NOT_PUBLIC)]
        if host == "site.test":
            return ["127.0.0.2"]
        try:
            socket.inet_aton(host)  # every spelling of an IPv4 address
        except OSError:
            return [host.strip("[]")]
        return [socket.inet_ntoa(socket.inet_aton(host))]

    def damaged(self, data: bytes) -> bytes:
        """Cut off, or with bytes that are others, left out or put in."""
        size, rng = len(data), self.random
        match rng.randrange(4):
            case 0:
                return data[: rng.randrange(size * 9 // 10)]
            case 1:
                at = rng.randrange(min(size, 40))
                return data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at + 40 :]
            case 2:
                return rng.randbytes(rng.randrange(200))
            case _:
                start = rng.randrange(size // 2)
                return data[start + rng.randrange(1, size // 2) :]


Case = tuple[str, Any]
"""Type of the part, and its value."""


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def broken_picture(world: World) -> Case:
    data = world.random.choice([*world.pictures.values()])
    return "image_url", data_url(world.damaged(data))


def wrong_type(world: World) -> Case:
    data = [*world.other.values(), world.video, world.features, b"", b"<svg/>", b"%PDF-1.4", b"#!/bin/sh", b"\0" * 100]
    return "image_url", data_url(world.random.choice(data))


def bomb(world: World) -> Case:
    return "image_url", data_url(world.random.choice(world.bombs))


def broken_video(world: World) -> Case:
    heads = [
        b"#EXTM3U\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile 'x'\n",
        world.pictures["GIF"],
        world.damaged(world.video),
    ]
    return "video_url", data_url(world.random.choice(heads), "video/mp4")


def private_url(world: World) -> Case:
    rng, port = world.random, world.site.server_port
    number = 0x7F000000 + rng.randrange(1, 2**24)
    octets = number.to_bytes(4, "big")
    hosts = [
        *(str(number), hex(number), oct(number).replace("o", ""), f"{octets[0]}.{number & 0xFFFFFF}"),
        *(".".join(map(hex, octets)), ".".join(f"0{octet:o}" for octet in octets), f"[::ffff:{octets[0]}.0.0.1]"),
        *("localhost", "LOCALHOST.", "private.test", "[::1]", "0", "user@127.0.0.1", "127.0.0.1%2f"),
        *(f"[{address}]" if ":" in address else address for address in NOT_PUBLIC if "%" not in address),
    ]
    scheme = rng.choice(["http", "https", "HTTP"])
    if rng.randrange(4) == 0:
        world.asked = 0  # the name is at the web site's address, and redirects to where the name is a moment later
        return "image_url", f"http://rebind.test:{port}/to?http://rebind.test:{port}/a"
    if rng.randrange(3) == 0:
        return "image_url", f"http://site.test:{port}/to?{scheme}://{rng.choice(hosts)}:{port}/a"
    return rng.choice(
        ["image_url", "video_url"]
    ), f"{scheme}://{rng.choice(hosts)}:{rng.choice([port, 22, 80])}/latest/meta-data"


def bad_site(world: World) -> Case:
    path = world.random.choice(
        ["/size?300000", "/status?404", "/status?500", "/gzip", "/a", "/to?file:///etc/passwd", "/to?/to?/to"]
    )
    return "image_url", f"http://site.test:{world.site.server_port}{path}"


def no_url(world: World) -> Case:
    rng = world.random
    texts = [
        "",
        "x",
        "/etc/passwd",
        "file:///etc/passwd",
        "file:///proc/self/mem",
        "ftp://a/",
        "data:",
        "data:;base64,*",
        "//a",
    ]
    values = [None, 5, [], {}, {"url": 5}, {"url": None}, {"url": ""}, {"url": "http://[::1", "detail": "x"}, True]
    return rng.choice(["image_url", "video_url"]), rng.choice([rng.choice(texts), rng.choice(values), rng.randbytes(9).hex()])


def broken_features(world: World) -> Case:
    rng = world.random
    changes: list[dict[str, Any]] = [
        *({"features": np.ones((2, 8), dtype)} for dtype in (np.int64, np.float64, np.uint8, np.bool_, np.int32)),
        *({"features": np.ones(shape, np.float32)} for shape in ((2, 9), (3, 8), (0, 8), (16,), (1, 2, 8), (2, 0), ())),
        *({"features": nan(value, 2, 8)} for value in (np.nan, np.inf, -np.inf)),
        *(
            {"grid_thw": np.array(grid)}
            for grid in ([[1, 2, 0]], [[1, 2, -4]], [[2**40, 2, 4]], [1, 2, 4], [[1, 2]], [[1, 2, 4]] * 2)
        ),
        *({name: None} for name in ("features", "grid_thw")),
        *({"deepstack": np.ones((1, 3, 8), np.float32)}, {"second_per_grid": np.zeros(1, np.float32)}, {"x": np.ones(1)}),
    ]
    kind = rng.choice(["image_embeds", "video_embeds"])
    match rng.randrange(5):
        case 0:
            return kind, {"data": base64.b64encode(world.features[: rng.randrange(len(world.features))]).decode()}
        case 1:
            size = rng.choice([2**63, 2**16 + 1, 10, 0, rng.randrange(2**64)])
            return kind, {"data": base64.b64encode(size.to_bytes(8, "little") + rng.randbytes(50)).decode()}
        case 2:
            header = {
                "features": {"dtype": rng.choice(["F32", "Q"]), "shape": [2 ** rng.randrange(60), 8], "data_offsets": [0, 64]}
            }
            text = json.dumps(header).encode()
            return kind, {"data": base64.b64encode(len(text).to_bytes(8, "little") + text + bytes(64)).decode()}
        case 3:
            return kind, rng.choice(
                [{"ref": "feat_x"}, {"ref": 5}, {}, [], "AAAA", {"data": "?"}, {"data": "AAAA", "ref": "x"}, None]
            )
        case _:
            return kind, {"data": base64.b64encode(save(tensors(**rng.choice(changes)))).decode()}


CASES: list[Callable[[World], Case]] = [
    *(
        broken_picture,
        broken_picture,
        wrong_type,
        broken_video,
        private_url,
        private_url,
        no_url,
        broken_features,
        broken_features,
    ),
    *(bad_site, bomb),
]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """At every loopback address; tests admit the one that it is not private at for them."""
    with serving("0.0.0.0") as server:
        yield server


def open_files() -> int:
    gc.collect()
    return psutil.Process().num_fds()


def attack(count: int, seed: int, site: Site) -> None:
    world = World(seed, site)
    fetcher = Fetcher(timeout=5.0, max_bytes=200_000, resolve=world.resolve, admits=lambda address: str(address) == "127.0.0.2")
    made = loader(fetcher, max_media_bytes=200_000, max_image_pixels=100_000, media_decode_seconds=5.0, num_video_frames=4)
    llm = SeeingLLM(made)

    async def run() -> None:
        await llm.start()
        transport = httpx.ASGITransport(app=build_app(llm), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as http:
            await send(http, world, "image_url", data_url(world.pictures["PNG"]), good=True)
            before = open_files(), threading.active_count()
            for index in range(count):
                kind, value = world.random.choice(CASES)(world)
                await send(http, world, kind, value)
                if index % ALIVE_EVERY == 0:
                    await send(http, world, "image_url", data_url(world.pictures["PNG"]), good=True)
            await send(http, world, "image_url", data_url(world.pictures["PNG"]), good=True)
            # Threads and connections of the loop's own may come and go.
            assert open_files() <= before[0] + 8
            assert threading.active_count() <= before[1] + 8

    children = set(psutil.Process().children())
    try:
        asyncio.run(run())
        assert made.budget.used == 0
        assert not llm.running
    finally:
        made.close()
    assert set(psutil.Process().children()) <= children


async def send(http: httpx.AsyncClient, world: World, kind: str, value: Any, *, good: bool = False) -> None:
    """Damage may leave a picture whole: then it is a picture. Everything else is refused."""
    parts = [{"type": "text", "text": "a"}, {"type": kind, kind: value}]
    seen = len(world.site.seen)
    answer = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
    what = f"{kind} {str(value)[:200]}: {answer.status_code} {answer.text[:300]}"
    if answer.status_code == 200:
        assert good or (isinstance(value, str) and value.startswith("data:")), what
        return
    assert not good and 400 <= answer.status_code < 500, what
    error = answer.json()["error"]
    assert error["param"].startswith("messages[0].content[1]"), what
    assert error["message"], what
    for host, path in world.site.seen[seen:]:
        # Whatever the web site was asked for, it was at the address that is admitted.
        assert host.split(":")[0] in ("site.test", "rebind.test") and not path.startswith("/latest"), what
        assert not (host.startswith("rebind.test") and path == "/a"), what


def test_hostile_media(site: Site) -> None:
    attack(COUNT, 0, site)
