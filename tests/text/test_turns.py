"""Boundaries of turns in the tokens of a conversation."""

from __future__ import annotations

from headrace.text.vocab import TokenBytes

START, END, BOS = 900, 901, 902
turn_boundaries = TokenBytes((), frozenset({START, END, BOS})).turn_boundaries


def turn(length: int) -> list[int]:
    return [START, *range(length), END, 10]


def test_the_boundaries_are_before_the_second_turn_and_the_answer() -> None:
    system, user, answer = turn(20), turn(7), turn(5)
    prompt = [BOS, *system, *user, *answer, *user, START, 1, 2]
    assert turn_boundaries(prompt) == (1 + len(system), len(prompt) - 3)


def test_a_first_question_has_one_boundary() -> None:
    assert turn_boundaries([BOS, *turn(9), START, 1]) == (13,)


def test_plain_prompts_have_none() -> None:
    assert turn_boundaries([]) == turn_boundaries([BOS, 1, 2]) == ()
    assert turn_boundaries([START, *range(100), START, *range(100)]) == (), "no answer begins near the end"
