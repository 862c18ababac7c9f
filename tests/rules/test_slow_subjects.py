"""Slow tests that CI runs for a change."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "slow_subjects.py"
Subjects = Callable[..., list[str]]
ALL = {"models", "kernels", "text"}
"""Packages of which no change but one of all runs the slow tests at once."""


def packages(*files: str) -> set[str]:
    return {Path(each).parts[1] for each in files}


@pytest.fixture(scope="module")
def slow_subjects() -> Subjects:
    """The script's function, which reads each file once for all tests."""
    spec = importlib.util.spec_from_file_location("slow_subjects", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.modules_used = functools.cache(script.modules_used)
    return lambda *changed: script.subjects(list(changed), ROOT)


def test_the_script_reads_names_and_prints_names() -> None:
    printed = subprocess.check_output([sys.executable, str(SCRIPT)], input="headrace/sim/fit.py", text=True, cwd=ROOT)
    assert packages(*printed.split()) == {"sim"}


@pytest.mark.parametrize("name", ["headrace/kernels/norm/triton.py", "tests/kernels/compile_variants.py"])
def test_a_change_of_a_package_runs_its_slow_tests(name: str, slow_subjects: Subjects) -> None:
    found = slow_subjects(name, "README.md")
    assert "tests/kernels/test_triton_invariance.py" in found
    assert packages(*found) == {"kernels"}


def test_a_change_of_pages_runs_none(slow_subjects: Subjects) -> None:
    assert slow_subjects("README.md", "docs/api.md") == []


def test_a_change_of_what_is_installed_runs_all(slow_subjects: Subjects) -> None:
    assert packages(*slow_subjects("pyproject.toml")) >= ALL


@pytest.mark.parametrize("name", ["sim/examples", pytest.param("sim/sleeping_process", marks=pytest.mark.slow)])
def test_a_change_of_a_fake_runs_the_slow_tests_that_use_it(name: str, slow_subjects: Subjects) -> None:
    """Through other fakes, and as a program; not those beside them."""
    found = slow_subjects(f"tests/support/{name}.py")
    assert "tests/sim/test_cluster.py" in found and "tests/bench/test_pictures.py" not in found


def test_a_change_of_the_interpreter_runs_all(slow_subjects: Subjects) -> None:
    assert packages(*slow_subjects("tests/support/interpreter.py")) >= ALL
