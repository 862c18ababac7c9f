"""Counted repetitions of regular expressions, which a few characters make as large as they like."""

from __future__ import annotations

import re

from headrace.constrain.lark import QUIET
from headrace.core.matcher import TOO_COMPLEX

_PIECE = re.compile(r"\\[xuUpP]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|([()])|\{(\d{1,10})(?:,\d*)?\}", re.DOTALL)
"""Escapes and classes, in which nothing counts; brackets; and the least count of a repetition. The library refuses counts of
more digits."""


def too_many_repetitions(pattern: str, most: int) -> str | None:
    """Returns why a pattern is refused that asks for more than ``most`` repetitions, those of nested groups multiplied.

    The library would repeat the part one by one until it passes another of its limits, which takes a second of processor
    time.
    """
    groups, last, end = [1], 1, -1
    for found in _PIECE.finditer(pattern):
        bracket, count = found.groups()
        inner = last if found.start() == end else 1
        last, end = 1, -1
        if bracket == "(":
            groups.append(1)
        elif bracket and len(groups) > 1:
            last, end = groups.pop(), found.end()
        elif count:
            last, end = inner * max(int(count), 1), found.end()
            if last > most:
                return f"{TOO_COMPLEX}: it repeats a part {last} times, more than the limit of {most} (max_grammar_size)"
        groups[-1] = max(groups[-1], last)
    return None


def too_many_in_grammar(grammar: str, most: int) -> str | None:
    """``too_many_repetitions`` of the regular expressions in a Lark grammar."""
    patterns = (found[0][1:-1] for found in QUIET.finditer(grammar) if found[0].startswith("/") and found[0][1] != "/")
    return next(filter(None, (too_many_repetitions(pattern, most) for pattern in patterns)), None)
