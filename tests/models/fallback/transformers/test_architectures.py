"""Every causal language model of text in transformers, and the page that says which of them run."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import transformers
from support.models import tiny_models
from support.models.architectures import PAGE, TOLERANCE, survey_one

ROOT = Path(__file__).resolve().parents[4]


@cache
def page() -> dict[str, tuple[str, str]]:
    """model_type -> (architecture, whether it runs, or why not), as the page has it."""
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (?:yes)? \| (.*?) \| [^|]*\|$", text(), re.MULTILINE)
    return {kind: (architecture, said) for kind, architecture, said in rows}


@cache
def text() -> str:
    return (ROOT / "docs" / PAGE).read_text(encoding="utf-8")


def made_with() -> str:
    found = re.search(r"with transformers ([\d.]+\d):", text())
    assert found is not None
    return found.group(1)


same_version = pytest.mark.skipif(made_with() != transformers.__version__, reason="the page is of another transformers")


def test_enough_run() -> None:
    """The more of them have a native implementation, the more families are ported."""
    ran = {architecture for architecture, said in page().values() if said == "runs"}
    assert len(ran) >= 115


def test_nothing_that_runs_says_something_else() -> None:
    assert "fault" not in text()


@same_version
def test_every_family_is_on_the_page() -> None:
    assert {kind: architecture for kind, (architecture, _) in page().items()} == tiny_models.families()


@same_version
@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(tiny_models.families()))
def test_what_the_page_says(kind: str) -> None:
    verdict = survey_one(kind)
    assert not verdict.fault
    assert page()[kind][1] == ("runs" if verdict.runs else f"refused: {verdict.reason}")
    assert verdict.error <= TOLERANCE
