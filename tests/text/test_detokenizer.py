"""Increments add up to the whole, in whole characters, and nothing is held back without need."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import vocabularies

from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.tokenizer import Tokenizer

quick = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


def whole(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """The text of ids that follow other text."""
    table = tokenizer.token_bytes
    return b"".join((table.visible if skip else table.pieces)[token] for token in ids).decode("utf-8", "replace")


@quick
@given(data=st.data(), skip=st.booleans())
def test_increments_add_up(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    token = st.integers(0, tokenizer.vocab_size - 1)
    if data.draw(st.booleans()):
        output = data.draw(st.lists(token, max_size=30))
    else:
        output = tokenizer.encode(data.draw(st.text(max_size=20)), add_special_tokens=False)
    prompt = tokenizer.encode("the ", add_special_tokens=False)
    stream = IncrementalDetokenizer(tokenizer, prompt, skip)
    pieces, place = [], 0
    while place < len(output):
        step = data.draw(st.integers(1, 3))
        pieces.append(stream.push(output[place : place + step]))
        place += step
    pieces.append(stream.flush())
    assert "".join(pieces) == whole(tokenizer, output, skip)


@quick
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12))
def test_no_half_characters(tokenizer: Tokenizer, text: str) -> None:
    """Only whole characters of a text come out, however the tokens cut it."""
    output = tokenizer.encode(text, add_special_tokens=False)
    stream = IncrementalDetokenizer(tokenizer, tokenizer.encode("x"))
    pieces = [stream.push([token]) for token in output]
    if "\ufffd" not in text and vocabularies.can_spell(tokenizer, text):
        assert not any("\ufffd" in piece for piece in pieces)
        assert stream.flush() == ""


def test_a_character_over_several_tokens(byte_level: Tokenizer) -> None:
    output = [byte_level.token_bytes.pieces.index(bytes([byte])) for byte in "a🦜b".encode()]
    stream = IncrementalDetokenizer(byte_level, [])
    assert [stream.push([token]) for token in output] == ["a", "", "", "", "🦜", "b"]


def test_invalid_bytes_come_out_at_once(byte_level: Tokenizer) -> None:
    """A byte that cannot go on shows what was held; held text never grows past three bytes."""
    byte = {value: byte_level.token_bytes.pieces.index(bytes([value])) for value in (0xF0, 0x9F, 0xFF, 0x61)}
    stream = IncrementalDetokenizer(byte_level, [])
    assert stream.push([byte[0xF0]]) == ""
    assert stream.push([byte[0x9F]]) == ""
    assert stream.push([byte[0x61]]) == "\ufffda"
    assert [stream.push([byte[0xFF]]) for _ in range(5)] == ["\ufffd"] * 5
    assert stream.push([byte[0xF0]]) == ""
    assert stream.flush() == "\ufffd"


def test_emoji_sequences_are_not_held(embedded: Tokenizer) -> None:
    family = "👩‍👩‍👧"
    stream = IncrementalDetokenizer(embedded, [])
    pieces = [stream.push([token]) for token in embedded.encode(family)]
    assert "".join(pieces) == family
    assert "👩" in pieces  # the first person comes before the rest of the family


def test_leading_space_of_sentencepiece(sentencepiece: Tokenizer) -> None:
    """Tokens that follow text keep their space; a text's own first token loses it."""
    output = sentencepiece.encode("the cat", add_special_tokens=False)
    prompt = sentencepiece.encode("a dog")
    follows = IncrementalDetokenizer(sentencepiece, prompt)
    assert "".join(follows.push([token]) for token in output) == " the cat"
    for start in ([], [1]):  # nothing at all, and bos, which shows no text
        begins = IncrementalDetokenizer(sentencepiece, start)
        assert "".join(begins.push([token]) for token in output) == "the cat"
    shown = IncrementalDetokenizer(sentencepiece, [1], skip_special_tokens=False)
    assert "".join(shown.push([token]) for token in output) == " the cat"


@pytest.mark.parametrize("skip", [True, False])
def test_in_context_equals_the_difference_of_whole_decodes(tokenizer: Tokenizer, skip: bool) -> None:
    prompt = tokenizer.encode("Once upon a time, ")
    output = tokenizer.encode("naïve 北京 🦜 end", add_special_tokens=False)
    own = tokenizer.hf.backend_tokenizer
    before = own.decode(prompt, skip_special_tokens=skip)
    after = own.decode(prompt + output, skip_special_tokens=skip)
    assert after.startswith(before)
    stream = IncrementalDetokenizer(tokenizer, prompt, skip)
    assert stream.push(output) + stream.flush() == after[len(before) :]


def test_a_character_begun_by_the_prompt_is_completed(byte_level: Tokenizer) -> None:
    ids = [byte_level.token_bytes.pieces.index(bytes([byte])) for byte in "a北b".encode()]
    stream = IncrementalDetokenizer(byte_level, ids[:2])
    assert stream.push(ids[2:]) == "北b"


def test_special_tokens_shown_or_not(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hi<|user|>you<|end|>")
    hidden, shown = IncrementalDetokenizer(byte_level, []), IncrementalDetokenizer(byte_level, [], skip_special_tokens=False)
    assert hidden.push(ids) == "hiyou"
    assert shown.push(ids) == "hi<|user|>you<|end|>"
    assert hidden.push([]) == ""


def test_work_does_not_grow_with_the_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the cat sat on the mat ") * 2000
    stream = IncrementalDetokenizer(byte_level, [])

    def seconds() -> float:
        start = time.process_time()
        for token in ids:
            stream.push([token])
        return time.process_time() - start

    first = min(seconds(), seconds())
    assert min(seconds() for _ in range(3)) < 5 * first
