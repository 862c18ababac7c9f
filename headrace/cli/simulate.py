"""``headrace simulate``: the real scheduler and router under a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.options import ReportOptions
from headrace.cli.bench import emit
from headrace.cli.errors import print_note
from headrace.cli.options import command
from headrace.errors import ConfigError


@command()
def simulate(
    config: Annotated[
        Path | None,
        typer.Option("--config", help="JSON file: calibration, replicas, routing policy, traffic, failures.", metavar="FILE"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="JSONL file of requests in place of the configuration's traffic: at, input_tokens, output_tokens, and "
            "prefix, prefix_tokens, session; or lines of Mooncake's traces.",
            metavar="FILE",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, not as tables.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the report as JSON to this file.", metavar="FILE")
    ] = None,
) -> None:
    """Simulate a server: latencies and throughput of traffic on an engine that was calibrated before.

    Scheduler, cache manager and router are those of the server; only the time of a step comes from a model, which
    `headrace bench calibrate` makes. The same files give the same report.
    """
    from headrace.sim.cluster import Simulation
    from headrace.sim.config import load
    from headrace.sim.traffic import generate, read_trace

    if config is None:
        raise ConfigError("say what to simulate", "--config")
    settings = load(config)
    longest, traffic = settings.measured.engine.max_model_len, settings.traffic
    simulation = Simulation(settings)
    if trace is not None and traffic is None:
        requests = read_trace(trace, settings.seed, longest)
    elif traffic is not None and trace is None:
        requests = generate(traffic, settings.seed, longest)
    else:
        raise ConfigError("give a trace, or traffic in the configuration, one of the two", "--trace")
    simulation.run(requests)
    report = simulation.report()
    emit(report, _tables(report), ReportOptions(as_json=as_json, output=output))
    for error, count in report["errors"].items():
        print_note(f"{count} requests failed: {error}")


def _tables(report: dict[str, Any]) -> list[Any]:
    from headrace.bench.report import distributions_table, table

    requests, rates = report["requests"], report["rates"]
    title = f"Simulated: {requests['succeeded']} of {requests['sent']} requests in {report['seconds']:,.1f} s"
    by_replica = [[str(number), *(f"{value:,}" for value in one.values())] for number, one in enumerate(report["by_replica"])]
    return [
        distributions_table(title, report["milliseconds"]),
        table("A second", list(rates), [[f"{value:,.1f}" for value in rates.values()]]),
        table("Replicas", ["replica", *report["by_replica"][0]], by_replica),
    ]
