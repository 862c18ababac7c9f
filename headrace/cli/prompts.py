"""The lines of an input file: a prompt each, with its own sampling parameters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.cli.sampling_options import check_fields
from headrace.errors import RequestError

KINDS = ("prompt", "messages", "prompt_token_ids")


@dataclasses.dataclass(frozen=True)
class Job:
    """One prompt. ``number`` is its line in the file, or its place among the arguments, from 1."""

    number: int
    content: Any
    """By ``kind``: text, messages, or token ids."""
    kind: str
    id: Any = None
    """Whatever the line's ``id`` says; it comes back with the result."""
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that cannot be run, and why."""

    number: int
    error: RequestError
    id: Any = None


def parse_line(number: int, text: str) -> Job | BadLine:
    """One line of JSON: exactly one of prompt, messages and prompt_token_ids; id; sampling parameters."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadLine(number, RequestError(f"not JSON: {error}"))
    if not isinstance(record, dict):
        return BadLine(number, RequestError(f"not a JSON object but {type(record).__name__}"))
    identifier = record.pop("id", None)
    try:
        kind, content = _content(record)
        return Job(number, content, kind, identifier, check_fields(record))
    except RequestError as error:
        return BadLine(number, error, identifier)


def parse_lines(lines: Iterable[str]) -> Iterator[Job | BadLine]:
    """Every line that is not blank, numbered from 1."""
    for number, text in enumerate(lines, start=1):
        if text.strip():
            yield parse_line(number, text)


def _content(record: dict[str, Any]) -> tuple[str, Any]:
    """Takes the prompt out of the record and checks its shape."""
    present = [kind for kind in KINDS if kind in record]
    if len(present) != 1:
        found = " and ".join(present) or "none of them"
        raise RequestError(f"a line has exactly one of prompt, messages and prompt_token_ids, and this one has {found}")
    kind = present[0]
    content = record.pop(kind)
    if kind == "prompt" and not isinstance(content, str):
        raise RequestError("prompt must be a string", "prompt")
    if kind == "prompt_token_ids" and not (
        isinstance(content, list) and content and all(isinstance(t, int) and not isinstance(t, bool) for t in content)
    ):
        raise RequestError("prompt_token_ids must be a list of token ids, and not empty", "prompt_token_ids")
    if kind == "messages" and not (isinstance(content, list) and content and all(isinstance(m, dict) for m in content)):
        raise RequestError("messages must be a list of messages, and not empty", "messages")
    return kind, content
