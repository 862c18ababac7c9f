"""/v1/embeddings, /pooling, /rerank and /score over the fake engine, whose numbers are functions of the tokens."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Api, error, running

from headrace.core.request import Request
from headrace.errors import EngineError
from headrace.frontend.pairs import INSTRUCTION
from headrace.frontend.pooling import PoolingInputs
from headrace.server.settings import ServerSettings
from headrace.sources.pooling import EmbeddingConfig, PoolingConfig, ScoringConfig

PROMPTS = {"query": "Instruct: Search\nQuery:", "document": "text: "}
EMBEDDER = EmbeddingConfig(prompts=PROMPTS, dimensions=range(2, 5), described=True)
RERANKER = ScoringConfig(head="tokens", template="qwen3-reranker", token_ids=(7, 8))


def numbers(request: Request) -> list[float]:
    """Computes logits of a pair from its document, and a vector of a text. ``!`` breaks a prompt."""
    tokens = request.prompt_token_ids
    if ord("!") in tokens:
        raise EngineError("the model computed an embedding or a score that is not finite")
    if request.pooling is not None and request.pooling.head == "tokens":
        return [tokens.count(ord("*")) / 2, 0.5]
    return [float(len(tokens)), 1.0, 2.0, 3.0]


def served(**config: Any) -> FakeLLM:
    llm = FakeLLM()
    llm.pool = numbers
    llm.pooling = PoolingInputs(llm.inputs, PoolingConfig(**config))
    return llm


@pytest.fixture
def api() -> Api:
    return Api(served(embedding=EMBEDDER, scoring=RERANKER))


def unit(*values: float) -> list[float]:
    return [value / math.hypot(*values) for value in values]


def sent(api: Api) -> list[bytes]:
    """The prompts of the engine's requests, without <bos>."""
    return [bytes(token for token in request.prompt_token_ids if token < 256) for request in api.llm.seen]


def test_embeddings(api: Api) -> None:
    answer = api.post("/v1/embeddings", {"model": "fake-model", "input": ["ab", "c"], "user": "me"})
    assert answer.status_code == 200
    body = answer.json()
    assert (body["object"], body["model"], body["id"][:5]) == ("list", "fake-model", "embd-")
    assert [(entry["object"], entry["index"]) for entry in body["data"]] == [("embedding", 0), ("embedding", 1)]
    assert body["data"][0]["embedding"] == pytest.approx(unit(3, 1, 2, 3))
    assert body["data"][1]["embedding"] == pytest.approx(unit(2, 1, 2, 3))
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}
    assert [request.session for request in api.llm.seen] == ["me", "me"]


@pytest.mark.parametrize(
    ("given", "count"),
    [("ab", 1), ([97, 98], 1), ([[97], [98, 99]], 2), (["a"] * 60, 60)],
    ids=["text", "ids", "several", "many"],
)
def test_inputs(api: Api, given: Any, count: int) -> None:
    data = api.post("/v1/embeddings", {"input": given}).json()["data"]
    assert [entry["index"] for entry in data] == list(range(count))
    assert all(len(entry["embedding"]) == 4 for entry in data)


def test_base64_and_dimensions(api: Api) -> None:
    answer = api.post("/v1/embeddings", {"input": "ab", "encoding_format": "base64", "dimensions": 3}).json()
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), dtype="<f4")
    assert vector.tolist() == pytest.approx(unit(3, 1, 2))
    assert api.post("/v1/embeddings", {"input": "ab", "normalize": False}).json()["data"][0]["embedding"] == [3, 1, 2, 3]


def test_prompts_go_before_texts(api: Api) -> None:
    for fields in (
        {"input_type": "query"},
        {"prompt_name": "document"},
        {"instruction": "Find"},
        {"add_special_tokens": False},
    ):
        api.post("/v1/embeddings", {"input": "ab", **fields})
    assert sent(api) == [b"Instruct: Search\nQuery:ab", b"text: ab", b"Instruct: Find\nQuery:ab", b"ab"]


