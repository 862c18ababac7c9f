"""Named workloads through one engine: what counts, what is kept, and what the command writes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console
from support.models.tiny_llama import write_config
from typer.testing import CliRunner

from headrace.bench import throughput
from headrace.bench.constrained import constraint_of
from headrace.bench.engines import HeadraceEngine
from headrace.bench.workloads import RANDOM_WORKLOADS, Workload
from headrace.cli.main import app
from headrace.config import EngineArgs
from headrace.constrain.compiler import compiled
from headrace.constrain.factory import GrammarFactory
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.errors import EngineError
from headrace.metrics.stats import EngineStats
from headrace.option_groups import StructuredOutputsConfig

LOAD = Workload("little", [[1, 2, 3], [4, 5]], [4, 6])


class Counting:
    """An LLM whose counters rise by themselves."""

    info: Any = None

    def __init__(self, short_by: int = 0) -> None:
        self.calls = 0
        self._short_by = short_by

    @property
    def stats(self) -> EngineStats:
        return EngineStats(step=6 * self.calls, forward_seconds=0.5 * self.calls, num_running=3)

    def generate(self, prompts: Any, sampling_params: Any = None) -> list[Any]:
        self.calls += 1
        tokens = [[0] * (params.max_tokens - self._short_by) for params in sampling_params]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=each)]) for each in tokens]

    def close(self) -> None: ...


def engine_around(llm: Counting, monkeypatch: pytest.MonkeyPatch) -> HeadraceEngine:
    monkeypatch.setattr("headrace.frontend.llm.LLM", lambda **engine_args: llm)
    return HeadraceEngine(EngineArgs())


def test_every_repetition_is_kept_and_counted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = Counting()
    row = throughput.measure(engine_around(llm, monkeypatch), LOAD, 3)
    assert llm.calls == 3 and len(row.seconds) == 3
    assert row.best == min(row.seconds) <= row.median
    assert row.counters["step"] == 6 and row.counters["forward_seconds"] == 0.5
    assert "num_running" not in row.counters


def test_an_output_of_another_length_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="generated 3 tokens where 4"):
        throughput.measure(engine_around(Counting(short_by=1), monkeypatch), LOAD, 1)


def test_the_best_repetition_counts() -> None:
    row = throughput.row_of(LOAD, [(4.0, {"step": 6}), (2.0, {"step": 5, "host_seconds": 0.5}), (2.5, {"step": 6})])
    assert (row.best, row.median, row.seconds) == (2.0, 2.5, [4.0, 2.0, 2.5])
    assert (row.output_rate, row.total_rate, row.prompt_rate, row.rate) == (5.0, 7.5, None, 5.0)
    assert throughput.step_milliseconds(row) == [400.0, 0.0, 0.0, 100.0]
    assert throughput.launches(row) == ["-", "0"]
    counters = {"replayed_steps": 3, "eager_steps": 1, "padding_tokens": 1234}
    assert throughput.launches(throughput.row_of(LOAD, [(1.0, counters)])) == ["75.0%", "1,234"]
    prefill = Workload("prefill", [[1] * 10, [2] * 10], [1, 1])
    assert throughput.row_of(prefill, [(2.0, {})]).rate == 10.0


def test_large_workloads_run_once_less() -> None:
    runs = {name: throughput.repetitions_of(make()) for name, make in RANDOM_WORKLOADS.items()}
    assert {name for name, count in runs.items() if count == 3} == {"single", "batch8", "batch64", "prefill16k", "prefill32k"}
    assert set(runs.values()) == {2, 3}


def test_the_command_writes_rows_and_reasons(tmp_path: Path) -> None:
    """The command needs a config alone: no tokenizer, no weights."""
    folder = write_config(tmp_path / "tiny", max_position_embeddings=512)
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    output = tmp_path / "report.json"
    words = ["bench", "throughput", str(folder), "--load-format", "dummy", "--num-kv-blocks", "64", "--max-num-seqs", "8"]
    words += [
        "--workload",
        "single, prefill8k",
        "--workload",
        "single",
        "--repetitions",
        "2",
        "--output",
        str(output),
        "--json",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    assert json.loads(result.stdout) == report
    (row,) = (msgspec.convert(row, throughput.WorkloadRow) for row in report["rows"])
    assert (row.workload, row.output_tokens, len(row.seconds)) == ("single", 256, 2)
    assert row.counters["generation_tokens"] == 256 and row.counters["prefix_hit_tokens"] == 0 and row.steps >= 256
    assert set(report["skipped"]) == {"prefill8k"} and "8,193 tokens" in report["skipped"]["prefill8k"]
    assert report["model"] == "tiny" and report["startup"]["seconds"] > 0 and report["engine"]["attention"]
    assert report["startup"]["kernels"] == ""
    told = report | {"startup": report["startup"] | {"kernels": "being compiled"}}
    assert str(throughput.tables(told)[0].title).endswith(" s; FlashInfer: being compiled")
    assert not list(tmp_path.glob("*.partial"))
    console = Console(width=160, file=io.StringIO())
    for table in throughput.tables(report):
        console.print(table)
    assert "prefill8k" in console.file.getvalue() and "single" in console.file.getvalue()


THROUGHPUT, LATENCY = ["bench", "throughput"], ["bench", "latency"]
NAMED = ["--workload", "single"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ([*THROUGHPUT, *NAMED, "--batch", "4"], "--batch"),
        ([*THROUGHPUT, *NAMED, "--input-len", "128"], "--input-len"),
        ([*THROUGHPUT, *NAMED, "--output-len", "7"], "--output-len"),
        ([*THROUGHPUT, *NAMED, "--timeout", "60"], "--timeout"),
        ([*THROUGHPUT, "--timeout", "60"], "--timeout"),
        ([*THROUGHPUT, "--copies", "2"], "--copies"),
        ([*THROUGHPUT, *NAMED, "--compare", "transformers", "--temperature", "0.5"], "--temperature"),
        ([*THROUGHPUT, *NAMED, "--reference-dtype", "float32"], "--reference-dtype"),
        ([*THROUGHPUT, "--reference-dtype", "float32"], "--reference-dtype"),
        ([*THROUGHPUT, "--compare", "llama.cpp", "--reference-dtype", "float32"], "--reference-dtype"),
        ([*THROUGHPUT, *NAMED, "--compare", "transformers", "--batch", "4"], "--batch"),
        ([*LATENCY, *NAMED, "--input-len", "128"], "--input-len"),
        ([*LATENCY, *NAMED, "--output-len", "7"], "--output-len"),
        (["bench", "serve", "--seed", "0"], "--seed"),
        (["bench", "serve", "--concurrency", "4", "--max-in-flight", "9"], "--max-in-flight"),
    ],
    ids=" ".join,
)
def test_options_that_would_change_nothing_are_refused(words: list[str], option: str) -> None:
    """Their defaults too, where they were given."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and f"error: {option}: " in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_options_that_apply_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons take a time limit and a dtype; without names lengths and batches count."""
    compared: list[tuple[Any, Any]] = []
    measured: list[Any] = []

    def compare(jobs: list[Any], repetitions: int, *, timeout: float, tell: object) -> dict[str, Any]:
        compared.append((jobs, timeout))
        return {"errors": {}}

    def run(args: EngineArgs, loads: list[Workload], options: Any, **others: Any) -> dict[str, Any]:
        measured.append((loads, options.temperature))
        return {}

    monkeypatch.setattr("headrace.bench.throughput.compare", compare)
    monkeypatch.setattr("headrace.bench.throughput.run", run)
    monkeypatch.setattr("headrace.bench.throughput.tables", lambda report: [])
    words = [*THROUGHPUT, *NAMED, "--compare", "transformers", "--timeout", "60", "--reference-dtype", "float32"]
    assert CliRunner().invoke(app, words).exit_code == 0
    lengths = [*THROUGHPUT, "--batch", "2", "--input-len", "20", "--output-len", "7"]
    assert CliRunner().invoke(app, [*lengths, "--temperature", "0.5"]).exit_code == 0
    assert CliRunner().invoke(app, [*lengths, "--compare", "transformers"]).exit_code == 0
    ((named, limit), (plain, default_limit)) = compared
    assert limit == 60 and {job.reference_dtype for job in named} == {"float32"} and len(named) == 2
    assert default_limit == 1800 and {job.reference_dtype for job in plain} == {"bfloat16"}
    ((loads, temperature),) = measured
    assert temperature == 0.5 and plain[0].loads == loads
    assert [len(prompt) for prompt in loads[0].prompts] == [20, 20]
    assert set(loads[0].output_lens) == {7}


def test_constrained_outputs_have_the_workloads_length() -> None:
    """Every grammar compiles, and goes on behind a line."""
    vocabulary, config = GrammarVocabulary.of_bytes(), StructuredOutputsConfig()
    factory = GrammarFactory(config, vocabulary)
    lines = ['{"name": "a", "age": 1}', '{"tags": ["a", "b", "c", "d"]}', '{"kind": "a", "text": "x"}', '{"on": true}']
    for index, line in enumerate(lines):
        matcher = compiled(factory.constraint(constraint_of(index)).grammar, vocabulary, config)
        assert matcher.advance([*f"{line}\n{line}\n".encode()]) is None and matcher.accepting and not matcher.ended


def test_constraints_are_refused_where_they_do_not_apply(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "throughput", "--constrain", "json-schema", "--compare", "transformers"])
    assert result.exit_code != 0 and "--constrain" in result.output
