"""The script that runs kernel tests under compute-sanitizer: what it chooses, and what its status says."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "sanitize.sh"
TESTS_OF_THE_PROJECT = Path(__file__).resolve().parents[1]
TESTS = """
import os
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("shape", range(9))
def test_shapes(shape):
    assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    print(f"shape {shape}")

@pytest.mark.gpu
def test_alone():
    OUTCOME

@pytest.mark.gpu
@pytest.mark.captures
@pytest.mark.parametrize("rows", [1, 2])
def test_a_graph(rows):
    raise AssertionError("was not left out")

def test_on_a_cpu():
    raise AssertionError("was not asked for")
"""


def project(folder: Path, outcome: str = "pass", status: str = "$?") -> dict[str, str]:
    """A project with the script, tests, and a sanitizer that only runs what it is given; returns the environment."""
    for name in ("benchmarks", "tests/kernels", "tests/empty"):
        (folder / name).mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "benchmarks")
    (folder / "tests/kernels/test_kernels.py").write_text(TESTS.replace("OUTCOME", outcome))
    (folder / "tests/empty/test_none.py").write_text("def test_cpu():\n    pass\n")
    sanitizer = folder / "sanitizer"
    sanitizer.write_text(f'#!/bin/sh\necho "$@"\nshift 4\n"$@" -s\nexit {status}\n')
    sanitizer.chmod(0o755)
    # pytest's plugins take longer to import than everything else here takes.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return environment | {"SANITIZER": str(sanitizer), "PYTHON": sys.executable, "PER_TEST": "3"}


def sanitize(folder: Path, environment: dict[str, str], *words: str) -> tuple[int, str]:
    """Exit status, and what was printed."""
    command = ["bash", str(folder / "benchmarks" / SCRIPT.name), str(folder / "log.txt"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout + done.stderr


def test_a_few_shapes_of_each_test_run(tmp_path: Path) -> None:
    code, printed = sanitize(tmp_path, project(tmp_path))
    log = (tmp_path / "log.txt").read_text()
    assert code == 0, printed + log
    assert [place for place in range(9) if f"shape {place}\n" in log] == [0, 4, 8]
    assert log.startswith("--tool memcheck --error-exitcode 86") and "4 passed" in printed
    left_out = [line for line in printed.splitlines() if line.startswith("left out")]
    assert [line.rpartition("::")[2] for line in left_out] == ["test_a_graph[1]", "test_a_graph[2]"]


def test_whatever_captures_a_graph_is_marked() -> None:
    """Or it would fail under the sanitizer, for a reason that is not an error of the kernel's."""
    found = []
    for file in sorted(TESTS_OF_THE_PROJECT.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "CUDAGraph" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            if any(isinstance(part, ast.Attribute) and part.attr == "CUDAGraph" for part in ast.walk(node)):
                marks = {ast.unparse(mark) for mark in node.decorator_list}
                found.append(node.name)
                assert {"pytest.mark.gpu", "pytest.mark.captures"} <= marks, f"{file.name}: {node.name}"
    assert "test_a_captured_draw_of_any_slots" in found


@pytest.mark.parametrize(("outcome", "status", "expected"), [("assert False", "$?", 1), ("pass", "86", 86)])
def test_the_status_tells(outcome: str, status: str, expected: int, tmp_path: Path) -> None:
    code, printed = sanitize(tmp_path, project(tmp_path, outcome, status))
    assert code == expected and f"status {expected}" in printed


def test_nothing_that_ran_is_no_success(tmp_path: Path) -> None:
    environment = project(tmp_path)
    code, printed = sanitize(tmp_path, environment, "tests/empty")
    assert code == 5 and "no GPU test" in printed
    code, printed = sanitize(tmp_path, environment | {"SANITIZER": "true"})
    assert code == 5 and "no test ran" in printed
    code, printed = sanitize(tmp_path, environment | {"SANITIZER": str(tmp_path / "nonesuch")})
    assert code == 127 and "SANITIZER may name it" in printed
