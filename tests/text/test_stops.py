"""Stop strings: found over any cutting of the text, and never sent out in part."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import EngineArgs
from headrace.errors import RequestError
from headrace.text.stops import StopAutomaton, StopStrings, check_stops


def plain(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Finds a stop string by the definition: the first to be complete, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_any_cutting_gives_what_the_definition_says(pieces: list[str], stops: list[str], include: bool) -> None:
    finder = StopStrings(StopAutomaton(stops), include=include)
    out, match, taken = "", None, ""
    for piece in pieces:
        taken += piece
        emitted, match = finder.push(piece)
        out += emitted
        if match is not None:
            break
        if not include:
            held = taken[len(out) :]
            assert not held or any(stop.startswith(held) for stop in stops), "held back without need"
            longest = max((k for stop in stops for k in range(1, len(stop)) if taken.endswith(stop[:k])), default=0)
            assert len(held) == longest, "part of a stop string went out"
        else:
            assert out == taken
    if match is None:
        out += finder.flush()
    assert (out, match) == plain("".join(pieces), stops, include)
    assert finder.matched == match


@pytest.mark.parametrize("include", [False, True])
def test_nothing_comes_after_a_match(include: bool) -> None:
    finder = StopStrings(StopAutomaton(["END"]), include=include)
    assert finder.push("say E") == ("say E" if include else "say ", None)
    assert finder.push("ND and more") == ("ND" if include else "", "END")
    assert finder.push("more") == ("", "END")
    assert finder.flush() == ""


def test_first_complete_wins_and_then_the_longest() -> None:
    assert StopStrings(StopAutomaton(["abcd", "bc"])).push("xabcd") == ("xa", "bc")
    assert StopStrings(StopAutomaton(["bc", "abc"])).push("xabcd") == ("x", "abc")
    assert StopStrings(StopAutomaton(["abc", "bc"])).push("xabcd") == ("x", "abc")


def test_flush_gives_back_what_was_held() -> None:
    finder = StopStrings(StopAutomaton(["\n\nUser:"]))
    assert finder.push("done\n\nUse") == ("done", None)
    assert finder.flush() == "\n\nUse"


def test_text_of_the_first_min_tokens_takes_no_part() -> None:
    finder = StopStrings(StopAutomaton(["ab"]), min_tokens=2)
    assert finder.push("ab") == ("ab", None)  # token 1
    assert finder.push("a") == ("a", None)  # token 2: cannot begin a match either
    assert finder.push("b") == ("b", None)  # token 3
    assert finder.push("ab!") == ("", "ab")
    exact = StopStrings(StopAutomaton(["x"]), min_tokens=1)
    assert exact.push("x") == ("x", None)
    assert exact.push("x") == ("", "x")


def test_work_is_linear_in_the_text() -> None:
    """A text that keeps nearly matching is where rescanning would show."""

    def seconds(length: int) -> float:
        finder = StopStrings(StopAutomaton(["a" * 40 + "b"]))
        start = time.process_time()
        for _ in range(length):
            finder.push("a")
        return time.process_time() - start

    seconds(1000)
    assert min(seconds(80_000), seconds(80_000)) < 40 * max(seconds(8_000), 1e-3)


def test_samples_share_an_automaton() -> None:
    automaton = StopAutomaton(["END"])
    first, second = StopStrings(automaton), StopStrings(automaton)
    assert first.push("EN") == ("", None)
    assert second.push("D") == ("D", None)
    assert first.push("D") == ("", "END")


def test_lengths_count_characters() -> None:
    limits = EngineArgs(max_logprobs=20, max_bad_words_num=2, bad_words_max_len=3, max_stop_seqs_num=2, stop_seqs_max_len=9)
    check_stops(["x" * 9, "🙂" * 9], limits)
    with pytest.raises(RequestError, match="10 characters; at most 9") as error:
        check_stops(["a", "🙂" * 10], limits)
    assert error.value.param == "stop"
