"""Regular expressions that begin with lookaheads, compared with Python's."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from support.words import accepts, matcher

from headrace.constrain.lookaheads import json_patterns, split
from headrace.errors import RequestError

TEXTS = ["".join(chars) for count in range(5) for chars in itertools.product("ab.1", repeat=count)]
TEXTS += ["foo", "fo", "fooa", "bar", "foob", "c", "a/b", "a$", "a$b", "a\n"]
PATTERNS = [
    r"^(?=.*[0-9])(?=.*[a-z]).{2,4}$",
    r"^(?!foo)[a-z]*$",
    r"^(?!foo|ba)[a-z]+$",
    r"^(?!(?:foo|fo|a)$)[a-z]+$",
    r"^(?!a$)(?=..?$)[a-c]*$",
    r"^(?!a\.b)[ab.]+$",
    r"^(?=a[)(]?|b[^)]$)[a-z1]+$",
    r"^(?!a\$)[a$/b\n]+$",
    r"^(?=a/|foo$)[a-z/]+$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_allows_what_it_says(pattern: str) -> None:
    texts = [text for text in TEXTS if not text.endswith("\n")]  # before which Python's $ matches
    for made, written in ((matcher(regex=pattern), str), (matcher(json={"type": "string", "pattern": pattern}), json.dumps)):
        wrong = [text for text in texts if accepts(made, written(text)) != bool(re.search(pattern, text))]
        assert not wrong


@pytest.mark.parametrize("pattern", ["(?=a)b", "^(?!a.*b)ab$", "^(?!a|b$)c$", "^(?=a)b|c", "a(?=b)", "^(?!)a$"])
def test_what_cannot_be_taken_apart_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match=r"look-around|empty"):
        matcher(json={"type": "string", "pattern": pattern})


def test_a_pattern_without_lookaheads_stays() -> None:
    for pattern in ("^a$", "(a", "^(?:a|b)", "(?=a", "[(?=a)]"):
        assert json_patterns(pattern) == [pattern]
        assert not split(pattern).wanted
