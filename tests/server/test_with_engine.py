"""The server over the real engine client, tokenizer, scheduler and process; only the runner says a script."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.engine.fakes import SCRIPT, fake_process, said
from support.models.tiny_llama import write_config
from support.server.harness import Running, error, events, running

from headrace.config import EngineArgs
from headrace.frontend.async_llm import AsyncLLM
from headrace.server.app import build_app
from headrace.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"))


def engine(folder: Path, seconds: float = 0.0, **args: Any) -> AsyncLLM:
    llm = AsyncLLM(EngineArgs(model=str(folder), load_format="dummy", **args), chat_template=TEMPLATE)
    llm._supervisor._command = fake_process(seconds=seconds)
    return llm


@contextlib.asynccontextmanager
async def serving(llm: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(llm, ServerSettings())
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as http:
            await until(lambda: app.state.serving.health()[0])
            yield http


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.02)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 240))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Running]:
    """Engine for tests that leave it as they found it; starting one takes seconds."""
    with running(engine(folder, 0.005)) as server:
        yield server


def test_answers(shared: Running) -> None:
    with httpx.Client(base_url=shared.url, timeout=60) as http:
        whole = http.post(CHAT, json=ASK | {"n": 3, "logprobs": True, "top_logprobs": 2}).json()
        chunks = [chunk["choices"][0] for chunk in events(http.post(CHAT, json=ASK | {"n": 3, "stream": True}))]
        for index, choice in enumerate(whole["choices"]):
            expected = said(index, 20)
            entries = choice["logprobs"]["content"]
            assert bytes(byte for entry in entries for byte in entry["bytes"]) == expected
            assert choice["message"]["content"] == expected.decode("utf-8", "replace")
            assert [top["token"] for top in entries[0]["top_logprobs"]] == [" ", "!"]
            assert choice["finish_reason"] == "length"
            streamed = "".join(chunk["delta"].get("content", "") for chunk in chunks if chunk["index"] == index)
            assert streamed == choice["message"]["content"]
        assert whole["usage"]["prompt_tokens"] == len("[user]Hi[assistant]")
        again = http.post(CHAT, json=ASK).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        stopped = http.post(CHAT, json=ASK | {"stop": ["wheel"]}).json()["choices"][0]
        assert (stopped["message"]["content"], stopped["stop_reason"]) == ("The mill ", "wheel")


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_lists_are_limited_by_the_engine(name: str, shared: Running) -> None:
    words = [f"{name} {number}" for number in range(17)]
    refused = httpx.post(f"{shared.url}/v1/completions", json={"prompt": "a", "max_tokens": 1, name: words}, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == name
    assert "at most 16 are allowed" in refused.json()["error"]["message"]


@pytest.mark.parametrize("extra", [{"max_tokens": 0}, {"max_tokens": 2}, {"max_tokens": 2, "stream": True}])
def test_echo_scores_long_prompts_that_take_several_chunks(shared: Running, extra: dict[str, Any]) -> None:
    prompt = "wörld " * 25
    size, count = len(prompt.encode()), extra["max_tokens"]
    body = {"prompt": [prompt, "b"], "echo": True, "logprobs": 1, "n": 2}
    response = httpx.post(f"{shared.url}/v1/completions", json=body | extra, timeout=60)
    choices = [chunk["choices"][0] for chunk in events(response)] if "stream" in extra else response.json()["choices"]
    mine = [choice for choice in choices if choice["index"] == 1]
    assert "".join(choice["text"] for choice in mine) == prompt + said(1, count).decode()
    parts = [choice["logprobs"] for choice in mine if choice["logprobs"]]
    assert [entry for part in parts for entry in part["token_logprobs"]] == [None, *[-3.0] * (size - 1 + count)]
    offsets = [entry for part in parts for entry in part["text_offset"]]
    assert offsets[:7] == [0, 1, 1, 2, 3, 4, 5]
    assert offsets[size:] == list(range(len(prompt), len(prompt) + count))


def test_only_the_assistants_message_is_continued(shared: Running) -> None:
    body = ASK | {"continue_final_message": True}
    refused = error(httpx.post(shared.url + CHAT, json=body, timeout=60))
    assert refused["param"] == "continue_final_message" and "'user'" in refused["message"]
    body["messages"] = [*ASK["messages"], {"role": "assistant", "content": "Well"}]
    assert httpx.post(shared.url + CHAT, json=body, timeout=60).status_code == 200


def test_clients_that_leave_free_their_blocks(shared: Running) -> None:
    llm: Any = shared.llm

    async def work() -> None:
        async with httpx.AsyncClient(base_url=shared.url, timeout=60) as http:
            body = ASK | {"max_tokens": 200, "n": 2}
            async with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
                await anext(response.aiter_lines())
            with pytest.raises(httpx.ReadTimeout):
                await http.post(CHAT, json=body, timeout=0.4)
            await until(lambda: llm.stats.kv_blocks_used == 0 and llm.stats.num_running == 0)
            assert 'headrace_sequences_finished_total{reason="abort"} 4.0' in (await http.get("/metrics")).text

    run(work())


def test_aborted_requests_keep_their_tokens(shared: Running) -> None:
    """More sequences than run at once: some run, and some wait."""
    params = {"max_new_tokens": 250, "ignore_eos": True}
    body = {"input_ids": [72, 105], "sampling_params": params | {"n": 100}, "return_logprob": True, "rid": "mine"}
    last = body | {"sampling_params": params, "stream": True}

    async def work() -> None:
        async with httpx.AsyncClient(base_url=shared.url, timeout=60) as http:
            answer = asyncio.create_task(http.post("/generate", json=body))
            async with http.stream("POST", "/generate", json=last | {"rid": "last"}) as response:
                lines = response.aiter_lines()
                while not (await anext(lines)).startswith("data: "):
                    pass
                assert (await http.post("/abort_request", json={"rid": ["mine", "last"]})).json() == {"aborted": 2}
                *_, end = [line async for line in lines if line]
            assert end == "data: [DONE]"
            results = (await answer).json()
        reasons = [result["meta_info"]["finish_reason"]["type"] for result in results]
        assert "abort" in reasons
        for result, reason in zip(results, reasons, strict=True):
            assert len(result["output_ids"]) == len(result["meta_info"]["output_token_logprobs"])
            assert (len(result["output_ids"]) == 250) == (reason == "length")
        llm: Any = shared.llm
        await until(lambda: llm.stats.kv_blocks_used == 0 and llm.stats.num_running == 0)

    run(work())


def test_full_queue_is_429_for_streams_too(folder: Path) -> None:
    async def work() -> None:
        async with serving(engine(folder, 0.02, max_queue_len=2)) as http:
            body = {"prompt": "x", "max_tokens": 30}
            posts = [http.post("/v1/completions", json=body | {"stream": i % 2 == 0}) for i in range(40)]
            answers = await asyncio.gather(*posts)
            for answer in answers[::2]:
                assert answer.status_code == 429 or events(answer)
            for answer in answers[1::2]:
                assert answer.status_code == 200 or error(answer, 429)["code"] == "queue_full"
            assert (
                {answer.status_code for answer in answers[::2]}
                == {answer.status_code for answer in answers[1::2]}
                == {200, 429}
            )

    run(work())


def test_a_killed_engine_answers_those_in_flight_and_comes_back(folder: Path) -> None:
    async def work() -> None:
        llm = engine(folder, 0.02)
        async with serving(llm) as http:
            body = ASK | {"max_tokens": 200}
            plain = asyncio.create_task(http.post(CHAT, json=body))
            stream = asyncio.create_task(http.post(CHAT, json=body | {"stream": True}))
            await until(lambda: llm.stats.generation_tokens > 20)
            assert llm.engine_pid is not None
            os.kill(llm.engine_pid, signal.SIGKILL)
            answer = await plain
            assert error(answer, 503)["type"] == "server_error" and answer.headers["retry-after"]
            assert '"error"' in (await stream).text.strip().split("\n")[-1]
            error(await http.get("/health"), 503)
            await until(lambda: llm.health().ok)
            assert (await http.get("/health")).status_code == 200
            text = (await http.post(CHAT, json=ASK)).json()["choices"][0]["message"]["content"]
            assert text == SCRIPT[:20].decode()

    run(work())
