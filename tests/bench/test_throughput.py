"""The comparison: warm-up, interleaved repetitions, crashes that cost one engine and not the table."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from headrace.bench import throughput
from headrace.bench.engines import BenchJob
from headrace.bench.throughput import Outcome, row_of
from headrace.bench.workloads import Workload
from headrace.config import EngineArgs
from headrace.errors import ConfigError

BATCH = Workload("batch 2", [[1, 2, 3], [4, 5, 6]], [11, 11])
MIXED = Workload("mixed", [[1], [4, 5, 6]], [3, 6])


def job(engine: str, *loads: Workload) -> BenchJob:
    return BenchJob(engine=engine, args=EngineArgs(), reference_dtype="bfloat16", num_threads=1, loads=list(loads))


class Recorder:
    """An engine that records how many tokens it was asked for."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []
        self.closed = False

    def generate(self, load: Workload) -> None:
        self.lengths.append(load.output_lens)

    def counters(self) -> dict[str, float]:
        return {"forward_seconds": 1.0 * len(self.lengths)}

    def facts(self) -> dict[str, str]:
        return {"dtype": "x"}

    def close(self) -> None:
        self.closed = True


def test_a_job_warms_up_each_workload_then_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorder()
    monkeypatch.setattr(throughput, "create", lambda job: engine)
    outcome = throughput.run_job(job("headrace", BATCH, MIXED))
    assert engine.lengths == [[4, 4], [11, 11], [3, 4], [3, 6]] and engine.closed
    assert [(row.workload, row.output_tokens) for row in outcome.rows] == [("batch 2", 22), ("mixed", 9)]
    assert all(row.counters == {"forward_seconds": 1.0} and row.best > 0 for row in outcome.rows)
    assert outcome.facts == {"dtype": "x"}


def test_sittings_are_interleaved_and_a_broken_engine_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = []

    def run_process(job: BenchJob, timeout: float) -> Outcome:
        engines.append(job.engine)
        if job.engine == "llama.cpp":
            return Outcome(error="its process ended with signal 11")
        return Outcome(facts={"dtype": "x"}, rows=[row_of(BATCH, [(float(len(engines)), {})])])

    monkeypatch.setattr(throughput, "_run_process", run_process)
    jobs = [job(engine, BATCH) for engine in ("headrace", "transformers", "llama.cpp")]
    report = throughput.compare(jobs, 2, timeout=1, tell=lambda text: None)
    assert engines == ["headrace", "transformers", "llama.cpp", "headrace", "transformers"]
    assert report["errors"] == {"llama.cpp": "its process ended with signal 11"}
    rows = [(row["engine"], row["best"], row["median"], row["seconds"]) for row in report["rows"]]
    assert rows == [("headrace", 1.0, 2.5, [1.0, 4.0]), ("transformers", 2.0, 3.5, [2.0, 5.0])]
    console = Console(width=140, file=io.StringIO())
    for table in throughput.tables(report):
        console.print(table)
    printed = console.file.getvalue()
    assert "2.00x" in printed
    assert "transformers" in printed


def test_a_process_that_crashes_is_reported_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho something is wrong >&2\nkill -SEGV $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    outcome = throughput._run_process(job("headrace", BATCH), timeout=10)
    assert outcome.error is not None and "signal 11" in outcome.error and "something is wrong" in outcome.error
    script.write_text("#!/bin/sh\nexec sleep 20\n")
    outcome = throughput._run_process(job("headrace", BATCH), timeout=0.2)
    assert outcome.error == "took longer than 0.2 seconds"


def test_the_process_writes_a_user_error_as_its_outcome(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(job("nonesuch", BATCH)))
    assert throughput.main(str(tmp_path / "job.json"), str(tmp_path / "result.json")) == 1
    outcome = msgspec.json.decode((tmp_path / "result.json").read_bytes(), type=Outcome)
    assert outcome.error is not None and "nonesuch" in outcome.error


def test_llama_cpp_that_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from llamacpp import LlamaCppEngine

    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        LlamaCppEngine("x.gguf", sequences=1, longest=1, num_threads=1)
