"""Editing and replies of ``headrace chat`` on a terminal."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from headrace.cli.chat import speed
from headrace.cli.terminal import CommandCompleter, LineEditor, MarkdownReply, end_of_blocks

UP, LEFT, ALT_ENTER, ENTER = "\x1b[A", "\x1b[D", "\x1b\r", "\r"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def typed(*messages: str) -> list[str]:
    """Returns the messages that a new editor reads while these keys are pressed."""
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        editor = LineEditor(["/help", "/image", "/quit"], frozenset({"/image"}))
        read = []
        for keys in messages:
            pipe.send_text(keys)
            read.append(editor.read("> "))
        return read


def test_lines_are_edited_and_remembered(state: Path) -> None:
    assert typed("ac" + LEFT + "b" + ENTER, "one" + ALT_ENTER + "two" + ENTER) == ["abc", "one\ntwo"]
    assert typed(UP + ENTER, UP + UP + UP + ENTER) == ["one\ntwo", "abc"]
    file = state / "headrace" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_pasted_text_keeps_its_lines() -> None:
    assert typed("\x1b[200~first\nsecond\n\x1b[201~end" + ENTER) == ["first\nsecond\nend"]


@pytest.mark.parametrize(
    ("line", "endings"),
    [("/he", ["/help"]), ("/", ["/help", "/image"]), ("he", []), ("see /he", []), ("/image pic", ["ture.png"])],
)
def test_commands_are_completed(line: str, endings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "picture.png").touch()
    monkeypatch.chdir(tmp_path)
    completer = CommandCompleter(["/help", "/image"], frozenset({"/image"}))
    assert [each.text for each in completer.get_completions(Document(line), CompleteEvent())] == endings


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert typed("hi" + ENTER) == ["hi"]


def test_the_end_of_the_input() -> None:
    with pytest.raises(EOFError):
        typed("\x04")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("one", 0),
        ("one\n\ntwo", 5),
        ("a\n\nb\n\nc", 6),
        ("```\na\n\nb", 0),
        ("x\n\n```\na\n\nb", 3),
        ("```\na\n\nb\n```\n\nc", 14),
    ],
)
def test_blocks(text: str, end: int) -> None:
    assert end_of_blocks(text) == end


def test_markdown_is_printed_once_however_it_comes() -> None:
    text = "# Title\n\nSome **bold** text.\n\n```python\nx = 1\n\ny = 2\n```\n\n- one\n- two\x1b[2J"
    printed = []
    for size in (1, 7, len(text)):
        stream = io.StringIO()
        reply = MarkdownReply(Console(file=stream, width=60, force_terminal=False))
        for start in range(0, len(text), size):
            reply.write(text[start : start + size])
        reply.close()
        printed.append([line.rstrip() for line in stream.getvalue().splitlines() if line.strip()])
    assert printed[0] == printed[1] == printed[2]
    shown = "\n".join(printed[0])
    assert shown.count("Title") == 1 and "bold" in shown and "**" not in shown and "```" not in shown
    assert "y = 2" in shown and "• two\\x1b[2J" in shown


def test_speed() -> None:
    assert speed(11, 1.0, 1.5, 2.5) == "11 tokens, 10.0 a second, the first after 0.50 s"
    assert speed(1, 1.0, 1.5, 1.5) == "1 tokens, the first after 0.50 s"
