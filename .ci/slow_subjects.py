#!/usr/bin/env python3
"""Reads names of changed files, and prints the tests whose slow ones they are the subject of: tests/ mirrors the package."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

EVERYTHING = ("pyproject.toml", "Makefile", "tests/conftest.py")
"""What may change any test: other versions of what is installed, other ways to run."""


def subjects(changed: list[str], root: Path) -> list[str]:
    """Files with slow tests: the changed ones, those in the folders of changed packages, and users of changed fakes."""
    slow = [path.relative_to(root) for path in root.glob("tests/**/test_*.py") if "mark.slow" in path.read_text()]
    if any(name in EVERYTHING for name in changed):
        return sorted(map(str, slow))
    support = {name for name in changed if name.startswith("tests/support/")}
    rooms = [name for name in changed if name.startswith(("headrace/", "tests/")) and name not in support]
    folders = {Path("tests", *Path(name).parts[1:2]) for name in rooms}
    names = {folder.with_name(f"test_{folder.name}") for folder in folders}
    if support:
        folders |= users({root / name for name in support}, root)
    return sorted(str(path) for path in slow if folders & {path, *path.parents} or path in names)


def users(changed: set[Path], root: Path) -> set[Path]:
    """Tests, and folders of fixtures, that import changed modules of tests/support, or others there that do."""
    tests = root / "tests"
    used = {path: modules_used(path, tests) for path in tests.rglob("*.py")}
    found = set(changed)
    while more := {path for path in used if used[path] & {module(each, tests) for each in found}} - found:
        found |= more
    ends = {path.relative_to(root) for path in found if tests / "support" not in path.parents}
    return {path.parent if path.name == "conftest.py" else path for path in ends}


def modules_used(path: Path, tests: Path) -> set[str]:
    """What a file imports, modules or names in them, and the programs beside it that it names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".py"):
            found.add(module(path.with_name(Path(node.value).name), tests))
    return found


def module(path: Path, tests: Path) -> str:
    return ".".join(path.relative_to(tests).with_suffix("").parts)


if __name__ == "__main__":
    print(*subjects(sys.stdin.read().split(), Path.cwd()), sep="\n", end="")
