"""``headrace doctor``: what would be served here, how, and why, without serving it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from headrace.cli.options import ENGINE_OPTIONS, Group, command
from headrace.cli.own_options import DoctorOptions
from headrace.cli.units import picture_size
from headrace.config import Decision, EngineArgs
from headrace.errors import ConfigError
from headrace.frontend.plan import planned
from headrace.host.clock import process_start
from headrace.processes.spawn import spawn

if TYPE_CHECKING:
    from headrace.engine.info import EngineInfo
    from headrace.parity import Line, Parity


@command(args=ENGINE_OPTIONS, options=Group.of(DoctorOptions))
def doctor(args: EngineArgs, options: DoctorOptions) -> None:
    """Say what would be served here, how, and why: environment, decisions, attention layer by layer, memory.

    Without --load it loads no weights, and reads quantised ones of a layer alone, to say how they would be held: the memory
    of the weights is then an estimate.
    """
    from headrace.cli.startup import as_json as encoded
    from headrace.cli.startup import print_report

    sizes = [picture_size(size) for size in options.image_size or ["1024x1024"]]
    if options.devices and (options.load or options.parity):
        raise ConfigError("--devices needs no such GPUs here: leave --load and --parity out, or --devices", "--devices")
    if options.parity:
        if options.image_size:
            raise ConfigError("--parity reports on no pictures: leave --image-size out, or --parity", "--image-size")
        if options.load:
            raise ConfigError("--parity reports on no engine that was loaded to serve: leave --load out, or --parity", "--load")
        _compare(args, options.as_json)
        return
    info, refusal = (asyncio.run(_loaded(args)), None) if options.load else planned(args, options.devices)
    if info.media is None and options.image_size:
        raise ConfigError("the model reads text alone: it sees no pictures", "--image-size")
    if info.media is not None:
        info = _with_picture_tokens(info, args, sizes)
    if options.as_json:
        sys.stdout.write(encoded(info) + "\n")
    else:
        print_report(Console(), info, environment=True)
    if refusal is not None:
        raise refusal


def _with_picture_tokens(info: EngineInfo, args: EngineArgs, sizes: list[tuple[int, int]]) -> EngineInfo:
    """The report with the number of tokens of pictures of some sizes among its decisions."""
    from headrace.frontend.features import picture_rules
    from headrace.sources.files import find_model

    rules = picture_rules(args, find_model(args))
    if rules is None:
        return info
    reason = f"the model's processor resizes it ({rules.backend})"
    lines = [Decision(f"picture of {w} x {h}", f"{rules.image_rows(w, h)} tokens", reason) for w, h in sizes]
    return msgspec.structs.replace(info, decisions=[*info.decisions, *lines])


def _compare(args: EngineArgs, as_json: bool) -> None:
    from headrace.parity import measure

    errors = Console(stderr=True)
    with errors.status("comparing") as status:
        result = measure(args, lambda what: status.update(what))
    if as_json:
        report = dataclasses.asdict(result) | {"passed": result.passed}
        sys.stdout.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    else:
        for note in result.notes:
            errors.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
        print_parity(Console(), result)
    raise typer.Exit(0 if result.passed else 1)


def print_parity(console: Console, parity: Parity) -> None:
    """A line for each implementation and dtype, and the verdict."""
    from headrace.bench.report import plain_width, table

    plain_width(console)
    rows: list[Sequence[str | Text]] = []
    for line in parity.lines:
        if line.passed is None and line.note:
            rows.append((line.name, line.dtype, "", "", "", "", Text(f"not compared: {line.note}", style="dim")))
            continue
        errors = f"{line.max_error:.1e}", f"{line.mean_error:.1e}", f"{line.agreement:.1%}"
        rows.append((line.name, line.dtype, *errors, line.diverging or "none", _verdict(line)))
    title = f"{parity.architecture}: logprobs of {parity.tokens} tokens against {parity.reference}"
    columns = ("implementation", "dtype", "largest difference", "mean", "same token", "first diverging layer", "verdict")
    console.print(table(title, columns, rows, "llrrrll"))
    console.print(Text("parity" if parity.passed else "no parity", style="bold green" if parity.passed else "bold red"))


def _verdict(line: Line) -> Text:
    if line.passed is None:
        return Text("reference", style="dim")
    return Text("pass", style="green") if line.passed else Text(f"fail: {line.note}", style="red")


async def _loaded(args: EngineArgs) -> EngineInfo:
    spawned = spawn(origin=process_start())
    from headrace.cli.startup import AnnouncedLLM

    llm = AnnouncedLLM(args, Console(stderr=True), spawned=spawned)
    try:
        await llm.start()
        return llm.info
    finally:
        await llm.close()
