"""Compares routing policies on prompts behind shared prefixes, in the simulator, and says where the tails come from.

    python benchmarks/simulated_routing.py --replicas 2 --rates 3,5 --prefixes 12 --requests 1500
    python benchmarks/simulated_routing.py --calibration qwen3-8b.json --replicas 4 --rates 10 --output results.json

Rates, prefixes and requests are those of one replica. A request misses its prefix because it is the first with it (no router
can help), because only other replicas have it, or because this replica had it and has evicted it. Each policy gets the same
requests. Without --calibration the step times are made up: a step full of 2,048 prompt tokens takes 60 ms, one of 32 decode
rows 12 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

from headrace.choices import RoutingPolicy  # noqa: E402
from headrace.metrics.exchanges import distribution  # noqa: E402
from headrace.sim.cluster import Simulation  # noqa: E402
from headrace.sim.config import Calibration, EngineShape, GroupShape, Lengths, Prefixes, SimConfig, Traffic, read  # noqa: E402
from headrace.sim.step_time import Curve, KindTimes, StepTimeModel  # noqa: E402
from headrace.sim.traffic import generate  # noqa: E402

MADE_UP = Calibration(
    engine=EngineShape(
        max_model_len=16_384,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        block_size=16,
        cache_bytes=16 * 4001,
        groups=[GroupShape(1)],
        pipeline_depth=2,
    ),
    step_times=StepTimeModel(
        decode=KindTimes(Curve([1, 8, 32], [0.008, 0.009, 0.012]), context=2e-8),
        mixed=KindTimes(Curve([1, 256, 2048], [0.009, 0.012, 0.060]), context=2e-8, row=5e-5, prefill_context=1e-9),
        host_step=0.0005,
        host_row=0.00002,
    ),
)
POLICIES: tuple[RoutingPolicy, ...] = ("prefix", "round-robin")
HIT, FIRST, ELSEWHERE, EVICTED = "hit", "first", "elsewhere", "evicted"
Json = dict[str, Any]


def run(settings: SimConfig, traffic: Traffic) -> tuple[dict[str, float], dict[str, str]]:
    """Returns, for each request, the seconds to its first token, and why its prefix was computed, or ``HIT``."""
    simulation, prefixes = Simulation(settings), traffic.prefixes
    simulation.router.decisions = deque()
    requests = list(generate(traffic, settings.seed, settings.measured.engine.max_model_len))
    simulation.run(requests)
    decisions = {decision.request_id: decision for decision in simulation.router.decisions}
    computed: dict[tuple[int, ...], set[int]] = {}
    waits, causes = {}, {}
    for request in requests:
        name, first = request.request_id, simulation.exchanges[request.request_id].first_token
        if first is None or prefixes is None:
            raise SystemExit(f"{name}: {simulation.exchanges[name].error}")
        decision, prefix = decisions[name], tuple(request.prompt_token_ids[:64])
        holders = computed.setdefault(prefix, set())
        if (decision.true_hit or 0) >= prefixes.tokens // 2:
            causes[name] = HIT
        else:
            causes[name] = FIRST if not holders else EVICTED if decision.replica in holders else ELSEWHERE
        holders.add(decision.replica)
        waits[name] = first
    return waits, causes


def compare(calibration: Calibration, replicas: int, rate: float, options: argparse.Namespace) -> Json:
    traffic = Traffic(
        requests=options.requests * replicas,
        rate=rate * replicas,
        input_tokens=Lengths(200, 0.5, 1000),
        output_tokens=Lengths(60, 0.5, 300),
        prefixes=Prefixes(options.prefixes * replicas, options.prefix_tokens, options.skew),
    )
    row: Json = {"replicas": replicas, "rate": traffic.rate}
    for policy in POLICIES:
        times: dict[str, list[float]] = {"p50": [], "p99": []}
        causes: Counter[str] = Counter()
        by_cause: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            settings = SimConfig(calibration=calibration, replicas=replicas, routing=policy, max_queue_len=2**20, seed=seed)
            waits, why = run(settings, traffic)
            found = distribution(list(waits.values()))
            for key, values in times.items():
                values.append(found[key])
            causes.update(why.values())
            for name, cause in why.items():
                by_cause.setdefault(cause, []).append(waits[name])
        row[policy] = {key: round(statistics.mean(values), 1) for key, values in times.items()} | {
            "shares": {cause: round(count / causes.total(), 4) for cause, count in sorted(causes.items())},
            "first token": {cause: distribution(values) for cause, values in sorted(by_cause.items())},
        }
    row["ratio"] = round(row["prefix"]["p99"] / row["round-robin"]["p99"], 3)
    return row


def shown(row: Json) -> str:
    parts = [f"{row['replicas']}, {row['rate']:g} a second: p99 ratio {row['ratio']:.2f}"]
    for policy in POLICIES:
        one = row[policy]
        shares = ", ".join(f"{cause} {share:.1%}" for cause, share in one["shares"].items())
        parts.append(f"    {policy:12} first token p50 {one['p50']:7,.0f}  p99 {one['p99']:7,.0f} ms   {shares}")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path, help="made by `headrace bench calibrate`")
    parser.add_argument("--cache-tokens", type=int, help="of each replica, in place of the calibration's")
    parser.add_argument("--replicas", default="2,4", help="numbers, separated by commas")
    parser.add_argument("--rates", default="3,5", help="requests a second of a replica, separated by commas")
    parser.add_argument("--requests", type=int, default=1500, help="of a replica")
    parser.add_argument("--prefixes", type=int, default=12, help="of a replica")
    parser.add_argument("--prefix-tokens", type=int, default=4096)
    parser.add_argument("--skew", type=float, default=0.0, help="the n-th prefix is used n^-SKEW times as often")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    calibration = MADE_UP if options.calibration is None else read(options.calibration, Calibration, "--calibration")
    if options.cache_tokens is not None:
        size = options.cache_tokens * sum(group.bytes_per_token for group in calibration.engine.groups)
        engine = msgspec.structs.replace(calibration.engine, cache_bytes=size)
        calibration = msgspec.structs.replace(calibration, engine=engine)
    rows: list[Json] = []
    for replicas in map(int, options.replicas.split(",")):
        for rate in map(float, options.rates.split(",")):
            rows.append(compare(calibration, replicas, rate, options))
            print(shown(rows[-1]), flush=True)
            if options.output:
                options.output.write_text(json.dumps({"benchmark": "routing", "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
