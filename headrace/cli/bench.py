"""``headrace bench``: latency, throughput, serve, calibrate, agent, longcontext, longbench."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from rich.console import Console
from rich.text import Text

from headrace.bench.options import (
    LENGTH,
    AgentOptions,
    CalibrateOptions,
    LatencyOptions,
    LoadOptions,
    LongBenchOptions,
    LongContextOptions,
    ReportOptions,
    ThroughputOptions,
)
from headrace.bench.report import plain_width
from headrace.cli.errors import EXIT_FAILURE, print_error
from headrace.cli.help import Command
from headrace.cli.options import ENGINE_OPTIONS, EngineGroup, Group, command
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.host.user_files import open_output, write_output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headrace.bench.pictures import Pictures, SentPictures
    from headrace.bench.workloads import Encoder, Workload

BUSY = 0.5
"""Load per CPU above which other processes distort a measurement."""
OF_WORKLOADS = "a named workload has its own prompts and lengths: leave this option out, or --workload"
_TIMEOUT = 1800.0

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Measure this machine: latency, offline throughput (also against other engines), or a running server.",
)


class _BenchGroup(EngineGroup):
    """Engine options with prefix caching off unless it was asked for: a repeated prompt would measure the cache."""

    def build(self, values: dict[str, Any]) -> EngineArgs:
        return super().build({"enable_prefix_caching": False} | self.given(values))


BENCH_ENGINE = _BenchGroup(EngineArgs, ENGINE_OPTIONS.changed("enable_prefix_caching", default="off").options)
REPORT_OPTIONS: Group[ReportOptions] = Group.of(ReportOptions)


@app.command("latency", cls=Command)
@command(args=BENCH_ENGINE, options=Group.of(LatencyOptions), to=REPORT_OPTIONS)
def latency(args: EngineArgs, options: LatencyOptions, to: ReportOptions) -> None:
    """One request at a time: time to the first token, between tokens, and to the end."""
    from headrace.bench import latency as bench
    from headrace.bench.report import distributions_table, values_table
    from headrace.bench.throughput import standard_loads
    from headrace.frontend.async_llm import AsyncLLM

    if options.workload is not None:
        _refuse(OF_WORKLOADS, {"--input-len": options.input_len, "--output-len": options.output_len})
    encoder, vocab_size = _encoder(args)
    if options.workload is not None:
        load = _workload(options.workload, encoder, vocab_size)
        if load.pictures is not None:
            raise ConfigError(f"the prompts of {options.workload} have pictures, which bench throughput measures", "--workload")
    else:
        load = standard_loads(encoder, vocab_size, [1], options.input_len or LENGTH, options.output_len or LENGTH)[0]

    async def measure(tell: Callable[[str], None]) -> dict[str, Any]:
        llm = AsyncLLM(args)
        try:
            await llm.start()
            return await bench.run(llm, load, warm_up=options.warm_up, repetitions=options.repetitions, tell=tell)
        finally:
            await llm.close()

    with _status("starting the engine") as tell:
        report = asyncio.run(measure(tell))
    spent = report["engine_seconds"]
    total = sum(spent.values()) or 1.0
    times = distributions_table(f"Latency: {load.name}, {report['requests']} requests", report["milliseconds"])
    shares = {name: seconds / total for name, seconds in spent.items()}
    emit(report, [times, values_table("Where the time goes", shares, ".1%")], to)


@app.command("throughput", cls=Command)
@command(args=BENCH_ENGINE, options=Group.of(ThroughputOptions), to=REPORT_OPTIONS)
def throughput(args: EngineArgs, options: ThroughputOptions, to: ReportOptions) -> None:
    """Offline: tokens per second of prompts and outputs, alone or compared with other engines.

    Without --compare, one engine runs all workloads. With it, every engine gets the same token ids and generates the same
    number of tokens, greedily, in its own process; the processes run one after the other, in turns.
    """
    if options.workload:
        _refuse(OF_WORKLOADS, {"--batch": options.batch or None})
        _refuse(OF_WORKLOADS, {"--input-len": options.input_len, "--output-len": options.output_len})
    else:
        _refuse("it copies a workload, and needs --workload", {"--copies": options.copies})
    if "transformers" not in options.compare:
        _refuse("it applies to transformers, and needs --compare transformers", {"--reference-dtype": options.reference_dtype})
    if options.compare:
        _refuse("engines are compared greedily: it cannot be combined with --compare", {"--temperature": options.temperature})
        _refuse("headrace alone is measured with constraints: leave out --compare", {"--constrain": options.constrain})
    else:
        _refuse("it limits the processes of a comparison, and needs --compare", {"--timeout": options.timeout})
    from headrace.bench import throughput as bench
    from headrace.bench.engines import OTHERS, OURS, BenchJob
    from headrace.bench.workloads import RANDOM_WORKLOADS
    from headrace.startup.environment import probe

    engines = [OURS, *dict.fromkeys(options.compare)]
    for engine in engines[1:]:
        if engine not in OTHERS:
            raise ConfigError(f"there is no engine {engine!r} to compare with; there are {', '.join(OTHERS)}", "--compare")
    encoder, vocab_size = _encoder(args)
    if encoder is None:
        _refuse("the model has no tokenizer, which constraints need", {"--constrain": options.constrain})
        args = dataclasses.replace(args, skip_tokenizer_init=True)
    if options.workload:
        names = [name.strip() for entry in options.workload for name in entry.split(",") if name.strip()]
        chosen = dict.fromkeys(each for name in names for each in (RANDOM_WORKLOADS if name == "all" else [name]))
        loads = [_workload(name, encoder, vocab_size) for name in chosen]
        loads = [load if load.pictures is None else _with_pictures(load, args) for load in loads]
        loads = [load.copied(options.copies or 1) for load in loads]
        if options.compare and any(load.pictures is not None for load in loads):
            raise ConfigError("workloads with pictures are measured for headrace alone: leave out --compare", "--workload")
    else:
        sizes = options.input_len or LENGTH, options.output_len or LENGTH
        loads = bench.standard_loads(encoder, vocab_size, options.batch or (1, 8, 32), *sizes)
    save = functools.partial(_write, to.output)
    save({})
    with _status("starting") as tell:
        if options.compare:
            dtype, threads = options.reference_dtype or "bfloat16", args.num_threads or probe().num_cores
            jobs = [BenchJob(engine=e, args=args, reference_dtype=dtype, num_threads=threads, loads=loads) for e in engines]
            report = bench.compare(jobs, options.repetitions or 3, timeout=options.timeout or _TIMEOUT, tell=tell)
        else:
            report = bench.run(args, loads, options, tell=tell, save=save)
    emit(report, bench.tables(report), to)
    errors = report.get("errors", {})
    for engine, error in errors.items():
        print_error(f"{engine}: {error}")
    if errors:
        raise typer.Exit(EXIT_FAILURE)


def _refuse(reason: str, options: Mapping[str, object]) -> None:
    """Raises ConfigError for the first option that is set, although the others leave it without effect."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError(reason, option)


