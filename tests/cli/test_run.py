"""``headrace run`` over an engine that needs no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.cli.options import checked_fields
from headrace.cli.prompts import parse_lines
from headrace.errors import ConfigError, RequestError
from headrace.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.sampling_params import SamplingParams


class FakeLLM:
    """Answers with the prompt's length, the longer ones first; refuses token 666."""

    made: list[FakeLLM] = []

    def __init__(self, args: Any, console: Any, *, report: bool, spawned: Any) -> None:
        self.args, self.closed, self.params, self.most, self.now = args, False, [], 0, 0
        self.info = SimpleNamespace(max_num_seqs=2)
        self.inputs = SimpleNamespace(
            default_sampling=SamplingParams(temperature=0.5, top_k=7),
            chat_prompt=lambda messages: {"prompt_token_ids": [len(message["content"]) for message in messages]},
        )
        FakeLLM.made.append(self)

    async def start(self) -> None:
        if self.args.model == "missing":
            raise ConfigError("there is no file or directory missing", "model")

    async def close(self) -> None:
        self.closed = True

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        self.params.append(params)
        tokens = [ord(c) for c in prompt["prompt"]] if "prompt" in prompt else prompt["prompt_token_ids"]
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02 / len(tokens))
        self.now -= 1
        if 666 in tokens:
            raise RequestError("token id 666 is not in the vocabulary", "prompt")
        logprobs = [{5: Logprob(-0.5, 1, "x")}] if params.logprobs else None
        sample = CompletionOutput(index=0, text=f"{len(tokens)} tokens", token_ids=[5], finish_reason="stop", logprobs=logprobs)
        output = RequestOutput(request_id=request_id, prompt=None, prompt_token_ids=tokens, outputs=[sample], finished=True)
        yield RequestOutput(request_id=request_id, prompt=None, prompt_token_ids=tokens, outputs=[CompletionOutput(index=0)])
        yield output


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    import headrace.cli.announce
    import headrace.cli.run

    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(headrace.cli.announce, "AnnouncedLLM", FakeLLM)
    monkeypatch.setattr(headrace.cli.run, "spawn", lambda origin: None)


def invoke(*words: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, ["run", *words], input=input)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_arguments() -> None:
    result = invoke("ab", "abcd", "--max-tokens", "3", "--stop", "x", "--stop", "y")
    assert result.exit_code == 0, result.output
    assert [record["outputs"][0]["text"] for record in records(result.stdout)] == ["2 tokens", "4 tokens"]
    (llm,) = FakeLLM.made
    assert llm.closed
    assert llm.params[0] == SamplingParams(temperature=0.5, top_k=7, max_tokens=3, stop=["x", "y"])


def test_chat_arguments_go_through_the_template() -> None:
    result = invoke("--chat", "hello")
    assert records(result.stdout)[0]["num_prompt_tokens"] == 1


LINES = [
    {"prompt": "abc", "id": "first", "top_k": 1},
    {"messages": [{"role": "user", "content": "hello"}], "temperature": 0},
    {"prompt_token_ids": [1, 2], "logprobs": 1},
    {"prompt_token_ids": [666]},
    {"prompt": "abc", "top_k": "many", "id": 5},
    {"prompt": "abc", "topk": 1},
    {"prompt": "abc", "messages": []},
    {"text": "abc"},
]


def test_a_file_with_bad_lines(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in LINES) + "\n\nnot json\n[1]\n")
    result = invoke("--input", str(source), "--output", str(target), "--top-k", "3")
    assert result.exit_code == 1
    found = records(target.read_text())
    assert [record["line"] for record in found] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11]
    assert [("error" in record) for record in found] == [False] * 3 + [True] * 7
    assert found[0]["id"] == "first" and found[4]["id"] == 5
    assert found[2]["outputs"][0]["logprobs"] == [{"5": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}]
    assert [record["error"]["param"] for record in found[3:6]] == ["prompt", "top_k", "topk"]
    assert "error: line 4: prompt: token id 666" in result.stderr and "error: line 10: not JSON" in result.stderr
    by_top_k = sorted((params.top_k, params.temperature) for params in FakeLLM.made[0].params)
    assert by_top_k == [(1, 0.5), (3, 0.0), (3, 0.5), (3, 0.5)]


def test_results_come_in_order_and_some_run_at_once() -> None:
    lines = "\n".join(json.dumps({"prompt": "x" * (1 + number % 7)}) for number in range(60))
    result = invoke("--input", "-", input=lines)
    assert [record["line"] for record in records(result.stdout)] == list(range(1, 61))
    assert 2 <= FakeLLM.made[0].most <= 8


def test_strict_stops_at_the_first_bad_line() -> None:
    lines = "\n".join(json.dumps(line) for line in LINES)
    result = invoke("--input", "-", "--strict", input=lines)
    assert result.exit_code == 2
    assert [record["line"] for record in records(result.stdout)] == [1, 2, 3, 4]
    assert FakeLLM.made[0].closed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--input"),
        (["a", "--input", "x"], "--input"),
        (["--input", "/nowhere/x"], "there is no file"),
        (["--chat", "--input", "-"], "--chat"),
        (["a", "--output", "/nowhere/x"], "cannot write"),
        (["a", "--temperature", "-1"], "temperature"),
        (["a", "--model", "missing"], "there is no file or directory missing"),
    ],
)
def test_what_cannot_run(words: list[str], said: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert said in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_sampling_layers() -> None:
    base = SamplingParams(temperature=0.5, top_k=7, top_p=0.9)
    assert base.replace({"top_k": 1} | {"top_p": 0.5}) == SamplingParams(temperature=0.5, top_k=1, top_p=0.5)
    assert checked_fields({"logit_bias": {"7": 2}}) == {"logit_bias": {7: 2.0}}
    with pytest.raises(RequestError) as caught:
        checked_fields({"stop": [1]})
    assert caught.value.param == "stop"


def test_lines_are_numbered_as_in_the_file() -> None:
    found = list(parse_lines(["", '{"prompt": "a"}', "  ", "[" * 100_000]))
    assert found[0].error is None and found[0].number == 2
    assert found[1].error is not None and found[1].number == 4
