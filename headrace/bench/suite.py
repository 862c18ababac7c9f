"""Named workloads through one engine that is loaded once: what a row says of one engine and one model.

A workload runs two or three times, by its size; every repetition is kept, and the best one counts. The first warms up:
it is where kernels are compiled and graphs captured that the start-up left for later.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from rich.table import Table

from headrace.bench.engines import check_length
from headrace.bench.report import facts, load_average, table
from headrace.bench.workloads import Workload
from headrace.config import EngineArgs
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.info import EngineInfo
    from headrace.metrics.stats import EngineStats
    from headrace.outputs import RequestOutput

SMALL = 60_000
"""Tokens, in and out: a workload of fewer is run once more."""
_NO_COUNTERS = frozenset({"num_running", "num_waiting", "kv_blocks_used", "kv_blocks_total", "finished"})


class Engine(Protocol):
    """What is asked of ``LLM``."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats: ...

    def generate(self, prompts: Any, sampling_params: Any = None) -> list[RequestOutput]: ...

    def close(self) -> None: ...


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One workload. Rates are in tokens a second, over the best repetition."""

    workload: str
    requests: int
    input_tokens: int
    output_tokens: int
    seconds: list[float]
    """Of every repetition, in their order: from all prompts handed over to the last token of the last."""
    best: float
    median: float
    output_rate: float
    total_rate: float
    """Tokens in and out."""
    prompt_rate: float | None
    """Tokens in, where every request has one token out; else None."""
    counters: dict[str, float]
    """What the engine's counters gained in the best repetition: steps, seconds in forward pass, sampler and host, ..."""
    at: float
    """Seconds since the epoch when the row was complete."""

    @property
    def rate(self) -> float:
        """The number that stands for the workload."""
        return self.output_rate if self.prompt_rate is None else self.prompt_rate

    @property
    def steps(self) -> float:
        return self.counters.get("step", 0)


def repetitions_of(load: Workload) -> int:
    return 3 if load.input_tokens + load.output_tokens < SMALL else 2


def measure(engine: Engine, load: Workload, repetitions: int, params: Sequence[SamplingParams]) -> Row:
    """Raises: EngineError: a request got another number of tokens than it was due."""
    prompts = [{"prompt_token_ids": prompt} for prompt in load.prompts]
    runs: list[tuple[float, dict[str, float]]] = []
    for _ in range(repetitions):
        before = engine.stats
        start = time.perf_counter()
        results = engine.generate(prompts, params)
        seconds = time.perf_counter() - start
        runs.append((seconds, counted(engine.stats.since(before))))
        for result, length in zip(results, load.output_lens, strict=True):
            check_length("headrace", length, len(result.outputs[0].token_ids))
    return row_of(load, runs)


def counted(gained: EngineStats) -> dict[str, float]:
    """Whatever the engine counts, also what later versions count."""
    return {name: value for name, value in msgspec.structs.asdict(gained).items() if name not in _NO_COUNTERS}


def row_of(load: Workload, runs: Sequence[tuple[float, dict[str, float]]]) -> Row:
    """``runs``: (seconds, counters) of each repetition."""
    best, counters = min(runs, key=lambda run: run[0])
    inputs, outputs = load.input_tokens, load.output_tokens
    return Row(
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
    *,
    temperature: float,
    repetitions: int | None,
    tell: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Loads the engine and measures each workload in turn.

    Args:
        temperature: 0 is greedy.
        repetitions: None: two or three, by the workload's size.
        save: is given the report so far after every row: who is cut off keeps what was measured.

    Raises:
        ConfigError: the arguments cannot work.
        EngineError: the engine failed; ``save`` has had the rows before.
    """
    load_before = load_average()
    start = time.perf_counter()
    from headrace.engine.llm import LLM

    imported = time.perf_counter()
    engine: Engine = LLM(**vars(args))
    ready = time.perf_counter()
    report: dict[str, Any] = {
        "benchmark": "workloads",
        "model": Path(args.model).name if args.model else engine.info.model,
        "temperature": temperature,
        "startup": {
            "seconds": ready - imported,
            "import_seconds": imported - start,
            "phases": {phase.name: phase.seconds for phase in engine.info.timeline},
        },
        "engine": engine_facts(engine.info),
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
            params = [
                SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=length, detokenize=False)
                for length in load.output_lens
            ]
            row = measure(engine, load, repetitions or repetitions_of(load), params)
            report["rows"].append(msgspec.structs.asdict(row))
            save(report)
    finally:
        engine.close()
    save(report)
    return report


def engine_facts(info: EngineInfo) -> dict[str, Any]:
    """What the engine says of itself, as far as it bears on speed."""
    plain = ("architecture", "dtype", "quantization", "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    backends = sorted({line.backend for line in info.layers})
    return {name: getattr(info, name) for name in (*plain, "block_size", "num_blocks", "environment")} | {
        "attention": backends,
        "decisions": {line.name: f"{line.value}: {line.reason}" for line in info.decisions},
        "memory": {line.name: line.nbytes for line in info.memory},
    }


def tables(report: dict[str, Any]) -> list[Table]:
    rows = [msgspec.convert(row, Row) for row in report["rows"]]
    header = ["workload", "requests", "tokens in", "tokens out", "best, s", "median, s", "tokens/s", "of"]
    cells = [
        [
            row.workload,
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
    startup = report["startup"]["seconds"]
    result = [table(f"{report['model']}: ready after {startup:.1f} s", header, cells)]
    if any(row.steps for row in rows):
        names = ["wall", "forward", "sample", "host"]
        steps = [
            [row.workload, f"{row.steps:,.0f}", *(f"{ms:.3f}" for ms in step_milliseconds(row)), *launches(row)]
            for row in rows
            if row.steps
        ]
        header = ["workload", "steps", *names, "as graphs", "padding tokens"]
        result.append(table("A step, in milliseconds, by the engine's own account", header, steps))
    if report["skipped"]:
        result.append(table("Left out", ["workload", "why"], [[name, why] for name, why in report["skipped"].items()]))
    return result


def step_milliseconds(row: Row) -> list[float]:
    """Wall time of a step, then its forward pass, sampler and host; on a device that works ahead they overlap."""
    spent = [row.best, *(row.counters.get(f"{name}_seconds", 0.0) for name in ("forward", "sample", "host"))]
    return [1e3 * seconds / row.steps for seconds in spent]


def launches(row: Row) -> list[str]:
    """The share of steps that were CUDA graphs, and the tokens of nobody's that filled them up."""
    replayed, eager = (row.counters.get(f"{kind}_steps", 0) for kind in ("replayed", "eager"))
    share = f"{replayed / (replayed + eager):.1%}" if replayed + eager else "-"
    return [share, f"{row.counters.get('padding_tokens', 0):,.0f}"]
