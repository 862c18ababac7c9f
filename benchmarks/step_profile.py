"""Profiles a step: GPU kernels, the gaps between them, and the host.

    python benchmarks/step_profile.py MODEL --batch 64 --context 1024
    python benchmarks/step_profile.py MODEL --phase prefill --batch 16 --context 8192
    python benchmarks/step_profile.py MODEL --batch 1 --host --set enforce_eager=true --json profile.json

MODEL is a folder with a config.json; its weights are random. After the first output token of sequences of --context
random tokens, --steps decode steps run several times: without a profiler, for the time of a step; with a timer around each
part of the engine's step; under torch.profiler, for the kernels; and with --host under cProfile, for Python functions.
Profiling slows a step: take times from the first pass, and shares from the others. Without a GPU, PyTorch's operations are
listed instead of kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import dataclasses
import itertools
import json
import pstats
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from headrace.bench.report import facts, load_average  # noqa: E402
from headrace.config import EngineArgs  # noqa: E402
from headrace.frontend.llm import LLM  # noqa: E402
from headrace.sampling_params import SamplingParams  # noqa: E402

SETTLING = 8
"""Decode steps before anything is measured: graphs are captured, the pipeline is full."""
COUNTERS = ("forward_seconds", "sample_seconds", "host_seconds")


@dataclasses.dataclass(frozen=True)
class Span:
    """One kernel, copy or operation: microseconds."""

    name: str
    start: float
    end: float


class Bench:
    """An engine with a batch of sequences that it can bring forward step by step."""

    def __init__(self, options: argparse.Namespace) -> None:
        arguments: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
        arguments |= dict(options.set)
        self._llm = LLM(str(options.model), **arguments)
        self._core = self._llm._engine.core
        self._options = options
        self._vocab_size = self._llm.info.vocab_size
        self._names = itertools.count()

    def fill(self, output_len: int) -> None:
        """A new batch. Prompts are random, so that nothing is alike."""
        options, rng = self._options, random.Random(0)
        params = SamplingParams(temperature=options.temperature, ignore_eos=True, max_tokens=output_len, detokenize=False)
        for _ in range(options.batch):
            prompt = [rng.randrange(self._vocab_size) for _ in range(options.context)]
            name = f"profiled-{next(self._names)}"
            self._core.add(self._llm.inputs.request({"prompt_token_ids": prompt}, params, request_id=name))

    def decode(self) -> None:
        """Runs until every sequence of the batch has its first token, and a few steps more."""
        before = self._llm.stats
        batch = self._options.batch
        while self._llm.stats.since(before).computed_prompt_tokens < batch * self._options.context:
            self._core.step()
        if (running := self._llm.stats.num_running) < batch:
            raise SystemExit(f"only {running} of {batch} sequences run at once: raise max_num_seqs or shorten --context")
        self.steps(SETTLING)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._core.step()

    def drain(self) -> None:
        while self._core.has_work():
            self._core.step()
        synchronize()

    def timed(self, work: Callable[[], None]) -> dict[str, float]:
        """Milliseconds of a step, by the clock and by the engine's own account."""
        synchronize()
        before, start = self._llm.stats, time.perf_counter()
        work()
        synchronize()
        wall, gained = time.perf_counter() - start, self._llm.stats.since(before)
        steps = max(1, gained.step)
        spent = {name.removesuffix("_seconds"): getattr(gained, name) for name in COUNTERS}
        return {"steps": gained.step} | {name: 1e3 * value / steps for name, value in ({"wall": wall} | spent).items()}

    def parts(self, count: int) -> dict[str, float]:
        """Milliseconds of a step that the host spends in each part of it; to collect is also to wait for the device."""
        core, spent = self._core, {"whole": 0.0}
        places = (
            {"schedule": core.scheduler}
            | dict.fromkeys(("execute", "sample", "collect"), core.executor)
            | {"update": core.scheduler}
        )
        with contextlib.ExitStack() as stack:
            for name, owner in (*places.items(), ("process", core.outputs)):
                spent[name] = 0.0
                stack.enter_context(mock.patch.object(owner, name, clocked(getattr(owner, name), spent, name)))
            clocked(self.steps, spent, "whole")(count)
        result = {name: 1e3 * seconds / count for name, seconds in spent.items()}
        return result | {"rest": 2 * result["whole"] - sum(result.values())}

    def facts(self) -> dict[str, Any]:
        info = self._llm.info
        chosen = {line.name: line.value for line in info.decisions}
        return {"device": info.device, "dtype": info.dtype, "attention": sorted({line.backend for line in info.layers})} | {
            "decisions": chosen
        }

    def close(self) -> None:
        self._llm.close()


