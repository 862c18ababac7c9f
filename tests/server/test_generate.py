"""/generate, /inference/v1/generate, /health_generate and /abort_request over the fake engine."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import numpy as np
import pytest
from support.byte_tokenizer import BOS, EOS, VOCAB
from support.server.fakes import FakeLLM
from support.server.harness import Api, client, error, events

from headrace.errors import EngineError
from headrace.sampling_params import SamplingParams
from headrace.server.settings import ServerSettings

HELLO = [*"Hello 0, wörld € 🙂 seed 0".encode(), EOS]
IDS = [BOS, *b"Hi"]


def sglang(api: Api, **fields: Any) -> Any:
    answer = api.post("/generate", {"input_ids": IDS, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def vllm(api: Api, **fields: Any) -> Any:
    answer = api.post("/inference/v1/generate", {"token_ids": IDS, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_result(api: Api) -> None:
    result = sglang(api, rid="mine", return_logprob=True)
    assert (result["text"], result["output_ids"]) == ("Hello 0, wörld € 🙂 seed 0", HELLO)
    meta = result["meta_info"]
    assert meta["output_token_logprobs"] == [[-1.5, token, None] for token in HELLO]
    expected = {"id": "mine", "finish_reason": {"type": "stop", "matched": EOS}, "prompt_tokens": 3, "cached_tokens": 0}
    expected |= {"completion_tokens": len(HELLO), "weight_version": "0", "output_token_logprobs_length": len(HELLO)}
    assert {name: meta[name] for name in expected} == expected
    assert meta["e2e_latency"] >= 0
    assert "output_top_logprobs" not in meta


def test_the_prompt_as_text_and_texts_of_tokens(api: Api) -> None:
    fields = {"text": "Hi", "return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = api.post("/generate", fields).json()["meta_info"]
    assert meta["prompt_tokens"] == 3
    assert meta["output_token_logprobs"][0] == [-1.5, ord("H"), "H"]
    assert [len(best) for best in meta["output_top_logprobs"]] == [1] * len(HELLO)


def test_parameters_by_sglangs_names(api: Api) -> None:
    params = {"max_new_tokens": 7, "min_new_tokens": 2, "sampling_seed": 2**63 - 1, "no_stop_trim": True, "top_k": 1 << 30}
    ignored = {"spaces_between_special_tokens": False, "temperature": None}
    result = sglang(api, sampling_params={**params, **ignored, "stop": "o 0", "json_schema": '{"type": "object"}'})
    [request] = api.llm.seen
    assert request.constraint.kind == "json"
    assert request.sampling == SamplingParams(
        max_tokens=7, min_tokens=2, seed=2**63 - 1, include_stop_str_in_output=True, top_k=1 << 30, stop=["o 0"]
    )
    assert (result["text"], result["meta_info"]["finish_reason"]) == ("Hello 0", {"type": "stop", "matched": "o 0"})


def test_the_models_defaults_do_not_apply() -> None:
    """Whoever trains on what was sampled computes with the distribution that it asked for."""
    llm = FakeLLM()
    llm.inputs.default_sampling = SamplingParams(temperature=0.2, repetition_penalty=1.1, top_k=20)
    api = Api(llm)
    sglang(api)
    vllm(api, sampling_params={"temperature": 0.5})
    assert [request.sampling.temperature for request in llm.seen] == [1.0, 0.5]
    assert {(request.sampling.repetition_penalty, request.sampling.top_k) for request in llm.seen} == {(1.0, 0)}
    assert [request.max_tokens for request in llm.seen] == [509, 509], "the rest of the context"


def test_lists_and_samples_are_prompt_major(api: Api) -> None:
    params = [{"n": 2, "max_new_tokens": 9}, {"max_new_tokens": 1}]
    results = sglang(api, input_ids=[IDS, [BOS, 97]], sampling_params=params, rid=["a", "b"])
    assert [result["text"] for result in results] == ["Hello 0, ", "Hello 1, ", "H"]
    assert [result["meta_info"]["id"] for result in results] == ["a", "a", "b"]
    assert [result["meta_info"]["prompt_tokens"] for result in results] == [3, 3, 2]
    [alone] = api.post("/generate", {"text": ["Hi"], "sampling_params": {"max_new_tokens": 1}}).json()
    assert alone["text"] == "H"


def test_a_stream_has_results_so_far(api: Api) -> None:
    answer = api.post("/generate", {"input_ids": IDS, "stream": True, "return_logprob": True})
    assert answer.content.endswith(b"data: [DONE]\n\n")
    results = events(answer)
    for result in results:
        meta = result["meta_info"]
        assert [token for _, token, _ in meta["output_token_logprobs"]] == result["output_ids"]
        assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == len(result["output_ids"])
    assert [result["meta_info"]["finish_reason"] for result in results[:-1]] == [None] * (len(results) - 1)
    assert results[-1]["output_ids"] == HELLO
    assert results[-1]["text"] == sglang(api)["text"]
    several = events(api.post("/generate", {"input_ids": [IDS, IDS], "stream": True, "sampling_params": {"max_new_tokens": 1}}))
    assert sorted(result["index"] for result in several) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_scored(api: Api, stream: bool) -> None:
    fields = {"return_logprob": True, "logprob_start_len": 0, "stream": stream, "sampling_params": {"max_new_tokens": 0}}
    answer = api.post("/generate", {"input_ids": IDS, **fields})
    result = events(answer)[-1] if stream else answer.json()
    assert result["meta_info"]["input_token_logprobs"] == [[None, BOS, None], [-1.5, ord("H"), None], [-1.5, ord("i"), None]]
    assert (result["text"], result["output_ids"], result["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    fields |= {"logprob_start_len": 2, "top_logprobs_num": 2}
    meta = sglang(api, **fields | {"stream": False})["meta_info"]
    assert meta["input_token_logprobs"] == [[-1.5, ord("i"), None]]
    assert [len(best) for best in meta["input_top_logprobs"]] == [2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_ids": IDS, "text": "Hi"}, "input_ids"),
        ({}, "input_ids"),
        ({"input_ids": "Hi"}, "input_ids"),
        ({"text": IDS}, "text"),
        ({"input_ids": [IDS, "Hi"]}, "input_ids[1]"),
        ({"input_ids": IDS, "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"input_ids": IDS, "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"input_ids": IDS, "sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens"),
        ({"input_ids": IDS, "sampling_params": {"regex": "("}}, "sampling_params.regex"),
        ({"input_ids": [*IDS] * 200}, "input_ids"),
        ({"input_ids": [IDS, IDS], "sampling_params": [{}, {"ebnf": "("}]}, "sampling_params[1].ebnf"),
        ({"input_ids": IDS, "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"input_ids": IDS, "sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params"),
        ({"text": "Hi", "sampling_params": {"skip_special_tokens": 1}}, "sampling_params.skip_special_tokens"),
        ({"input_ids": [IDS, IDS], "sampling_params": [{}]}, "sampling_params"),
        ({"input_ids": [IDS, IDS], "sampling_params": [{}, {"n": 0}]}, "sampling_params[1].n"),
        ({"input_ids": [IDS, IDS], "rid": ["a"]}, "rid"),
        ({"input_ids": IDS, "top_logprobs_num": 1}, "top_logprobs_num"),
        (
            {"text": "Hi", "sampling_params": {"custom_params": {"return_top_p_token_ids": True}}},
            "sampling_params.custom_params",
        ),
        ({"text": "Hi", "sampling_params": {"custom_params": {"return_top_p_token_ids": 1}}}, "sampling_params.custom_params"),
        ({"input_ids": IDS, "image_data": ["x"]}, "image_data"),
        ({"input_ids": IDS, "priority": 1}, "priority"),
        ({"input_ids": IDS, "return_logprobs": True}, "return_logprobs"),
    ],
)
def test_mistakes_name_the_field(api: Api, fields: dict[str, Any], param: str) -> None:
    assert error(api.post("/generate", fields), 400)["param"] == param
    assert not api.llm.seen


def test_tokens_for_tokens(api: Api) -> None:
    params = {"logprobs": 1, "prompt_logprobs": 1, "n": 2, "max_tokens": 2, "output_kind": 2, "detokenize": True}
    answer = vllm(api, request_id="trl-1", model="fake-model", sampling_params=params)
    assert answer["request_id"] == "trl-1"
    assert [choice["token_ids"] for choice in answer["choices"]] == [[*b"He"]] * 2
    content = answer["choices"][1]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{ord(letter)}" for letter in "He"]
    assert [entry["logprob"] for entry in content] == [-1.5, -1.5]
    assert {len(entry["top_logprobs"]) for entry in content} == {1}
    assert answer["choices"][1]["finish_reason"] == "length"
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1][str(ord("H"))]["logprob"] == -1.5
    assert answer["usage"]["completion_tokens"] == 4
    assert not api.llm.seen[0].sampling.detokenize, "nobody reads the text"


def test_a_shorter_path(api: Api) -> None:
    assert api.post("/v1/generate", {"token_ids": IDS}).json()["choices"] == vllm(api)["choices"]


def test_a_stream_of_tokens(api: Api) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(api.post("/inference/v1/generate", {"token_ids": IDS, "request_id": "r", **options}))
    assert {chunk["request_id"] for chunk in chunks} == {"r"}
    *parts, usage = chunks
    assert [token for chunk in parts for token in chunk["choices"][0]["token_ids"]] == HELLO
    assert [chunk["choices"][0]["finish_reason"] for chunk in parts][-2:] == [None, "stop"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(HELLO))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": IDS, "features": {"mm_hashes": {}}}, "features"),
        ({"token_ids": IDS, "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"token_ids": IDS, "sampling_params": {"logits_processors": []}}, "sampling_params.logits_processors"),
        ({"token_ids": IDS, "sampling_params": {"output_kind": 3}}, "sampling_params.output_kind"),
        ({"token_ids": IDS, "sampling_params": {"detokenize": 1}}, "sampling_params.detokenize"),
        ({"token_ids": IDS, "sampling_params": {"prompt_logprobs": 0}, "stream": True}, "sampling_params.prompt_logprobs"),
        ({"token_ids": IDS, "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_mistakes_of_tokens_name_the_field(api: Api, fields: dict[str, Any], param: str) -> None:
    assert error(api.post("/inference/v1/generate", fields), 400)["param"] == param


def decoded(text: str) -> list[int]:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").tolist()


def test_the_set_that_was_sampled_from(api: Api) -> None:
    """slime normalises its own logits over the same tokens, and reads them from a flat array."""
    params = {"max_new_tokens": 2, "top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
    meta = sglang(api, sampling_params=params, return_logprob=True)["meta_info"]
    ids, offsets = decoded(meta["top_p_token_ids"]), decoded(meta["top_p_token_offsets"])
    assert offsets == [0, 2, 2 + VOCAB]
    assert (ids[:2], ids[2:]) == ([72, 73], [*range(VOCAB)])
    assert api.llm.seen[0].sampling.return_sampling_mask
    answer = vllm(api, sampling_params={"max_tokens": 2, "logprobs": 0, "return_sampling_mask": True})
    assert answer["choices"][0]["sampling_mask"] == [[72, 73], None]
    fields = {"token_ids": IDS, "sampling_params": {"max_tokens": 2, "logprobs": 0, "return_sampling_mask": True}}
    chunks = events(api.post("/inference/v1/generate", fields | {"stream": True}))
    assert [chunk["choices"][0]["sampling_mask"] for chunk in chunks] == [[[72, 73]], [None]]


def test_an_unknown_model_is_refused(api: Api) -> None:
    assert error(api.post("/inference/v1/generate", {"token_ids": IDS, "model": "other"}), 404)["param"] == "model"


@pytest.mark.parametrize("path", ["/generate", "/inference/v1/generate"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", [{"rid": "mine"}, {"abort_all": True}, {"rid": "", "abort_all": True}])
def test_an_aborted_request_has_its_tokens(path: str, stream: bool, by: dict[str, Any]) -> None:
    llm = FakeLLM(script=lambda request, index: [97] * 400, step=0.002)
    name, prompt = ("rid", "input_ids") if path == "/generate" else ("request_id", "token_ids")

    async def call() -> tuple[httpx.Response, list[httpx.Response]]:
        async with client(llm) as http:
            running = asyncio.create_task(http.post(path, json={prompt: IDS, name: "mine", "stream": stream}))
            while not llm.seen:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            aborts = [await http.post("/abort_request", json={"rid": "other"}), await http.post("/abort_request", json=by)]
            return await running, aborts

    answer, aborts = asyncio.run(call())
    assert [abort.json() for abort in aborts] == [{"aborted": 0}, {"aborted": 1}]
    assert answer.status_code == 200
    if path == "/generate":
        result = events(answer)[-1] if stream else answer.json()
        assert result["meta_info"]["finish_reason"]["type"] == "abort"
        tokens = result["output_ids"]
    else:
        choices = [event["choices"][0] for event in events(answer)] if stream else answer.json()["choices"]
        assert choices[-1]["finish_reason"] == "abort"
        tokens = [token for choice in choices for token in choice["token_ids"]]
    assert 0 < len(tokens) < 400
    assert set(tokens) == {97}


def test_a_key_aborts_its_own_requests() -> None:
    llm = FakeLLM(script=lambda request, index: [97] * 300, step=0.002)
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("mine", "other"))

    async def call() -> list[httpx.Response]:
        async with client(llm, ServerSettings(api_keys=("mine", "other"))) as http:
            running = asyncio.create_task(http.post("/generate", json={"input_ids": IDS, "rid": "r"}, headers=mine))
            while not llm.seen:
                await asyncio.sleep(0.001)
            first = await http.post("/abort_request", json={"abort_all": True}, headers=other)
            second = await http.post("/abort_request", json={"rid": "r"}, headers=mine)
            return [first, second, await running]

    first, second, answer = asyncio.run(call())
    assert (first.json(), second.json()) == ({"aborted": 0}, {"aborted": 1})
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_abort_needs_a_name_or_all(api: Api) -> None:
    for body in ({}, {"rid": ""}, {"rid": "a", "abort_all": True}):
        assert error(api.post("/abort_request", body), 400)["param"] == "rid"


def test_health_is_a_token(api: Api) -> None:
    assert api.get("/health_generate").json() == api.post("/health_generate").json() == {"status": "ok"}
    assert [request.max_tokens for request in api.llm.seen] == [1, 1]
    assert not api.llm.running


def test_health_of_an_engine_that_does_not_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.routes.generate._PROBE_SECONDS", 0.02)
    assert "no token in 0.02 s" in error(Api(FakeLLM(step=5.0)).get("/health_generate"), 503)["message"]

    def broken(*_: Any) -> list[Any]:
        return [EngineError("broken")]

    assert Api(FakeLLM(script=broken)).get("/health_generate").status_code == 500
    full = FakeLLM(max_queue=0)
    assert error(Api(full).get("/health_generate"), 503)
    full = Busy(max_queue=0)
    assert Api(full).get("/health_generate").json() == {"status": "ok"}, "the engine steps for others"


class Busy(FakeLLM):
    """Makes a step whenever somebody looks."""

    @property
    def stats(self) -> Any:
        self._steps += 1
        return super().stats


def test_sessions_of_sglangs_router(api: Api) -> None:
    api.post("/generate", {"input_ids": IDS}, headers={"X-SMG-Routing-Key": "s"})
    assert api.llm.seen[0].session == "s"


def test_without_a_tokenizer() -> None:
    llm = FakeLLM()
    llm.tokenizer = None
    result = sglang(Api(llm), sampling_params={"max_new_tokens": 2})
    assert (result["output_ids"], "text" in result) == ([*b"He"], False)
    assert error(Api(llm).post("/generate", {"text": "Hi"}), 400)["param"] == "text"


RENDERED = {"request_id", "model", "token_ids", "features", "sampling_params", "cache_salt", "priority", "stream"}


def test_rendered_requests_generate_the_same(api: Api) -> None:
    fields = {"temperature": 0.5, "seed": 3, "max_tokens": 9, "cache_salt": "s"}
    chat = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    rendered = api.post("/v1/chat/completions/render", chat).json()
    assert set(rendered) == RENDERED
    several = api.post("/v1/completions/render", {"prompt": ["a", "bc"], **fields}).json()
    assert [each["token_ids"] for each in several] == [[BOS, 97], [BOS, 98, 99]]
    assert not api.llm.seen, "nothing is generated"
    direct = api.chat(**fields, return_token_ids=True).json()
    answer = api.post("/inference/v1/generate", rendered).json()
    assert answer["choices"][0]["token_ids"] == direct["choices"][0]["token_ids"]
    first, second = api.llm.seen
    assert (first.prompt_token_ids, first.max_tokens, first.cache_salt) == (second.prompt_token_ids, 9, "s")
    assert second.sampling == SamplingParams(temperature=0.5, seed=3, max_tokens=9, detokenize=False)


def test_what_cannot_be_rendered_is_refused(api: Api) -> None:
    regex = {"prompt": "a", "structured_outputs": {"regex": "a"}}
    assert error(api.post("/v1/completions/render", regex), 400)["param"] == "structured_outputs"
    assert error(api.post("/v1/completions/render", {"prompt": 1}), 400)["param"] == "prompt"


def test_posts_without_a_body_pass_the_gate(api: Api) -> None:
    """Trainers send neither a body nor a Content-Type."""
    assert api.post("/reset_prefix_cache").json() == {"reset": True}
    assert "content-type" not in httpx.Request("POST", "http://server").headers
    with_key = Api(FakeLLM(), ServerSettings(api_keys=("k",)))
    assert with_key.post("/reset_prefix_cache", headers={"Authorization": "Bearer k"}).status_code == 200
