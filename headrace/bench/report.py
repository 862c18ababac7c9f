"""What every benchmark prints beside its numbers, and how: percentiles, machine facts, tables, JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

import headrace

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "tokenizers", "llama-cpp-python", "numpy")
GPU_FIELDS = ("name", "uuid", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "power.limit")
PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie, interpolated linearly between neighbours."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum in milliseconds; empty for no values."""
    if not seconds:
        return {}
    result = {"mean": sum(seconds) / len(seconds)}
    result |= {f"p{percent}": percentile(seconds, percent) for percent in PERCENTILES}
    result["max"] = max(seconds)
    return {name: round(value * 1e3, 3) for name, value in result.items()}


def load_average() -> float:
    """Processes that have wanted a CPU in the last minute. Ask before measuring, which adds to it."""
    return round(os.getloadavg()[0], 2)


def facts(load_before: float) -> dict[str, Any]:
    """Where and when this was measured, with what, by which command, and beside how much else."""
    return {
        "load_before": load_before,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["headrace", *sys.argv[1:]]),
        "machine": {
            "system": platform.platform(),
            "cpu": _cpu(),
            "cpus": os.cpu_count(),
            "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "gpus": gpus(),
        },
        "versions": {"headrace": headrace.__version__, "python": platform.python_version()} | _versions(),
    }


def gpus() -> list[dict[str, str]]:
    """What ``nvidia-smi`` tells of each GPU; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(GPU_FIELDS, map(str.strip, line.split(",")), strict=False)) for line in listed.splitlines() if line]


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The first column to the left, numbers to the right."""
    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, name in enumerate(header):
        result.add_column(name, justify="left" if place == 0 else "right")
    for row in rows:
        result.add_row(*map(Text, row))
    return result


def distributions_table(title: str, parts: dict[str, dict[str, float]]) -> Table:
    """A row a quantity, in milliseconds."""
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    rows = [[name, *(f"{values[column]:,.1f}" for column in columns)] for name, values in parts.items() if values]
    return table(title, ["milliseconds", *columns], rows)


def as_json(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2, ensure_ascii=False)