def _workload(name: str, encoder: Encoder | None, vocab_size: int) -> Workload:
    """The named workload, its token ids folded into the vocabulary where that is smaller than the sampled ids."""
    from headrace.bench.workloads import build

    load = build(name, encoder)
    if max(map(max, load.prompts)) < vocab_size:
        return load
    Console(stderr=True).print(f"[dim]{name}: token ids are taken modulo the vocabulary's {vocab_size:,}[/dim]")
    return load.folded(vocab_size)


def _with_pictures(load: Workload, args: EngineArgs) -> Workload:
    """The workload with the model's placeholder in each prompt and, where they are encoded, the size of its features."""
    from headrace.bench.workloads import placeholder
    from headrace.frontend.features import picture_rules
    from headrace.sources.files import find_model

    files = find_model(args)
    if picture_rules(args, files) is None:
        raise ConfigError(f"{load.name} has pictures, and the model has no processor of them", "--workload")
    load, pictures = load.marked(placeholder(vars(files.config))), load.pictures
    if pictures is None or not pictures.encoded:
        return load
    return dataclasses.replace(load, pictures=_with_features(args, pictures, "--workload"))


def _with_features(args: EngineArgs, pictures: Pictures, option: str) -> Pictures:
    """The pictures with the size that their features have in the model of ``args``. Reads no weights.

    Raises:
        ConfigError: the model has no processor of pictures, or sees one as several items; names ``option``.
    """
    from headrace.bench.pictures import PictureFeatures
    from headrace.frontend.features import feature_shape

    (image,) = dataclasses.replace(pictures, encoded=False).media(0)["image"]
    shape = feature_shape(args, image, option)
    return dataclasses.replace(pictures, encoded=True, features=PictureFeatures(*shape))


