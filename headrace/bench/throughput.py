"""Offline throughput: workloads through one engine in this process, or through several engines in turn.

In a comparison each engine runs in its own process (``python -m headrace.bench.throughput JOB RESULT``), one at a time, and
repetitions are interleaved (a, b, a, b, ...), so that a machine that slows down slows all of them. The best repetition of
each row counts.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from headrace.bench.engines import OURS, BenchEngine, BenchJob, HeadraceEngine, create
from headrace.bench.options import ThroughputOptions
from headrace.bench.report import facts, load_average, table
from headrace.bench.workloads import Encoder, Workload, prose, random_tokens
from headrace.config import EngineArgs
from headrace.errors import HeadraceError

SMALL = 60_000
"""Tokens, in and out: smaller workloads are repeated once more."""
WARM_UP_TOKENS = 4


class WorkloadRow(msgspec.Struct, frozen=True, kw_only=True):
    """One workload on one engine. Rates are in tokens per second, over the best repetition."""

    engine: str = OURS
    workload: str
    requests: int
    input_tokens: int
    output_tokens: int
    seconds: list[float]
    """Seconds of each repetition, in order: from the submission of all prompts to the last token of the last request."""
    best: float
    median: float
    output_rate: float
    total_rate: float
    """Input and output tokens."""
    prompt_rate: float | None
    """Input tokens, where every request has one output token; else None."""
    counters: dict[str, float]
    """Increase of the engine's counters in the best repetition: steps, seconds in forward pass, sampler and host, ..."""
    at: float
    """Seconds since the epoch when the row was complete."""

    @property
    def rate(self) -> float:
        """The rate that the workload is about."""
        return self.output_rate if self.prompt_rate is None else self.prompt_rate

    @property
    def steps(self) -> float:
        return self.counters.get("step", 0)


def standard_loads(
    encoder: Encoder | None, vocab_size: int, batches: Sequence[int], input_len: int, output_len: int
) -> list[Workload]:
    """Decoding in batches of the given sizes, then longer prompts. English, or random tokens without a tokenizer."""
    shapes = [("single" if batch == 1 else f"batch {batch}", batch, input_len, output_len) for batch in batches]
    shapes.append(("prompts", 8, 512, 1))
    if encoder is not None:
        return [prose(encoder, *shape) for shape in shapes]
    return [random_tokens(name, 0, *shape).folded(vocab_size) for name, *shape in shapes]


def repetitions_of(load: Workload) -> int:
    return 3 if load.input_tokens + load.output_tokens < SMALL else 2


def measure(engine: BenchEngine, load: Workload, repetitions: int) -> WorkloadRow:
    """Raises: EngineError: a request got another number of tokens than the workload says."""
    runs: list[tuple[float, dict[str, float]]] = []
    for number in range(repetitions):
        own = load.repetition(number)
        before = engine.counters()
        start = time.perf_counter()
        engine.generate(own)
        seconds = time.perf_counter() - start
        runs.append((seconds, {name: value - before[name] for name, value in engine.counters().items()}))
    return row_of(load, runs)


def row_of(load: Workload, runs: Sequence[tuple[float, dict[str, float]]]) -> WorkloadRow:
    """``runs``: (seconds, counters) of each repetition."""
    best, counters = min(runs, key=lambda run: run[0])
    inputs, outputs = load.input_tokens, load.output_tokens
    return WorkloadRow(
        workload=load.name,
        requests=len(load.prompts),
        input_tokens=inputs,
        output_tokens=outputs,
        seconds=[seconds for seconds, _ in runs],
        best=best,
        median=statistics.median(seconds for seconds, _ in runs),
        output_rate=outputs / best,
        total_rate=(inputs + outputs) / best,
        prompt_rate=inputs / best if set(load.output_lens) == {1} else None,
        counters=counters,
        at=time.time(),
    )


