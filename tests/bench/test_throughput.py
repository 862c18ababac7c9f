"""The comparison: rates from times, interleaved sittings, crashes that cost one engine and not the table."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from headrace.bench import throughput, worker
from headrace.bench.worker import Case, Job, Measured, Outcome, measure
from headrace.errors import ConfigError

CASE = Case(name="batch 2", prompts=[[1, 2, 3], [4, 5, 6]], output_lens=[11, 11])
MIXED = Case(name="mixed", prompts=[[1], [4, 5, 6]], output_lens=[5, 6])
PROMPTS = Case(name="prompts", prompts=[[1, 2], [4, 5]], output_lens=[1, 1])


def job(engine: str, *cases: Case) -> Job:
    return Job(engine=engine, engine_args={}, reference_dtype="bfloat16", num_threads=1, cases=list(cases))


class Recorder:
    """An engine that notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> None:
        self.asked.append(output_lens)

    def seconds(self) -> dict[str, float]:
        return {"forward": 1.0 * len(self.asked)}

    def facts(self) -> dict[str, str]:
        return {}

    def close(self) -> None: ...


def test_a_case_is_warmed_up_then_timed_to_its_first_and_last_tokens() -> None:
    engine = Recorder()
    measured = measure(engine, CASE)
    assert engine.asked == [[4, 4], [1, 1], [11, 11]]
    assert measured.first is not None and measured.whole is not None
    assert measured.engine_seconds == {"forward": 1.0}


def test_mixed_lengths_have_no_first_and_single_tokens_no_whole() -> None:
    engine = Recorder()
    measured = measure(engine, MIXED)
    assert measured.first is None and measured.whole is not None
    assert engine.asked == [[4, 4], [5, 6]]
    measured = measure(Recorder(), PROMPTS)
    assert measured.first is not None and measured.whole is None and measured.engine_seconds == {}


def test_rates() -> None:
    measured = [
        Measured(name=CASE.name, first=0.5, whole=3.0, engine_seconds={"host": 1.0}),
        Measured(name=CASE.name, first=0.6, whole=2.5, engine_seconds={"host": 0.1}),
    ]
    row = throughput.row_of(CASE, "headrace", measured)
    assert (row.first_seconds, row.whole_seconds) == (0.5, 2.5)
    assert row.prompt_rate == 6 / 0.5
    assert row.decode_rate == 20 / 2.0
    assert row.output_rate == 22 / 2.5
    assert row.request_rate == 2 / 2.5
    assert row.engine_seconds == {"host": 0.1}
    row = throughput.row_of(MIXED, "headrace", [Measured(name="mixed", first=None, whole=2.0)])
    assert (row.prompt_rate, row.decode_rate, row.output_rate) == (None, None, 5.5)
    row = throughput.row_of(PROMPTS, "headrace", [Measured(name="prompts", first=2.0, whole=None)])
    assert (row.prompt_rate, row.decode_rate, row.request_rate) == (2.0, None, 1.0)


def test_sittings_are_interleaved_and_a_broken_engine_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def sitting(job: Job, timeout: float) -> Outcome:
        seen.append(job.engine)
        if job.engine == "llama.cpp":
            return Outcome(error="its process ended with signal 11")
        return Outcome(facts={"dtype": "x"}, measured=[Measured(name=CASE.name, first=1.0, whole=len(seen) + 1.0)])

    monkeypatch.setattr(throughput, "_sitting", sitting)
    jobs = [job(engine, CASE) for engine in ("headrace", "transformers", "llama.cpp")]
    report = throughput.run(jobs, 2, timeout=1, tell=lambda text: None)
    assert seen == ["headrace", "transformers", "llama.cpp", "headrace", "transformers"]
    assert report["errors"] == {"llama.cpp": "its process ended with signal 11"}
    assert [(row["engine"], row["whole_seconds"]) for row in report["rows"]] == [("headrace", 2.0), ("transformers", 3.0)]
    console = Console(width=140, file=io.StringIO())
    for table in throughput.tables(report):
        console.print(table)
    printed = console.file.getvalue()
    assert "2.00x" in printed  # decode: (3 - 1) / (2 - 1)
    assert "transformers" in printed


def test_a_worker_that_crashes_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho something is wrong >&2\nkill -SEGV $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    outcome = throughput._sitting(job("headrace", CASE), timeout=10)
    assert outcome.error is not None and "signal 11" in outcome.error and "something is wrong" in outcome.error
    script.write_text("#!/bin/sh\nexec sleep 20\n")
    outcome = throughput._sitting(job("headrace", CASE), timeout=0.2)
    assert outcome.error == "took longer than 0.2 seconds"


def test_the_worker_writes_a_user_error_as_its_outcome(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(job("nonesuch", CASE)))
    assert worker.main(str(tmp_path / "job.json"), str(tmp_path / "result.json")) == 1
    outcome = msgspec.json.decode((tmp_path / "result.json").read_bytes(), type=Outcome)
    assert outcome.error is not None and "nonesuch" in outcome.error


def test_llama_cpp_that_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.bench.llamacpp import LlamaCppEngine

    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        LlamaCppEngine("x.gguf", sequences=1, longest=1, num_threads=1)
