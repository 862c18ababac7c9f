"""Which slow tests CI runs for a change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def slow_subjects(*changed: str) -> list[str]:
    command = [sys.executable, str(ROOT / ".ci" / "slow_subjects.py")]
    return subprocess.check_output(command, input="\n".join(changed), text=True, cwd=ROOT).split()


@pytest.mark.parametrize("name", ["headrace/kernels/norm/triton.py", "tests/kernels/compile_variants.py"])
def test_a_change_of_a_package_runs_its_slow_tests(name: str) -> None:
    found = slow_subjects(name, "README.md")
    assert "tests/kernels/test_triton_invariance.py" in found
    assert {Path(each).parts[1] for each in found} == {"kernels"}


def test_a_change_of_pages_runs_none() -> None:
    assert slow_subjects("README.md", "docs/api.md") == []


def test_a_change_of_what_is_installed_runs_all() -> None:
    assert {"models", "kernels", "text"} <= {Path(each).parts[1] for each in slow_subjects("pyproject.toml")}
