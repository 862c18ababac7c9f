"""A server over a tiny multimodal model and a real engine process: pictures, videos and features end to end."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save
from support.media import clip, noise, picture, real_picture, real_video
from support.models import tiny_vision
from support.server.harness import Running, running

from headrace import LLM, SamplingParams
from headrace.config import EngineArgs
from headrace.frontend.async_llm import AsyncLLM

pytestmark = pytest.mark.slow
HIDDEN = 64
FIELDS: dict[str, Any] = {"max_model_len": 1024, "num_kv_blocks": 200, "dtype": "float32", "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    tiny_vision.save("qwen2_5_vl", folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(AsyncLLM(EngineArgs(model=str(folder), **FIELDS))) as started:
        yield started


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(model=str(folder), **FIELDS)


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def ask(server: Running, *parts: Any, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 6, "temperature": 0, "logprobs": True}
    with httpx.Client(base_url=server.url, timeout=120) as http:
        answer = http.post("/v1/chat/completions", json=body | {"return_token_ids": True} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def test_a_picture_over_http_is_what_python_sees(server: Running, llm: LLM) -> None:
    parts = [{"type": "text", "text": "what?"}, image(picture(50, 40)), image(picture(30, 60, seed=1))]
    answer = ask(server, *parts)
    (offline,) = llm.chat(
        [{"role": "user", "content": [parts[0], {"type": "image_pil", "image_pil": noise(50, 40)}, parts[2]]}],
        SamplingParams(max_tokens=6, temperature=0.0),
    )
    assert tokens(answer) == offline.outputs[0].token_ids
    assert answer["prompt_token_ids"] == offline.prompt_token_ids
    details = answer["usage"]["prompt_tokens_details"]
    assert details["image_tokens"] == offline.prompt_token_ids.count(tiny_vision.IDS["<|image_pad|>"])
    again = ask(server, *parts)
    assert tokens(again) == tokens(answer)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    other = ask(server, parts[0], image(picture(50, 40, seed=7)), parts[2])
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < again["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_streams_of_pictures_are_their_answers(server: Running) -> None:
    """Several samples, a stop string and logprobs; the joined pieces of a stream are the whole answer."""
    messages: Any = [{"role": "user", "content": [image(picture(50, 40)), {"type": "text", "text": "what?"}]}]
    fields: dict[str, Any] = {"max_tokens": 24, "n": 2, "temperature": 1.0, "seed": 7, "logprobs": True}
    fields["extra_body"] = {"allowed_token_ids": list(b"abcdefghij")}
    with server.openai() as client:
        name = client.models.list().data[0].id
        free = client.chat.completions.create(model=name, messages=messages, **fields)
        stop = (free.choices[0].message.content or "")[5:7]
        whole = client.chat.completions.create(model=name, messages=messages, stop=stop, **fields)
        texts, tokens, reasons = ["", ""], [0, 0], ["", ""]
        for chunk in client.chat.completions.create(model=name, messages=messages, stop=stop, stream=True, **fields):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                tokens[choice.index] += len(choice.logprobs.content or ()) if choice.logprobs else 0
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices] and reasons[0] == "stop"
    assert tokens == [len((choice.logprobs and choice.logprobs.content) or ()) for choice in whole.choices]
    assert (free.choices[0].message.content or "").startswith(texts[0]) and stop not in texts[0]


def test_text_beside_pictures(server: Running) -> None:
    spelt = ask(server, {"type": "text", "text": "what does <|image_pad|> mean?"})
    assert tiny_vision.IDS["<|image_pad|>"] not in spelt["prompt_token_ids"]
    both = ask(server, {"type": "text", "text": "<|image_pad|>"}, image(picture(50, 40)))
    assert (
        both["prompt_token_ids"].count(tiny_vision.IDS["<|image_pad|>"])
        == both["usage"]["prompt_tokens_details"]["image_tokens"]
    )


def test_features_uploaded_and_sent(server: Running) -> None:
    rows = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(0))
    tensors = {"features": rows, "grid_thw": torch.tensor([[1, 4, 6]])}
    data = base64.b64encode(save(tensors)).decode()
    narrow = base64.b64encode(save(tensors | {"features": torch.ones(6, 5)})).decode()
    with httpx.Client(base_url=server.url, timeout=120) as http:
        made = http.post("/v1/features", json={"data": data})
        assert made.status_code == 200, made.text
        wrong = http.post("/v1/features", json={"data": narrow}).json()["error"]
    assert (wrong["param"], wrong["message"]) == ("data.features", f"data.features: expected hidden size {HIDDEN}, not 5")
    sent = ask(server, {"type": "image_embeds", "image_embeds": {"data": data}})
    named = ask(server, {"type": "image_embeds", "image_embeds": {"ref": made.json()["id"]}})
    assert tokens(sent) == tokens(named)
    assert sent["usage"]["prompt_tokens_details"]["image_tokens"] == 6


def through_openai(server: Running, *parts: Any, **more: Any) -> Any:
    with server.openai() as client:
        name = client.models.list().data[0].id
        content: Any = [*parts, {"type": "text", "text": "what?"}]
        messages: Any = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model=name, messages=messages, max_tokens=4, extra_body=more)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.model_dump()


def test_real_pictures(server: Running) -> None:
    limited = {"mm_processor_kwargs": {"max_pixels": 32 * 32 * 64}}
    for name in ("astronaut.png", "rocket.jpg"):
        assert through_openai(server, image(real_picture(name)), **limited)["image_tokens"] > 10


def video(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(data).decode()}"}}


def test_videos(server: Running) -> None:
    assert through_openai(server, video(clip(10)), image(picture()))["video_tokens"] > 10


def test_a_real_video(server: Running) -> None:
    assert through_openai(server, video(real_video("bikes.mp4")))["video_tokens"] > 10


def test_what_cannot_be_had_leaves_the_engine_alone(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        for part in (image(b"no picture"), image(picture(300, 1)), {"type": "image_url", "image_url": "http://127.0.0.1/"}):
            answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith("messages[0].content[0].image_url")
        assert http.get("/health").status_code == 200
    assert len(tokens(ask(server, image(picture(50, 40))))) > 0
