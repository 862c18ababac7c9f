"""Compares the simulator with the engine that it simulates, on traffic and limits other than those of its calibration.

    python benchmarks/simulator_accuracy.py MODEL --output results.json
    python benchmarks/simulator_accuracy.py MODEL --clock processor --cycles 8
    python benchmarks/simulator_accuracy.py MODEL --served --load-format dummy --seconds 45 --output results.json

MODEL is a model as `headrace serve` takes it, or `tiny`: a Llama of two layers with random weights. Calibration and cases take
turns for --cycles cycles, so that a machine whose speed drifts drifts for all; the step times are then fitted to the steps of
all cycles. A case's number is the median of its runs, with their range.

With --clock processor every clock of this process counts its processor time: what one idle core would take, whatever else
runs on the machine. It is for one thread without a pipeline, and leaves out the cases that are served by an engine process.

With --served one process calibrates the engine with its default limits (`headrace bench calibrate`); then AsyncLLM serves
traffic with other limits, prompts and arrivals, one engine process after the other, while the simulator expects what will be
measured. Rates are shares of what the simulator says the engine can do. Every case is printed and written when it is done.
Each has 3 simulations, whose medians count.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PROCESSOR = "processor"
if PROCESSOR in sys.argv:  # Before anything binds a clock.
    time.perf_counter = time.monotonic = time.process_time  # type: ignore[assignment]

import msgspec  # noqa: E402

from headrace.bench import calibrate  # noqa: E402
from headrace.bench.report import facts, load_average  # noqa: E402
from headrace.config import EngineArgs  # noqa: E402
from headrace.core.request import Request  # noqa: E402
from headrace.frontend.async_llm import AsyncLLM  # noqa: E402
from headrace.host.garbage import freeze_gc  # noqa: E402
from headrace.metrics.exchanges import Exchange, totals  # noqa: E402
from headrace.metrics.stats import EngineStats  # noqa: E402
from headrace.processes.load import LoadedEngine, load_engine  # noqa: E402
from headrace.sim.cluster import Simulation  # noqa: E402
from headrace.sim.config import Calibration, Lengths, SimConfig, Traffic, read  # noqa: E402
from headrace.sim.fit import MeasuredStep, fit  # noqa: E402
from headrace.sim.traffic import generate  # noqa: E402
from headrace.startup.source import FileSource  # noqa: E402

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
}
CALIBRATED = {"max_num_seqs": 32, "max_model_len": 1024, "num_kv_blocks": 2000}
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """Traffic for an engine with its own limits. ``load``: tokens asked for as a share of what the case without one gives."""

    name: str
    max_num_seqs: int
    num_kv_blocks: int
    requests: int
    inputs: Lengths
    outputs: Lengths
    load: float | None = None
    """None: all requests come at once."""
    served: bool = False

    def traffic(self, rate: float) -> Traffic:
        return Traffic(requests=self.requests, rate=rate, input_tokens=self.inputs, output_tokens=self.outputs)


def cases(scale: int) -> list[Case]:
    """``scale``: requests of a case; a quarter as many tokens fit in the cache of one that is short of memory."""
    short, long = Lengths(40, 0.5, 200), Lengths(200, 0.5, 700)
    return [
        Case("12 rows, at once", 12, 1000, scale, short, Lengths(24, 0.5, 100)),
        Case("4 rows, long prompts, at once", 4, 1000, scale // 2, long, Lengths(24, 0.5, 100)),
        Case("24 rows, long outputs, at once", 24, 1000, scale, Lengths(10, 0.5, 60), Lengths(64, 0.5, 200)),
        Case("16 rows, few blocks, at once", 16, 66, scale // 2, short, Lengths(40, 0.5, 100)),
        Case("12 rows, 0.6 of the load", 12, 1000, scale, short, Lengths(24, 0.5, 100), 0.6),
        Case("12 rows, served, at once", 12, 1000, scale, short, Lengths(24, 0.5, 100), served=True),
        Case("12 rows, served, 0.4 of the load", 12, 1000, scale, short, Lengths(24, 0.5, 100), 0.4, served=True),
    ]


def asked(case: Case, rate: float, cycle: int, longest: int) -> list[Request]:
    made = generate(case.traffic(rate), cycle, longest)
    return [msgspec.structs.replace(request, request_id=f"{cycle}-{request.request_id}") for request in made]


def run_offline(engine: LoadedEngine, requests: Sequence[Request]) -> tuple[float, list[Exchange]]:
    """Seconds, and what each request met. While nothing runs, time jumps to the next arrival."""
    core, waiting = engine.core, list(requests)
    exchanges = {request.request_id: Exchange(input_tokens=len(request.prompt_token_ids)) for request in requests}
    arrived = {request.request_id: request.arrival_time for request in requests}
    last: dict[str, float] = {}
    start = time.perf_counter()
    while waiting or core.has_work():
        now = time.perf_counter() - start
        while waiting and waiting[0].arrival_time <= now:
            core.add(waiting.pop(0))
        if not core.has_work():
            start -= waiting[0].arrival_time - now
            continue
        deltas = core.step()
        now = time.perf_counter() - start
        for delta in deltas:
            note(exchanges[delta.request_id], delta.request_id, len(delta.token_ids), now, arrived, last)
            if delta.finish_reason is not None:
                exchanges[delta.request_id].whole = now - arrived[delta.request_id]
    return time.perf_counter() - start, list(exchanges.values())


def note(exchange: Exchange, name: str, tokens: int, now: float, arrived: dict[str, float], last: dict[str, float]) -> None:
    if not tokens:
        return
    if exchange.first_token is None:
        exchange.first_token = now - arrived[name]
    else:
        exchange.between_tokens += [(now - last[name]) / tokens] * tokens
    last[name] = now
    exchange.output_tokens += tokens


async def run_served(llm: AsyncLLM, requests: Sequence[Request]) -> tuple[float, list[Exchange]]:
    """The same with an engine process."""
    start = time.monotonic()

    async def follow(request: Request) -> Exchange:
        await asyncio.sleep(max(0.0, start + request.arrival_time - time.monotonic()))
        name, last = request.request_id, dict[str, float]()
        exchange, arrived = Exchange(input_tokens=len(request.prompt_token_ids)), {name: time.monotonic() - start}
        now = 0.0
        async with await llm.add(msgspec.structs.replace(request, arrival_time=time.monotonic())) as stream:
            async for delta in stream:
                now = time.monotonic() - start
                note(exchange, name, len(delta.token_ids), now, arrived, last)
        exchange.whole = now - arrived[name]
        return exchange

    exchanges = await asyncio.gather(*map(follow, requests))
    return time.monotonic() - start, list(exchanges)


def simulate(calibration: Calibration, case: Case, requests: Sequence[Request]) -> tuple[float, list[Exchange]]:
    settings = SimConfig(
        calibration=calibration, message_seconds=0.0005 if case.served else 0.0, max_queue_len=2**20, traffic=case.traffic(1.0)
    )
    simulation = Simulation(settings)
    simulation.run(requests)
    return simulation.now, list(simulation.exchanges.values())


def numbers(seconds: float, exchanges: Sequence[Exchange]) -> dict[str, float]:
    """Tokens a second, and milliseconds."""
    found = totals(exchanges, "between tokens")
    shown = {"tokens/s": found["output_tokens"] / seconds}
    for name, values in found["milliseconds"].items():
        shown |= {f"{name} {key}": values[key] for key in ("p50", "p99") if values is not None}
    return shown


def measure(args: EngineArgs, chosen: Sequence[Case], options: argparse.Namespace) -> Json:
    def engine(**changes: Any) -> LoadedEngine:
        return load_engine(FileSource(dataclasses.replace(args, **changes)))

    base = engine(**CALIBRATED)
    engines = {
        case.name: engine(max_num_seqs=case.max_num_seqs, num_kv_blocks=case.num_kv_blocks, max_model_len=1024)
        for case in chosen
        if not case.served
    }
    steps: list[MeasuredStep] = []
    rates: dict[str, float] = {}
    runs: dict[str, list[tuple[list[Request], float, list[Exchange]]]] = {case.name: [] for case in chosen}
    for cycle in range(options.cycles):
        steps += calibrate.measure(base.core, base.config, options.seconds, seed=cycle, tell=lambda what: None)
        for case in chosen:
            rate = 1e6 if case.load is None else case.load * rates[case.name.split(",")[0], case.served]  # type: ignore[index]
            requests = asked(case, rate, cycle, 1024)
            if case.served:
                seconds, exchanges = serve_case(args, case, requests)
            else:
                seconds, exchanges = run_offline(engines[case.name], requests)
            rates.setdefault((case.name.split(",")[0], case.served), len(requests) / seconds)  # type: ignore[arg-type]
            runs[case.name].append((requests, seconds, exchanges))
            print(f"cycle {cycle}, {case.name}: {numbers(seconds, exchanges)['tokens/s']:,.0f} tokens/s", flush=True)
    fitted = fit(steps, calibrate.graph_sizes(base.core, base.config))
    report: Json = {"fit": msgspec.to_builtins(fitted.model), "errors": msgspec.to_builtins(fitted.errors), "cases": {}}
    for case in chosen:
        config = engines[case.name].config if not case.served else None
        shape = calibrate.shape(config) if config else calibrate.shape(base.config)
        shape = msgspec.structs.replace(shape, max_num_seqs=case.max_num_seqs)
        calibration = Calibration(engine=shape, step_times=fitted.model)
        real = [numbers(seconds, exchanges) for _, seconds, exchanges in runs[case.name]]
        simulated = [numbers(*simulate(calibration, case, requests)) for requests, _, _ in runs[case.name]]
        report["cases"][case.name] = {
            key: {
                "real": statistics.median(one[key] for one in real),
                "range": [min(one[key] for one in real), max(one[key] for one in real)],
                "simulated": statistics.median(one[key] for one in simulated),
                "ratio": statistics.median(ours[key] / one[key] for ours, one in zip(simulated, real, strict=True)),
            }
            for key in real[0]
        }
    for one in (base, *engines.values()):
        one.core.close()
    return report


def serve_case(args: EngineArgs, case: Case, requests: Sequence[Request]) -> tuple[float, list[Exchange]]:
    async def work() -> tuple[float, list[Exchange]]:
        changes = {"max_num_seqs": case.max_num_seqs, "max_model_len": 1024, "num_kv_blocks": CALIBRATED["num_kv_blocks"]}
        async with AsyncLLM(dataclasses.replace(args, **changes)) as llm:
            while llm.health().reason:
                await asyncio.sleep(0.05)
            return await run_served(llm, requests)

    return asyncio.run(work())


@dataclasses.dataclass(frozen=True)
class Served:
    """Cases of one engine process."""

    max_num_seqs: int
    max_num_batched_tokens: int
    cases: tuple[tuple[str, int, Lengths, Lengths, float | None], ...]
    """Name, requests, tokens in and out, and the load: a share of what the engine can do; None: all requests at once."""


def served(tiny: bool) -> list[Served]:
    """Returns the cases for a GPU, or a tenth of them for the tiny model on a CPU."""
    scale = 10 if tiny else 1

    def lengths(median: float, sigma: float, most: int) -> Lengths:
        return Lengths(median / scale, sigma, most // scale)

    def limit(value: int) -> int:
        return value // (4 if tiny else 1)

    chat = lengths(500, 0.6, 3000), lengths(150, 0.5, 500)
    documents = lengths(3000, 0.5, 9000), lengths(120, 0.5, 400)
    answers = lengths(100, 0.5, 400), lengths(400, 0.4, 900)
    return [
        Served(limit(96), 4096 // scale, (("chat, at once", 256, *chat, None), ("chat, 0.7 of the load", 256, *chat, 0.7))),
        Served(
            limit(32),
            2048 // scale,
            (("documents, 0.6 of the load", 80, *documents, 0.6), ("long answers, at once", 64, *answers, None)),
        ),
    ]


def simulations(calibration: Calibration, requests: Sequence[Request]) -> list[Json]:
    found = []
    for seed in range(3):
        simulation = Simulation(SimConfig(calibration=calibration, max_queue_len=2**20, seed=seed))
        simulation.run(requests)
        replica = simulation.replicas[0]
        done = numbers(simulation.now, list(simulation.exchanges.values()))
        found.append(done | {"seconds": simulation.now, "steps": replica.num_steps, "device seconds": replica.busy_seconds})
    return found


def expected(calibration: Calibration, engine: Served) -> list[tuple[str, list[Request], Json]]:
    """Name, requests and simulated numbers of each case."""
    shape = msgspec.structs.replace(
        calibration.engine, max_num_seqs=engine.max_num_seqs, max_num_batched_tokens=engine.max_num_batched_tokens
    )
    calibration = msgspec.structs.replace(calibration, engine=shape)
    found = []
    for seed, (name, count, inputs, outputs, load) in enumerate(engine.cases):
        asked = Traffic(requests=count, rate=1e6, input_tokens=inputs, output_tokens=outputs)
        requests = list(generate(asked, seed, shape.max_model_len))
        if load is not None:
            simulation = Simulation(SimConfig(calibration=calibration, max_queue_len=2**20))
            simulation.run(requests)
            asked = msgspec.structs.replace(asked, rate=load * count / simulation.now)
            requests = list(generate(asked, seed, shape.max_model_len))
        all_found = simulations(calibration, requests)
        found.append((name, requests, {key: statistics.median(one[key] for one in all_found) for key in all_found[0]}))
    return found


async def measure_served(llm: AsyncLLM, requests: Sequence[Request]) -> Json:
    """A case on an engine that has nothing else to do, with what the engine counted meanwhile."""
    before = await quiet(llm)
    seconds, exchanges = await run_served(llm, requests)
    after = await quiet(llm)
    counted = ("step", "forward_seconds", "sample_seconds", "host_seconds", "replayed_steps", "eager_steps", "padding_tokens")
    engine = {name: getattr(after, name) - getattr(before, name) for name in counted}
    device = engine["forward_seconds"] + engine["sample_seconds"]
    totals = {"seconds": seconds, "steps": engine["step"], "device seconds": device}
    return numbers(seconds, exchanges) | totals | {"engine": engine}


async def quiet(llm: AsyncLLM) -> EngineStats:
    """The statistics once the engine is idle and has captured its graphs."""
    while True:
        await asyncio.sleep(0.1)
        stats = llm.stats
        if not stats.num_running and not stats.num_waiting and stats.graphs_captured >= stats.graphs_total:
            await asyncio.sleep(0.1)
            return llm.stats


async def serve_cases(
    args: EngineArgs, engine: Served, calibration: Calibration, done: Callable[[str, Json, Json], None]
) -> None:
    limits = {"max_num_seqs": engine.max_num_seqs, "max_num_batched_tokens": engine.max_num_batched_tokens}
    llm = AsyncLLM(dataclasses.replace(args, **limits))
    try:
        _, prepared = await asyncio.gather(llm.start(), asyncio.to_thread(expected, calibration, engine))
        freeze_gc()
        first = [msgspec.structs.replace(one, request_id=f"warm-{one.request_id}") for one in prepared[0][1][:8]]
        await quiet(llm)
        await run_served(llm, [msgspec.structs.replace(one, prompt_token_ids=one.prompt_token_ids[::-1]) for one in first])
        for place, (name, requests, simulated) in enumerate(prepared):
            named = [msgspec.structs.replace(one, request_id=f"{place}-{one.request_id}") for one in requests]
            done(name, await measure_served(llm, named), simulated)
    finally:
        await llm.close()


def compare_served(args: EngineArgs, options: argparse.Namespace, report: Json) -> None:
    """Fills ``report``, which is written after each case."""
    start = time.monotonic()
    file = options.output.with_suffix(".calibration.json") if options.output else Path(args.model or "") / "calibration.json"
    command = [sys.executable, "-m", "headrace.cli", "bench", "calibrate", *([args.model] if args.model else [])]
    command += ["--seconds", str(options.seconds), "--load-format", args.load_format, "--output", str(file)]
    if options.model == "tiny":
        command += ["--num-threads", "1", "--max-num-seqs", "64", "--max-num-batched-tokens", "1024"]
        command += ["--num-kv-blocks", str(args.num_kv_blocks)]
    else:
        command += ["--wait-for-kernels"]
    subprocess.run(command, check=True)
    calibration = read(file, Calibration, "calibration")
    print(f"{time.monotonic() - start:.0f} s: calibrated, errors {calibration.errors}", flush=True)
    report |= {"calibration": msgspec.to_builtins(calibration), "cases": {}}

    def done(name: str, real: Json, simulated: Json) -> None:
        ratios = {key: simulated[key] / real[key] if real[key] else math.nan for key in simulated}
        report["cases"][name] = {"real": real, "simulated": simulated, "ratio": ratios}
        print(f"{time.monotonic() - start:.0f} s: {name}")
        for key, ratio in ratios.items():
            print(f"    {key:20} real {real[key]:12,.2f}   simulated {simulated[key]:12,.2f}   ratio {ratio:.3f}", flush=True)
        write(report, options.output)

    for engine in served(options.model == "tiny"):
        asyncio.run(serve_cases(args, engine, calibration, done))
    report["seconds"] = time.monotonic() - start


def write(report: Json, output: Path | None) -> None:
    if output:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="tiny, embedded, or a model's folder or name")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of the calibration, in each cycle")
    parser.add_argument("--requests", type=int, default=120, help="of a case")
    parser.add_argument("--clock", choices=("wall", PROCESSOR), default="wall")
    parser.add_argument("--cases", help="numbers of some cases, separated by commas")
    parser.add_argument("--served", action="store_true", help="served traffic alone, on an engine calibrated once")
    parser.add_argument("--load-format", default="auto", help="of MODEL with --served, as `headrace serve` takes it")
    options = parser.parse_args()
    before = load_average()
    chosen = [case for case in cases(options.requests) if not (case.served and options.clock == PROCESSOR)]
    if options.cases:
        chosen = [chosen[int(number)] for number in options.cases.split(",")]
    with tempfile.TemporaryDirectory(prefix="simulator-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
        model = {"tiny": folder, "embedded": None}.get(options.model, options.model)
        load_format = "dummy" if options.model == "tiny" else options.load_format
        args = EngineArgs(model=model, load_format=load_format, skip_tokenizer_init=True)
        report: Json = {}
        if options.served:
            if options.model == "tiny":
                args = dataclasses.replace(args, num_threads=1, num_kv_blocks=4000)
            else:
                args = dataclasses.replace(args, wait_for_kernels=True)
            compare_served(args, options, report)
            write(report | {"benchmark": "simulator, served", "model": options.model} | facts(before), options.output)
            return
        report = measure(dataclasses.replace(args, num_threads=1), chosen, options)
    report |= {"benchmark": "simulator", "model": options.model, "clock": options.clock} | facts(before)
    for name, case in report["cases"].items():
        print(name)
        for key, one in case.items():
            low, high = one["range"]
            print(
                f"    {key:20} real {one['real']:10,.1f} ({low:,.1f} to {high:,.1f})"
                f"   simulated {one['simulated']:10,.1f}   ratio {one['ratio']:.3f}"
            )
    write(report, options.output)


if __name__ == "__main__":
    main()
