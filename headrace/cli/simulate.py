"""``headrace simulate``: the real scheduler and router under a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console

from headrace.bench.options import ReportOptions
from headrace.cli.bench import REPORT_OPTIONS, emit
from headrace.cli.errors import print_note
from headrace.cli.options import Group, command
from headrace.cli.own_options import SimulateOptions
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.core.request import Request


@command(options=Group.of(SimulateOptions), to=REPORT_OPTIONS)
def simulate(options: SimulateOptions, to: ReportOptions) -> None:
    """Simulate a server: latencies and throughput of traffic on an engine that was calibrated before.

    Scheduler, cache manager and router are those of the server; only the time of a step comes from a model, which
    `headrace bench calibrate` makes. The same files give the same report.
    """
    from headrace.sim.cluster import Simulation
    from headrace.sim.config import load
    from headrace.sim.traffic import generate, read_trace

    if options.config is None:
        raise ConfigError("say what to simulate", "--config")
    settings = load(options.config)
    longest, traffic, trace = settings.measured.engine.max_model_len, settings.traffic, options.trace
    simulation = Simulation(settings)
    if trace is not None and traffic is None:
        requests = read_trace(trace, settings.seed, longest)
    elif traffic is not None and trace is None:
        requests = generate(traffic, settings.seed, longest)
    else:
        raise ConfigError("give a trace, or traffic in the configuration, one of the two", "--trace")
    with Console(stderr=True).status("simulating") as status:
        simulation.run(_counted(requests, lambda count: status.update(f"{count:,} requests, {simulation.now:,.0f} s")))
    report = simulation.report()
    emit(report, _tables(report), to)
    for error, count in report["errors"].items():
        print_note(f"{count} requests failed: {error}")


def _counted(requests: Iterable[Request], tell: Callable[[int], None]) -> Iterator[Request]:
    for count, request in enumerate(requests):
        if count % 256 == 0:
            tell(count)
        yield request


def _tables(report: dict[str, Any]) -> list[Any]:
    from headrace.bench.report import distributions_table, table, values_table

    requests = report["requests"]
    title = f"Simulated: {requests['succeeded']} of {requests['sent']} requests in {report['seconds']:,.1f} s"
    by_replica = [[str(number), *(f"{value:,}" for value in one.values())] for number, one in enumerate(report["by_replica"])]
    return [
        distributions_table(title, report["milliseconds"]),
        values_table("A second", report["rates"], ",.1f"),
        table("Replicas", ["replica", *report["by_replica"][0]], by_replica),
    ]