def clocked(function: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    """The function, adding to ``spent[name]`` what it takes."""

    def call(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            spent[name] += time.perf_counter() - start

    return call


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ------------------------------------------------------------------ kernels


def watched(work: Callable[[], None], trace: Path | None) -> list[Span]:
    """Returns the spans of the GPU's work; without one, of PyTorch's operations."""
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if cuda and trace is None else [ProfilerActivity.CPU]
    if cuda and trace is not None:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as watch:
        work()
        synchronize()
    if trace is not None:
        watch.export_chrome_trace(str(trace))
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    events = [event for event in watch.events() if event.device_type == wanted and not event.is_user_annotation]
    if cuda:
        return sorted(
            (Span(event.name, event.time_range.start, event.time_range.end) for event in events), key=lambda span: span.start
        )
    # Operations nest: each counts for the time outside those that it calls.
    return [
        Span(event.name, event.time_range.start, event.time_range.start + event.self_cpu_time_total)
        for event in sorted(events, key=lambda event: event.time_range.start)
    ]


def by_name(spans: Iterable[Span], steps: int, top: int) -> list[dict[str, Any]]:
    """The names that took the most time: microseconds and calls of a step."""
    spent: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        spent[span.name].append(span.end - span.start)
    whole = sum(map(sum, spent.values())) or 1.0
    rows = [
        {"name": name, "us": sum(each) / steps, "calls": len(each) / steps, "share": sum(each) / whole}
        for name, each in spent.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:top]


def busy(spans: Sequence[Span]) -> float:
    """Microseconds in which anything ran: streams overlap. ``spans`` are in order of their start."""
    total, until = 0.0, float("-inf")
    for span in spans:
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def gaps(spans: Sequence[Span], steps: int, top: int) -> list[dict[str, Any]]:
    """Between which kernels nothing ran, and for how long in a step."""
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    last = None
    for span in spans:
        if last is not None and span.start > last.end:
            spent[last.name, span.name].append(span.start - last.end)
        if last is None or span.end > last.end:
            last = span
    rows = [
        {"after": after, "before": before, "us": sum(each) / steps, "times": len(each) / steps}
        for (after, before), each in spent.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:top]


def on_gpu(spans: Sequence[Span], steps: int, top: int) -> dict[str, Any]:
    """Microseconds of a step: from the first kernel to the end of the last, busy, idle; and what took them."""
    whole = max(span.end for span in spans) - spans[0].start if spans else 0.0
    run = busy(spans)
    return {
        "span_us": whole / steps,
        "busy_us": run / steps,
        "idle_us": (whole - run) / steps,
        "launches": len(spans) / steps,
        "top": by_name(spans, steps, top),
        "gaps": gaps(spans, steps, top),
    }


# ------------------------------------------------------------------ host


def on_host(work: Callable[[], None], steps: int, top: int) -> list[dict[str, Any]]:
    """Python functions by their own time, microseconds of a step."""
    watch = cProfile.Profile()
    watch.runcall(work)
    rows = []
    for (file, line, name), (_, calls, own, whole, _) in pstats.Stats(watch).stats.items():  # type: ignore[attr-defined]
        where = f"{Path(file).parent.name}/{Path(file).name}:{line}" if line else ""
        rows.append(
            {
                "name": f"{name} {where}".strip(),
                "us": 1e6 * own / steps,
                "calls": calls / steps,
                "whole_us": 1e6 * whole / steps,
            }
        )
    return sorted(rows, key=lambda row: -row["us"])[:top]


# ------------------------------------------------------------------ all of it


def measure(options: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {"benchmark": "profile", "model": options.model.name} | facts(load_average())
    report |= {name: getattr(options, name) for name in ("phase", "batch", "context", "steps", "temperature")}
    bench = Bench(options)
    try:
        report["engine"] = bench.facts()
        passes = decode_passes if options.phase == "decode" else prefill_passes
        report |= passes(bench, options)
    finally:
        bench.close()
    return report


def decode_passes(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    steps, rounds = options.steps, 4 if options.host else 3
    bench.fill(rounds * steps + 4 * SETTLING)
    bench.decode()

    def work() -> None:
        bench.steps(steps)

    result: dict[str, Any] = {"step_ms": bench.timed(work), "host_ms": bench.parts(steps)}
    result["device"] = on_gpu(watched(work, options.trace), steps, options.top)
    if options.host:
        result["host"] = on_host(work, steps, options.top)
    return result


def prefill_passes(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Whole batches of prompts, one token out each; all numbers are of a step."""

    def work() -> None:
        bench.fill(1)
        bench.drain()

    work()
    result: dict[str, Any] = {"step_ms": bench.timed(work)}
    steps = int(result["step_ms"]["steps"])
    result["device"] = on_gpu(watched(work, options.trace), steps, options.top)
    if options.host:
        result["host"] = on_host(work, steps, options.top)
    return result


def show(report: dict[str, Any]) -> None:
    step, device = report["step_ms"], report["device"]
    print(f"{report['model']}, {report['phase']}, batch {report['batch']}, context {report['context']}: {report['engine']}")
    print("a step, ms: " + ", ".join(f"{name} {value:.3f}" for name, value in step.items() if name != "steps"))
    if "host_ms" in report:
        print("the host's share, ms: " + ", ".join(f"{name} {value:.3f}" for name, value in report["host_ms"].items()))
    print(
        f"watched, us of a step: span {device['span_us']:.0f}, busy {device['busy_us']:.0f}, idle {device['idle_us']:.0f}, "
        f"{device['launches']:.1f} launches"
    )
    print(f"\n{'us/step':>10} {'calls':>8} {'share':>6}  kernel")
    for row in device["top"]:
        print(f"{row['us']:10.1f} {row['calls']:8.1f} {row['share']:6.1%}  {row['name'][:110]}")
    print(f"\n{'us/step':>10} {'times':>8}  idle between")
    for row in device["gaps"]:
        print(f"{row['us']:10.1f} {row['times']:8.1f}  {row['after'][:50]} -> {row['before'][:50]}")
    if "host" in report:
        print(f"\n{'us/step':>10} {'calls':>8} {'with callees':>12}  function")
        for row in report["host"]:
            print(f"{row['us']:10.1f} {row['calls']:8.1f} {row['whole_us']:12.1f}  {row['name'][:90]}")


def setting(text: str) -> tuple[str, Any]:
    """``field=value`` of EngineArgs; the value is JSON where it can be."""
    name, separator, value = text.partition("=")
    if not separator or name not in {field.name for field in dataclasses.fields(EngineArgs)}:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE with a field of EngineArgs")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("--phase", choices=["decode", "prefill"], default="decode")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of each pass")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top", type=int, default=25, help="lines of each table")
    parser.add_argument("--host", action="store_true", help="also watch the Python functions")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace here")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="FIELD=VALUE", help="an engine argument")
    options = parser.parse_args()
    report = measure(options)
    show(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
