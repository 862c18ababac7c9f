"""Prints the report of ``headrace doctor --parity``: a line for each implementation and dtype, and the verdict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from headrace.bench.report import table
from headrace.cli.startup import plain_width
from headrace.parity import Line, Parity


def print_parity(console: Console, parity: Parity) -> None:
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


def as_json(parity: Parity) -> str:
    return json.dumps(dataclasses.asdict(parity) | {"passed": parity.passed}, indent=2, ensure_ascii=False)


def _verdict(line: Line) -> Text:
    if line.passed is None:
        return Text("reference", style="dim")
    return Text("pass", style="green") if line.passed else Text(f"fail: {line.note}", style="red")
