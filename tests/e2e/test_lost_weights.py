"""A server whose process dies, with the weights of a trainer, does not serve the weights of its files unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.tiny_llama import write_model
from support.server.harness import wait_for
from support.server.running import start_server, stop_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_next_process_knows_the_version_that_was_served(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    options = ("--device", "cpu", "--num-threads", "1", "--num-kv-blocks", "64")
    server = start_server(tmp_path / "log", str(folder), "--enable-rl-api", "--weight-root", str(tmp_path), *options)
    http = httpx.Client(base_url=server.url, timeout=60)

    def call(path: str, body: Any = None, status: int = 200) -> dict[str, Any]:
        answer = http.get(path) if body is None else http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def crash() -> None:
        process = server.serving_process()
        process.kill()
        process.wait(30)
        wait_for(lambda: "started again" in server.log.read_text())
        server.wait_healthy()

    try:
        server.wait_healthy()
        crash()
        call("/v1/completions", {"prompt": "Hi", "max_tokens": 2})
        update = {"model_path": str(folder), "weight_version": "step-1"}
        call("/update_weights_from_disk", update)
        call("/pause?mode=keep", {})
        crash()
        lost = call("/weight_info")
        assert (lost["state"], lost["number"], lost["pause"]) == ("lost", 1, "keep")
        assert "version step-1 was served" in call("/health")["reason"]
        assert call("/v1/models")["data"] and call("/server_info")["model"] == str(folder)
        assert "lost" in call("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, 503)["error"]["message"]
        call("/update_weights_from_disk", update)
        call("/resume", {})
        assert call("/weight_info")["number"] == 2, "numbers are not used again"
        call("/v1/completions", {"prompt": "Hi", "max_tokens": 2})
        assert stop_server(server) == 0
    finally:
        server.process.kill()
        server.process.wait()
