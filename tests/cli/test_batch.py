"""OpenAI's batch lines in ``headrace run``, over the server's fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server.fakes import FakeLLM
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.cli.results import ResultFile
from headrace.errors import EngineDeadError

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 4, "seed": 7, "logprobs": True, "top_logprobs": 1},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 4, "logprobs": 1, "user": None},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
}


class BatchLLM(FakeLLM):
    made: list[BatchLLM] = []
    dies = 0
    """Times that the engine is dead when a request comes."""
    seconds = 0.0
    """Seconds of a step."""

    def __init__(self, args: Any, console: Any, **more: Any) -> None:
        super().__init__(step=BatchLLM.seconds)
        BatchLLM.made.append(self)

    async def add(self, *requests: Any) -> Any:
        if BatchLLM.dies:
            BatchLLM.dies -= 1
            raise EngineDeadError("the engine died")
        return await super().add(*requests)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    import headrace.cli.run
    import headrace.cli.startup

    monkeypatch.setattr(BatchLLM, "made", [])
    monkeypatch.setattr(headrace.cli.startup, "AnnouncedLLM", BatchLLM)
    monkeypatch.setattr(headrace.cli.run, "spawn_checked", lambda args, sampling: None)
    monkeypatch.setattr(headrace.cli.run, "RESTART_POLL_SECONDS", 0.001)


def line(identity: Any, url: str = "/v1/messages", body: Any = None, **more: Any) -> dict[str, Any]:
    return {"custom_id": identity, "method": "POST", "url": url, "body": BODIES.get(url) if body is None else body, **more}


def run(folder: Path, lines: list[dict[str, Any]], *words: str) -> tuple[Result, list[dict[str, Any]]]:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in lines))
    result = CliRunner().invoke(app, ["run", "-i", str(source), "-o", str(target), *words])
    return result, written(target)


def written(file: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []


def test_each_url_is_answered_in_the_shape_of_its_endpoint(tmp_path: Path) -> None:
    result, records = run(tmp_path, [line(url, url) for url in BODIES])
    assert result.exit_code == 0, result.output
    assert [record["custom_id"] for record in records] == list(BODIES)
    for record in records:
        assert set(record) == {"id", "custom_id", "response", "error"} and record["id"].startswith("batch_req_")
        assert record["error"] is None and record["response"]["status_code"] == 200 and record["response"]["request_id"]
        assert record["response"]["body"]["id"] == record["response"]["request_id"]
    chat, text, response, message = (record["response"]["body"] for record in records)
    assert chat["choices"][0]["message"]["content"] == "Hell" and len(chat["choices"][0]["logprobs"]["content"]) == 4
    assert [choice["text"] for choice in text["choices"]] == ["Hell", "Hell"]
    assert response["output"][0]["content"][0]["text"] == "Hell" and response["store"] is False
    assert message["content"] == [{"type": "text", "text": "Hell"}]


BAD = [
    line("bad", body={"messages": HI}),
    line("unknown", "/v1/chat/completions", {"messages": HI, "temprature": 1}),
    line("stream", "/v1/chat/completions", {"messages": HI, "stream": True}),
    line("url", "/v1/embeddings", {}),
    line("body", body=7),
    line("more", model="x"),
    line(7),
]


def test_failures_stand_in_place_or_go_to_their_file(tmp_path: Path) -> None:
    lines = [line("first"), *BAD, line("last")]
    result, records = run(tmp_path, lines)
    assert result.exit_code == 1
    assert [record.get("custom_id") for record in records[:7]] == ["first", "bad", "unknown", "stream", "url", "body", "more"]
    bad, unknown, stream, url = records[1:5]
    assert bad["response"]["status_code"] == 400 and bad["response"]["body"]["type"] == "error"
    assert unknown["response"]["body"]["error"]["param"] == "temprature"
    assert stream["response"]["body"]["error"]["param"] == "stream"
    assert url["response"] is None and "/v1/responses" in url["error"]["message"]
    assert "line 3: 400: temprature is not a parameter" in result.stderr
    errors = tmp_path / "errors.jsonl"
    _, good = run(tmp_path, lines, "--error-file", str(errors))
    assert [record["custom_id"] for record in good] == ["first", "last"]
    assert len(written(errors)) == len(BAD)


def test_a_line_that_no_body_could_be_costs_one_line(tmp_path: Path) -> None:
    texts = {"a": "\ud800", "b": float("nan")}
    lines = [line(name, "/v1/responses", {"input": "Hi", "metadata": {"a": text}}) for name, text in texts.items()]
    result, records = run(tmp_path, [*lines, line("c")])
    assert result.exit_code == 1 and result.stderr.count("not JSON") == 2
    assert [record.get("custom_id") for record in records] == [None, None, "c"]


def test_resume_skips_what_has_an_answer(tmp_path: Path) -> None:
    run(tmp_path, [line("a"), line("b", body={"messages": HI})])
    result, records = run(tmp_path, [line("c"), line("b"), line("a")], "--resume")
    assert result.exit_code == 0
    assert [record["custom_id"] for record in records] == ["a", "c", "b"]
    assert len(BatchLLM.made[-1].seen) == 2


def test_duplicates_and_sampling_options_are_refused_before_anything_runs(tmp_path: Path) -> None:
    for lines, words in (([line("a"), line("b"), line("a")], ()), ([line("a")], ("--temperature", "1"))):
        result, records = run(tmp_path, lines, *words)
        assert result.exit_code == 2 and not records and not BatchLLM.made
    assert "custom_id 'a'" in run(tmp_path, [line("a"), line("a")])[0].stderr
    text = "".join(json.dumps(one) + "\n" for one in [line("a"), line("a")])
    result = CliRunner().invoke(app, ["run", "-i", "-"], input=text)
    assert [json.loads(one)["response"] is None for one in result.stdout.splitlines()] == [False, True]


def test_unordered_results_come_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchLLM, "seconds", 0.02)
    lines = [line(str(number), body={"messages": HI, "max_tokens": most}) for number, most in enumerate([100, 2])]
    _, records = run(tmp_path, lines, "--unordered")
    assert [record["custom_id"] for record in records] == ["1", "0"]
    _, records = run(tmp_path, lines)
    assert [record["custom_id"] for record in records] == ["0", "1"]


@pytest.mark.parametrize("words", [(), ("--unordered",)])
def test_lines_are_read_only_as_far_ahead_as_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Memory does not grow with the file, beside the digests of its ids."""
    import headrace.cli.run

    ahead = most = 0
    parse, write = headrace.cli.run.parse_lines, ResultFile.write

    def parsed(lines: Iterable[str]) -> Iterator[Any]:
        nonlocal ahead
        for job in parse(lines):
            ahead += 1
            yield job

    def noted(self: ResultFile, record: Any) -> None:
        nonlocal ahead, most
        most, ahead = max(most, ahead), ahead - 1
        write(self, record)

    monkeypatch.setattr(headrace.cli.run, "parse_lines", parsed)
    monkeypatch.setattr(ResultFile, "write", noted)
    monkeypatch.setattr(headrace.cli.run, "AHEAD", 1)
    _, records = run(tmp_path, [line(str(number)) for number in range(200)], *words)
    assert len(records) == 200 and ahead == 0 and 1 < most <= FakeLLM().info.max_num_seqs + 1


def test_an_engine_that_dies_costs_a_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchLLM, "dies", 2)
    result, (record,) = run(tmp_path, [line("a")])
    assert result.exit_code == 0 and record["response"]["status_code"] == 200
    monkeypatch.setattr(BatchLLM, "dies", 3)
    result, (record,) = run(tmp_path, [line("a")])
    assert result.exit_code == 1 and record["error"]["message"] == "the engine died"
