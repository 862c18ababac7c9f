"""Parts of benchmark reports beside their numbers: percentiles, machine facts, tables, JSON."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import headrace
from headrace.metrics.exchanges import PERCENTILES

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "tokenizers", "llama-cpp-python", "numpy")
GPU_FIELDS = ("name", "uuid", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "power.limit")


def load_average() -> float:
    """Mean number of runnable processes in the last minute. Read it before measuring, which adds to it."""
    return round(os.getloadavg()[0], 2)


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def facts(load_before: float) -> dict[str, Any]:
    """Machine, date, versions, command, and the load before the measurement."""
    return {
        "load_before": load_before,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["headrace", *sys.argv[1:]]),
        "machine": {
            "system": platform.platform(),
            "cpu": _cpu(),
            "cpus": os.cpu_count(),
            "cpus_usable": usable_cpus(),
            "gpus": gpus(),
        },
        "versions": {"headrace": headrace.__version__, "python": platform.python_version()} | _versions(),
    }


def gpus() -> list[dict[str, str]]:
    """``GPU_FIELDS`` of each GPU, from ``nvidia-smi``; empty without a GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(GPU_FIELDS, map(str.strip, line.split(",")), strict=False)) for line in listed.splitlines() if line]


def _cpu() -> str:
    """Name of the processor, or of its architecture if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


PLAIN_WIDTH = 160
"""Width of the report where no terminal gives one."""


def plain_width(console: Console) -> Console:
    """The console, as wide as the reports are where no terminal gives a width."""
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str | Text]], align: str = "") -> Table:
    """A table of plain text: square brackets in a cell are not markup.

    Args:
        align: ``l`` or ``r`` for each column; without it the first column is aligned left and the others right.
    """
    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, side in zip(header, align or "l" + "r" * (len(header) - 1), strict=True):
        result.add_column(Text(name), justify="left" if side == "l" else "right", overflow="fold")
    for row in rows:
        add_row(result, *row)
    return result


def values_table(title: str, values: Mapping[str, object], form: str = "") -> Table:
    """A table of one row: named values, each in the form."""
    return table(title, list(values), [[format(value, form) for value in values.values()]])


def add_row(table: Table, *cells: str | Text) -> None:
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def distributions_table(title: str, parts: dict[str, dict[str, float]]) -> Table:
    """One row per quantity, in milliseconds."""
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    rows = [[name, *(f"{values[column]:,.1f}" for column in columns)] for name, values in parts.items() if values]
    return table(title, ["milliseconds", *columns], rows)


def as_json(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2, ensure_ascii=False)
