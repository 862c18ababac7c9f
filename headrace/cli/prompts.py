"""The lines of an input file: a prompt each, with its own sampling parameters."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import math
import mimetypes
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, AnyStr, TextIO

import msgspec

from headrace.cli.options import checked_fields
from headrace.errors import ConfigError, RequestError
from headrace.host.user_files import MAX_BYTES, read_input
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
    """Content by ``kind``: text, messages, token ids, or the url and the body of a batch line."""
    kind: str = ""
    id: str | float | None = None
    """The line's ``id`` or ``custom_id``, which is repeated in the result."""
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    mm_processor_kwargs: Any = None
    """Options of the model's processor, for the media of messages."""
    error: RequestError | None = None


def read_stdin(encoding: str = "utf-8") -> TextIO:
    """Standard input, whose bytes that are not of the encoding become lone surrogates: they fail the prompt they are in."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding=encoding, errors=ERRORS)
    return sys.stdin


def picture_part(path: str, most: int) -> dict[str, Any]:
    """The part of a message that shows a picture file of at most ``most`` bytes. Raises ConfigError if it cannot be read."""
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    data = base64.b64encode(read_input(Path(path), "--image", most, " (--max-media-bytes)")).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def parse_line(number: int, text: str) -> PromptJob:
    """Parses a line of JSON: one of prompt, messages and prompt_token_ids; id; sampling parameters; mm_processor_kwargs."""
    identifier = None
    try:
        if len(text) > MAX_BYTES:
            raise RequestError(f"a line has at most {MAX_BYTES:,} characters")
        text.encode()
        record = json.loads(text)
        if not isinstance(record, dict):
            raise RequestError(f"not a JSON object but {type(record).__name__}")
        if "custom_id" in record:
            return _batch_line(number, record, text)
        identifier = _identifier(record)
        kind, content = _content(record)
        options = record.pop("mm_processor_kwargs", None)
        return PromptJob(number, content, kind, identifier, checked_fields(record), options)
    except RequestError as error:
        return PromptJob(number, id=identifier, error=error)
    except (ValueError, RecursionError) as error:
        return PromptJob(number, error=RequestError(f"not JSON: {error}"))


BATCH = "batch"
_BATCH_FIELDS = ("custom_id", "method", "url", "body")
_BATCH_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def _batch_line(number: int, record: dict[str, Any], text: str) -> PromptJob:
    """A line of OpenAI's batch files."""
    try:
        # As the server reads a body: no NaN and no lone surrogates.
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as wrong:
        raise RequestError(f"not JSON: {wrong}") from None
    identity = record["custom_id"]
    if not isinstance(identity, str) or not identity:
        raise RequestError("custom_id must be a string that is not empty", "custom_id")
    url, body = record.get("url"), record.get("body")
    error = None
    if unknown := sorted(record.keys() - set(_BATCH_FIELDS)):
        error = RequestError(f"a batch line has {', '.join(_BATCH_FIELDS)}, and no {unknown[0]!r}", unknown[0])
    elif record.get("method") != "POST":
        error = RequestError("method must be POST", "method")
    elif url not in _BATCH_URLS:
        error = RequestError(f"url must be one of {', '.join(_BATCH_URLS)}", "url")
    elif not isinstance(body, dict):
        error = RequestError("body must be an object", "body")
    return PromptJob(number, (url, body), BATCH, identity, error=error)


class _Identified(msgspec.Struct):
    custom_id: Any = None


def _digest(identity: str) -> bytes:
    """Stands for the custom_id among millions."""
    return hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def distinct(jobs: Iterable[PromptJob]) -> Iterator[PromptJob]:
    """The jobs; a batch line with the custom_id of an earlier one is an error."""
    seen: set[bytes] = set()
    for job in jobs:
        if job.kind == BATCH:
            digest = _digest(str(job.id))
            if digest in seen:
                job = dataclasses.replace(job, error=RequestError("an earlier line has this custom_id", "custom_id"))
            seen.add(digest)
        yield job


def check_batch_ids(lines: Iterable[bytes]) -> bool:
    """Whether there are batch lines.

    Raises:
        ConfigError: two of them have the same custom_id.
    """
    seen: set[bytes] = set()
    for number, line in enumerate(lines, start=1):
        if b'"custom_id"' not in line:
            continue
        try:
            identity = msgspec.json.decode(line, type=_Identified).custom_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(identity, str):
            digest = _digest(identity)
            if digest in seen:
                raise ConfigError(f"line {number} has the custom_id {identity!r} of an earlier line", "--input")
            seen.add(digest)
    return bool(seen)


def bounded_lines(file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Yields the lines of a file. A line of more than ``MAX_BYTES`` is cut one byte beyond them, by which ``parse_line`` knows
    it."""
    while line := file.readline(MAX_BYTES + 1):
        rest = line
        while len(rest) > MAX_BYTES:
            rest = file.readline(MAX_BYTES + 1)
        yield line


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