def test_pooling_gives_the_numbers_as_they_are(api: Api) -> None:
    body = api.post("/pooling", {"input": "ab"}).json()
    assert body["data"] == [{"index": 0, "object": "pooling", "data": [3, 1, 2, 3]}]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(api: Api, path: str) -> None:
    body = api.post(path, {"query": "q", "documents": ["*", {"text": "***"}, "**"], "top_n": 2}).json()
    assert [(entry["index"], entry["document"]) for entry in body["results"]] == [(1, {"text": "***"}), (2, {"text": "**"})]
    assert body["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-1.0)))
    assert body["usage"]["total_tokens"] == sum(len(request.prompt_token_ids) for request in api.llm.seen)
    assert f"<Instruct>: {INSTRUCTION}\n<Query>: q\n<Document>: ***<|im_end|>".encode() in sent(api)[1]
    plain = api.post(path, {"query": "q", "documents": ["*"], "return_documents": False, "instruction": "Find"}).json()
    assert plain["results"][0].keys() == {"index", "relevance_score"}
    assert b"<Instruct>: Find\n" in sent(api)[-1]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(api: Api, path: str) -> None:
    one = api.post(path, {"text_1": "q", "text_2": ["*", "**"]}).json()
    assert one["object"] == "list" and [entry["object"] for entry in one["data"]] == ["score", "score"]
    pairs = api.post(path, {"queries": ["q", {"text": "r"}], "documents": ["*", "**"]}).json()
    assert [entry["score"] for entry in one["data"]] == [entry["score"] for entry in pairs["data"]]
    assert one["data"][0]["score"] == pytest.approx(0.5)
    assert len(api.post(path, {"text_1": "q", "text_2": "d"}).json()["data"]) == 1


def test_an_embedder_scores_by_similarity() -> None:
    api = Api(served(embedding=EMBEDDER))
    body = api.post("/rerank", {"query": "q", "documents": ["ab", "ab", "c" * 40]}).json()
    assert len(api.llm.seen) == 3  # Equal texts are computed once.
    assert [request.prompt_token_ids[1:3] for request in api.llm.seen] == [[*b"In"], [*b"te"], [*b"te"]]
    assert sorted(entry["index"] for entry in body["results"]) == [0, 1, 2]


def test_one_result_that_is_not_finite_is_its_own_error(api: Api) -> None:
    data = api.post("/v1/embeddings", {"input": ["a", "!", "b"]}).json()["data"]
    assert [entry["embedding"] is None for entry in data] == [False, True, False]
    assert data[1]["error"]["code"] == "engine_error" and "not finite" in data[1]["error"]["message"]
    results = api.post("/rerank", {"query": "q", "documents": ["!", "*"]}).json()["results"]
    assert [(entry["index"], entry["relevance_score"] is None) for entry in results] == [(1, False), (0, True)]
    assert "error" in api.post("/score", {"text_1": "q", "text_2": ["!", "*"]}).json()["data"][0]
    alone = api.post("/v1/embeddings", {"input": "!"})
    assert alone.status_code == 500 and "not finite" in alone.json()["error"]["message"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ["a", 1]}, "input[1]"),
    ("/v1/embeddings", {"input": ["a", ""] * 129}, "input"),
    ("/v1/embeddings", {"input": [[97], []]}, "input[1]"),
    ("/v1/embeddings", {"input": ["a", "b" * 600]}, "input[1]"),
    ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "input_type": "passage"}, "input_type"),
    ("/v1/embeddings", {"input": "a", "prompt_name": "passage"}, "prompt_name"),
    ("/v1/embeddings", {"input": "a", "instruction": "b", "prompt_name": "query"}, "prompt_name"),
    ("/v1/embeddings", {"input": [97], "instruction": "b"}, "instruction"),
    ("/v1/embeddings", {"input": "a", "dimension": 3}, "dimension"),
    ("/v1/embeddings", {"input": "a", "cache_salt": ""}, "cache_salt"),
    ("/pooling", {"input": "a", "dimensions": 3}, "dimensions"),
    ("/rerank", {"query": "q"}, "documents"),
    ("/rerank", {"query": "q", "documents": []}, "documents"),
    ("/rerank", {"query": "q", "documents": ["a", {"title": "b"}]}, "documents[1]"),
    ("/rerank", {"query": "q", "documents": ["a"] * 257}, "documents"),
    ("/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
    ("/rerank", {"query": "q" * 400, "documents": ["a"]}, "query"),
    ("/score", {"text_2": "a"}, "text_1"),
    ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "queries"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
    ("/score", {"text_1": "a", "text_2": 3}, "text_2"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_errors_name_the_field(api: Api, path: str, body: dict[str, Any], param: str) -> None:
    answer = api.post(path, body)
    assert answer.status_code == 400
    assert error(answer)["param"] == param
    assert not api.llm.seen


def test_a_model_that_serves_something_else(api: Api) -> None:
    other = Api(served(embedding="its files say so", scoring="its files say so"))
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "q", "documents": ["a"]})):
        answer = other.post(path, body)
        assert answer.status_code == 400 and error(answer)["code"] == "unsupported_task"
        assert "its files say so" in error(answer)["message"]
    assert api.post("/v1/embeddings", {"input": "a", "model": "other"}).status_code == 404


def test_the_limits_of_other_routes_hold(api: Api) -> None:
    few = Api(api.llm, ServerSettings(max_prompts=2))
    assert error(few.post("/v1/embeddings", {"input": ["a"] * 3}))["message"].endswith("(max_prompts)")
    api.llm.max_queue = 2
    full = api.post("/v1/embeddings", {"input": ["a"] * 3})
    assert full.status_code == 429 and "Retry-After" in full.headers
    assert not api.llm.running


def test_the_openai_client() -> None:
    with running(served(embedding=EMBEDDER)) as server:
        answer = server.openai().embeddings.create(model="fake-model", input=["ab", "c"], dimensions=2)
        assert answer.data[0].embedding == pytest.approx(unit(3, 1)) and answer.usage.total_tokens == 5
        plain = server.openai().embeddings.create(model="fake-model", input="ab", encoding_format="float")
        assert plain.data[0].embedding == pytest.approx(unit(3, 1, 2, 3))
        broken = server.openai().embeddings.create(model="fake-model", input=["ab", "!"])
        assert broken.data[1].embedding is None
