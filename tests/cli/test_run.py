"""``headrace run`` over an engine that needs no model."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.cli.options import checked_fields
from headrace.cli.prompts import parse_lines
from headrace.cli.results import ResultFile
from headrace.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from headrace.outputs import CompletionOutput, ExpertLayers, Logprob, RequestOutput, RoutedExperts
from headrace.processes.supervisor import Health
from headrace.sampling_params import SamplingParams


class FakeLLM:
    """Answers with the prompt's length, the longer ones first; refuses token 666."""

    made: list[FakeLLM] = []
    first_refused = 0

    def __init__(self, args: Any, console: Any, *, spawned: Any) -> None:
        self.args, self.closed, self.params, self.most, self.now = args, False, [], 0, 0
        self.info = SimpleNamespace(max_num_seqs=2)
        self.inputs = SimpleNamespace(
            default_sampling=SamplingParams(temperature=0.5, top_k=7),
            loaded_chat_prompt=self._chat_prompt,
        )
        self.prompts: list[Any] = []
        self.defaults: list[int | None] = []
        """Limits of outputs whose parameters have none."""
        self.asked: list[Any] = []
        """Each conversation, with the options of the processor."""
        self.dies: set[int] = set()
        """Calls of ``generate``, counted from 1, in which the engine dies; it is back after a moment."""
        self.busy = FakeLLM.first_refused
        """Conversations that are refused for want of room, and tried again."""
        self.gone = False
        """It is not back."""
        self._down = 0
        self._calls = 0
        FakeLLM.made.append(self)

    @contextlib.asynccontextmanager
    async def _chat_prompt(
        self, messages: list[dict[str, Any]], mm_processor_kwargs: Any = None
    ) -> AsyncIterator[dict[str, Any]]:
        self.asked.append((messages, mm_processor_kwargs))
        self.busy -= 1
        if self.busy >= 0:
            raise QueueFullError("too many pictures")
        yield {"prompt_token_ids": [len(message["content"]) for message in messages]}

    async def start(self) -> None:
        if self.args.model == "missing":
            raise ConfigError("there is no file or directory missing", "model")

    async def close(self) -> None:
        self.closed = True

    def health(self) -> Health:
        self._down = max(0, self._down - 1)
        ok = not (self._down or self.gone)
        return Health(ok, "" if ok else "the engine died", final=self.gone)

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, *, default_max_tokens: int | None
    ) -> AsyncIterator[RequestOutput]:
        self._calls += 1
        self.defaults.append(default_max_tokens)
        if self._down or self.gone:
            raise EngineDeadError("the engine died")
        if self._calls in self.dies:
            self._down = 3
            output = RequestOutput(request_id=request_id, prompt=None, prompt_token_ids=[1], outputs=[])
            output.error, output.engine_died = "the engine died", True
            yield output
            return
        self.params.append(params)
        self.prompts.append(prompt)
        tokens = [ord(c) for c in prompt["prompt"]] if "prompt" in prompt else prompt["prompt_token_ids"]
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02 / len(tokens))
        self.now -= 1
        if 666 in tokens:
            raise RequestError("token id 666 is not in the vocabulary", "prompt")
        logprobs = [{5: Logprob(-0.5, 1, "x")}] if params.logprobs else None
        sample = CompletionOutput(index=0, text=f"{len(tokens)} tokens", token_ids=[5], finish_reason="stop", logprobs=logprobs)
        if params.return_sampling_mask:
            sample.sampling_mask = [[5, 6]]
            sample.routed_experts = RoutedExperts(b"ab", ExpertLayers([1], 2, 1, False))
        output = RequestOutput(request_id=request_id, prompt=None, prompt_token_ids=tokens, outputs=[sample], finished=True)
        yield RequestOutput(request_id=request_id, prompt=None, prompt_token_ids=tokens, outputs=[CompletionOutput(index=0)])
        yield output


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    import headrace.cli.run
    import headrace.cli.startup

    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(headrace.cli.startup, "AnnouncedLLM", FakeLLM)
    monkeypatch.setattr(headrace.cli.run, "spawn_checked", lambda args, sampling: None)
    monkeypatch.setattr(headrace.cli.run, "RESTART_POLL_SECONDS", 0.001)


def invoke(*words: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, ["run", *words], input=input)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_text_is_for_people() -> None:
    one = invoke("ab", "--format", "text")
    assert (one.exit_code, one.stdout) == (0, "2 tokens\n")
    several = invoke("ab", "abcd", "--format", "text")
    assert several.stdout == "[1] 2 tokens\n[2] 4 tokens\n"
    refused = invoke("--format", "text", "--input", "-")
    assert refused.exit_code == 2 and "--format" in refused.stderr


