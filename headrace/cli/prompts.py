"""The lines of an input file: a prompt each, with its own sampling parameters."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from headrace.cli.options import checked_fields
from headrace.errors import RequestError
from headrace.options import Option, OptionSpec, check_value

_ID = Option(None, "id", OptionSpec(), str, False)
ERRORS = "surrogateescape"
KINDS = ("prompt", "messages", "prompt_token_ids")


@dataclasses.dataclass(frozen=True)
class PromptJob:
    """One prompt, or a line that cannot be run and its ``error``."""

    number: int
    """Line of the file, or position among the arguments, from 1."""
    content: Any = None
    """By ``kind``: text, messages, or token ids."""
    kind: str = ""
    id: str | float | None = None
    """The line's ``id``, which is repeated in the result."""
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: RequestError | None = None


def read_stdin(encoding: str = "utf-8") -> TextIO:
    """Standard input, whose bytes that are not of the encoding become lone surrogates: they fail the prompt they are in."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding=encoding, errors=ERRORS)
    return sys.stdin


def parse_line(number: int, text: str) -> PromptJob:
    """Parses a line of JSON: exactly one of prompt, messages and prompt_token_ids; id; sampling parameters."""
    identifier = None
    try:
        text.encode()
        record = json.loads(text)
        if not isinstance(record, dict):
            raise RequestError(f"not a JSON object but {type(record).__name__}")
        identifier = _identifier(record)
        kind, content = _content(record)
        return PromptJob(number, content, kind, identifier, checked_fields(record))
    except RequestError as error:
        return PromptJob(number, id=identifier, error=error)
    except (ValueError, RecursionError) as error:
        return PromptJob(number, error=RequestError(f"not JSON: {error}"))


def parse_lines(lines: Iterable[str]) -> Iterator[PromptJob]:
    """Every line that is not blank, numbered from 1."""
    return (parse_line(number, text) for number, text in enumerate(lines, start=1) if text.strip())


def _identifier(record: dict[str, Any]) -> str | float | None:
    """Take the id out of the record."""
    value = record.pop("id", None)
    if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
        raise RequestError("id must be a string or a number", "id")
    if isinstance(value, str):
        check_value(_ID, value, RequestError)
    return value


def _content(record: dict[str, Any]) -> tuple[str, Any]:
    """Take the prompt out of the record. The engine's gate checks its shape."""
    present = [kind for kind in KINDS if kind in record]
    if len(present) != 1:
        names = " and ".join(present) or "none of them"
        raise RequestError(f"a line has exactly one of prompt, messages and prompt_token_ids, and this one has {names}")
    return present[0], record.pop(present[0])
