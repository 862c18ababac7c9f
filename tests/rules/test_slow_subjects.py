"""Slow tests that CI runs for a change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALL = {"models", "kernels", "text"}
"""Packages of which no change but one of all runs the slow tests at once."""


def packages(*files: str) -> set[str]:
    return {Path(each).parts[1] for each in files}


def slow_subjects(*changed: str) -> list[str]:
    command = [sys.executable, str(ROOT / ".ci" / "slow_subjects.py")]
    return subprocess.check_output(command, input="\n".join(changed), text=True, cwd=ROOT).split()


@pytest.mark.parametrize("name", ["headrace/kernels/norm/triton.py", "tests/kernels/compile_variants.py"])
def test_a_change_of_a_package_runs_its_slow_tests(name: str) -> None:
    found = slow_subjects(name, "README.md")
    assert "tests/kernels/test_triton_invariance.py" in found
    assert packages(*found) == {"kernels"}


def test_a_change_of_pages_runs_none() -> None:
    assert slow_subjects("README.md", "docs/api.md") == []


def test_a_change_of_what_is_installed_runs_all() -> None:
    assert packages(*slow_subjects("pyproject.toml")) >= ALL


@pytest.mark.parametrize("name", ["sim/examples", pytest.param("sim/sleeping_process", marks=pytest.mark.slow)])
def test_a_change_of_a_fake_runs_the_slow_tests_that_use_it(name: str) -> None:
    """Through other fakes, and as a program; not those beside them."""
    found = slow_subjects(f"tests/support/{name}.py")
    assert "tests/sim/test_cluster.py" in found and "tests/bench/test_pictures.py" not in found


def test_a_change_of_the_interpreter_runs_all() -> None:
    assert packages(*slow_subjects("tests/support/interpreter.py")) >= ALL