@pytest.mark.parametrize(
    ("again", "shown"),
    [
        (["2", "2 tok", "2 tokens"], "2 tokens\n"),
        (["2", "2 to"], "2 tok\n2 to\n"),
        (["3", "3 tokens"], "2 tok\n3 tokens\n"),
        (None, "2 tok\n"),
    ],
)
def test_text_of_a_prompt_that_is_run_again(monkeypatch: pytest.MonkeyPatch, again: list[str] | None, shown: str) -> None:
    """What a dead engine wrote already is neither repeated nor continued by another text. None: it does not come back."""
    runs = iter([["2", "2 tok"], again or []])

    async def generate(self: FakeLLM, _: Any, params: Any, request_id: str, **__: Any) -> AsyncIterator[RequestOutput]:
        self.gone, texts = again is None, next(runs)
        for text in texts:
            sample = CompletionOutput(index=0, text=text, token_ids=[5])
            ended = text == texts[-1]
            if ended and texts is again:
                sample.finish_reason = "stop"
            died = ended and texts is not again
            error = "the engine died" if died else None
            yield RequestOutput(
                request_id=request_id, prompt=None, prompt_token_ids=[1], outputs=[sample], error=error, engine_died=died
            )

    monkeypatch.setattr(FakeLLM, "generate", generate)
    result = invoke("ab", "--format", "text")
    assert result.stdout == shown and result.exit_code == (0 if again else 1)
    assert ("begins again" in result.stderr) == (shown.count("\n") == 2)


def test_arguments() -> None:
    result = invoke("ab", "abcd", "--max-tokens", "3", "--stop", "x", "--stop", "y")
    assert result.exit_code == 0, result.output
    assert [record["outputs"][0]["text"] for record in records(result.stdout)] == ["2 tokens", "4 tokens"]
    (llm,) = FakeLLM.made
    assert llm.closed
    assert llm.params[0] == SamplingParams(temperature=0.5, top_k=7, max_tokens=3, stop=["x", "y"])


def test_outputs_have_a_limit_where_nobody_sets_one() -> None:
    """``"max_tokens": null`` asks for the rest of the context."""
    lines = [{"prompt": "abc"}, {"prompt": "abc", "max_tokens": 5}, {"prompt": "abc", "max_tokens": None}]
    assert invoke("--input", "-", input="\n".join(map(json.dumps, lines))).exit_code == 0
    assert FakeLLM.made[-1].defaults == [2048, None, None]


def test_chat_arguments_go_through_the_template() -> None:
    result = invoke("--chat", "hello")
    assert records(result.stdout)[0]["num_prompt_tokens"] == 1


def test_chat_arguments_show_pictures(tmp_path: Path) -> None:
    for name in ("a.png", "b.unknown"):
        (tmp_path / name).write_bytes(b"abc")
    result = invoke("--chat", "--image", f"{tmp_path}/a.png", "--image", f"{tmp_path}/b.unknown", "hello", "you")
    assert result.exit_code == 0, result.stderr
    urls = ["data:image/png;base64,YWJj", "data:application/octet-stream;base64,YWJj"]
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    asked = [messages for messages, _ in FakeLLM.made[-1].asked]
    assert asked == [[{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}] for text in ("hello", "you")]


def test_lines_have_options_of_the_processor() -> None:
    options = {"mm_processor_kwargs": {"max_pixels": 99}}
    lines = [LINES[1] | options, LINES[0] | options]
    result = invoke("--input", "-", input="\n".join(map(json.dumps, lines)))
    assert records(result.stdout)[0]["num_prompt_tokens"] == 1
    (llm,) = FakeLLM.made
    assert llm.asked == [(LINES[1]["messages"], options["mm_processor_kwargs"])]
    assert llm.prompts[-1] == {"prompt": "abc", **options}


def test_media_without_room_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "first_refused", 2)
    monkeypatch.setattr("headrace.cli.run.RETRY_SECONDS", 0.001)
    result = invoke("--chat", "hello")
    assert records(result.stdout)[0]["num_prompt_tokens"] == 1
    assert FakeLLM.made[-1].busy < 0


LINES = [
    {"prompt": "abc", "id": "first", "top_k": 1},
    {"messages": [{"role": "user", "content": "hello"}], "temperature": 0},
    {"prompt_token_ids": [1, 2], "logprobs": 1, "return_sampling_mask": True, "return_routed_experts": True},
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
    assert found[2]["outputs"][0]["sampling_mask"] == [[5, 6]]
    experts = {"data": "YWI=", "layers": [1], "num_layers": 2, "top_k": 1, "wide": False, "weighted": False}
    assert found[2]["outputs"][0]["routed_experts"] == experts
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
        (["--image", "a.png", "hello"], "--image"),
        (["--chat", "--image", "missing.png", "hello"], "--image"),
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


# No result is lost


def jsonl(*lines: Any) -> bytes:
    return b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)


