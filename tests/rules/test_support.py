"""What tests of several folders share stands in ``tests/support``: one fake an interface, in one place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rules.source import ROOT

TESTS = ROOT / "tests"
IMPORT = re.compile(r"^\s*from (\w[\w.]*) import (?:\(\s*([\w\s,]+)|([\w ,]+))", re.MULTILINE)
ELSEWHERE = {
    "models.fallback.test_contract": "what a page shows, checked by the test of the pages",
    "server.test_media_fuzz": "attacks that also go to a server for hours",
}
"""Modules that tests of other folders import, each with its reason. Harnesses may take their problems from tests of kernels."""


def imported(path: Path) -> Iterator[str]:
    """Modules, or names in them, that a file imports absolutely; imports within a folder may be relative."""
    for module, several, names in IMPORT.findall(path.read_text(encoding="utf-8")):
        yield module
        yield from (f"{module}.{name.split()[0]}" for name in (several or names).split(",") if name.strip())


def test_folders_share_what_is_in_support() -> None:
    files = {".".join(path.relative_to(TESTS).with_suffix("").parts): path for path in TESTS.rglob("*.py")}
    shared = {
        name
        for user, path in files.items()
        for name in imported(path)
        if name in files and name.split(".")[0] not in ("support", "kernels", user.split(".")[0])
    }
    assert shared == set(ELSEWHERE)
