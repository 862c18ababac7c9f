"""Offline throughput: the same prompts and token counts through one engine or several, in one sitting.

Each engine runs in a process of its own, one after the other and never two at once; repetitions are interleaved
(a, b, a, b, ...), so that a machine that slows down slows both. The best repetition of each row counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from headrace.bench.report import facts, load_average, table
from headrace.bench.worker import Case, Job, Measured, Outcome
from headrace.bench.workloads import Encoder, Workload, prose, random_tokens

OURS = "headrace"
PROMPT_ROW = "prompts"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's best of one case. Rates are in tokens a second; None where the case cannot tell."""

    case: str
    engine: str
    requests: int
    input_tokens: int
    output_tokens: int
    first_seconds: float | None
    whole_seconds: float | None
    prompt_rate: float | None
    """Prompt tokens over the time to the first token of every request."""
    decode_rate: float | None
    """Tokens after the first over the time after the first."""
    output_rate: float | None
    """All output tokens over the whole time, prompts included."""
    request_rate: float
    engine_seconds: dict[str, float]


def standard_cases(
    encoder: Encoder | None, vocab_size: int, batches: Sequence[int], input_len: int, output_len: int
) -> list[Case]:
    """Decoding in batches of the given sizes, then the processing of longer prompts. English, or random without a tokenizer."""
    shapes = [("single" if batch == 1 else f"batch {batch}", batch, input_len, output_len) for batch in batches]
    shapes.append((PROMPT_ROW, 8, 512, 1))
    if encoder is not None:
        return [case_of(prose(encoder, *shape)) for shape in shapes]
    return [case_of(random_tokens(name, 0, *shape).folded(vocab_size)) for name, *shape in shapes]


def case_of(load: Workload) -> Case:
    return Case(name=load.name, prompts=load.prompts, output_lens=load.output_lens)


def run(jobs: Sequence[Job], repetitions: int, *, timeout: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Runs every job ``repetitions`` times, interleaved; ``jobs`` differ by engine and share their cases."""
    load_before = load_average()
    outcomes: dict[str, list[Outcome]] = {job.engine: [] for job in jobs}
    broken: dict[str, str] = {}
    for repetition in range(repetitions):
        for job in jobs:
            if job.engine in broken:
                continue
            tell(f"{job.engine}, sitting {repetition + 1} of {repetitions}")
            outcome = _sitting(job, timeout)
            if outcome.error is not None:
                broken[job.engine] = outcome.error
            else:
                outcomes[job.engine].append(outcome)
    rows = [
        row_of(case, job.engine, [_of(outcome, case.name) for outcome in outcomes[job.engine]])
        for case in jobs[0].cases
        for job in jobs
        if outcomes[job.engine]
    ]
    return {
        "benchmark": "throughput",
        "rows": [msgspec.structs.asdict(row) for row in rows],
        "engines": {engine: found[0].facts for engine, found in outcomes.items() if found},
        "errors": broken,
        "repetitions": repetitions,
        "threads": jobs[0].num_threads,
    } | facts(load_before)


def _of(outcome: Outcome, name: str) -> Measured:
    return next(measured for measured in outcome.measured if measured.name == name)


def row_of(case: Case, engine: str, measured: Sequence[Measured]) -> Row:
    """The best of the repetitions, each time by itself."""
    requests, outputs = len(case.prompts), sum(case.output_lens)
    inputs = sum(map(len, case.prompts))
    first = min((m.first for m in measured if m.first is not None), default=None)
    best = min(measured, key=lambda m: m.whole if m.whole is not None else float("inf"))
    whole = best.whole
    rest = None if first is None or whole is None else whole - first
    total = whole if whole is not None else first
    if total is None:
        raise ValueError(f"case {case.name} was not measured")
    return Row(
        case=case.name,
        engine=engine,
        requests=requests,
        input_tokens=inputs,
        output_tokens=outputs,
        first_seconds=first,
        whole_seconds=whole,
        prompt_rate=inputs / first if first else None,
        decode_rate=(outputs - requests) / rest if rest and rest > 0 else None,
        output_rate=outputs / whole if whole else None,
        request_rate=requests / total,
        engine_seconds=best.engine_seconds,
    )


def _sitting(job: Job, timeout: float) -> Outcome:
    """One worker process from start to end. What it prints is shown only if it fails."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        job_file, result_file, log_file = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        job_file.write_bytes(msgspec.json.encode(job))
        command = [sys.executable, "-m", "headrace.bench.worker", str(job_file), str(result_file)]
        with log_file.open("wb") as log:
            try:
                code = subprocess.run(command, stdout=log, stderr=log, timeout=timeout, env=dict(os.environ)).returncode
            except subprocess.TimeoutExpired:
                return Outcome(error=f"took longer than {timeout:g} seconds")
        if result_file.is_file():
            return msgspec.json.decode(result_file.read_bytes(), type=Outcome)
        lines = log_file.read_text(errors="replace").strip().splitlines()
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Outcome(error=f"its process ended with {ending}: {lines[-1] if lines else 'it printed nothing'}")


def tables(report: dict[str, Any]) -> list[Table]:
    """Rates of each engine, then ours over the others', then our host overhead."""
    rows = [Row(**row) for row in report["rows"]]
    result = [_rates_table(rows)]
    others = [engine for engine in report["engines"] if engine != OURS]
    if OURS in report["engines"] and others:
        result.append(_ratio_table(rows, others))
    overhead = _overhead_rows(rows)
    if overhead:
        result.append(table("Where headrace's time goes", ["case", "forward", "sampler", "host"], overhead))
    return result


def _rates_table(rows: Sequence[Row]) -> Table:
    header = ["case", "engine", "tokens in", "tokens out", "prompt", "decode", "output", "requests"]
    cells = [
        [
            row.case,
            row.engine,
            f"{row.input_tokens:,}",
            f"{row.output_tokens:,}",
            _rate(row.prompt_rate),
            _rate(row.decode_rate),
            _rate(row.output_rate),
            f"{row.request_rate:.2f}",
        ]
        for row in rows
    ]
    return table("Tokens a second: of prompts, decoded, of all output; requests a second", header, cells)


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _ratio_table(rows: Sequence[Row], others: Sequence[str]) -> Table:
    by_key = {(row.case, row.engine): row for row in rows}
    cells = []
    for case in dict.fromkeys(row.case for row in rows):
        for other in others:
            ours, theirs = by_key.get((case, OURS)), by_key.get((case, other))
            if ours is not None and theirs is not None:
                names = ("prompt_rate", "decode_rate", "output_rate")
                ratios = [_ratio(getattr(ours, name), getattr(theirs, name)) for name in names]
                cells.append([case, other, *ratios])
    return table("headrace over the others", ["case", "over", "prompt", "decode", "output"], cells)


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "" if ours is None or theirs is None else f"{ours / theirs:.2f}x"


def _overhead_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Shares of the time in headrace's steps."""
    result = []
    for row in rows:
        spent = row.engine_seconds
        if row.engine != OURS or not spent or not sum(spent.values()):
            continue
        total = sum(spent.values())
        result.append([row.case, *(f"{spent[name] / total:.1%}" for name in ("forward", "sample", "host"))])
    return result
