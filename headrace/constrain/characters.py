"""by_character: rewrites the Lark grammar of a text that stands within another, as it is or inside a JSON string.

The lexer takes the longest match and does not go back: what ends the text could as well go on with it, and in JSON a backslash
could begin an escape or end the text's last line. So each character becomes a separate terminal, and terminals of several
characters become rules.
"""

from __future__ import annotations

import json
import re

from headrace.constrain.lark import regex, serialised
from headrace.errors import RequestError

_SPECIAL = [*map(chr, range(32)), '"', "\\"]
_SAFE = r'[^"\\\x00-\x1f]'
_TOKEN = re.compile(
    r'(?P<comment>(?://(?=[^/])|#)[^\n]*)|(?P<range>"(?:\\.|[^"\\])"\s*\.\.\s*"(?:\\.|[^"\\])")'
    r'|(?P<string>"(?:\\.|[^"\\\n])*")(?!i)|/(?P<regex>(?:\\.|\[(?:\\.|[^\]\\\n])+\]|[^/\\\n\[])+)/(?P<flags>s?)(?![a-z])'
    r"|%import\s+common\s*\.\s*(?P<common>\w+)(?:\s*->\s*(?P<alias>\w+))?"
    r"|(?P<label>->\s*\w+)|(?P<terminal>_?[A-Z][A-Z0-9_]*)|(?P<other>_?[a-z][a-z0-9_]*|\s+|[?!]?(?=_?[a-z])|[:|()*+?]|\{\d*,?\d*\})",
)
_ATOM = re.compile(
    r"(?P<class>\[\^?\]?(?:\\.|[^\]\\\[&])*\]|\.|\\[dDwWsS])"
    r"|(?P<group>\()(?:\?:|\?P?<\w+>)?(?!\?)|(?P<kept>[)|]|(?:[*+?]|\{\d*,?\d*\}))\??|(?P<edge>[\^$])"
    r"|\\(?:x(?P<hex>[0-9a-fA-F]{2})|[xu]\{(?P<braces>[0-9a-fA-F]{1,6})\}|u(?P<four>[0-9a-fA-F]{4})|(?P<letter>[nrtfv])"
    r"|(?P<escaped>[^\w\s]))|(?P<plain>[^\\\[\]({}])",
    re.DOTALL,
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_COMMON = {
    "CNAME": r"[a-zA-Z_]\w*",
    "CR": r"\r",
    "DIGIT": r"[0-9]",
    "ESCAPED_STRING": r'"(?:\\.|[^"\\\n])*"',
    "HEXDIGIT": r"[0-9a-fA-F]",
    "INT": r"[0-9]+",
    "LETTER": r"[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"[0-9]+(?:\.[0-9]*)?(?:[eE][+\-]?[0-9]+)?",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "SIGNED_NUMBER": r"[+\-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+\-]?[0-9]+)?",
    "WORD": r"[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Terminals of Lark's library."""


def by_character(grammar: str, *, json_string: bool) -> str:
    """The grammar, of Lark, with terminals of one character.

    Args:
        json_string: the text is written as the inside of a JSON string.

    Raises:
        RequestError: the grammar has a part that cannot be rewritten.
    """
    main, *schemas = json.loads(grammar)["grammars"]
    if schemas:
        raise _refused("%json")
    text, parts, place = main["lark_grammar"], [], 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None or found.end() == place:
            raise _refused(text[place:].split("\n")[0])
        parts.append(_rewritten(found, json_string))
        place = found.end()
    return serialised("".join(parts))


def characters(text: str, *, json_string: bool = False) -> str:
    """A text as an expression of such a grammar."""
    written = [json.dumps(char, ensure_ascii=False)[1:-1] if json_string else char for char in text]
    return f"({' '.join(json.dumps(each, ensure_ascii=False) for each in written)})" if text else '""'


def _rewritten(found: re.Match[str], json_string: bool) -> str:
    if found["range"]:
        first, last = (regex(_text(each)) for each in re.findall(r'"(?:\\.|[^"\\])"', found["range"]))
        return _expression(f"[{first}-{last}]", "", json_string)
    if found["string"]:
        return characters(_text(found["string"]), json_string=json_string)
    if found["regex"]:
        return _expression(found["regex"], found["flags"], json_string)
    if name := found["common"]:
        if name not in _COMMON:
            raise _refused(found[0])
        return f"{_rule(found['alias'] or name)}: {_expression(_COMMON[name], '', json_string)}"
    if found["terminal"]:
        return _rule(found[0])
    return found["other"] or ""


def _rule(terminal: str) -> str:
    return f"terminal_{terminal.lower()}"


def _text(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        raise _refused(literal) from None


def _expression(pattern: str, flags: str, json_string: bool) -> str:
    """A regular expression as one of rules."""
    parts, place = [], 0
    while place < len(pattern):
        if (found := _ATOM.match(pattern, place)) is None:
            raise _refused(f"/{pattern}/ from {pattern[place:][:20]!r} on")
        place = found.end()
        if found["class"]:
            parts.append(_class(found["class"], flags, json_string))
        elif found["edge"]:
            if 0 < found.start() < len(pattern) - 1:
                raise _refused(f"/{pattern}/ from {found[0]} on")
        elif structure := found["group"] or found["kept"]:
            parts.append(structure)
        else:
            point = found["hex"] or found["braces"] or found["four"]
            char = _char(point) if point else _LETTERS.get(found["letter"] or "") or found["escaped"] or found["plain"]
            parts.append(characters(char, json_string=json_string))
    return f"({' '.join(parts)})"


def _char(point: str) -> str:
    try:
        char = chr(int(point, 16))
        char.encode()
    except (ValueError, OverflowError):
        raise _refused(f"U+{point}") from None
    return char


def _class(text: str, flags: str, json_string: bool) -> str:
    """A class of characters: in JSON, those that it leaves as they are, and those that it escapes."""
    if text == ".":
        text = r"[\s\S]" if flags else r"[^\n]"
    if not json_string:
        return f"/{text}/"
    try:
        member = re.compile(text, re.ASCII)
    except re.error:
        raise _refused(text) from None
    within = [json.dumps(char)[1:-1] for char in _SPECIAL if member.fullmatch(char)]
    kinds = [f"[{text}&&{_SAFE}]"]
    if short := "".join(regex(each[1]) for each in within if len(each) == 2):
        kinds.append(rf"\x{{5c}}[{short}]")
    if long := "|".join(each[4:] for each in within if len(each) == 6):
        kinds.append(rf"\x{{5c}}u00({long})")
    return f"/{'|'.join(kinds)}/"


def _refused(part: str) -> RequestError:
    message = f"{part[:100]} cannot be held in this model's format of tool calls"
    return RequestError(message, None, code="unsupported_grammar")
