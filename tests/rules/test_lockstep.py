"""Below the engine nothing that a rank observes alone decides what it launches: ranks would launch different collectives."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from rules.source import modules

PACKAGES = ("kernels", "parallel", "cache", "attention", "layers", "sampling", "runner")
CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "now"}
MEMORY = {"mem_get_info", "memory_reserved", "memory_allocated", "memory_stats", "virtual_memory", "elapsed_time", "query"}
FILES = {"open", "exists", "is_file", "stat", "glob", "listdir", "read_text", "read_bytes", "environ", "getenv"}
OBSERVED = CLOCKS | MEMORY | FILES
"""Attributes that differ from process to process."""

ALLOWED = {
    "headrace/kernels/support.py": "TRITON_INTERPRET runs kernels on a CPU, for tests",
    "headrace/kernels/native/build.py": "finds or compiles the CPU's kernels before the first step",
    "headrace/kernels/native/library.py": "finds the CPU's kernels and OpenMP's library before the first step",
    "headrace/kernels/cuda_launch.py": "finds compiled kernels, or compiles them",
    "headrace/attention/compiled.py": "measures how long compiling takes; ranks wait for it before the first step",
    "headrace/runner/clock.py": "measures steps for statistics",
    "headrace/runner/graphs.py": "counts the memory of graphs for the report",
    "headrace/runner/parts/record.py": "writes what is launched",
    "headrace/runner/replay.py": "reads the plans that are to be launched",
}
"""Files that observe, and why no rank launches anything else for that."""


def observations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in OBSERVED:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OBSERVED:
            yield node.lineno, node.func.id


def test_ranks_decide_nothing_alone() -> None:
    """And what observes nothing any more is not allowed to."""
    inside = (module for module in modules() if module.package in PACKAGES)
    found = {module.where: sorted(observations(module.tree)) for module in inside}
    assert {where: seen for where, seen in found.items() if seen and where not in ALLOWED} == {}
    assert {where for where in ALLOWED if not found.get(where)} == set()


@pytest.mark.parametrize(
    "text",
    ["time.perf_counter()", "os.environ['A']", "torch.cuda.mem_get_info()", "open('x')", "event.query()", "Path('x').exists()"],
)
def test_observations_are_seen(text: str) -> None:
    assert list(observations(ast.parse(text)))
