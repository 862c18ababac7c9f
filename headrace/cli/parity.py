"""What ``headrace doctor --parity`` prints: one line an implementation and dtype, and a verdict."""

from __future__ import annotations

import dataclasses
import json
import math

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.startup import PLAIN_WIDTH
from headrace.engine.parity import Line, Parity

_BAR = 24
_LEAST, _MOST = -7.0, 1.0
"""Powers of ten of a difference: the ends of its bar."""


def print_parity(console: Console, parity: Parity) -> None:
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    table = Table(
        title=f"{parity.architecture}: logprobs of {parity.tokens} tokens against {parity.reference}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for name in ("implementation", "dtype"):
        table.add_column(name)
    for name in ("largest difference", "mean", "same token"):
        table.add_column(name, justify="right")
    for name in ("", "first diverging layer", "verdict"):
        table.add_column(name)
    for line in parity.lines:
        if line.passed is None and line.note:
            table.add_row(line.name, line.dtype, "", "", "", "", "", Text(f"not compared: {line.note}", style="dim"))
            continue
        table.add_row(
            line.name,
            line.dtype,
            f"{line.max_error:.1e}",
            f"{line.mean_error:.1e}",
            f"{line.agreement:.1%}",
            _bar(line.mean_error),
            line.diverging or "none",
            _verdict(line),
        )
    console.print(table)
    console.print(Text("parity" if parity.passed else "no parity", style="bold green" if parity.passed else "bold red"))


def as_json(parity: Parity) -> str:
    return json.dumps(dataclasses.asdict(parity) | {"passed": parity.passed}, indent=2, ensure_ascii=False)


def _bar(error: float) -> Text:
    """As long as the exponent of a difference, from 1e-7 to 10."""
    exponent = math.log10(error) if error > 0 else _LEAST
    share = min(1.0, max(0.0, (exponent - _LEAST) / (_MOST - _LEAST)))
    return Text("█" * round(share * _BAR) + "·" * (_BAR - round(share * _BAR)), style="cyan")


def _verdict(line: Line) -> Text:
    if line.passed is None:
        return Text("the measure", style="dim")
    return Text("pass", style="green") if line.passed else Text(f"fail: {line.note}", style="red")
