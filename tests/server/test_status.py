"""/health, /live, /version, /models, /tokenize, /detokenize, /reset_prefix_cache, and the app's life."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from support.byte_tokenizer import BOS, EOS
from support.server.fakes import FakeLLM
from support.server.harness import Api, error, running

import headrace
from headrace.sampling_params import SamplingParams
from headrace.server.app import build_app
from headrace.server.settings import ServerSettings


def test_version(api: Api) -> None:
    assert api.get("/version").json() == api.get("/").json() == {"version": headrace.__version__}


def test_models(api: Api) -> None:
    answer = api.get("/v1/models").json()
    assert answer["object"] == "list"
    [card] = answer["data"]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == ("fake-model", "model", "headrace", 512)
    assert card["default_sampling_params"] == {}
    # Each request has a server of its own, which may start in the next second.
    assert api.get("/v1/models/fake-model").json() | {"created": card["created"]} == card


def test_models_tell_their_sampling_defaults() -> None:
    llm = FakeLLM()
    llm.inputs.default_sampling = SamplingParams(temperature=0.2, top_p=0.9)
    api = Api(llm)
    [card] = api.get("/v1/models").json()["data"]
    assert card["default_sampling_params"] == {"temperature": 0.2, "top_p": 0.9}
    assert api.complete().status_code == api.complete(**card["default_sampling_params"]).status_code == 200
    assert llm.seen[0].sampling == llm.seen[1].sampling
    assert api.complete(temperature=1).status_code == 200
    assert (llm.seen[2].sampling.temperature, llm.seen[2].sampling.top_p) == (1, 0.9)


def asked(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server")


def test_health_tells_why_while_the_engine_loads_and_after() -> None:
    llm = FakeLLM(load_seconds=0.15)
    app = build_app(llm, ServerSettings(ready_timeout=0.0))

    async def life() -> None:
        async with asked(app) as http:
            async with app.router.lifespan_context(app):
                assert error(await http.get("/health"), 503)["message"] == "the engine is loading"
                assert error(await http.post("/v1/completions", json={"prompt": "Hi"}), 503)
                assert (await http.get("/live")).status_code == (await http.head("/live")).status_code == 200
                assert (await http.get("/metrics")).status_code == 200
                assert (await http.get("/version")).status_code == 200
                await asyncio.sleep(0.3)
                for answer in (await http.get("/health"), await http.get("/ping"), await http.post("/ping")):
                    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
            assert llm.closed

    asyncio.run(life())


def test_an_engine_that_is_up_before_its_client_is_not_served_yet() -> None:
    class EarlyLLM(FakeLLM):
        async def start(self) -> None:
            await super().start()
            await asyncio.sleep(0.2)

    llm = EarlyLLM()
    app = build_app(llm, ServerSettings(ready_timeout=0.0))

    async def life() -> None:
        async with app.router.lifespan_context(app), asked(app) as http:
            await asyncio.sleep(0.05)
            assert llm.health().ok
            for answer in (await http.get("/health"), await http.post("/v1/completions", json={"prompt": "Hi"})):
                assert error(answer, 503)["message"] == "the engine is starting"
            await asyncio.sleep(0.3)
            assert (await http.get("/health")).status_code == 200

    asyncio.run(life())


def test_requests_wait_for_an_engine_that_comes() -> None:
    """And not for one that does not."""
    llm = FakeLLM(load_seconds=0.2)
    app = build_app(llm)

    async def life() -> None:
        async with app.router.lifespan_context(app), asked(app) as http:
            assert error(await http.get("/health"), 503)
            for path in ("/v1/completions", "/tokenize"):
                assert (await http.post(path, json={"prompt": "Hi"})).status_code == 200
            llm.die()
            waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "Hi"}))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await llm.start()
            assert (await waiting).status_code == 200
            llm.die()
            waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "Hi"}))
            await asyncio.sleep(0.05)
            llm.give_up()
            answer = await waiting
            assert error(answer, 503)["message"] == "the engine died 3 times" and answer.headers["retry-after"] == "1"

    asyncio.run(asyncio.wait_for(life(), 20))


def test_health_tells_why_the_engine_did_not_start() -> None:
    llm = FakeLLM()
    llm.start_error = ValueError("no such model")
    with running(llm) as server:
        response = httpx.get(f"{server.url}/health")
        assert error(response, 503)["message"] == "the engine did not start: no such model"
        assert server.app.state.serving.failure is llm.start_error
        assert error(httpx.get(f"{server.url}/live"), 503)["message"] == "the engine did not start: no such model"


def test_live_until_the_engine_stays_down(api: Api) -> None:
    assert api.get("/live").json() == {"status": "ok"}
    app = build_app(api.llm)

    async def life() -> None:
        async with asked(app) as http:
            api.llm.die()
            assert error(await http.get("/health"), 503)
            assert (await http.get("/live")).status_code == 200, "the engine is being restarted"
            app.state.serving.draining = True
            assert (await http.get("/live")).status_code == 200, "requests in flight are being finished"
            app.state.serving.draining = False
            api.llm.give_up()
            assert error(await http.get("/live"), 503)["message"] == "the engine died 3 times"

    asyncio.run(life())


def test_closing_while_the_engine_loads() -> None:
    llm = FakeLLM(load_seconds=60)
    app = build_app(llm)

    async def life() -> None:
        async with app.router.lifespan_context(app):
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(life(), 5))
    assert llm.closed


def test_tokenize(api: Api) -> None:
    answer = api.post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert answer == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [BOS, 97, 0xC3, 0xA9],
        "token_strs": ["<bos>", "a", "\ufffd", "\ufffd"],
    }
    bare = api.post("/tokenize", {"prompt": "a", "add_special_tokens": False, "model": "fake-model"}).json()
    assert bare["tokens"] == [97] and "token_strs" not in bare
    assert api.post("/tokenize", {"prompt": "", "add_special_tokens": False}).json()["tokens"] == []
    assert api.post("/tokenize", {"prompt": "x" * 100_000}).json()["count"] == 100_001


def test_tokenize_makes_the_tokens_that_chat_makes(api: Api) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    api.chat(messages=messages)
    assert api.post("/tokenize", {"messages": messages}).json()["tokens"] == api.llm.seen[0].prompt_token_ids
    ended = api.post("/tokenize", {"messages": messages, "add_generation_prompt": False, "add_special_tokens": True}).json()
    assert bytes(ended["tokens"][1:]) == b"[user]Hi\n" and ended["tokens"][0] == BOS


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}])
def test_tokenize_wants_one_of_prompt_and_messages(api: Api, body: dict) -> None:
    assert error(api.post("/tokenize", body))["param"] == "prompt"


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message", "chat_template_kwargs"])
def test_tokenize_of_a_prompt_takes_no_fields_of_messages(api: Api, name: str) -> None:
    value: object = {} if name == "chat_template_kwargs" else False
    assert error(api.post("/tokenize", {"prompt": "a", name: value}))["param"] == name


def test_tokenize_is_bounded() -> None:
    api = Api(FakeLLM())
    api.llm.inputs.max_prompt_chars = 100
    assert api.post("/tokenize", {"prompt": "x" * 100}).status_code == 200
    assert error(api.post("/tokenize", {"prompt": "x" * 101}))["param"] == "prompt"
    long = [{"role": "user", "content": "x" * 100}]
    assert error(api.post("/tokenize", {"messages": long}))["param"] == "messages"
    assert api.post("/detokenize", {"tokens": [97] * 100}).status_code == 200
    assert error(api.post("/detokenize", {"tokens": [97] * 101}))["param"] == "tokens"


def test_detokenize(api: Api) -> None:
    tokens = [97, 0xC3, 0xA9, EOS]
    assert api.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "aé<eos>"}
    assert api.post("/detokenize", {"tokens": tokens, "skip_special_tokens": True}).json() == {"prompt": "aé"}
    assert api.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    for tokens, param in [([1, 999], "tokens[1]"), ([-1], "tokens[0]"), (["a"], "tokens[0]"), ("a", "tokens")]:
        assert error(api.post("/detokenize", {"tokens": tokens}))["param"] == param
    assert error(api.post("/detokenize", {"tokens": [1], "model": "x"}), 404)["code"] == "model_not_found"
    assert error(api.post("/detokenize", {}))["code"] == "missing_required_parameter"
    assert error(api.post("/detokenize", {"tokens": [1], "x": 1}))["code"] == "unknown_parameter"


def test_reset_prefix_cache(api: Api) -> None:
    assert api.post("/reset_prefix_cache").json() == {"reset": True}
    api.llm.caching = False
    found = error(api.post("/reset_prefix_cache"), 409)
    assert found["code"] == "prefix_caching_disabled" and "disabled" in found["message"]