def prompts(*names: str) -> bytes:
    return jsonl(*({"id": name, "prompt": name} for name in names))


def ids(file: Path) -> list[Any]:
    return [record.get("id", record["line"]) for record in records(file.read_text(encoding="utf-8"))]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_bytes(prompts("a", "b", "c", "d"))
    return file


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def run(source: Path, target: Path, *words: str) -> Result:
    return invoke("--input", str(source), "--output", str(target), *words)


def partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def test_the_input_cannot_be_the_output(source: Path, target: Path) -> None:
    before = source.read_bytes()
    (source.parent / "symbolic").symlink_to(source)
    (source.parent / "hard").hardlink_to(source)
    partial(target).hardlink_to(source)
    for other in (source, source.parent / "symbolic", source.parent / "hard", source.parent / "." / source.name, target):
        result = run(source, other)
        assert result.exit_code == 2 and "--output" in result.stderr and len(result.stderr.splitlines()) == 1
    assert source.read_bytes() == before and not FakeLLM.made


@pytest.mark.parametrize("option", ["--output", "--error-file"])
def test_a_pipe_without_a_reader_is_refused_at_once(option: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = invoke("abc", option, str(tmp_path / "pipe"))
    assert result.exit_code == 2 and "a pipe that no program reads" in result.stderr and option in result.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pipe", "a pipe, not a file"),
        ("folder", "a directory, not a file"),
        ("prompt.jsonl", "prompts.jsonl?"),
        ("/dev/zero", "a device"),
    ],
)
def test_an_input_that_is_no_file_is_refused_at_once(name: str, said: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "prompts.jsonl").write_text("{}")
    for words in (["--input"], ["--chat", "hello", "--image"]):
        result = invoke(*words, str(tmp_path / name))
        assert result.exit_code == 2 and said in result.stderr and words[-1] in result.stderr