def run(
    args: EngineArgs,
    loads: Sequence[Workload],
    options: ThroughputOptions,
    *,
    tell: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Loads headrace in this process and measures each workload in turn. The first repetition is the warm-up.

    Args:
        options: those of how to measure; without repetitions, two or three by the workload's size.
        save: called with the report so far after every row.

    Raises:
        ConfigError: the arguments cannot work.
        EngineError: the engine failed; ``save`` has had the rows before.
    """
    load_before = load_average()
    start = time.perf_counter()
    import headrace.frontend.llm  # noqa: F401

    imported = time.perf_counter()
    engine = HeadraceEngine(args, options.temperature or 0.0, options.constrain)
    ready = time.perf_counter()
    report: dict[str, Any] = {
        "benchmark": "workloads",
        "model": Path(args.model).name if args.model else engine.info.model,
        "temperature": options.temperature or 0.0,
        "constrained": options.constrain,
        "startup": {
            "seconds": ready - imported,
            "import_seconds": imported - start,
            "phases": {phase.name: phase.seconds for phase in engine.info.timeline},
            "kernels": next((phase.detail for phase in engine.info.timeline if phase.name == "FlashInfer"), ""),
        },
        "engine": engine.facts(),
        "rows": [],
        "skipped": {},
    } | facts(load_before)
    save(report)
    try:
        for load in loads:
            if load.longest > engine.info.max_model_len:
                report["skipped"][load.name] = f"{load.longest:,} tokens, and the context is {engine.info.max_model_len:,}"
                continue
            tell(f"{load.name}: {load.input_tokens:,} tokens in, {load.output_tokens:,} out")
            row = measure(engine, load, options.repetitions or repetitions_of(load))
            report["rows"].append(msgspec.structs.asdict(row))
            save(report)
    finally:
        engine.close()
    save(report)
    return report


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one process of a comparison."""

    facts: dict[str, Any] = {}
    rows: list[WorkloadRow] = []
    error: str | None = None


def compare(jobs: Sequence[BenchJob], repetitions: int, *, timeout: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Runs every job ``repetitions`` times, interleaved; ``jobs`` differ in their engine and share their workloads."""
    load_before = load_average()
    outcomes: dict[str, list[Outcome]] = {job.engine: [] for job in jobs}
    errors: dict[str, str] = {}
    for repetition in range(repetitions):
        for job in jobs:
            if job.engine in errors:
                continue
            tell(f"{job.engine}, repetition {repetition + 1} of {repetitions}")
            outcome = _run_process(job, timeout)
            if outcome.error is not None:
                errors[job.engine] = outcome.error
            else:
                outcomes[job.engine].append(outcome)
    measured = {engine: sittings for engine, sittings in outcomes.items() if sittings}
    rows = [
        _merged(engine, [outcome.rows[place] for outcome in sittings])
        for place in range(len(jobs[0].loads))
        for engine, sittings in measured.items()
    ]
    return {
        "benchmark": "throughput",
        "rows": [msgspec.structs.asdict(row) for row in rows],
        "engines": {engine: sittings[0].facts for engine, sittings in measured.items()},
        "errors": errors,
        "repetitions": repetitions,
        "threads": jobs[0].num_threads,
    } | facts(load_before)


def _merged(engine: str, rows: Sequence[WorkloadRow]) -> WorkloadRow:
    seconds = [each for row in rows for each in row.seconds]
    best = min(rows, key=lambda row: row.best)
    return msgspec.structs.replace(best, engine=engine, seconds=seconds, median=statistics.median(seconds))


def _run_process(job: BenchJob, timeout: float) -> Outcome:
    """Runs a job in its own process. Shows what the process prints only if it fails."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        job_file, result_file, log_file = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        job_file.write_bytes(msgspec.json.encode(job))
        command = [sys.executable, "-m", "headrace.bench.throughput", str(job_file), str(result_file)]
        with log_file.open("wb") as log:
            try:
                code = subprocess.run(command, stdout=log, stderr=log, timeout=timeout).returncode
            except subprocess.TimeoutExpired:
                return Outcome(error=f"took longer than {timeout:g} seconds")
        if result_file.is_file():
            return msgspec.json.decode(result_file.read_bytes(), type=Outcome)
        lines = log_file.read_text(errors="replace").strip().splitlines()
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Outcome(error=f"its process ended with {ending}: {lines[-1] if lines else 'it printed nothing'}")


def run_job(job: BenchJob) -> Outcome:
    """Loads the engine; runs each workload once with short outputs, then measures it once."""
    engine = create(job)
    try:
        rows = []
        for load in job.loads:
            short = [min(WARM_UP_TOKENS, length) for length in load.output_lens]
            engine.generate(dataclasses.replace(load, output_lens=short))
            rows.append(measure(engine, load, 1))
        return Outcome(facts=engine.facts(), rows=rows)
    finally:
        engine.close()


def tables(report: dict[str, Any]) -> list[Table]:
    """Rates of each engine, the ratios of headrace's to the others', and how headrace's steps divide."""
    rows = [msgspec.convert(row, WorkloadRow) for row in report["rows"]]
    header = ["workload", "engine", "requests", "tokens in", "tokens out", "best, s", "median, s", "tokens/s", "of"]
    cells = [
        [
            row.workload,
            row.engine,
            f"{row.requests:,}",
            f"{row.input_tokens:,}",
            f"{row.output_tokens:,}",
            f"{row.best:.3f}",
            f"{row.median:.3f}",
            f"{row.rate:,.1f}",
            "output" if row.prompt_rate is None else "prompt",
        ]
        for row in rows
    ]
    startup = "Throughput"
    if "startup" in report:
        kernels = report["startup"].get("kernels", "")
        startup = f"{report['model']}: ready after {report['startup']['seconds']:.1f} s{kernels and f'; FlashInfer: {kernels}'}"
    result = [table(startup, header, cells)]
    ours = {row.workload: row for row in rows if row.engine == OURS}
    ratios = [
        [row.workload, row.engine, f"{ours[row.workload].rate / row.rate:.2f}x"]
        for row in rows
        if row.engine != OURS and row.workload in ours
    ]
    if ratios:
        result.append(table("headrace over the others", ["workload", "over", "ratio"], ratios))
    steps = [
        [row.workload, f"{row.steps:,.0f}", *(f"{ms:.3f}" for ms in step_milliseconds(row)), *launches(row)]
        for row in ours.values()
        if row.steps
    ]
    if steps:
        header = ["workload", "steps", "wall", "forward", "sample", "host", "as graphs", "padding tokens"]
        result.append(table("Milliseconds per step of headrace, by its own counters", header, steps))
    if report.get("skipped"):
        result.append(table("Skipped", ["workload", "why"], [[name, why] for name, why in report["skipped"].items()]))
    return result


def step_milliseconds(row: WorkloadRow) -> list[float]:
    """Wall time per step, then its forward pass, sampler and host, which overlap on a GPU."""
    spent = [row.best, *(row.counters.get(f"{name}_seconds", 0.0) for name in ("forward", "sample", "host"))]
    return [1e3 * seconds / row.steps for seconds in spent]


def launches(row: WorkloadRow) -> list[str]:
    """The share of steps that ran as CUDA graphs, and the padding tokens that they computed."""
    replayed, eager = (row.counters.get(f"{kind}_steps", 0) for kind in ("replayed", "eager"))
    share = f"{replayed / (replayed + eager):.1%}" if replayed + eager else "-"
    return [share, f"{row.counters.get('padding_tokens', 0):,.0f}"]


def main(job_file: str, result_file: str) -> int:
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=BenchJob)
    try:
        outcome = run_job(job)
    except HeadraceError as error:
        outcome = Outcome(error=str(error))
    Path(result_file).write_bytes(msgspec.json.encode(outcome))
    return 1 if outcome.error else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
