"""The repository: no traces of the machine it was built on, and every page, link, target and setting that is named exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rules.source import ROOT, tracked_files

TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".cfg", ".txt", ".json", ".svg", ".sh", ""}

TRACES = {
    "a machine path": re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/\w"),
    "a package index by name": re.compile(r"files\.pythonhosted\.org|//pypi\.org/simple|--(?:extra-)?index-url|--trusted-host"),
    "a ticket number": re.compile(r"\b(?:issue|PR|ticket) ?#?\d+\b|(?<!\w)#\d{2,}\b(?![0-9a-fA-F])", re.IGNORECASE),
}


def text_files() -> list[Path]:
    here = Path(__file__).resolve()
    return [path for path in tracked_files() if path.suffix in TEXT and path.name != "LICENSE" and path.resolve() != here]


@pytest.mark.parametrize("kind", TRACES)
def test_no_traces(kind: str) -> None:
    found = []
    for path in text_files():
        # Colours in pictures look like ticket numbers.
        if path.suffix == ".svg" and kind == "a ticket number":
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for trace in TRACES[kind].finditer(text):
            found.append(f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, trace.start()) + 1} {trace[0]}")
    assert not found, "\n".join(found)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_make_targets_that_are_named_exist() -> None:
    pages = [path for path in text_files() if path.suffix in (".md", ".yml")] + [ROOT / ".ci" / "run"]
    named = {(path.name, target) for path in pages for target in re.findall(r"\bmake ([a-z-]+)\b", code_of(path))}
    assert named, "no page names a target"
    assert {(page, target) for page, target in named if target not in targets()} == set()


def code_of(path: Path) -> str:
    """Fenced blocks and inline code of a page; the whole text of other files."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        return text
    blocks = re.findall(r"^```.*?$(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", text)])


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    missing = []
    for path in text_files():
        if path.suffix != ".md":
            continue
        for target, anchor in re.findall(r"!?\[[^\]]*\]\(([^)#\s]*)#?([^)\s]*)\)", path.read_text(encoding="utf-8")):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            page = path.parent / target if target else path
            if not page.exists() or (anchor and anchor not in anchors(page)):
                missing.append(f"{path.relative_to(ROOT)}: {target}#{anchor}")
    assert not missing, "\n".join(missing)


def test_tests_that_pages_name_exist() -> None:
    """`` `tests/a.py::test_b` ``, or `` `::test_b` `` behind another of the same file."""
    missing = []
    for page in (ROOT / "docs").rglob("*.md"):
        file = ""
        for named, test in re.findall(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`", page.read_text(encoding="utf-8")):
            file = named or file
            path = ROOT / file
            if file and not (path.is_file() and f"def {test}" in path.read_text(encoding="utf-8")):
                missing.append(f"{page.name}: {file}::{test}")
    assert missing == []


def test_links_of_the_site_stay_within_it() -> None:
    """mkdocs, which refuses others, is not installed everywhere. Files elsewhere are named as code."""
    docs = ROOT / "docs"
    outside = []
    for path in docs.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
            inside = (path.parent / target).resolve().is_relative_to(docs) or target.startswith(("http", "mailto:"))
            if not inside:
                outside.append(f"{path.relative_to(ROOT)}: {target}")
    assert outside == []


def test_every_measurement_is_listed() -> None:
    """Reports are linked from the table of results, and raw files from a report."""
    folder = ROOT / "benchmarks"
    pages = [folder / "README.md", *(folder / "reports").glob("*.md")]
    linked = {name for page in pages for name in re.findall(r"\]\((?:reports/)?([^)/]+)\)", page.read_text(encoding="utf-8"))}
    assert {path.name for path in (folder / "reports").iterdir()} - linked == set()


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else []
        return [page for value in values for page in pages(value)]

    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(pages(settings["nav"]))
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert listed == there


def test_the_fields_are_documented() -> None:
    from reference import TABLES, with_tables

    from headrace.server.fields import FIELDS

    for name in TABLES:
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert page == with_tables(name, page), f"a table in docs/{name} is out of date: python docs/reference.py"
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert all(f"| `{rule.name}` |" in page for rule in FIELDS)


def test_the_command_line_is_documented() -> None:
    from reference import cli_page

    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == cli_page(), "docs/cli.md is out of date: python docs/reference.py"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(rows)), "docs/cli.md describes an option twice"


def test_the_python_reference_names_every_public_name() -> None:
    import headrace

    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    from headrace.config import EngineArgs
    from headrace.sampling_params import SamplingParams

    names = {*headrace.__all__, *EngineArgs.__dataclass_fields__, *SamplingParams.__struct_fields__} - {"__version__"}
    assert {name for name in names if f"`{name}`" not in page and f"`{name}(" not in page} == set()


def test_the_environment_variables_are_documented() -> None:
    """A misspelt name in the documentation would have no effect."""
    read = set()
    for path in (ROOT / "headrace").rglob("*.py"):
        read |= set(re.findall(r"HEADRACE_[A-Z_]+", path.read_text(encoding="utf-8")))
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert {name for name in read if name not in pages} == set()


def test_the_tests_that_pages_name_exist() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", pages)
    assert named, "no page names a test"
    assert [name for path, name in named if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")] == []
