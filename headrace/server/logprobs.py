"""Logprobs in the three shapes that clients know: chat, legacy completions, vLLM's prompt_logprobs.

Answers keep them as encoded JSON, part by part: it takes a tenth of the memory of Python's objects, and no call encodes more
than a few hundred positions, which would hold up every other request.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.outputs import Logprob, PositionLogprobs, TokenLogprobs, position_logprobs
from headrace.text.vocab import TokenBytes

_encode = msgspec.json.Encoder().encode
_POSITIONS = 256
"""Positions of a prompt that are shaped and encoded at once."""
LEAST = -9999.0
"""Number that OpenAI writes for a token that is next to impossible; JSON has no minus infinity."""


def _finite(value: float) -> float:
    return value if value > LEAST else LEAST


class JSONArray:
    """A JSON array that grows, encoded."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def extend(self, items: Sequence[Any]) -> None:
        if items:
            self._parts.append(_encode(items)[1:-1])

    def join(self, other: JSONArray) -> None:
        self._parts += other._parts

    @property
    def json(self) -> msgspec.Raw:
        return msgspec.Raw(b"[%b]" % b",".join(self._parts))


class JSONColumns:
    """Legacy logprobs that grow: a JSON array for each field, None for a field that was not requested."""

    def __init__(self) -> None:
        self._columns: dict[str, JSONArray | None] = {}

    def extend(self, shape: Mapping[str, Sequence[Any] | None]) -> None:
        for name, items in shape.items():
            column = self._columns.setdefault(name, None if items is None else JSONArray())
            if column is not None and items is not None:
                column.extend(items)

    def join(self, other: JSONColumns) -> None:
        for name, column in other._columns.items():
            own = self._columns.setdefault(name, None if column is None else JSONArray())
            if own is not None and column is not None:
                own.join(column)

    def __bool__(self) -> bool:
        return bool(self._columns)

    @property
    def json(self) -> dict[str, msgspec.Raw | None] | None:
        if not self._columns:
            return None
        return {name: None if column is None else column.json for name, column in self._columns.items()}


class TokenTexts:
    """The text and bytes of single tokens. Without a tokenizer, tokens are shown by their ids."""

    def __init__(self, vocab: TokenBytes | None) -> None:
        self._pieces: Sequence[bytes] = () if vocab is None else vocab.pieces

    def raw(self, token: int) -> bytes | None:
        return self._pieces[token] if token < len(self._pieces) else None

    def text(self, token: int) -> str:
        """Bytes that are not whole characters become U+FFFD, as in chat logprobs, which carry the bytes as well."""
        raw = self.raw(token)
        return f"token_id:{token}" if raw is None else raw.decode("utf-8", "replace")

    def exact(self, token: int) -> str:
        """Returns a token in the form of OpenAI's legacy completions: ``bytes:\\xe2\\x82`` where the bytes are not whole
        characters."""
        raw = self.raw(token)
        if raw is None:
            return f"token_id:{token}"
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


IDS = TokenTexts(None)
"""Shows tokens as ``token_id:872``."""


