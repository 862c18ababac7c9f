"""The wire contract as the openai package sees it, over a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Running, running

MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hi"}]
TEXT = "Hello 0, wörld € 🙂 seed 4"


def test_chat(server: Running) -> None:
    answer = server.openai().chat.completions.create(model="fake-model", messages=MESSAGES, seed=4, user="me", store=False)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 32
    assert answer.to_dict(mode="json")["object"] == "chat.completion"


def test_an_answer_can_be_sent_back_as_a_message(server: Running) -> None:
    client = server.openai()
    answer = client.chat.completions.create(model="fake-model", messages=MESSAGES)
    again: Any = [*MESSAGES, answer.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(model="fake-model", messages=again).choices[0].finish_reason == "stop"


def test_chat_stream(server: Running) -> None:
    stream = server.openai().chat.completions.create(
        model="fake-model", messages=MESSAGES, seed=4, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(TEXT.encode()) + 1


def test_the_clients_own_accumulator(server: Running) -> None:
    with server.openai().chat.completions.stream(
        model="fake-model", messages=MESSAGES, seed=4, n=2, logprobs=True, top_logprobs=1
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [TEXT, TEXT.replace("0", "1", 1)]
    for choice in final.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == len(TEXT.encode()) + 1
        data = bytes(byte for entry in choice.logprobs.content[:-1] for byte in entry.bytes or [])
        assert data.decode() == choice.message.content


def test_async_streams_side_by_side(server: Running) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(model="fake-model", messages=MESSAGES, seed=seed, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def many() -> list[str]:
        async with server.async_openai() as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(40)))

    assert asyncio.run(many()) == [TEXT.replace("4", str(seed)) for seed in range(40)]


def test_completions(server: Running) -> None:
    client = server.openai()
    answer = client.completions.create(model="fake-model", prompt=["a", "b"], n=2, seed=4, logprobs=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[2].text == "b" + TEXT
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert logprobs.tokens[:3] == ["<bos>", "a", "H"] and logprobs.text_offset[:3] == [0, 0, 1]
    stream = client.completions.create(model="fake-model", prompt=[97, 98], seed=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_extra_fields(server: Running) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "return_token_ids": True, "stop_token_ids": [ord("o")], "repetition_penalty": 1.1}
    answer = server.openai().chat.completions.create(model="fake-model", messages=MESSAGES, extra_body=extra)
    choice = answer.choices[0].to_dict()
    assert choice["token_ids"] == list(b"Hello")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord("o"))
    assert answer.choices[0].message.content == "Hell"


def test_models(server: Running) -> None:
    client = server.openai()
    assert [model.id for model in client.models.list()] == ["fake-model"]
    assert client.models.retrieve("fake-model").owned_by == "headrace"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_errors_become_the_clients_exceptions(server: Running) -> None:
    client = server.openai()

    def chat(**fields: Any) -> Any:
        return client.chat.completions.create(**{"model": "fake-model", "messages": MESSAGES} | fields)

    with pytest.raises(openai.BadRequestError) as bad:
        chat(temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as bad:
        chat(tools=[{"type": "function", "function": {"name": "f"}}])
    assert (bad.value.param, bad.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError) as missing:
        chat(model="gpt-6")
    assert missing.value.code == "model_not_found"


def test_full_queue_and_broken_stream() -> None:
    with running(FakeLLM(max_queue=0)) as server, pytest.raises(openai.RateLimitError):
        server.openai().chat.completions.create(model="fake-model", messages=MESSAGES, stream=True)
    llm = FakeLLM(script=lambda request, index: [72, 105, ValueError("it broke")])
    with running(llm) as server:
        stream = server.openai().chat.completions.create(model="fake-model", messages=MESSAGES, stream=True)
        texts = []
        with pytest.raises(openai.APIError, match="it broke"):
            texts.extend(chunk.choices[0].delta.content for chunk in stream)