@app.command("serve", cls=Command)
@command(load=Group.of(LoadOptions), to=REPORT_OPTIONS)
def serve(load: LoadOptions, to: ReportOptions) -> None:
    """Load a running server: times to the first token, between events, and to the end, over HTTP streams."""
    from headrace.bench import serving as bench
    from headrace.bench.report import distributions_table, table, values_table
    from headrace.bench.texts import CHAT_PROMPTS

    sent = None if load.image_size is None else _sent_pictures(load, load.image_size)
    if not bench.is_loopback(load.url):
        Console(stderr=True).print(Text(f"note: {load.url} is not this machine; make sure that you may load it", "yellow"))
    with _status(f"asking {load.url}") as tell:
        report = asyncio.run(bench.run(load, CHAT_PROMPTS, sent, tell=tell))
    counts, generator = report["requests"], report["load_generator"]
    tables = [
        values_table("Requests", counts, ","),
        values_table("A second", report["rates"], ",.2f"),
        distributions_table("Times", report["milliseconds"]),
        table(
            "Load generator", ["processes", "busiest"], [[f"{generator['processes']}", f"{generator['max_busy']:.0%}"]], "rr"
        ),
    ]
    if sent is not None:
        tables.append(values_table("Pictures", report["pictures"]))
    emit(report, tables, to)
    for error, count in report["errors"].items():
        print_error(f"{count} x {error}")
    if not counts["succeeded"]:
        raise typer.Exit(EXIT_FAILURE)


def _sent_pictures(load: LoadOptions, size: str) -> SentPictures:
    """Raises: ConfigError: the size is none, or no picture has features in the model."""
    from headrace.bench.pictures import MAX_BYTES, Pictures, SentPictures
    from headrace.cli.units import picture_size

    width, height = picture_size(size)
    if 3 * width * height > MAX_BYTES:
        raise ConfigError(f"a picture of {size} takes more than {MAX_BYTES} bytes", "--image-size")
    pictures = Pictures(width, height)
    if load.sends_features:
        args = EngineArgs(model=load.image_model, load_format="dummy")
        pictures = _with_features(args, pictures, "--image-model")
    return SentPictures(pictures, load.image_form or "png")


@app.command("calibrate", cls=Command)
@command(args=ENGINE_OPTIONS, options=Group.of(CalibrateOptions), to=REPORT_OPTIONS)
def calibrate(args: EngineArgs, options: CalibrateOptions, to: ReportOptions) -> None:
    """Measure how long the engine's steps take under random traffic, for `headrace simulate`.

    A fifth of the steps is held out; the report has the error of the fitted times on them.
    """
    import msgspec

    from headrace.bench import calibrate as bench
    from headrace.bench.report import table

    with _status("calibrating") as tell:
        calibration = bench.run(args, options.seconds, seed=options.traffic_seed, tell=tell)
    rows = [
        [kind, f"{error['steps']:,.0f}", *(f"{error[name]:+.1%}" for name in ("mean_error", "p90_error", "total_error"))]
        for kind, error in calibration.errors.items()
    ]
    header = ["steps", "held out", "mean error", "p90 error", "error of the sum"]
    emit(msgspec.to_builtins(calibration), [table(f"Step times of {calibration.model}", header, rows)], to)


@app.command("agent", cls=Command)
@command(args=ENGINE_OPTIONS, options=Group.of(AgentOptions), to=REPORT_OPTIONS)
def agent(args: EngineArgs, options: AgentOptions, to: ReportOptions) -> None:
    """Conversations of agents, offline: how much of their prompts the prefix cache finds, and times to the first token.

    Prompts are random tokens behind shared instructions; answers are the model's own, of fixed length.
    """
    from headrace.bench import agent as bench
    from headrace.bench.report import distributions_table, values_table
    from headrace.frontend.llm import LLM

    encoder, _ = _encoder(args)
    if encoder is None:
        args = dataclasses.replace(args, skip_tokenizer_init=True)
    with _status("starting the engine") as tell, LLM(**vars(args)) as llm:
        report = bench.run(llm, options, tell=tell)
    found = report["prefix_cache"]
    columns = {name: found[name] for name in ("prompt_tokens", "ideal", "reused")}
    columns |= {f"computed, {name}": count for name, count in found["computed"].items()}
    share = "" if found["share_of_ideal"] is None else f": {found['share_of_ideal']:.1%} of the ideal is reused"
    tables = [
        values_table(f"Tokens of prompts{share}", columns, ","),
        distributions_table("Times", report["milliseconds"]),
        values_table(f"A second, of {report['seconds']:,.2f}", report["rates"], ",.2f"),
    ]
    emit(report, tables, to)


# What a mode is, it says itself; the cache serves the second request of each prompt.
_BY_MODE = ENGINE_OPTIONS.without("enable_prefix_caching", "skip_tokenizer_init", "sparse_prefill", "sparse_threshold").changed(
    "sparse_min_tokens", default="0"
)


