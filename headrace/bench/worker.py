"""One engine, one sitting: a process of its own that runs the cases of a job file and writes what it measured.

    python -m headrace.bench.worker JOB RESULT

A process a run keeps engines out of each other's memory, threads and caches; a crash costs one row.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from headrace.bench.engines import Engine, create
from headrace.errors import HeadraceError

WARM_UP_TOKENS = 4


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. All prompts are handed over at once."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def uniform(self) -> bool:
        """Prompts of one length, outputs of one length: the share of the prompts can be told from that of the outputs."""
        return len({len(prompt) for prompt in self.prompts}) == 1 == len(set(self.output_lens))


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker is to do."""

    engine: str
    engine_args: dict[str, object]
    """Fields of EngineArgs that differ from their defaults: headrace's own, and which model."""
    reference_dtype: str
    num_threads: int
    cases: list[Case]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one case."""

    name: str
    first: float | None
    """To the first token of every request: the prompts. None where lengths are mixed."""
    whole: float | None
    """To the last token of every request. None where one token is all there is."""
    engine_seconds: dict[str, float] = {}
    """Of ``whole``, by the engine's own account: forward, sample, host."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    facts: dict[str, str] = {}
    measured: list[Measured] = []
    error: str | None = None


def run(job: Job) -> Outcome:
    """Loads the engine and measures each case in turn."""
    engine = create(job)
    try:
        measured = [measure(engine, case) for case in job.cases]
        return Outcome(facts=engine.facts(), measured=measured)
    finally:
        engine.close()


def measure(engine: Engine, case: Case) -> Measured:
    """The case twice: once to its first tokens, once to its last. The same prompts warm up both."""
    short = [min(WARM_UP_TOKENS, length) for length in case.output_lens]
    engine.generate(case.prompts, short)
    first = whole = None
    if case.uniform:
        first = _seconds(engine, case.prompts, [1] * len(case.prompts))
    before = engine.seconds()
    if not case.uniform or case.output_lens[0] > 1:
        whole = _seconds(engine, case.prompts, case.output_lens)
    after = engine.seconds()
    spent = {name: after[name] - before[name] for name in after} if whole is not None else {}
    return Measured(name=case.name, first=first, whole=whole, engine_seconds=spent)


def _seconds(engine: Engine, prompts: list[list[int]], output_lens: list[int]) -> float:
    start = time.perf_counter()
    engine.generate(prompts, output_lens)
    return time.perf_counter() - start


def main(job_file: str, result_file: str) -> int:
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=Job)
    try:
        outcome = run(job)
    except HeadraceError as error:
        outcome = Outcome(error=str(error))
    Path(result_file).write_bytes(msgspec.json.encode(outcome))
    return 1 if outcome.error else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
