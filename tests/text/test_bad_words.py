"""Bad words never appear in the text, however they are tokenised; and nothing is banned that need not be."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bad_words_reference import BadWordsStepper

from headrace.config import EngineArgs
from headrace.errors import RequestError
from headrace.text.bad_words import check_bad_words, compile_bad_words
from headrace.text.tokenizer import Tokenizer
from headrace.text.vocab import TokenBytes, VocabularyIndex

LIMITS = EngineArgs(max_logprobs=20, max_bad_words_num=2, bad_words_max_len=3, max_stop_seqs_num=2, stop_seqs_max_len=3)

words = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4)
pieces = st.lists(st.text(alphabet="abcé", max_size=4).map(str.encode), min_size=3, max_size=20)
halves = st.lists(st.sampled_from([b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", b"\xff"]), max_size=4)


def walk(table_words: list[str], table: TokenBytes, seed: int, steps: int, special_text: bool) -> None:
    """Draws tokens that are not banned, and holds the table to the definition at each step."""
    compiled = compile_bad_words(table_words, table, special_text=special_text)
    texts = table.pieces if special_text else table.visible
    stepper = BadWordsStepper(compiled, table)
    rng = random.Random(seed)
    text = b""
    encoded = [word.encode() for word in table_words]
    for _ in range(steps):
        banned = stepper.banned()
        completing = {t for t, piece in enumerate(texts) if piece and any(word in text + piece for word in encoded)}
        assert banned == completing
        allowed = sorted(set(range(len(texts))) - banned)
        token = rng.choice(allowed)
        stepper.push(token)
        text += texts[token]
        assert not any(word in text.decode("utf-8", "replace") for word in table_words)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(words=words, pieces=pieces, halves=halves, seed=st.integers(0, 99), special=st.booleans())
def test_banned_exactly_where_a_word_would_be_completed(
    words: list[str], pieces: list[bytes], halves: list[bytes], seed: int, special: bool
) -> None:
    table = TokenBytes([*pieces, *halves, b"<ab>", b"", b"z"], frozenset({len(pieces) + len(halves)}))
    walk(words, table, seed, 25, special)


@pytest.mark.parametrize("fixture", ["embedded", "sentencepiece", "byte_level", "qwen3"])
def test_real_vocabularies(request: pytest.FixtureRequest, fixture: str) -> None:
    """Random text over the whole vocabulary never shows the words, and bans are exact in the states it meets."""
    tokenizer: Tokenizer = request.getfixturevalue(fixture)
    table = tokenizer.token_bytes
    bad = ["the", " a", "secret", "北京", "😀", "\n\n", "e"]
    compiled = compile_bad_words(bad, table, special_text=False)
    stepper = BadWordsStepper(compiled, table)
    rng = np.random.default_rng(0)
    text = b""
    for step in range(300):
        banned = stepper.banned()
        if step % 100 == 0:
            tail = text[-16:]
            completing = {t for t, p in enumerate(table.visible) if p and any(word.encode() in tail + p for word in bad)}
            assert banned == completing
        token = int(rng.integers(tokenizer.vocab_size))
        while token in banned:
            token = int(rng.integers(tokenizer.vocab_size))
        stepper.push(token)
        text += table.visible[token]
    assert not any(word in text.decode("utf-8", "replace") for word in bad)


def test_a_word_is_caught_however_it_is_tokenised(embedded: Tokenizer) -> None:
    table = embedded.token_bytes
    compiled = compile_bad_words(["password"], table, special_text=False)
    spellings = [["pass", "word"], ["p", "assword"], [" password"], ["pa", "ss", "wor", "ds"], list("password")]
    for spelling in spellings:
        stepper = BadWordsStepper(compiled, table)
        ids = [table.pieces.index(piece.encode()) for piece in spelling if piece.encode() in table.pieces]
        for token in ids[:-1]:
            assert token not in stepper.banned()
            stepper.push(token)
        if len(ids) == len(spelling):
            assert ids[-1] in stepper.banned(), spelling


def test_table_layout() -> None:
    """The layout that samplers read: int16, little-endian, states by bytes; lists ascending and disjoint."""
    table = TokenBytes([b"a", b"b", b"ab", b"xaby", b"ba", b"c"], frozenset())
    compiled = compile_bad_words(["ab"], table, special_text=True)
    assert compiled.num_states == 2
    transitions = np.frombuffer(compiled.transitions, dtype="<i2").reshape(2, 256)
    assert transitions[0, ord("a")] == 1
    assert transitions[1, ord("a")] == 1
    assert transitions[1, ord("b")] == 0
    assert np.count_nonzero(transitions) == 2
    assert compiled.always == [2, 3]
    assert compiled.by_state == [[], [1, 4]]
    assert compiled.special_text is True


def test_words_within_words_need_no_states_of_their_own() -> None:
    table = TokenBytes([b"a", b"b", b"c"], frozenset())
    both = compile_bad_words(["ab", "xabyab", "ab"], table, special_text=True)
    assert both == compile_bad_words(["ab"], table, special_text=True)


def test_forced_text_that_completes_a_word_leaves_a_sound_state() -> None:
    table = TokenBytes([b"a", b"b"], frozenset())
    compiled = compile_bad_words(["aba"], table, special_text=True)
    stepper = BadWordsStepper(compiled, table)
    for token in (0, 1, 0, 1):  # "abab": the third token was banned
        stepper.push(token)
    assert stepper.banned() == {0}


@pytest.mark.parametrize(
    ("bad", "table"),
    [
        (["a", "b"], TokenBytes([b"a", b"ab", b"b", b""], frozenset())),
        (["ab"], TokenBytes([b"a", b"b", b"ab"], frozenset())),  # after "a": "a" goes on, so this one is fine
    ],
)
def test_no_token_left(bad: list[str], table: TokenBytes) -> None:
    if bad == ["ab"]:
        compile_bad_words(bad, table, special_text=True)
        return
    with pytest.raises(RequestError, match="no token") as error:
        compile_bad_words(bad, table, special_text=True)
    assert error.value.param == "bad_words"


def test_a_state_that_would_ban_everything_is_refused() -> None:
    table = TokenBytes([b"a", b"b"], frozenset())
    with pytest.raises(RequestError, match="no token"):
        compile_bad_words(["aa", "ab"], table, special_text=True)


@pytest.mark.parametrize("word", ["", "a\ufffd", "\ud800"])
def test_words_that_are_no_text_are_refused(word: str) -> None:
    with pytest.raises(RequestError) as error:
        compile_bad_words([word], TokenBytes([b"a", b"b"], frozenset()), special_text=True)
    assert error.value.param == "bad_words"


def test_too_many_states_are_refused() -> None:
    with pytest.raises(RequestError, match="32767"):
        compile_bad_words(["a" * 40_000], TokenBytes([b"a", b"b"], frozenset()), special_text=True)


def test_special_tokens_are_text_only_where_they_are_shown() -> None:
    table = TokenBytes([b"<bad>", b"x"], frozenset({0}))
    assert compile_bad_words(["bad"], table, special_text=False).always == []
    assert compile_bad_words(["bad"], table, special_text=True).always == [0]


def test_limits_count_and_length(byte_level: Tokenizer) -> None:
    check_bad_words(["ab", "cd"], byte_level, LIMITS)
    with pytest.raises(RequestError, match="tokens; at most 3") as error:
        check_bad_words(["zqzqzqzq"], byte_level, LIMITS)
    assert error.value.param == "bad_words"


def test_index_finds_by_beginning_and_by_content() -> None:
    pieces = [b"the", b"", b"\xff\xff", b" the", b"th", b"ththe", b"\xe4\xba"]
    index = VocabularyIndex(pieces)
    low, high = index.starting_with(b"th")
    assert sorted(index.tokens[low:high].tolist()) == [0, 4, 5]
    assert index.containing(b"the").tolist() == [0, 3, 5]
    assert index.containing(b"th").tolist() == [0, 3, 4, 5]
    assert index.containing(b"zz").tolist() == []
    low, high = index.starting_with(b"\xbf")
    assert low == high


def test_compiling_is_quick(request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue("qwen3")
    bad = ["damn", "hell", "foo bar", "secret", "password", "e", "the", "Paris", "12", "日本", "😀", " kill", "abcab", "xyz"]
    _ = tokenizer.token_bytes.visible_index
    start = time.process_time()
    compile_bad_words(bad, tokenizer.token_bytes, special_text=False)
    assert time.process_time() - start < 1.0  # far above what it takes: only a wrong method fails
