"""Ollama's API over HTTP, streaming and not, and as its own client sees it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import hub
from support.media import picture
from support.server.fakes import FakeLLM
from support.server.harness import Api, running
from support.server.media import SeeingLLM, loader
from support.server.scripted import ScriptedLLM, Scripts

from headrace.frontend.pooling import PoolingInputs
from headrace.server.settings import ServerSettings
from headrace.sources.pooling import EmbeddingConfig, PoolingConfig
from headrace.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": "Hi"}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
# The template opens the reasoning that ``think`` asks for.
ANSWER = 'sums\n</think>\n\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def refused(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    message: str = response.json()["error"]
    return message


def test_a_conversation_whole_and_in_lines(scripts: Scripts) -> None:
    body = {"model": "fake-model:latest", "messages": HI, "tools": [ADD], "think": True}
    streamed = lines(scripts(ANSWER).post("/api/chat", body))
    whole = scripts(ANSWER).post("/api/chat", body | {"stream": False}).json()
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    for field in ("content", "thinking"):
        assert "".join(line["message"].get(field, "") for line in streamed) == whole["message"][field]
    assert whole["message"]["thinking"] == "sums" and whole["message"]["content"] == "Let me see."
    (call,) = (call for line in streamed for call in line["message"].get("tool_calls", ()))
    for one in (call, whole["message"]["tool_calls"][0]):
        assert one.pop("id")
        assert one == {"function": {"index": 0, "name": "add", "arguments": {"a": 1}}}
    assert (whole["model"], whole["done_reason"], streamed[-1]["done_reason"]) == ("fake-model:latest", "stop", "stop")
    assert whole["eval_count"] == streamed[-1]["eval_count"] > 10
    assert whole["prompt_eval_count"] > 0


def test_a_history_with_calls_and_results(scripts: Scripts) -> None:
    api = scripts("3")
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    history = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {
            "role": "assistant",
            "content": "",
            "thinking": "sums",
            "tool_calls": [call, {"function": {"name": "now", "arguments": {}}}],
        },
        {"role": "tool", "content": "noon", "tool_name": "now"},
        {"role": "tool", "content": "1", "tool_name": "add"},
    ]
    api.post("/api/chat", {"model": "fake-model", "messages": history, "stream": False})
    prompt = api.llm.tokenizer.decode(api.llm.seen[0].prompt_token_ids, skip_special_tokens=False)
    assert "Be brief." in prompt and "sums" in prompt and prompt.index("noon") < prompt.index("tool\n1")
    message = refused(api.post("/api/chat", {"model": "fake-model", "messages": [*history, {"role": "tool", "content": "2"}]}))
    assert "messages[5] is the result of no call before it" in message
    message = refused(api.post("/api/chat", {"model": "fake-model", "messages": [{"role": "robot", "content": ""}]}))
    assert "messages[0].role" in message


def test_generate(scripts: Scripts) -> None:
    api = scripts("The mill turns.")
    fields = {"model": "fake-model", "prompt": "Hi", "stream": False}
    whole = api.post("/api/generate", fields | {"system": "Be brief."}).json()
    assert (whole["response"], whole["done_reason"]) == ("The mill turns.", "stop")
    assert (
        "".join(line["response"] for line in lines(api.post("/api/generate", fields | {"stream": True}))) == "The mill turns."
    )
    raw = api.post("/api/generate", fields | {"raw": True, "options": {"num_predict": 4}}).json()
    assert (raw["response"], raw["done_reason"], raw["eval_count"]) == ("The ", "length", 4)
    prompts = [api.llm.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) for request in api.llm.seen]
    assert "system\nBe brief." in prompts[0] and prompts[0].endswith("assistant\n")
    assert prompts[2].endswith("Hi") and "assistant" not in prompts[2]
    assert "context may only be empty" in refused(api.post("/api/generate", fields | {"context": [1]}))
    assert "system needs the chat template" in refused(api.post("/api/generate", fields | {"raw": True, "system": "x"}))


def test_options_become_sampling_parameters(api: Api) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 5, "stop": ["x"], "repeat_penalty": 1.5}
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "num_predict": 9, "num_ctx": 512, "repeat_last_n": -1}
    options |= {"typical_p": 1.0, "mirostat": 0}
    whole = api.post(
        "/api/chat", {"model": "fake-model", "messages": HI, "stream": False, "options": options, "keep_alive": "5m"}
    )
    assert whole.json()["eval_count"] == 9 and whole.json()["done_reason"] == "length"
    assert whole.json()["total_duration"] >= whole.json()["eval_duration"] > 0
    sampling = api.llm.seen[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.5, 0.1)
    assert (sampling.seed, sampling.stop, sampling.repetition_penalty) == (5, ["x"], 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert api.post("/api/chat", {"model": "fake-model", "messages": HI, "options": {"num_predict": -1, "seed": -1}}).is_success
    assert api.llm.seen[1].max_tokens > 100 and api.llm.seen[1].sampling.seed is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"options": {"temperature": -1}}, "options.temperature must be"),
        (
            {"options": {"typical_p": 0.5}},
            "options.typical_p is not supported: there is no such filter (it may be left out, or be 1)",
        ),
        ({"options": {"num_gpu": 1}}, "options.num_gpu is not supported: it is decided when the server starts"),
        ({"options": {"num_ctx": 4096}}, "options.num_ctx 4096 is above the context of 512 tokens"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n is not supported"),
        ({"options": {"num_predict": 0}}, "options.num_predict must be at least 1"),
        ({"options": {"top_kk": 1}}, "did you mean top_k?"),
        ({"options": []}, "options"),
        ({"format": "yaml"}, "format"),
        ({"format": {"type": "nonsense"}}, "format"),
        ({"think": True}, "think is not supported: this model does not reason"),
        ({"keep_alive": "soon"}, "keep_alive must be a duration such as 5m"),
        ({"truncate": True}, "truncate may only be false: no part of a prompt is cut off"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"nonsense": 1}, "nonsense"),
        ({"messages": [], "keep_alive": 0}, "keeps its model loaded"),
        ({"model": "other"}, "the model 'other' is not served here"),
    ],
)
def test_refusals_name_the_field(api: Api, fields: dict[str, Any], words: str) -> None:
    response = api.post("/api/chat", {"model": "fake-model", "messages": HI, **fields})
    assert words in refused(response, 404 if "model" in fields else 400)


def test_format_holds_the_answer(scripts: Scripts) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    api = scripts('{"n": 1}')
    for given in (schema, "json"):
        whole = api.post("/api/chat", {"model": "fake-model", "messages": HI, "format": given, "stream": False}).json()
        assert json.loads(whole["message"]["content"]) == {"n": 1}
    first, second = (request.constraint for request in api.llm.seen)
    assert first is not None and second is not None and first != second


def test_logprobs(api: Api) -> None:
    body = {"model": "fake-model", "messages": HI, "logprobs": True, "top_logprobs": 2}
    whole = api.post("/api/chat", body | {"stream": False}).json()
    streamed = [entry for line in lines(api.post("/api/chat", body)) for entry in line.get("logprobs", ())]
    assert whole["logprobs"] == streamed and len(streamed) == whole["eval_count"]
    assert len(streamed[0]["top_logprobs"]) == 2


def test_pictures() -> None:
    media = loader()
    shown, api = base64.b64encode(picture(32, 24)).decode(), Api(SeeingLLM(media))
    for path, fields in (
        ("/api/chat", {"messages": [{"role": "user", "content": "What?", "images": [shown]}]}),
        ("/api/generate", {"prompt": "What?", "images": [shown]}),
    ):
        response = api.post(path, {"model": "fake-model", "stream": False, **fields})
        assert response.status_code == 200, response.text
    assert len(api.llm.pictures) == 2
    broken = {"model": "fake-model", "messages": [{"role": "user", "content": "What?", "images": ["%%"]}]}
    assert "messages[0].images[0]" in refused(api.post("/api/chat", broken))
    media.close()


def test_what_is_served(scripts: Scripts) -> None:
    api = scripts("x")
    (model,) = api.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "fake-model" and len(model["digest"]) == 64
    (loaded,) = api.get("/api/ps").json()["models"]
    assert loaded["context_length"] == 512
    shown = api.post("/api/show", {"model": "fake-model"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"] and "enable_thinking" in shown["template"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 512 and shown["details"]["family"] == family
    assert "not served here" in refused(api.post("/api/show", {"name": "other"}), 404)
    assert "model" in refused(api.post("/api/show", {}))
    for path, field in (("/api/chat", "message"), ("/api/generate", "response")):
        loaded = api.post(path, {"model": "fake-model", "keep_alive": -1}).json()
        assert (loaded["done"], loaded["done_reason"]) == (True, "load") and field in loaded


def test_embeddings() -> None:
    llm = FakeLLM()
    llm.pooling = PoolingInputs(llm.inputs, PoolingConfig(embedding=EmbeddingConfig(dimensions=range(2, 5))))
    llm.pool = lambda request: [float(len(request.prompt_token_ids)), 0.0, 4.0, 0.0]
    api = Api(llm)
    body = {"model": "fake-model:latest", "input": ["ab", "c"], "keep_alive": "5m", "options": {"num_ctx": 512, "top_k": None}}
    answer = api.post("/api/embed", body).json()
    assert answer["embeddings"] == [pytest.approx([0.6, 0, 0.8, 0]), pytest.approx([2 / 20**0.5, 0, 4 / 20**0.5, 0])]
    assert (answer["model"], answer["prompt_eval_count"]) == ("fake-model:latest", 5) and answer["total_duration"] > 0
    (cut,) = api.post("/api/embed", {"model": "fake-model", "input": "ab", "dimensions": 2}).json()["embeddings"]
    assert cut == [1.0, 0.0]
    assert api.post("/api/embed", {"model": "fake-model", "input": []}).json()["embeddings"] == []
    older = api.post("/api/embeddings", {"model": "fake-model", "prompt": "ab"}).json()
    assert older == {"embedding": [3.0, 0.0, 4.0, 0.0]}
    for field, value in (("options", {"top_k": 1}), ("truncate", True), ("input", [1]), ("keep_alive", "soon")):
        assert field in refused(api.post("/api/embed", {"model": "fake-model", "input": "x", field: value}))
    assert "not served here" in refused(api.post("/api/embed", {"model": "other", "input": "x"}), 404)


def test_a_model_is_pulled_where_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "config.json").write_text("{}")
    (tmp_path / "repo" / "model.safetensors").write_bytes(b"x" * 1000)
    allowed = Api(FakeLLM(), ServerSettings(allow_pull=True))
    with hub.stand_in({"some/model": tmp_path / "repo"}) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        first, *progress, last = lines(allowed.post("/api/pull", {"model": "some/model"}))
        assert (first["status"], last) == ("pulling manifest", {"status": "success"})
        assert progress[-1] == {"status": "pulling some/model", "completed": 1002}
    (weights,) = (tmp_path / "cache").rglob("model.safetensors")
    assert weights.read_bytes() == b"x" * 1000


def test_what_is_not_pulled(tmp_path: Path) -> None:
    allowed = Api(FakeLLM(), ServerSettings(allow_pull=True))
    for name in (str(tmp_path), "../etc", "/etc/passwd", "~/x", "a/b/c", "headrace"):
        assert "a model of the hub" in refused(allowed.post("/api/pull", {"model": name}))
    assert "insecure" in refused(allowed.post("/api/pull", {"model": "a/b", "insecure": True}))
    assert "--allow-pull" in refused(Api(FakeLLM()).post("/api/pull", {"model": "a/b"}), 403)
    keys = Api(FakeLLM(), ServerSettings(allow_pull=True, api_keys=("k",), admin_keys=("a",)))
    as_user = keys.post("/api/pull", {"model": "/x"}, headers={"Authorization": "Bearer k"})
    assert "--admin-key" in refused(as_user, 403)
    refused(keys.post("/api/pull", {"model": "/x"}, headers={"Authorization": "Bearer a"}))
    assert "headrace remove" in refused(allowed.request("DELETE", "/api/delete", json={"model": "x"}), 403)
    assert "uploads nothing" in refused(allowed.post("/api/push", {"model": "x"}), 403)


def test_an_error_in_the_middle_is_the_last_line() -> None:
    llm = FakeLLM(script=lambda request, index: [72, RuntimeError("broken")])
    *_, last = lines(Api(llm).post("/api/chat", {"model": "fake-model", "messages": HI}))
    assert set(last) == {"error"}


def test_keys() -> None:
    api = Api(FakeLLM(), ServerSettings(api_keys=("secret",)))
    assert "needs an API key" in refused(api.get("/api/tags"), 401)
    assert api.get("/api/version", headers={"Authorization": "Bearer secret"}).json()["version"].count(".") == 2


def test_its_own_client(made: Tokenizer) -> None:
    ollama = pytest.importorskip("ollama", reason="Ollama's client is not installed: pip install 'headrace[dev]'")
    with running(ScriptedLLM(made, [ANSWER, ANSWER, "The mill.", '{"n": 1}'])) as server:
        client = ollama.Client(server.url, timeout=30)

        def add(a: int) -> int:
            """Adds one.

            Args:
                a: The number.
            """
            return a + 1

        answer = client.chat("fake-model", messages=HI, tools=[add], think=True, options={"temperature": 0}, keep_alive="5m")
        assert answer.message.thinking == "sums"
        assert answer.message.tool_calls[0].function.arguments == {"a": 1}
        pieces = list(client.chat("fake-model", messages=HI, tools=[add], think=True, stream=True))
        assert "".join(piece.message.content or "" for piece in pieces) == answer.message.content
        again = [*HI, answer.message, {"role": "tool", "content": "2", "tool_name": "add"}]
        assert client.chat("fake-model", messages=again).message.content == "The mill."
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
        assert client.generate("fake-model", "Hi", format=schema).response == '{"n": 1}'
        assert [model.model for model in client.list().models] == ["fake-model"]
        assert [model.model for model in client.ps().models] == ["fake-model"]
        assert "tools" in client.show("fake-model").capabilities
        with pytest.raises(ollama.ResponseError, match="--allow-pull"):
            client.pull("some/model")
        with pytest.raises(ollama.ResponseError, match="not served here") as error:
            client.chat("other", messages=HI)
        assert error.value.status_code == 404
    with running(FakeLLM()) as server:
        client = ollama.Client(server.url, timeout=30)
        assert [len(numbers) for numbers in client.embed("fake-model", ["Hi", "you"]).embeddings] == [4, 4]
        assert len(client.embeddings("fake-model", "Hi").embedding) == 4