def test_a_line_that_is_too_long_costs_one_line(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.prompts.MAX_BYTES", 100)
    source.write_text("\n".join(json.dumps({"prompt": text}) for text in ("abc", "x" * 1000, "abcd")))
    result = invoke("--input", str(source))
    assert result.exit_code == 1
    assert ["error" in record for record in records(result.stdout)] == [False, True, False]
    assert "at most 100 characters" in json.dumps(records(result.stdout)[1])


def test_resume_refuses_a_file_of_nested_lists(source: Path, target: Path) -> None:
    target.write_text("[" * 200_000 + "\n")
    result = invoke("--input", str(source), "--output", str(target), "--resume")
    assert result.exit_code == 2 and "line 1 of" in result.stderr and "is not a result of a run" in result.stderr


def test_an_earlier_file_stays_until_the_run_has_ended(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target.write_text("yesterday")
    target.chmod(0o600)
    assert run(source, target, "--model", "missing").exit_code == 2
    assert target.read_text() == "yesterday" and not partial(target).exists()
    seen: list[str] = []
    real = FakeLLM.generate

    def generate(self: FakeLLM, *words: Any, **more: Any) -> AsyncIterator[RequestOutput]:
        seen.append(target.read_text())
        return real(self, *words, **more)

    monkeypatch.setattr(FakeLLM, "generate", generate)
    assert run(source, target).exit_code == 0
    assert set(seen) == {"yesterday"} and ids(target) == ["a", "b", "c", "d"]
    assert target.stat().st_mode & 0o777 == 0o600 and not partial(target).exists()


def test_an_output_that_is_a_link_or_no_file(source: Path, target: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    target.symlink_to(real)
    assert run(source, target).exit_code == 0
    assert target.is_symlink() and ids(real) == ["a", "b", "c", "d"]
    assert run(source, Path("/dev/null")).exit_code == 0
    assert not Path("/dev/null").is_file()


def died_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ends for good in the call after ``count`` ones."""
    real = FakeLLM.generate

    def generate(self: FakeLLM, *words: Any, **more: Any) -> AsyncIterator[RequestOutput]:
        self.gone = self._calls >= count
        return real(self, *words, **more)

    monkeypatch.setattr(FakeLLM, "generate", generate)


@pytest.mark.parametrize("cut", [0, 5])
def test_resume_runs_what_has_no_result(source: Path, target: Path, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        died_after(2, patch)
        result = run(source, target)
    assert result.exit_code == 1 and not target.exists()
    (line,) = result.stderr.splitlines()
    assert "the engine died" in line and f"{partial(target)}: continue with --resume" in line
    assert ids(partial(target)) == ["a", "b"]
    if cut:
        partial(target).write_bytes(partial(target).read_bytes()[:-cut])  # half of the second result was written
    again = run(source, target)
    assert again.exit_code == 2 and "--resume" in again.stderr
    source.write_bytes(prompts("d", "x", "b", "a", "c"))
    FakeLLM.made.clear()
    assert run(source, target, "--resume").exit_code == 0
    kept = ["a"] if cut else ["a", "b"]
    assert ids(target) == kept + [name for name in "dxbac" if name not in kept]
    assert len(FakeLLM.made[0].params) == 5 - len(kept)


def test_resume_runs_errors_again_and_counts_lines_of_one_name(source: Path, target: Path) -> None:
    first, second = {"id": "same", "prompt": "a"}, {"id": "same", "prompt": "bb"}
    source.write_bytes(jsonl(first, {"prompt": "abc", "top_k": "many"}, {"prompt": "no id"}))
    assert run(source, target).exit_code == 1
    source.write_bytes(jsonl(first, {"prompt": "abc", "top_k": 5}, {"prompt": "no id"}, second))
    assert run(source, target, "--resume").exit_code == 0
    assert ids(target) == ["same", 3, 2, "same"]


def test_resume_refuses_a_file_of_other_lines(source: Path, target: Path) -> None:
    for text in ('{"my": "data"}\n', "text\n", "[1]\n"):
        target.write_text(text)
        result = run(source, target, "--resume")
        assert result.exit_code == 2 and "line 1 of" in result.stderr
        assert target.read_text() == text
    assert invoke("a", "--resume", "--output", str(target)).exit_code == 2


def test_a_bad_line_costs_one_line(source: Path, target: Path) -> None:
    bad = [
        b'{"id": "\\ud800", "prompt": "a"}\n',
        b'{"prompt": "\xff"}\n',
        b'{"\\ud800": 1, "prompt": "a"}\n',
        b'{"id": NaN, "prompt": "a"}\n',
        b'{"id": [1], "prompt": "a"}\n',
        b"\x00\n",
        b"1" * 5000 + b"\n",
        b'{"prompt": "a"\n',
    ]
    source.write_bytes(b"\xef\xbb\xbf" + prompts("a") + b"".join(bad) + prompts("b"))
    result = run(source, target)
    assert result.exit_code == 1
    found = records(target.read_text(encoding="utf-8"))
    assert [("error" in record) for record in found] == [False] + [True] * len(bad) + [False]
    assert found[1]["error"]["param"] == "id" and len(result.stderr.splitlines()) == len(bad)


def test_standard_input_with_a_byte_order_mark_and_bytes_that_are_no_text() -> None:
    text = b"\xef\xbb\xbf" + prompts("a") + b'{"prompt": "\xff"}\n' + prompts("b")
    result = CliRunner().invoke(app, ["run", "--input", "-"], input=text)
    assert [("error" in record) for record in records(result.stdout)] == [False, True, False]


def test_an_engine_that_dies_costs_a_retry(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FakeLLM.__init__

    def dying(self: FakeLLM, *words: Any, **more: Any) -> None:
        real(self, *words, **more)
        self.dies = {2, 5}

    monkeypatch.setattr(FakeLLM, "__init__", dying)
    result = run(source, target)
    assert (result.exit_code, result.stderr) == (0, "")
    assert ids(target) == ["a", "b", "c", "d"]


def test_a_prompt_under_which_the_engine_always_dies_is_an_error(source: Path, target: Path, monkeypatch: Any) -> None:
    real = FakeLLM.generate

    def generate(self: FakeLLM, prompt: Any, *words: Any, **more: Any) -> AsyncIterator[RequestOutput]:
        self.dies = {self._calls + 1} if prompt["prompt"] == "b" else set()
        return real(self, prompt, *words, **more)

    monkeypatch.setattr(FakeLLM, "generate", generate)
    assert run(source, target).exit_code == 1
    assert [("error" in record) for record in records(target.read_text())] == [False, True, False, False]


def test_a_full_disk_is_one_line_and_what_was_written_stays(target: Path, source: Path, monkeypatch: Any) -> None:
    real = ResultFile.__init__

    def nearly_full(self: ResultFile, *words: Any, **more: Any) -> None:
        real(self, *words, **more)
        self._file = Full(self._file, 400)

    monkeypatch.setattr(ResultFile, "__init__", nearly_full)
    result = run(source, target)
    monkeypatch.undo()
    assert result.exit_code == 1 and not target.exists()
    (line,) = result.stderr.splitlines()
    assert "No space left on device" in line and "--resume" in line
    assert partial(target).stat().st_size == 400


class Full:
    """A file on a disk with so many bytes left, which takes what fits."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room, self.name = file, room, file.name

    def write(self, data: bytes) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self._file.write(data[: self._room])
        self._room -= count
        return int(count)

    def flush(self) -> None: ...

    def close(self) -> None:
        self._file.close()
