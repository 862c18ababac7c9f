"""The pages of the repository and the examples in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]


def blocks(page: Path, language: str = "") -> list[tuple[int, str]]:
    """(line, text) of the fenced blocks of a language, in their order; "" is a block that names none."""
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, fence.start(2)), fence[2]) for fence in fences if fence[1] == language]


def run_blocks(page: Path, names: dict[str, Any], replacements: dict[str, str] | None = None) -> None:
    """Executes the Python blocks of a page in one namespace. Tracebacks show the page's lines."""
    for line, code in blocks(page, "python"):
        for shown, used in (replacements or {}).items():
            code = code.replace(shown, used)
        exec(compile("\n" * line + code, str(page), "exec"), names)  # noqa: S102


def command_lines(page: Path, program: str) -> Iterator[str]:
    """Commands of a program in blocks and inline code, without comments and options in brackets."""
    text = page.read_text(encoding="utf-8")
    shown = [block.replace("\\\n", " ") for _, block in blocks(page)] + re.findall(r"`([^`\n]+)`", text)
    for line in "\n".join(shown).splitlines():
        if line.startswith(f"{program} "):
            yield re.sub(r" \[-[^]]*\]", "", line.partition(" #")[0]).rstrip()
