"""Logprob shapes: tokens of every kind, offsets, ranks."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.outputs import Logprob, TokenLogprobs
from headrace.server.logprobs import (
    CompletionLogprobs,
    JSONArray,
    JSONColumns,
    TokenTexts,
    best,
    chat_logprobs,
    prompt_logprobs,
)
from headrace.text.vocab import TokenBytes

PIECES = [b" He", b"llo", b"\xf0\x9f", b"\x99\x82", b"<s>", b"", b" w", "é".encode()]
HE, LLO, HALF, REST, START, EMPTY, W, ACCENT = range(8)
TEXTS = TokenTexts(TokenBytes(PIECES, frozenset({START})))


def position(token: int) -> TokenLogprobs:
    return TokenLogprobs([token], [-1.0], 1)


def decoded(encoded: JSONArray | JSONColumns) -> Any:
    return msgspec.json.decode(msgspec.json.encode(encoded.json))


def offsets(logprobs: CompletionLogprobs, tokens: list[int]) -> list[int]:
    return logprobs.add(tokens, [position(token) for token in tokens])["text_offset"]


def test_offsets_count_characters_not_bytes() -> None:
    logprobs = CompletionLogprobs(TEXTS, 0, frozenset({START}), special_text=False)
    tokens = [HE, HALF, REST, EMPTY, START, ACCENT, LLO]
    starts = offsets(logprobs, tokens)
    text = " He🙂éllo"
    assert starts == [0, 3, 3, 4, 4, 4, 5]
    assert text[starts[-1] :] == "llo"


def test_offsets_go_on_over_pieces() -> None:
    logprobs = CompletionLogprobs(TEXTS, 0, frozenset({START}), special_text=True)
    assert [offsets(logprobs, [token])[0] for token in (HE, HALF, REST, START, LLO)] == [0, 3, 3, 4, 7]


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("Hello w", [START, HE, LLO, W], [0, 0, 2, 5]),
        (" Hello w", [START, HE, LLO, W], [0, 0, 3, 6]),
        ("<s> Hello", [START, HE, LLO], [0, 3, 6]),
    ],
)
def test_offsets_of_an_echoed_prompt(text: str, tokens: list[int], expected: list[int]) -> None:
    """The prompt has a first token that the tokenizer added or the text holds, and a space that the tokenizer puts before
    texts."""
    logprobs = CompletionLogprobs(TEXTS, 0, frozenset({START}), special_text=False)
    shape = decoded(logprobs.echo(tokens, [None, *(position(token) for token in tokens[1:])], text))
    assert shape["text_offset"] == expected
    assert shape["token_logprobs"] == [None, *[-1.0] * (len(tokens) - 1)]
    assert offsets(logprobs, [W]) == [len(text)]


def test_best_is_by_rank_and_at_most_as_many_as_asked() -> None:
    tied = {5: Logprob(-3.0, 4), 1: Logprob(-1.0, 1), 2: Logprob(-2.0, 2), 3: Logprob(-2.0, 2)}
    assert [token for token, _ in best(tied, 2)] == [1, 2]
    assert [token for token, _ in best(tied, 3)] == [1, 2, 3]
    assert [token for token, _ in best(tied, 0)] == []
    assert [token for token, _ in best(tied, -1)] == [1, 2, 3, 5]


def test_texts_of_tokens() -> None:
    assert (TEXTS.text(HALF), TEXTS.exact(HALF)) == ("\ufffd", "bytes:\\xf0\\x9f")
    assert (TEXTS.text(ACCENT), TEXTS.exact(ACCENT), TEXTS.raw(ACCENT)) == ("é", "é", "é".encode())
    assert (TEXTS.text(99), TEXTS.exact(99), TEXTS.raw(99)) == ("token_id:99", "token_id:99", None)
    assert TokenTexts(None).text(3) == "token_id:3"


def test_nothing_is_infinite_on_the_wire() -> None:
    never = TokenLogprobs([LLO], [-math.inf], 8)
    [entry] = chat_logprobs(TEXTS, [never], 0)["content"]
    assert entry == {"token": "llo", "logprob": -9999.0, "bytes": list(b"llo"), "top_logprobs": []}
    assert decoded(prompt_logprobs(TEXTS, [None, never])) == [
        None,
        {"1": {"logprob": -9999.0, "rank": 8, "decoded_token": "llo"}},
    ]
    logprobs = CompletionLogprobs(TEXTS, 1, frozenset(), special_text=False)
    assert logprobs.add([LLO], [never])["token_logprobs"] == [-9999.0]


def test_the_chosen_token_stands_beside_the_best() -> None:
    logprobs = CompletionLogprobs(TEXTS, 1, frozenset(), special_text=False)
    where = TokenLogprobs([LLO, HE], [-3.0, -0.1], 5)
    assert logprobs.add([LLO], [where])["top_logprobs"] == [{" He": -0.1, "llo": -3.0}]
    [entry] = chat_logprobs(TEXTS, [where], 1)["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == [" He"]


@settings(derandomize=True, deadline=None)
@given(parts=st.lists(st.lists(st.none() | st.text(max_size=3) | st.lists(st.integers()), max_size=3), max_size=5))
def test_encoded_parts_are_the_list_in_one(parts: list[list[Any]]) -> None:
    array, other = JSONArray(), JSONArray()
    for part in parts[:2]:
        array.extend(part)
    for part in parts[2:]:
        other.extend(part)
    array.join(other)
    assert decoded(array) == [item for part in parts for item in part]


def test_a_long_prompt_is_shaped_in_parts_that_join() -> None:
    tokens = [HE, LLO, W, ACCENT] * 200
    entries = [None, *(position(token) for token in tokens[1:])]
    text = b"".join(PIECES[token] for token in tokens).decode()
    logprobs, whole = (CompletionLogprobs(TEXTS, 0, frozenset(), special_text=False) for _ in range(2))
    assert decoded(logprobs.echo(tokens, entries, text)) == whole.add(tokens, entries)
    assert len(decoded(prompt_logprobs(TEXTS, entries))) == len(tokens)
