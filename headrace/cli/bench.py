"""``headrace bench``: latency, throughput, serve, calibrate, longcontext."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from headrace.bench.constrained import Constrained
from headrace.cli.errors import EXIT_FAILURE, print_error
from headrace.cli.options import ENGINE_OPTIONS, Group, command
from headrace.cli.startup import plain_width
from headrace.config import EngineArgs
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headrace.bench.workloads import Encoder, Workload

BUSY = 0.5
"""Load per CPU above which other processes distort a measurement."""
OF_WORKLOADS = "a named workload has its own prompts and lengths: leave this option out, or --workload"
_LENGTH = 128
"""Default length of a prompt and of an output, in tokens."""
_TIMEOUT = 1800.0
_IN_FLIGHT = 1024
WHAT = functools.partial(typer.Option, rich_help_panel="What is measured")
HOW = functools.partial(typer.Option, rich_help_panel="How it is measured")
REPORT = functools.partial(typer.Option, rich_help_panel="Report")

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure this machine: latency, offline throughput (also against other engines), or a running server.",
)

AsJson = Annotated[bool, REPORT("--json", help="Print the report as JSON, not as tables.")]
Output = Annotated[
    Path | None,
    REPORT("--output", "-o", help="Also write the report as JSON to this file.", metavar="FILE"),
]
WorkloadName = Annotated[
    str | None,
    WHAT(
        "--workload",
        help="A workload by name: chat, chat_shared (text); single, batch8, batch64, mixed256, prefill8k, prefill32k, "
        "prefill64k, prefill128k, longctx_decode (random tokens); images64, images64_features, images64_text (a picture of "
        "1024 x 1024 random pixels in each prompt, random features in its place, and neither; for throughput).",
        metavar="NAME",
    ),
]


InputLen = Annotated[
    int | None,
    WHAT(min=1, help="Tokens of each prompt, without --workload.", show_default=str(_LENGTH)),
]
OutputLen = Annotated[
    int | None,
    WHAT(min=1, help="Tokens to generate for each, without --workload.", show_default=str(_LENGTH)),
]


Dtype = Literal["float32", "bfloat16", "float16"]


class _BenchGroup(Group[EngineArgs]):
    """Engine options with prefix caching off unless it was asked for: a repeated prompt would measure the cache."""

    def build(self, values: dict[str, Any]) -> EngineArgs:
        return super().build({"enable_prefix_caching": False} | self.given(values))


BENCH_ENGINE = _BenchGroup(EngineArgs, ENGINE_OPTIONS.changed("enable_prefix_caching", default="off").options)


@app.command("latency")
@command(args=BENCH_ENGINE)
def latency(
    args: EngineArgs,
    workload: WorkloadName = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    repetitions: Annotated[int, HOW(min=1, help="Measured repetitions of each prompt.")] = 5,
    warm_up: Annotated[int, HOW(min=0, help="Requests before the measured ones.")] = 2,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """One request at a time: time to the first token, between tokens, and to the end."""
    from headrace.bench import latency as bench
    from headrace.bench.report import distributions_table, table
    from headrace.bench.throughput import standard_loads
    from headrace.engine.async_llm import AsyncLLM

    if workload is not None:
        _refuse(OF_WORKLOADS, {"--input-len": input_len, "--output-len": output_len})
    encoder, vocab_size = _encoder(args)
    if workload is not None:
        load = _workload(workload, encoder, vocab_size)
        if load.pictures is not None:
            raise ConfigError(f"the prompts of {workload} have pictures, which bench throughput measures", "--workload")
    else:
        load = standard_loads(encoder, vocab_size, [1], input_len or _LENGTH, output_len or _LENGTH)[0]

    async def measure(tell: Callable[[str], None]) -> dict[str, Any]:
        llm = AsyncLLM(args)
        try:
            await llm.start()
            return await bench.run(llm, load, warm_up=warm_up, repetitions=repetitions, tell=tell)
        finally:
            await llm.close()

    with _status("starting the engine") as tell:
        report = asyncio.run(measure(tell))
    spent = report["engine_seconds"]
    total = sum(spent.values()) or 1.0
    emit(
        report,
        [
            distributions_table(f"Latency: {load.name}, {report['requests']} requests", report["milliseconds"]),
            table("Where the time goes", list(spent), [[f"{value / total:.1%}" for value in spent.values()]]),
        ],
        as_json,
        output,
    )


@app.command("throughput")
@command(args=BENCH_ENGINE)
def throughput(
    args: EngineArgs,
    workload: Annotated[
        list[str] | None,
        WHAT(
            "--workload",
            help="Workloads by name, as for latency. Repeatable, or separated by commas; all: every one of random tokens.",
            metavar="NAME",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        WHAT("--batch", min=1, help="Prompts at once, without --workload. Repeatable.", show_default="1, 8, 32"),
    ] = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    compare: Annotated[
        list[str] | None,
        WHAT("--compare", help="Also run the workloads through transformers or llama.cpp. Repeatable.", metavar="ENGINE"),
    ] = None,
    reference_dtype: Annotated[
        Dtype | None,
        HOW(
            help="Dtype of transformers, with --compare transformers; a quantised file is dequantised.", show_default="bfloat16"
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        HOW(min=0.0, help="Sampling temperature, without --compare.", show_default="0: greedy"),
    ] = None,
    constrain: Annotated[
        Constrained | None,
        HOW(help="Hold every output to lines of JSON of one of four schemas, without --compare. Needs a tokenizer."),
    ] = None,
    repetitions: Annotated[
        int | None,
        HOW(min=1, help="Repetitions of each workload; the best one counts.", show_default="3; of large workloads 2"),
    ] = None,
    timeout: Annotated[
        float | None,
        HOW(min=1, help="Seconds that each process of a comparison may take.", show_default=f"{_TIMEOUT:g}"),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Offline: tokens per second of prompts and outputs, alone or compared with other engines.

    Without --compare, one engine runs all workloads. With it, every engine gets the same token ids and generates the same
    number of tokens, greedily, in its own process; the processes run one after the other, in turns.
    """
    if workload:
        _refuse(OF_WORKLOADS, {"--batch": batch or None, "--input-len": input_len, "--output-len": output_len})
    if "transformers" not in (compare or []):
        _refuse("it applies to transformers, and needs --compare transformers", {"--reference-dtype": reference_dtype})
    if compare:
        _refuse("engines are compared greedily: it cannot be combined with --compare", {"--temperature": temperature})
        _refuse("headrace alone is measured with constraints: leave out --compare", {"--constrain": constrain})
    else:
        _refuse("it limits the processes of a comparison, and needs --compare", {"--timeout": timeout})
    from headrace.bench import throughput as bench
    from headrace.bench.engines import OTHERS, OURS, BenchJob
    from headrace.bench.workloads import RANDOM_WORKLOADS
    from headrace.engine.environment import probe

    engines = [OURS, *dict.fromkeys(compare or [])]
    for engine in engines[1:]:
        if engine not in OTHERS:
            raise ConfigError(f"there is no engine {engine!r} to compare with; there are {', '.join(OTHERS)}", "--compare")
    encoder, vocab_size = _encoder(args)
    if encoder is None:
        _refuse("the model has no tokenizer, which constraints need", {"--constrain": constrain})
        args = dataclasses.replace(args, skip_tokenizer_init=True)
    if workload:
        names = [name.strip() for entry in workload for name in entry.split(",") if name.strip()]
        chosen = dict.fromkeys(each for name in names for each in (RANDOM_WORKLOADS if name == "all" else [name]))
        loads = [_workload(name, encoder, vocab_size) for name in chosen]
        loads = [load if load.pictures is None else _with_pictures(load, args) for load in loads]
        if compare and any(load.pictures is not None for load in loads):
            raise ConfigError("workloads with pictures are measured for headrace alone: leave out --compare", "--workload")
    else:
        lengths = input_len or _LENGTH, output_len or _LENGTH
        loads = bench.standard_loads(encoder, vocab_size, batch or [1, 8, 32], *lengths)

    def save(report: dict[str, Any]) -> None:
        if output is not None:
            _write(report, output)

    save({})
    with _status("starting") as tell:
        if compare:
            dtype, threads = reference_dtype or "bfloat16", args.num_threads or probe().num_cores
            jobs = [BenchJob(engine=e, args=args, reference_dtype=dtype, num_threads=threads, loads=loads) for e in engines]
            report = bench.compare(jobs, repetitions or 3, timeout=timeout or _TIMEOUT, tell=tell)
        else:
            report = bench.run(
                args,
                loads,
                temperature=temperature or 0.0,
                constrain=constrain,
                repetitions=repetitions,
                tell=tell,
                save=save,
            )
    emit(report, bench.tables(report), as_json, output)
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
    from headrace.bench.workloads import Features, placeholder
    from headrace.engine.features import picture_rules
    from headrace.multimodal.items import Picture
    from headrace.sources.files import find_model

    files = find_model(args)
    rules = picture_rules(args, files)
    if rules is None:
        raise ConfigError(f"{load.name} has pictures, and the model has no processor of them", "--workload")
    load, pictures = load.marked(placeholder(vars(files.config))), load.pictures
    if pictures is None or not pictures.encoded:
        return load
    (image,) = dataclasses.replace(pictures, encoded=False).media(0)["image"]
    processed = rules.process(Picture(image), {}, load.name)
    if len(processed) != 1:
        raise ConfigError(f"the model sees {len(processed)} crops of a picture, which have no features of one", "--workload")
    features = Features(processed[0].expansion.num_rows, files.config.get_text_config().hidden_size, processed[0].grid)
    return dataclasses.replace(load, pictures=dataclasses.replace(pictures, features=features))


