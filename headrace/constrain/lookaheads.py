"""Lookaheads at the beginning of a regular expression: it and they hold for the same text, which is an intersection."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)
"""Tokens by which the end of a group is found, an escape, a class or a bracket; and the bar between alternatives."""
_LITERAL = re.compile(r"(?:[^\\\[\](){}|*+?.^$]|\\[^\w\s])*")
_ANY = r"[\s\S]"


class Lookaheads(NamedTuple):
    """A regular expression in parts."""

    wanted: list[str]
    unwanted: list[str]
    rest: str
    """Pattern behind the lookaheads, without the anchor before them."""


def split(pattern: str) -> Lookaheads:
    """The lookaheads that stand at the beginning, or right behind its ^."""
    found: dict[str, list[str]] = {"=": [], "!": []}
    rest = pattern.removeprefix("^")
    while rest[:3] in ("(?=", "(?!") and (end := _end(rest)):
        found[rest[2]].append(rest[3 : end - 1])
        rest = rest[end:]
    if _parts(rest)[1:]:  # which ^ and the lookaheads are not part of
        return Lookaheads([], [], pattern)
    return Lookaheads(found["="], found["!"], rest)


def json_patterns(pattern: str) -> list[str]:
    """Patterns of a JSON Schema that hold together for the strings for which the pattern does.

    A negative lookahead is taken apart where it has literal texts only. Others stay, and are refused.
    """
    parts = split(pattern)
    if not (parts.wanted or parts.unwanted) or not pattern.startswith("^"):
        return [pattern]
    others = [_without(unwanted) for unwanted in parts.unwanted]
    known = [other for other in others if other is not None]
    if len(known) < len(others):
        return [pattern]
    return [f"^{parts.rest}", *(f"^(?:{wanted})" for wanted in parts.wanted), *(f"^(?:{other})$" for other in known)]


def lark_terminal(pattern: str) -> str | None:
    """The terminal of a whole text for which a pattern holds. None: it begins with no lookahead."""
    parts = split(pattern)
    if not (parts.wanted or parts.unwanted):
        return None
    terms = [_slashed(_unanchored(parts.rest))]
    for sign, lookaheads in (("", parts.wanted), ("~", parts.unwanted)):
        terms += [sign + _slashed(_whole(lookahead)) for lookahead in lookaheads]
    return " & ".join(terms)


def _whole(lookahead: str) -> str:
    """Returns a pattern of whole texts that begin with a match of a lookahead."""
    ends = ((part, _unanchored(part)) for part in _parts(lookahead))
    return "|".join(f"({part})(?s:.*)" if part == text else f"({text})" for part, text in ends)


def _unanchored(pattern: str) -> str:
    return pattern[:-1] if pattern.endswith("$") and not pattern.endswith("\\$") else pattern


def _slashed(pattern: str) -> str:
    """A regular expression between the slashes of Lark."""
    return "/" + re.sub(r"\\.|/|\n", lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), pattern) + "/"


def _end(pattern: str) -> int:
    """Returns the index behind the group that a pattern begins with; 0: the group does not end."""
    depth = 0
    for found in _PIECE.finditer(pattern):
        depth += (found[0] == "(") - (found[0] == ")")
        if not depth:
            return found.end()
    return 0


def _parts(pattern: str) -> list[str]:
    """The alternatives of a pattern, as far as they are not part of groups."""
    depth, parts, start = 0, [], 0
    for found in _PIECE.finditer(pattern):
        depth += (found[0] == "(") - (found[0] == ")")
        if found[0] == "|" and not depth:
            parts.append(pattern[start : found.start()])
            start = found.end()
    return [*parts, pattern[start:]]


def _without(lookahead: str) -> str | None:
    """The texts that do not begin with any of the lookahead's literals, or are none of them if it ends with $. None: it has
    something else."""
    inside = _unanchored(lookahead)
    whole = inside != lookahead
    if inside.startswith("(?:") and _end(inside) == len(inside):
        inside = inside[3:-1]
    elif whole and len(_parts(inside)) > 1:
        return None  # whose last alternative alone has the $
    words = _parts(inside)
    if not all(_LITERAL.fullmatch(word) for word in words):
        return None
    return _beside([re.sub(r"\\(.)", r"\1", word) for word in words], whole)


def _beside(words: Sequence[str], whole: bool) -> str:
    """A pattern of the texts that begin with none of the words, or are ``whole`` none of them."""
    firsts: dict[str, list[str]] = {}
    for word in words:
        if word:
            firsts.setdefault(word[0], []).append(word[1:])
    ended = "" in words
    if ended and not whole:
        return "[^\\s\\S]"
    others = "".join(f"\\x{{{ord(char):x}}}" for char in firsts)
    parts = [f"[^{others}]{_ANY}*" if others else f"{_ANY}+"]
    parts += [f"\\x{{{ord(char):x}}}{_beside(rests, whole)}" for char, rests in firsts.items() if whole or "" not in rests]
    return f"(?:{'|'.join(parts)}){'' if ended else '?'}"