def best(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The ``count`` most likely tokens of a position, best first; -1: all that the engine gave."""
    ranked = sorted(position.items(), key=lambda item: (item[1].rank, -item[1].logprob))
    return ranked if count < 0 else [item for item in ranked if item[1].rank <= count][:count]


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """``ChatCompletionTokenLogprob`` an output token."""

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        raw = texts.raw(token)
        return {
            "token": texts.text(token),
            "logprob": _finite(logprob.logprob),
            "bytes": None if raw is None else list(raw),
        }

    content = []
    for position in map(position_logprobs, entries):
        token = next(iter(position))
        alternatives = [entry(other, logprob) for other, logprob in best(position, top)]
        content.append({**entry(token, position[token]), "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Legacy logprobs of one choice, made piece by piece: offsets count characters from the start of its text."""

    def __init__(
        self, texts: TokenTexts, top: int, special: frozenset[int], special_text: bool, names: TokenTexts | None = None
    ) -> None:
        """
        Args:
            special_text: special tokens appear in the generated text.
            names: by which tokens are shown; None: by their texts.
        """
        self._texts, self._names = texts, names or texts
        self._top = top
        self._special = special
        self._special_text = special_text
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def echo(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], text: str) -> JSONColumns:
        """The prompt's own tokens, of which ``text`` is the text. Those that the tokenizer added have no part in it."""
        columns = JSONColumns()
        start = self._offset
        for first in range(0, len(tokens), _POSITIONS):
            part = slice(first, first + _POSITIONS)
            columns.extend(self._shape(tokens[part], entries[part], self._echo_offsets(tokens[part], text, start)))
        self.after_echo(text, start)
        return columns

    def after_echo(self, text: str, start: int = 0) -> None:
        """Generated tokens follow ``text``."""
        self._offset = start + len(text)
        self._decoder.reset()

    def _echo_offsets(self, tokens: Sequence[int], text: str, start: int) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            raw = self._texts.raw(token) or b""
            shown = text.startswith(raw.decode("utf-8", "replace"), self._offset - start)
            if not shown and self._offset == start:
                # Some tokenizers put a space before every text.
                raw = raw.removeprefix(b" ")
            if shown or token not in self._special:
                self._advance(raw)
        return offsets

    def add(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Generated tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            if self._special_text or token not in self._special:
                self._advance(self._texts.raw(token) or b"")
        return self._shape(tokens, entries, offsets)

    def _advance(self, raw: bytes) -> None:
        self._offset += len(self._decoder.decode(raw))

    def _shape(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: list[int]) -> dict[str, Any]:
        """The first token of a prompt has no logprob: its position is None."""
        pairs = [
            (token, None if entry is None else position_logprobs(entry)) for token, entry in zip(tokens, entries, strict=True)
        ]
        return {
            "tokens": [self._names.exact(token) for token in tokens],
            "token_logprobs": [None if position is None else _finite(position[token].logprob) for token, position in pairs],
            "top_logprobs": [self._alternatives(*pair) for pair in pairs],
            "text_offset": offsets,
        }

    def _alternatives(self, token: int, position: PositionLogprobs | None) -> dict[str, float] | None:
        """The best tokens, and the token itself where it is not among them."""
        if position is None:
            return None
        chosen = dict(best(position, self._top)) | {token: position[token]}
        return {self._names.exact(other): _finite(logprob.logprob) for other, logprob in chosen.items()}


def triples(texts: TokenTexts | None, entries: Sequence[TokenLogprobs]) -> tuple[list[Any], list[Any]]:
    """SGLang's shapes: ``[logprob, token, text]`` of each token, and a list of these of the most likely tokens at its position.

    Args:
        texts: None: texts are null.
    """

    def triple(token: int, logprob: float) -> list[Any]:
        return [_finite(logprob), token, None if texts is None else texts.text(token)]

    own = [triple(entry.token_ids[0], entry.logprobs[0]) for entry in entries]
    ranked = [zip(entry.token_ids[1:], entry.logprobs[1:], strict=True) for entry in entries]
    return own, [[triple(*pair) for pair in pairs] for pairs in ranked]


def prompt_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs | None]) -> JSONArray:
    """vLLM's shape: for each prompt token ``{"token id": {"logprob", "rank", "decoded_token"}}``."""

    def shape(position: PositionLogprobs) -> dict[str, Any]:
        return {
            str(token): {"logprob": _finite(logprob.logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}
            for token, logprob in position.items()
        }

    found = JSONArray()
    for first in range(0, len(entries), _POSITIONS):
        part = entries[first : first + _POSITIONS]
        found.extend([None if entry is None else shape(position_logprobs(entry, texts.text)) for entry in part])
    return found
