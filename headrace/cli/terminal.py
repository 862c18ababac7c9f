"""A conversation's lines and replies on a terminal: editing with a history, and Markdown as it comes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from headrace.cli.errors import printable

_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)


class LineEditor:
    """Reads messages with editing, completion of commands and a history on disk.

    Enter sends; Alt-Enter begins a new line, and a pasted text keeps its lines.

    Args:
        commands: words that a line may begin with.
        with_path: those of them that a path follows.
    """

    def __init__(self, commands: Sequence[str], with_path: frozenset[str]) -> None:
        keys = KeyBindings()
        keys.add("escape", "enter")(_new_line)
        file = history_file()
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if file is None else FileHistory(file),
            completer=CommandCompleter(commands, with_path),
            complete_while_typing=False,
            key_bindings=keys,
            enable_open_in_editor=True,
        )

    def read(self, prompt: str) -> str:
        """One message.

        Raises:
            EOFError, KeyboardInterrupt: as ``input`` does.
        """
        return self._session.prompt(prompt)


class CommandCompleter(Completer):
    """Completes a command at the beginning of a line, and the path behind it."""

    def __init__(self, commands: Sequence[str], with_path: frozenset[str]) -> None:
        self._commands, self._with_path = commands, with_path
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        word, space, path = document.text_before_cursor.partition(" ")
        if not space:
            return [Completion(each, -len(word)) for each in self._commands if word.startswith("/") and each.startswith(word)]
        return self._paths.get_completions(Document(path), complete_event) if word in self._with_path else ()


def _new_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


def history_file() -> Path | None:
    """Where the lines of earlier conversations are kept, readable by their user alone; None: nowhere."""
    root = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "headrace"
    file = root / "chat_history"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError:
        return None
    return file


class MarkdownReply:
    """Renders Markdown while it comes: a finished block is printed once, the one under way is drawn again with each piece."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._live.start()

    def write(self, piece: str) -> None:
        self._text += printable(piece)
        if done := end_of_blocks(self._text):
            self._live.update("")
            self._console.print(Markdown(self._text[:done]), "")
            self._text = self._text[done:]
        self._live.update(Markdown(self._text), refresh=True)

    def close(self) -> None:
        self._live.update("", refresh=True)
        self._live.stop()
        if self._text.strip():
            self._console.print(Markdown(self._text))
        self._text = ""


def end_of_blocks(text: str) -> int:
    """Number of characters up to the last empty line that is not inside a fence of code; 0: there is none."""
    end = text.rfind("\n\n")
    while end > 0:
        if len(_FENCE.findall(text, 0, end)) % 2 == 0:
            return end + 2
        end = text.rfind("\n\n", 0, end)
    return 0
