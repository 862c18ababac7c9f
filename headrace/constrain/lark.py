"""Lark: a grammar that is put together, as llguidance reads it."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Piece = str | int
"""Text, or the id of a token."""
QUIET = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/')
"""Strings, comments and regular expressions of Lark."""
_DECODER = json.JSONDecoder()
_SCHEMA = re.compile(rf"{QUIET.pattern}|(%json\s*)")


Grammars = dict[str, dict[str, Any]]
"""Serialised grammars by the names that rules refer to."""


class Hold(Protocol):
    """Makes the grammar of a field of StructuredOutputsParams, in llguidance's serialised form. Raises RequestError."""

    def __call__(self, **content: Any) -> str: ...


class Lark:
    """Rules, and the grammars that they name. Texts are written with tokens where the vocabulary has markers as one."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """``tokens``: text -> id, of those that are never text."""
        self.tokens = tokens
        self.rules: list[str] = []
        self.grammars: Grammars = {}
        """Grammars by name. A name is made of the content, so that grammars of different ``Lark`` never share one."""

    def serialised(self, start: str) -> str:
        """The grammar with this start rule, in llguidance's serialised form."""
        return serialised("\n".join([*self.rules, f"start: {start}"]), self.grammars)

    def until(self, marker: str) -> str:
        """Text up to a marker, and the marker."""
        first, *rest = spelled(marker, self.tokens)
        if isinstance(first, int):
            return f"{self.terminal('/(?s:.+)/')}? {self.pieces([first, *rest])}"
        return f"{self.lazy(first)} {self.pieces(rest)}"

    def lazy(self, ending: str, without: Sequence[str] = ()) -> str:
        """Text up to the first ``ending``, and this; ``without`` other markers."""
        terms = [f"/(?s:.*){regex(ending)}/", *(f"~/(?s:.*){regex(other)}(?s:.*)/" for other in without if other != ending)]
        terminal = self.terminal(" & ".join(terms))
        name = f"until{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {terminal}")
        return name

    def text(self, without: Sequence[str], lead: Sequence[str] = ()) -> str:
        """Text without these markers, which may be empty. ``lead``: characters that it does not begin with."""
        terms = ["/(?s:.+)/"]
        if without:
            terms.append(f"~/(?s:.*)({'|'.join(map(regex, without))})(?s:.*)/")
        if lead:
            terms.append(f"~/\\s*[{''.join(map(re.escape, lead))}](?s:.*)/")
        return f"{self.terminal(' & '.join(terms))}?"

    def is_token(self, text: str) -> bool:
        return isinstance(spelled(text, self.tokens)[0], int)

    def literal(self, text: str) -> str:
        return self.pieces(spelled(text, self.tokens))

    def pieces(self, pieces: Sequence[Piece]) -> str:
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False) for piece in pieces)

    def terminal(self, expression: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def rule(self, expression: str) -> str:
        name = f"rule{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def sub(self, grammar: str) -> str:
        name = f"g{hashlib.sha256(grammar.encode()).hexdigest()[:16]}"
        main, *others = json.loads(grammar)["grammars"]
        self.grammars |= {name: main} | {other["name"]: other for other in others}
        return f"@{name}"


def serialised(text: str, grammars: Grammars | None = None) -> str:
    """The grammar that a text in Lark describes, in llguidance's serialised form."""
    named = ({**grammar, "name": name} for name, grammar in (grammars or {}).items())
    return json.dumps({"grammars": [{"lark_grammar": text}, *named]}, ensure_ascii=False)


def with_schemas(text: str, hold: Hold) -> str:
    """The grammar of a text whose schemas, behind ``%json``, are held by ``hold``: the library has its own way with them.

    Raises:
        RequestError: a schema cannot be held.
    """
    lark = Lark({})
    pieces, at = [], 0
    while (found := _SCHEMA.search(text, at)) is not None:
        start, end = found.span()
        held, stop = found[0], _end_of_json(text, end) if found[1] else 0
        if stop:
            held, end = lark.sub(hold(json=text[end:stop])), stop
        pieces += [text[at:start], held]
        at = end
    return serialised("".join([*pieces, text[at:]]), lark.grammars)


def _end_of_json(text: str, start: int) -> int:
    """Where the JSON value ends that begins at ``start``; 0: there is none, and the library says so."""
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return 0


def spelled(text: str, tokens: Mapping[str, int]) -> list[Piece]:
    """Text with markers as a model writes it: as tokens where the vocabulary has them as one."""
    pattern = _tokens_pattern(tuple(sorted(tokens, key=len, reverse=True)))
    pieces: list[Piece] = []
    for part in pattern.split(text) if pattern is not None else [text]:
        if part:
            pieces.append(tokens.get(part, part))
    return pieces


@functools.lru_cache(maxsize=8)
def _tokens_pattern(tokens: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile(f"({'|'.join(map(re.escape, tokens))})") if tokens else None


def regex(text: str) -> str:
    """A text as part of a regular expression between slashes."""
    return "".join(char if char.isalnum() else "\\n" if char == "\n" else f"\\x{{{ord(char):x}}}" for char in text)
