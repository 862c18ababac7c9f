"""Runs the tests that the rows of docs/compared.md name, and says for each row whether they pass: ``python docs/compared.py``.

A row whose test is skipped, as those of the page are without a browser, counts as failed.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Outcomes:
    """Records, for each test function and each file, how its variants ended."""

    def __init__(self) -> None:
        self.of: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            function = report.nodeid.partition("[")[0]
            for name in (function, function.partition("::")[0]):
                self.of[name].add(report.outcome)


def rows(page: str) -> list[tuple[str, list[str]]]:
    """(feature, tests) of the rows of the table."""
    table = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    return [(cells[0].removeprefix("| "), re.findall(r"`(tests/[^`]+)`", cells[1])) for cells in table]


def main() -> int:
    found = rows((ROOT / "docs" / "compared.md").read_text(encoding="utf-8"))
    outcomes = Outcomes()
    named = dict.fromkeys(test for _, tests in found for test in tests)
    pytest.main(["--rootdir", str(ROOT), "-p", "no:xdist", "-m", "not gpu", *(str(ROOT / test) for test in named)], [outcomes])
    failed = 0
    for feature, tests in found:
        ended = set.union(*(outcomes.of[test] or {"not run"} for test in tests))
        failed += ended != {"passed"}
        print(f"{'pass' if ended == {'passed'} else 'FAIL (' + ', '.join(sorted(ended)) + ')'}\t{feature}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
