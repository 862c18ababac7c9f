"""Constraints that would end, fill or occupy the process that compiles them are refused, and the next one is served."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest
from support.hostile_constraints import LINKS, chain, rules

from headrace.constrain.factory import GrammarFactory
from headrace.constrain.paths import longest_path
from headrace.core.matcher import TOO_COMPLEX
from headrace.errors import RequestError
from headrace.option_groups import StructuredOutputsConfig
from headrace.sampling_params import StructuredOutputsParams


@pytest.fixture(scope="module")
def factory() -> GrammarFactory:
    return GrammarFactory(StructuredOutputsConfig(max_compile_seconds=1.0), None)


def refusal(factory: GrammarFactory, **constraint: Any) -> str:
    with pytest.raises(RequestError) as caught:
        factory.constraint(StructuredOutputsParams(**constraint))
    return caught.value.message


@pytest.mark.parametrize("link", LINKS)
def test_long_chains_of_references_are_refused(factory: GrammarFactory, link: str) -> None:
    assert "a path of" in refusal(factory, json=chain(link, 2500))
    assert factory.constraint(StructuredOutputsParams(json=chain(link, 200))).nbytes > 0


def test_long_chains_of_rules_are_refused(factory: GrammarFactory) -> None:
    assert "a chain of 3002 rules" in refusal(factory, grammar=rules(3000))
    assert factory.constraint(StructuredOutputsParams(grammar=rules(400))).kind == "grammar"


def test_a_crash_of_the_library_ends_a_process_of_its_own() -> None:
    """The library overflows its stack, with limits that let the constraint through."""
    factory = GrammarFactory(StructuredOutputsConfig(max_depth=256), None)
    for _ in range(2):  # The second time from the cache.
        assert refusal(factory, json=chain("patternProperties", 1000)).startswith(TOO_COMPLEX)
    assert factory.constraint(StructuredOutputsParams(regex="a")).kind == "regex"


def test_a_constraint_that_takes_too_long_is_refused(factory: GrammarFactory) -> None:
    patterns = {f"^(a|b){{{count}}}c": {"type": "integer"} for count in range(500)}
    assert "max_compile_seconds" in refusal(factory, json={"type": "object", "patternProperties": patterns})
    assert factory.constraint(StructuredOutputsParams(regex="b")).kind == "regex"


def test_what_passes_a_limit_with_its_first_token_is_refused(factory: GrammarFactory) -> None:
    """The engine would compile it in vain, and keep some 90 MiB of each in its cache."""
    for count in (400_000, 400_001):
        # By its lexer, or on a slow processor by the time that it takes.
        assert "grammar_too_complex" in refusal(factory, regex=f"a{{{count}}}")
    assert factory.constraint(StructuredOutputsParams(regex="a{999}")).nbytes < 2**22


REPEATED = "repeats a part {} times, more than the limit of 500000 (max_grammar_size)"


@pytest.mark.parametrize(
    ("pattern", "times"),
    [
        ("a{999999999}", 999_999_999),
        ("a{999999999,}", 999_999_999),
        ("(a{9999}){9999}", 99_980_001),
        ("((ab{100}|c){100}d){2}{100}", 2_000_000),
        (r"(?:\){700000}\{", 700_000),
        (r"[{]a{500001}", 500_001),
    ],
)
def test_repetitions_are_counted_before_they_are_compiled(factory: GrammarFactory, pattern: str, times: int) -> None:
    """Compiling them takes a second of processor time."""
    message = REPEATED.format(times)
    for held in (
        {"regex": pattern},
        {"json": {"type": "string", "pattern": pattern}},
        {"json": {"type": "object", "patternProperties": {pattern: {}}}},
        {"grammar": f'start: "/" /{pattern}/'},
    ):
        assert message in refusal(factory, **held)


def test_what_only_looks_like_a_repetition_is_held(factory: GrammarFactory) -> None:
    for pattern in (
        r"\x{100000}?b",
        r"[{600000}]{3}",
        r"\{600000}",
        r"a{0,999999999}",
        r"(a{1000}b)(c{1000}d)",
        r"(a{1000}){3}{1,9}",
    ):
        assert factory.constraint(StructuredOutputsParams(regex=pattern)).nbytes > 0
    assert factory.constraint(StructuredOutputsParams(grammar='start: "/a{700000}/" // /a{700000}/')).nbytes > 0


def test_nobody_waits_for_a_slow_constraint_of_another() -> None:
    """The others are checked in the time of the first one, by the one process that they have."""
    factory = GrammarFactory(StructuredOutputsConfig(max_compile_seconds=2.0, compile_threads=1), None)
    patterns = {f"^(a|b){{{count}}}c": {"type": "integer"} for count in range(500)}

    async def run() -> None:
        await factory.prepare(StructuredOutputsParams(regex="a"))
        schema = {"type": "object", "patternProperties": patterns}
        slow = asyncio.create_task(factory.prepare(StructuredOutputsParams(json=schema)))
        await asyncio.sleep(0)
        for number in range(20):
            await factory.prepare(StructuredOutputsParams(regex=f"b{number}"))
        assert not slow.done()
        with pytest.raises(RequestError, match="max_compile_seconds"):
            await slow

    asyncio.run(run())


def test_refused_constraints_leave_no_memory(factory: GrammarFactory) -> None:
    def refuse(first: int, count: int) -> int:
        for number in range(first, first + count):
            refusal(factory, regex=f"a(?=a)a{{{number}}}")
        own = psutil.Process()
        return sum(process.memory_info().rss for process in (own, *own.children(recursive=True)))

    before = refuse(1, 150)
    assert refuse(1000, 500) - before <= 10 * 2**20


def test_a_longest_path_goes_round_no_cycle() -> None:
    assert longest_path({"a": ["b", "c"], "b": ["c"], "c": ["a", "d"], "d": []}) == (4, "a")
    assert longest_path({}) == (0, "")