@app.command("longcontext", cls=Command)
@command(args=_BY_MODE, options=Group.of(LongContextOptions), to=REPORT_OPTIONS)
def longcontext(args: EngineArgs, options: LongContextOptions, to: ReportOptions) -> None:
    """Long documents, offline: scores, density and time to the first token of dense, elastic and sparse prompts."""
    from headrace.bench import longcontext as bench
    from headrace.bench.longcontext_tasks import build, read_data

    chosen = list(dict.fromkeys(map(bench.Mode.parse, _items(options.modes, "--modes"))))
    try:
        sizes = list(dict.fromkeys(int(size) for size in _items(options.lengths, "--lengths")))
    except ValueError:
        raise ConfigError(f"{options.lengths!r} is not a list of numbers", "--lengths") from None
    encoder, _ = _encoder(args)
    if encoder is None:
        raise ConfigError("the model has no tokenizer, which the tasks need", "model")
    names = dict.fromkeys(_items(options.tasks, "--tasks")) if options.tasks else {}
    shapes = itertools.product(names, sizes, range(options.samples))
    prompts = [build(encoder, name, size, number, options.task_seed) for name, size, number in shapes]
    if options.data is not None:
        prompts += read_data(encoder, options.data, max(sizes), options.samples)
    if not prompts:
        raise ConfigError("there is nothing to run: name tasks, or a file with lines", "--tasks")
    file = options.router_dump
    with contextlib.ExitStack() as stack:
        dump = None if file is None else stack.enter_context(open_output(file, "--router-dump"))
        tell = stack.enter_context(_status("starting"))
        report = bench.run(args, chosen, prompts, dump=dump, tell=tell, save=functools.partial(_write, to.output))
    emit(report, bench.tables(report), to)


@app.command("longbench", cls=Command)
@command(args=_BY_MODE, options=Group.of(LongBenchOptions), to=REPORT_OPTIONS)
def longbench(args: EngineArgs, options: LongBenchOptions, to: ReportOptions) -> None:
    """LongBench, offline, over its authors' files: scores of dense, elastic and sparse prompts."""
    from headrace.bench import longbench as bench
    from headrace.bench.longcontext import Mode

    chosen = list(dict.fromkeys(map(Mode.parse, _items(options.modes, "--modes"))))
    names = list(dict.fromkeys(_items(options.tasks, "--tasks"))) if options.tasks else []
    tasks = bench.read(cast(Path, options.directory), names, options.samples)
    with _status("starting") as tell:
        report = bench.run(args, chosen, tasks, length=options.length, tell=tell, save=functools.partial(_write, to.output))
    emit(report, bench.tables(report), to)


def _items(text: str, option: str) -> list[str]:
    """Raises: ConfigError: there is none."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ConfigError("name at least one, separated by commas", option)
    return items


def _encoder(args: EngineArgs) -> tuple[Encoder | None, int]:
    """The model's tokenizer, where there is one, and the size of its vocabulary."""
    from headrace.sources.files import find_model
    from headrace.text.tokenizer import load_tokenizer

    files = find_model(args)
    vocab_size = int(files.config.get_text_config().vocab_size)
    if args.skip_tokenizer_init:
        return None, vocab_size
    try:
        return load_tokenizer(files, args.tokenizer, None), vocab_size
    except ConfigError:
        # A config alone is enough for dummy weights; its workloads are then random tokens.
        if files.kind != "dummy":
            raise
        return None, vocab_size


@contextlib.contextmanager
def _status(text: str) -> Iterator[Callable[[str], None]]:
    """Shows progress on standard error if that is a terminal. Yields the function that updates it."""
    from headrace.bench.report import load_average, usable_cpus

    console = Console(stderr=True)
    if (load := load_average()) > BUSY * usable_cpus():
        console.print(Text(f"note: this machine is busy (load {load}), which distorts the numbers", "yellow"))
    with console.status(text) as status:
        yield status.update


def emit(report: dict[str, Any], tables: Sequence[RenderableType], to: ReportOptions) -> None:
    """Prints a report as tables or as JSON, and writes it to a file."""
    from headrace.bench.report import as_json

    if to.as_json:
        sys.stdout.write(as_json(report) + "\n")
    else:
        console = plain_width(Console())
        for item in tables:
            console.print(item)
            console.print()
    # A file that cannot be written does not take the printed report with it.
    _write(to.output, report)


def _write(output: Path | None, report: dict[str, Any]) -> None:
    """Writes the report to the file, if there is to be one."""
    from headrace.bench.report import as_json

    if output is not None:
        write_output(output, (as_json(report) + "\n").encode(), "--output")
