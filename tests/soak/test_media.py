"""Malformed and hostile pictures, videos, URLs and features: ten thousand in one process, and minutes of them on a server."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from safetensors.numpy import save
from server.test_media_fuzz import CASES, World, attack, bad_site, data_url, private_url, site
from support.feature_files import tensors
from support.models import tiny_vision
from support.site import Site

from .conftest import SoakedServer, serve

COUNT = 10_000
SECONDS = 300
ATTACKERS = 6
MEDIA_WORKERS = 2
SCALE = float(os.environ.get("SOAK_SCALE", "1"))
BINARY = {"content-type": "application/octet-stream"}
__all__ = ["site"]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def test_hostile_media(site: Site) -> None:
    attack(max(1, round(COUNT * SCALE)), 1, site)


@pytest.fixture
def seeing(tmp_path: Path) -> Iterator[SoakedServer]:
    folder = tmp_path / "model"
    folder.mkdir()
    tiny_vision.save("qwen2_5_vl", folder)
    limits = ("--max-media-bytes", "200000", "--max-image-pixels", "100000", "--media-decode-seconds", "5")
    sizes = ("--max-model-len", "512", "--features-bytes", "65536", "--max-feature-bytes", "16384")
    with tempfile.TemporaryDirectory() as temporary:
        workers = ("--media-workers", str(MEDIA_WORKERS))
        yield from serve(folder, tmp_path / "log.txt", Path(temporary), (*limits, *sizes, *workers))


def conversation(kind: str, value: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "what is it?"}, {"type": kind, kind: value}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def test_hostile_media_on_a_server(seeing: SoakedServer) -> None:
    """A bystander's picture is always seen alike; whatever else is sent is seen too, or a 4xx."""
    world = World(1, cast(Any, None))
    cases = [case for case in CASES if case not in (private_url, bad_site)]
    features = save(tensors(features=np.ones((2, 64), np.float32)))
    picture = conversation("image_url", data_url(world.pictures["PNG"]))
    counts: Counter[str] = Counter()

    async def post(http: httpx.AsyncClient, path: str, what: str, **sent: Any) -> httpx.Response:
        response = await http.post(path, **sent)
        assert response.status_code < 500, (path, str(sent)[:300], response.status_code, response.text)
        counts[f"{what} {response.status_code}"] += 1
        return response

    async def upload(http: httpx.AsyncClient) -> None:
        """Uploads features, whole or damaged, uses and deletes them: sometimes while they are used."""
        data = features if world.random.random() < 0.7 else world.damaged(features)
        response = await post(http, "/v1/features", "upload", content=data, headers=BINARY)
        if response.status_code == 200:
            name = response.json()["id"]
            use = post(http, "/v1/chat/completions", "use", json=conversation("image_embeds", {"ref": name}))
            async with asyncio.TaskGroup() as group:
                used = group.create_task(use)
                await asyncio.wait([used], timeout=world.random.choice([0, 0.05, 60]))
                await http.delete(f"/v1/features/{name}")

    async def run(seconds: float) -> None:
        async with httpx.AsyncClient(base_url=seeing.url, timeout=60) as http:
            expected = (await http.post("/v1/chat/completions", json=picture)).json()["choices"][0]["message"]
            end = asyncio.get_running_loop().time() + seconds

            async def attacker() -> None:
                while asyncio.get_running_loop().time() < end:
                    if world.random.random() < 0.3:
                        await upload(http)
                    else:
                        kind, value = world.random.choice(cases)(world)
                        await post(http, "/v1/chat/completions", "media", json=conversation(kind, value))

            async def watch() -> None:
                while asyncio.get_running_loop().time() < end:
                    response = await post(http, "/v1/chat/completions", "bystander", json=picture)
                    assert response.json()["choices"][0]["message"] == expected

            async with asyncio.TaskGroup() as group:
                group.create_task(watch())
                for _ in range(ATTACKERS):
                    group.create_task(attacker())

    asyncio.run(run(max(5, SECONDS / 10 * SCALE)))
    before = seeing.warm(MEDIA_WORKERS)
    asyncio.run(run(SECONDS * SCALE))
    print(f"\n{dict(counts)}")
    assert counts["bystander 200"] and counts["use 200"]
    assert seeing.holdings().grown_since(before) == []
