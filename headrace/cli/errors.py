"""Reports expected errors as one line without a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import typer

from headrace.errors import ConfigError, EngineError, HeadraceError, RequestError

EXIT_USAGE = 2
"""Invalid usage or configuration."""
EXIT_FAILURE = 1
"""The engine or a dependency failed."""


def describe(error: HeadraceError) -> str:
    """The message, with the parameter before it where the message does not name it already."""
    param = getattr(error, "param", None)
    message = str(error)
    if isinstance(error, EngineError):
        # What follows is the engine's traceback, which its log has.
        message = message.partition("\n")[0]
    if not param or param in message or f"--{param.replace('_', '-')}" in message:
        return message
    return f"{param}: {message}"


def print_error(message: str) -> None:
    _print_line("error", message, "red")


def print_note(message: str) -> None:
    _print_line("note", message, "yellow")


def _print_line(kind: str, message: str, colour: str) -> None:
    # Starting a command takes less time without it.
    from rich.console import Console
    from rich.text import Text

    text = printable(" ".join(message.split("\n")))
    Console(stderr=True, soft_wrap=True).print(Text.assemble((f"{kind}: ", f"bold {colour}"), (text, colour)))


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text with control characters as escapes: what others wrote must not steer the terminal."""
    return text.translate(_CONTROLS)


@contextlib.contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Turns headrace's own errors into a line and an exit code; ``debug`` lets the traceback through."""
    try:
        yield
    except BrokenPipeError:
        # The reader of our output left (`| head`); Python would complain again while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILURE) from None
    except (RequestError, ConfigError, EngineError) as error:
        if debug:
            raise
        print_error(describe(error))
        raise typer.Exit(EXIT_FAILURE if isinstance(error, EngineError) else EXIT_USAGE) from None
    except KeyboardInterrupt:
        if debug:
            raise
        raise typer.Exit(130) from None
