#!/usr/bin/env python3
"""Reads names of changed files, and prints the tests whose slow ones they are the subject of: tests/ mirrors the package."""

from __future__ import annotations

import sys
from pathlib import Path

EVERYTHING = ("pyproject.toml", "Makefile", "tests/conftest.py")
"""What may change any test: other versions of what is installed, other ways to run."""


def subjects(changed: list[str], root: Path) -> list[str]:
    """Files with slow tests: the changed ones, and those in the folders of changed packages."""
    slow = [path.relative_to(root) for path in root.glob("tests/**/test_*.py") if "mark.slow" in path.read_text()]
    if any(name in EVERYTHING for name in changed):
        return sorted(map(str, slow))
    folders = {Path("tests", *Path(name).parts[1:2]) for name in changed if name.startswith(("headrace/", "tests/"))}
    names = {folder.with_name(f"test_{folder.name}") for folder in folders}
    return sorted(str(path) for path in slow if folders & {path, *path.parents} or path in names)


if __name__ == "__main__":
    print(*subjects(sys.stdin.read().split(), Path.cwd()), sep="\n", end="")