@app.command("serve")
@command()
def serve(
    url: Annotated[str, WHAT(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, WHAT(help="The model to ask for.", show_default="the server's first")] = None,
    api_key: Annotated[str | None, WHAT(help="Key for the server.", envvar="HEADRACE_API_KEY")] = None,
    concurrency: Annotated[
        int | None,
        WHAT(
            min=1,
            max=4096,
            help="Closed loop: number of clients, each of which sends its next request when the last is answered.",
            show_default="8, without --rate",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        WHAT(help="Open loop: requests arrive at this mean rate a second, at random, whether the server keeps up or not."),
    ] = None,
    num_requests: Annotated[int, WHAT(min=1, max=1_000_000, help="Requests at most.")] = 64,
    duration: Annotated[float, WHAT(max=86_400, help="Seconds at most in which requests are sent.")] = 120.0,
    max_tokens: Annotated[int, WHAT(min=1, help="Tokens to generate for each request.")] = 64,
    ignore_eos: Annotated[
        bool,
        WHAT(
            "--ignore-eos",
            help="Generate all of --max-tokens every time. headrace and vLLM know this field; other servers may refuse it.",
        ),
    ] = False,
    seed: Annotated[int | None, HOW(help="Open loop: seeds the arrivals.", show_default="0")] = None,
    max_in_flight: Annotated[
        int | None,
        HOW(min=1, max=16_384, help="Open loop: requests in flight at most.", show_default=str(_IN_FLIGHT)),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Load a running server: times to the first token, between events, and to the end, over HTTP streams."""
    from headrace.bench import serving as bench
    from headrace.bench.report import distributions_table, table
    from headrace.bench.texts import CHAT_PROMPTS

    if rate is None:
        _refuse("it applies to the open loop, and needs --rate", {"--seed": seed, "--max-in-flight": max_in_flight})
    load = bench.Load(
        url=url,
        model=model,
        api_key=api_key,
        prompts=list(CHAT_PROMPTS),
        max_tokens=max_tokens,
        num_requests=num_requests,
        duration=duration,
        concurrency=8 if concurrency is None and rate is None else concurrency,
        rate=rate,
        max_in_flight=max_in_flight or _IN_FLIGHT,
        seed=seed or 0,
        ignore_eos=ignore_eos,
    )
    if not bench.is_loopback(url):
        Console(stderr=True).print(Text(f"note: {url} is not this machine; make sure that you may load it", "yellow"))
    with _status(f"asking {url}") as tell:
        report = asyncio.run(bench.run(load, tell=tell))
    counts, rates = report["requests"], report["rates"]
    emit(
        report,
        [
            table("Requests", list(counts), [[f"{value:,}" for value in counts.values()]]),
            table("A second", list(rates), [[f"{value:,.2f}" for value in rates.values()]]),
            distributions_table("Times", report["milliseconds"]),
        ],
        as_json,
        output,
    )
    for error, count in report["errors"].items():
        print_error(f"{count} x {error}")
    if not counts["succeeded"]:
        raise typer.Exit(EXIT_FAILURE)


@app.command("calibrate")
@command(args=ENGINE_OPTIONS)
def calibrate(
    args: EngineArgs,
    seconds: Annotated[float, HOW(min=1.0, max=86_400, help="Seconds of random traffic.")] = 60.0,
    seed: Annotated[int, HOW(min=0, help="Seed of the traffic.")] = 0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Measure how long the engine's steps take under random traffic, for `headrace simulate`.

    A fifth of the steps is held out; the report has the error of the fitted times on them.
    """
    import msgspec

    from headrace.bench import calibrate as bench
    from headrace.bench.report import table

    with _status("calibrating") as tell:
        calibration = bench.run(args, seconds, seed=seed, tell=tell)
    rows = [
        [kind, f"{error['steps']:,.0f}", *(f"{error[name]:+.1%}" for name in ("mean_error", "p90_error", "total_error"))]
        for kind, error in calibration.errors.items()
    ]
    header = ["steps", "held out", "mean error", "p90 error", "error of the sum"]
    emit(msgspec.to_builtins(calibration), [table(f"Step times of {calibration.model}", header, rows)], as_json, output)


# What a mode is, it says itself; the cache serves the second request of each prompt.
_BY_MODE = ("enable_prefix_caching", "skip_tokenizer_init", "sparse_prefill", "sparse_threshold")


@app.command("longcontext")
@command(
    args=ENGINE_OPTIONS.without(*_BY_MODE).changed("sparse_min_tokens", default="0"),
)
def longcontext(
    args: EngineArgs,
    tasks: Annotated[
        str,
        WHAT(help="Tasks, separated by commas: needle, multikey, variables, words.", metavar="NAMES"),
    ] = "needle,multikey,variables,words",
    lengths: Annotated[str, WHAT(help="Tokens of a prompt, separated by commas.", metavar="NUMBERS")] = "2048,4096",
    data: Annotated[
        Path | None,
        WHAT(
            help="Also the lines of a JSONL file with context, input and answers, as LongBench has them, cut to the largest "
            "of --lengths.",
            metavar="FILE",
        ),
    ] = None,
    samples: Annotated[int, WHAT(min=1, help="Prompts of each task and length, and lines of --data.")] = 4,
    modes: Annotated[
        str,
        WHAT(
            help="How prompts attend, separated by commas: dense, xattn, mean, elastic (by the model's router). :NUMBER sets "
            "a threshold, as in xattn:0.8.",
            metavar="MODES",
        ),
    ] = "dense,xattn,mean",
    task_seed: Annotated[int, HOW(min=0, help="Seed of the tasks.")] = 0,
    router_dump: Annotated[
        Path | None,
        REPORT(
            "--router-dump",
            help="Write a line of JSON for each prompt and mode: its answer, the density of each layer, the types of heads.",
            metavar="FILE",
        ),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Long documents, offline: scores, density and time to the first token of dense, elastic and sparse prompts."""
    from headrace.bench import longcontext as bench
    from headrace.bench.longcontext_tasks import build, read_data

    chosen = list(dict.fromkeys(map(bench.Mode.parse, _items(modes, "--modes"))))
    try:
        sizes = list(dict.fromkeys(int(size) for size in _items(lengths, "--lengths")))
    except ValueError:
        raise ConfigError(f"{lengths!r} is no list of numbers", "--lengths") from None
    encoder, _ = _encoder(args)
    if encoder is None:
        raise ConfigError("the model has no tokenizer, which the tasks need", "model")
    names = dict.fromkeys(_items(tasks, "--tasks")) if tasks else {}
    prompts = [build(encoder, name, size, number, task_seed) for name in names for size in sizes for number in range(samples)]
    if data is not None:
        prompts += read_data(encoder, data, max(sizes), samples)
    if not prompts:
        raise ConfigError("there is nothing to run: name tasks, or a file with lines", "--tasks")

    def save(report: dict[str, Any]) -> None:
        if output is not None:
            _write(report, output)

    with contextlib.ExitStack() as stack:
        try:
            dump = None if router_dump is None else stack.enter_context(router_dump.open("w", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot write {router_dump}: {error.strerror}", "--router-dump") from None
        tell = stack.enter_context(_status("starting"))
        report = bench.run(args, chosen, prompts, dump=dump, tell=tell, save=save)
    emit(report, bench.tables(report), as_json, output)


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


def emit(report: dict[str, Any], tables: Sequence[RenderableType], as_json: bool, output: Path | None) -> None:
    """Prints a report as tables or as JSON, and writes it to a file."""
    from headrace.bench.report import as_json as encoded

    if output is not None:
        _write(report, output)
    if as_json:
        sys.stdout.write(encoded(report) + "\n")
        return
    console = plain_width(Console())
    for item in tables:
        console.print(item)
        console.print()


def _write(report: dict[str, Any], output: Path) -> None:
    """Replaces the file atomically, so that a reader never sees half a report."""
    from headrace.bench.report import as_json as encoded

    partial = output.with_name(output.name + ".partial")
    try:
        partial.write_text(encoded(report) + "\n", encoding="utf-8")
        partial.replace(output)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}", "--output") from None
