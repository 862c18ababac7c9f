"""A server over a tiny model that takes features of audio, with a real engine process."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save
from support.models import tiny_vision
from support.server.harness import running

from headrace import LLM, SamplingParams
from headrace.config import EngineArgs
from headrace.frontend.async_llm import AsyncLLM

pytestmark = pytest.mark.slow


def test_clips_over_http_are_what_python_sends(tmp_path: Path) -> None:
    tiny_vision.save("qwen2_audio", tmp_path)
    fields: dict[str, Any] = {
        "model": str(tmp_path),
        "max_model_len": 256,
        "num_kv_blocks": 64,
        "dtype": "float32",
        "num_threads": 1,
    }
    clip = torch.randn(20, 64)
    sent = base64.b64encode(save({"features": clip})).decode()
    text = {"type": "text", "text": "what?"}
    params = SamplingParams(max_tokens=6, temperature=0.0)
    parts = [{"type": "audio", "audio": {"features": clip}}, text]
    (expected,) = LLM(**fields).chat([{"role": "user", "content": parts}], params)
    with running(AsyncLLM(EngineArgs(**fields))) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        made = http.post("/v1/features", json={"data": sent, "modality": "audio"}).json()
        for cached, value in enumerate(({"data": sent}, {"ref": made["id"]})):
            content = [{"type": "audio_embeds", "audio_embeds": value}, text]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
            answer = http.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()
            assert answer["choices"][0]["token_ids"] == expected.outputs[0].token_ids
            details = answer["usage"]["prompt_tokens_details"]
            assert (details["audio_tokens"], details["cached_tokens"] > 0) == (20, bool(cached))
        misfit = base64.b64encode(save({"features": clip[:, 1:].contiguous()})).decode()
        refused = http.post("/v1/features", json={"data": misfit, "modality": "audio"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data.features")
        refused = http.post("/v1/features", json={"data": sent})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data.grid_thw")
