"""The tutorials, as a reader follows them: every command and program of a page, in their order, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import first_hour
import pytest
import typer
from support.models import tiny_llama, tiny_vision
from support.pages import ROOT, command_lines
from support.server.running import Server, stop_server

from headrace.cli.main import app

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
RUN = [page for page in TUTORIALS if page.name != "first-hour.md"]
FIRST_HOUR = list(first_hour.steps(first_hour.PAGE.read_text(encoding="utf-8")))
ADDRESS = "http://127.0.0.1:8000"
SMALL = "--max-model-len 2048"
"""Options that keep the servers of a small machine small."""


def steps(page: Path) -> Iterator[tuple[str, int, str]]:
    """(language, line, text) of the fenced blocks in their order, but for those that show output."""
    language, start, lines = None, 0, list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.startswith("```"):
            lines.append(line)
        elif language is None:
            language, start, lines = line[3:], number, []
        else:
            if language != "text":
                yield language, start, "\n".join(lines) + "\n"
            language = None


def named_models(folder: Path) -> dict[str, str]:
    """Models that the pages name -> tiny ones that stand for them."""
    vision, policy = folder / "vision", folder / "policy"
    tiny_vision.save("qwen2_5_vl", vision)
    tiny_llama.write_model(policy)
    return {"Qwen/Qwen2.5-VL-3B-Instruct": str(vision), "path/to/checkpoint": str(policy)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return named_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the command ``headrace`` of this tree."""
    folder = tmp_path_factory.mktemp("programs")
    command = folder / "headrace"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headrace.cli "$@"\n')
    command.chmod(0o755)
    return folder


class Reader:
    """Follows one page."""

    def __init__(self, folder: Path, models: dict[str, str], programs: Path) -> None:
        self._folder, self._models = folder, models
        self._environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self._names: dict[str, Any] = {}
        self._server: Server | None = None

    def _used(self, text: str) -> str:
        for shown, used in self._models.items():
            text = text.replace(shown, used)
        return text.replace(ADDRESS, ADDRESS if self._server is None else self._server.url)

    def follow(self, language: str, line: int, text: str, page: Path) -> None:
        if language == "python":
            exec(compile("\n" * line + self._used(text), str(page), "exec"), self._names)  # noqa: S102
        elif text.startswith("headrace serve"):
            self._serve(self._used(text).strip())
        else:
            subprocess.run(
                ["bash", "-euo", "pipefail", "-c", self._used(text.replace("curl ", "curl -sSf "))],
                cwd=self._folder,
                env=self._environment,
                check=True,
                timeout=280,
            )

    def _serve(self, command: str) -> None:
        self.close()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        log = self._folder / "serve.txt"
        words = shlex.split(f"{command} --port {port}" + ("" if "/" in command else f" {SMALL}"))
        with log.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=output, cwd=self._folder, env=self._environment)
        self._server = Server(process, f"http://127.0.0.1:{port}", log)
        self._server.wait_healthy()

    def close(self) -> None:
        if self._server is not None:
            stop_server(self._server)
            self._server = None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_every_step_runs(
    page: Path, tmp_path: Path, models: dict[str, str], programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path, models, programs)
    try:
        for language, line, text in steps(page):
            reader.follow(language, line, text, page)
    finally:
        reader.close()


def test_commands_have_such_options() -> None:
    program: Any = typer.main.get_command(app)
    shown = [(page.name, line) for page in TUTORIALS for line in command_lines(page, "headrace")]
    assert len(shown) > 8
    shown += [("first-hour.md", step.command.partition(" | ")[0]) for step in FIRST_HOUR if "/headrace " in step.command]
    for _, line in shown:
        name, *words = shlex.split(line)[1:]
        program.commands[name].make_context(name, words).close()


def test_the_seconds_of_the_first_hour_can_be_written_anew() -> None:
    page = first_hour.PAGE.read_text(encoding="utf-8")
    timed = [step for step in FIRST_HOUR if not step.command.startswith(("cat ", "du "))]
    taken = {step: 1000.0 + number for number, step in enumerate(timed)}
    found = first_hour.written(page, taken, (71.5, 72.5), "started in 73.5 s", [0.25, 74.5])
    for shown in (
        "## Serve: 16 minutes 43 seconds, 72.5 the",
        "ends in 71.5 s, and the next one answers after 72.5 s",
        " 1002.0 s\n",
    ):
        assert found.count(shown) == 1, shown
    assert "\nstarted in 73.5 s\n" in found and "was 0.2 to 74.5. " in found
    headings = re.findall(r"^## ([^:\n]+): (?:16|5\d) minutes", found, re.MULTILINE)
    assert headings == list(dict.fromkeys(step.section for step in FIRST_HOUR))
    assert [step.command for step in first_hour.steps(found)] == [step.command for step in FIRST_HOUR]


@pytest.mark.parametrize(("page", "after"), [("compared.md", ""), ("quantization.md", "## Traps")])
def test_rows_of_a_table_name_tests(page: str, after: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    rows = [line for line in text[text.index(after) :].splitlines() if line.startswith("| ")][2:]
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        assert named, row
        for path, name in named:
            assert f"def {name}" in (ROOT / path).read_text(), f"{path} has no {name}"
