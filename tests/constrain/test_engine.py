"""Constraints in a running engine: outputs hold whatever the schedule is, faults stay with their sequence, streams replay."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.constrained import CLOSE, CONSTRAINTS, OPEN, PIECES, Engine, constrained, grammars, params, valid
from support.runner.harness import EOS, VOCAB, World, prompt, request

from headrace.constrain.compiler import GrammarCompiler
from headrace.constrain.compose import AnswerPlan
from headrace.constrain.constraints import Constraints
from headrace.constrain.matcher import GrammarMatcher
from headrace.core.request import Constraint, Request
from headrace.core.scheduler import Scheduler
from headrace.core.stops import check_stop
from headrace.engine.core import EngineCore
from headrace.engine.executor import LocalExecutor
from headrace.engine.outputs import OutputProcessor
from headrace.errors import EngineError, RequestError
from headrace.option_groups import StructuredOutputsConfig
from headrace.parallel.agreement import OneProcess
from headrace.runner.replay import replay
from headrace.sampling_params import SamplingParams, StructuredOutputsParams
from headrace.text.parse.format import Choice, Vocabulary
from headrace.text.parse.formats import reasoning_format

WORLDS = {
    "one step at a time": World(),
    "two in flight": World(depth=2),
    "three in flight": World(depth=3),
    "chunked": World(depth=2, max_num_batched_tokens=6),
    "preempted": World(depth=2, num_blocks=40, max_num_seqs=8),
    "preempted, three in flight": World(depth=3, num_blocks=40, max_num_seqs=8),
    "cached prefixes": World(depth=2, caching=True),
    "few slots": World(depth=3, max_num_seqs=3),
}


def mix() -> list[Request]:
    """Constrained requests of every kind, n = 1 to 4, between free ones."""
    requests = []
    for index, name in enumerate(CONSTRAINTS):
        requests.append(constrained(name, index, n=index + 1))
        requests.append(request(f"free {index}", prompt(50 + index, 7), temperature=1.0, seed=index, max_tokens=20))
    requests.append(constrained("schema", 9, temperature=0.0, logprobs=2, repetition_penalty=1.3, max_tokens=30))
    return requests


@functools.cache
def alone() -> dict[tuple[str, int], list[int]]:
    """Every request on its own, with nothing in flight."""
    tokens = {}
    for each in mix():
        engine = Engine(World())
        engine.add(each)
        tokens |= engine.run().tokens
    return tokens


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_the_schedule_changes_no_token(world: World) -> None:
    """Of constrained and free sequences alike, and what a constrained one says is valid."""
    engine = Engine(world)
    engine.compile(*mix())
    engine.add(*mix())
    engine.run().assert_valid()
    assert engine.tokens == alone()
    assert {reason for key, reason in engine.finish.items() if key[0].startswith("free")} <= {"stop", "length"}
    if world.num_blocks < 100:
        assert engine.core.stats().num_preemptions > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_random_outputs_hold(depth: int) -> None:
    engine = Engine(World(depth=depth, max_num_seqs=16))
    engine.add(*(constrained(name, index, n=4, temperature=5.0) for index, name in enumerate(CONSTRAINTS)))
    engine.run().assert_valid()
    assert len(engine.finish) == 16 and "stop" in engine.finish.values()


@pytest.mark.parametrize("world", ["one step at a time", "two in flight", "three in flight", "preempted, three in flight"])
@pytest.mark.parametrize("answer", [None, "choice"])
def test_a_thinking_budget_is_exact_to_the_token(world: str, answer: str | None) -> None:
    """Of reasoning that the prompt has opened, whatever is in flight; its end comes earlier only where it is drawn."""
    vocabulary = Vocabulary({"<think>": OPEN, "</think>": CLOSE}, frozenset())
    choice, made = Choice(None, reasoning_format("think")), grammars("letters")[0]
    held = params(answer) if answer is not None else None
    engine = Engine(WORLDS[world])
    for budget in (0, 1, 5, 9):
        plan = AnswerPlan(choice, vocabulary, "reasoning", budget=budget)
        asked = request(
            f"budget {budget}", prompt(budget, 6), seed=budget, n=3, temperature=1.0, max_tokens=24, ignore_eos=True
        )
        engine.add(msgspec.structs.replace(asked, constraint=made.constraint(held, plan)))
        engine.add(request(f"free {budget}", prompt(50 + budget, 7), temperature=1.0, max_tokens=20))
    engine.run()
    ends = []
    for (name, _), tokens in engine.tokens.items():
        if not name.startswith("budget"):
            continue
        end, budget = tokens.index(CLOSE), int(name.split()[1])
        assert end <= budget and OPEN not in tokens[end:]
        ends.append(end == budget)
        assert answer is None or valid(answer, b"".join(PIECES[token] for token in tokens[end + 1 :]).strip())
    assert len(ends) == 12 and sum(ends) > 6


def test_samples_differ_and_each_holds() -> None:
    engine = Engine(World(depth=2))
    engine.add(constrained("regex", n=4))
    engine.run().assert_valid()
    assert len({engine.text(key) for key in engine.finish}) > 1


def test_a_recorded_run_replays(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    world = World(depth=3, record=str(path))
    engine = Engine(world)
    engine.add(*mix())
    engine.run()
    engine.core.close()
    tokens: dict[int, list[int]] = {}
    for result in replay(path, World(depth=3).runner()):
        for seq_id, own in zip(result.seq_ids, result.token_ids, strict=True):
            tokens.setdefault(seq_id, []).extend(own)
    # Steps that ran ahead of an end have tokens that nobody got.
    replayed = sorted(tuple(own) for own in tokens.values())
    delivered = sorted(tuple(own) for own in engine.tokens.values())
    assert len(replayed) == len(delivered)
    assert all(any(own[: len(given)] == given for own in replayed) for given in delivered)


Masks = dict[int, Any]
"""By seq_id."""


def mutated(world: World, change: Callable[[Masks, Masks], Masks]) -> Engine:
    """An engine whose masks are changed: ``change(masks, masks of the step before)``."""
    engine = Engine(world)
    right, before = engine.constraints.masks, {}

    def wrong(sequences: Any) -> Any:
        nonlocal before
        seq_ids, masks, failed = right(sequences)
        changed = change(dict(zip(seq_ids, masks, strict=True)), before)
        before = dict(zip(seq_ids, masks, strict=True))
        return [*changed], np.stack([*changed.values()] or [*masks]), failed

    engine.constraints.masks = wrong
    engine.add(*(constrained(name, index, temperature=5.0) for index, name in enumerate(CONSTRAINTS)))
    return engine


@pytest.mark.parametrize("depth", [1, 2])
def test_a_mask_that_is_withheld_breaks_the_engine(depth: int) -> None:
    """A missing mask never counts as one that allows everything."""
    engine = mutated(World(depth=depth), lambda masks, _: dict(list(masks.items())[1:]))
    with pytest.raises(EngineError, match="no token mask"):
        engine.run()


def shifted(masks: Masks, before: Masks) -> Masks:
    values = list(masks.values())
    return dict(zip(masks, values[1:] + values[:1], strict=True))


def stale(masks: Masks, before: Masks) -> Masks:
    return {seq_id: before.get(seq_id, own) for seq_id, own in masks.items()}


@pytest.mark.parametrize("change", [shifted, stale])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_wrong_mask_is_noticed(depth: int, change: Any) -> None:
    """The matcher refuses the token, and the sequence ends with an error; nothing invalid passes for complete."""
    engine = mutated(World(depth=depth), change).run()
    assert "error" in engine.finish.values()
    for key, reason in engine.finish.items():
        assert reason == "error" or valid(key[0].split()[0], engine.text(key)) or reason == "length"
        assert reason != "error" or engine.codes[key] is None
        assert reason != "error" or "constraint" in str(engine.errors[key]) or "grammar" in str(engine.errors[key])


def test_the_end_beats_min_tokens_and_ignore_eos() -> None:
    engine = Engine(World(depth=2))
    engine.add(constrained("choice", 0, min_tokens=30), constrained("choice", 1, ignore_eos=True))
    engine.run().assert_valid()
    assert set(engine.finish.values()) == {"stop"}
    assert all(EOS not in tokens for tokens in engine.tokens.values())


def test_an_endless_number_is_cut_off() -> None:
    """A model that falls into digits does not come back: the output ends long before max_tokens, and says why."""
    made = grammars("letters")[0].constraint(StructuredOutputsParams(json={"type": "number"}))
    biased = {PIECES.index(b"7"): 100.0, PIECES.index(b"3"): 99.0}
    each = request("a", prompt(1, 5), temperature=1.0, logit_bias=biased, max_tokens=90)
    engine = Engine(World(depth=2))
    engine.add(msgspec.structs.replace(each, constraint=made))
    engine.run()
    assert engine.finish["a", 0] == "length" and engine.stops["a", 0] == "repetition"
    assert 60 < len(engine.tokens["a", 0]) < 80


@pytest.mark.parametrize(
    ("regex", "pieces", "cut"),
    [
        ("[A-Za-z]+", ("a",), True),
        ("(abc)+", ("a", "b", "c"), True),
        ('"[a-z]+"', ("a",), False),
        ("a{100}", ("a",), False),
    ],
)
def test_a_repeating_output_ends_where_it_is_complete(regex: str, pieces: tuple[str, ...], cut: bool) -> None:
    """A whole word may end after each letter; a string has no end without its quote, and what is counted has all of it."""
    made = grammars("letters")[0].constraint(StructuredOutputsParams(regex=regex))
    biased = {PIECES.index(piece.encode()): 100.0 for piece in pieces}
    each = request("a", prompt(1, 5), temperature=1.0, logit_bias=biased, max_tokens=100, ignore_eos=True)
    engine = Engine(World(depth=2))
    engine.add(msgspec.structs.replace(each, constraint=made))
    engine.run()
    assert (engine.stops["a", 0] == "repetition") == cut
    assert (len(engine.tokens["a", 0]) < 80) == cut


@pytest.mark.parametrize(
    ("constraint", "opening", "cycle"),
    [
        ({"json": {"type": "string"}}, '"', "abc"),
        ({"json": {"type": "array", "items": {"type": "integer"}}}, "[", "1,"),
        ({"regex": '"[a-z]+"'}, '"', "a"),
        ({"grammar": 'start: ("ab" | "c")+ ";"'}, "", "abc"),
    ],
)
def test_an_output_that_repeats_itself_for_very_long_ends_incomplete(
    constraint: dict[str, Any], opening: str, cycle: str
) -> None:
    """A string or a list has no end of its own; 64 tokens of it may still be meant."""
    factory, vocabulary = grammars("letters")
    compiler = GrammarCompiler(vocabulary, StructuredOutputsConfig())
    compiled = compiler.compile(factory.constraint(StructuredOutputsParams(**constraint)))[0].result()
    assert isinstance(compiled, GrammarMatcher)
    matcher = compiled.with_ends([EOS], vocabulary.digits if "json" in constraint else frozenset())
    ids = [PIECES.index(letter.encode()) for letter in opening]
    assert matcher.advance(ids) is None
    taken = 0
    while not matcher.stuck:
        assert taken < 1000
        taken += len(cycle)
        assert matcher.advance([PIECES.index(letter.encode()) for letter in cycle]) is None
    assert taken > 500 and not matcher.accepting


def test_min_tokens_holds_where_more_may_come() -> None:
    made = grammars("letters")[0].constraint(StructuredOutputsParams(regex="[a-c]*"))
    each = request("a", prompt(1, 5), temperature=1.0, min_tokens=10, max_tokens=40)
    engine = Engine(World())
    engine.add(msgspec.structs.replace(each, constraint=made))
    engine.run()
    assert len(engine.tokens["a", 0]) > 10 and re.fullmatch(rb"[a-c]*", engine.text(("a", 0)))


def test_stop_tokens_end_where_the_constraint_is_met() -> None:
    """Digits end the sequence: banned inside the number that must come, and the end once it may be over."""
    made = grammars("letters")[0].constraint(StructuredOutputsParams(regex="[a-c]{3}[a-z0-9]*"))
    digits = [PIECES.index(bytes([digit])) for digit in b"0123456789"]
    engine = Engine(World(depth=2))
    each = request("a", prompt(1, 5), temperature=1.0, stop_token_ids=digits, ignore_eos=True, n=4, max_tokens=60)
    engine.add(msgspec.structs.replace(each, constraint=made))
    engine.run()
    for key, reason in engine.finish.items():
        tokens = engine.tokens[key]
        assert reason == "stop" and tokens[-1] in digits and not set(tokens[:-1]) & set(digits) and len(tokens) > 2


def test_parameters_that_leave_no_token_are_named() -> None:
    engine = Engine(World())
    engine.add(constrained("choice", 0, allowed_token_ids=[PIECES.index(b"z")]), constrained("regex", 1))
    engine.run()
    assert engine.finish == {("choice 0", 0): "error", ("regex 1", 0): "stop"}
    assert "structured_outputs" in str(engine.errors["choice 0", 0])


class Held:
    """A compiler whose work is done when the test says so."""

    seconds = 0.0

    def __init__(self) -> None:
        self.vocabulary = grammars("letters")[1]
        self.real = GrammarCompiler(self.vocabulary, StructuredOutputsConfig())
        self.futures: dict[str, Future[Any]] = {}
        self.released = threading.Event()

    def compile(self, constraint: Constraint, tenant: str = "") -> tuple[Future[Any], bool]:
        known = constraint.grammar in self.futures
        return self.futures.setdefault(constraint.grammar, Future()), known

    def release(self, constraint: Constraint) -> None:
        self.futures[constraint.grammar].set_result(self.real.compile(constraint)[0].result())

    def cancel(self, compiled: Future[Any]) -> None:
        self.futures = {grammar: future for grammar, future in self.futures.items() if future is not compiled}

    def close(self) -> None:
        self.real.close()


def test_sequences_pass_one_that_is_compiled_and_it_keeps_its_place() -> None:
    held = Held()
    engine = Engine(World(max_num_seqs=1), held)
    first, others = constrained("schema", n=2), [request(f"free {i}", prompt(i, 5), max_tokens=6, eos=()) for i in range(3)]
    engine.add(first, *others)
    order: list[str] = []

    def before(step: int) -> None:
        order.extend(key[0] for key in engine.finish if key[0] not in order)
        if step == 3 and first.constraint is not None:
            held.release(first.constraint)

    engine.run(before).assert_valid()
    assert order == ["free 0", "schema 0", "free 1", "free 2"]


def test_an_engine_with_nothing_but_a_compiling_request_waits_for_it() -> None:
    held = Held()
    engine = Engine(World(depth=2), held)
    each = constrained("regex")
    engine.add(each)
    for _ in range(3):
        assert engine.core.has_work() and engine.core.step() == []
    assert each.constraint is not None
    held.release(each.constraint)
    engine.run().assert_valid()
    assert engine.core.stats().grammar_requests == {"regex compiled": 1}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_constraint_that_cannot_be_compiled_ends_its_request_alone(depth: int) -> None:
    engine = Engine(World(depth=depth))
    bad = msgspec.structs.replace(constrained("regex", 1, n=3), constraint=Constraint("regex", "no grammar"))
    engine.add(bad, constrained("choice", 2))
    engine.run()
    assert [engine.finish[bad.request_id, index] for index in range(3)] == ["error"] * 3
    assert engine.finish["choice 2", 0] == "stop"
    engine.add(msgspec.structs.replace(bad, request_id="again"))
    engine.run()
    assert "structured_outputs" in str(engine.errors["again", 0])
    assert engine.core.stats().grammar_requests == {
        "regex compiled": 1,
        "regex cached": 1,
        "regex failed": 2,
        "choice compiled": 1,
    }


def test_a_request_may_be_aborted_while_it_is_compiled() -> None:
    held = Held()
    engine = Engine(World(), held)
    each = constrained("regex", n=2)
    engine.add(each)
    engine.take(engine.core.abort(each.request_id))
    assert not engine.core.has_work() and set(engine.finish.values()) == {"abort"}
    assert not held.futures and not engine.constraints.compiling


def test_what_aborted_requests_waited_for_is_not_compiled() -> None:
    """Unless others wait for it, or come later."""
    compiler = GrammarCompiler(grammars("letters")[1], StructuredOutputsConfig(compile_threads=1))
    opened = threading.Event()
    compiler.pools.submit("", opened.wait, slow=False)
    engine = Engine(World(), compiler)
    engine.add(constrained("regex", 1), constrained("choice", 2), constrained("regex", 3))
    for name in ("regex 1", "choice 2"):
        engine.take(engine.core.abort(name))
    opened.set()
    engine.run()
    engine.add(constrained("choice", 4), constrained("regex", 5))
    engine.run().assert_valid()
    assert {key[0]: reason for key, reason in engine.finish.items() if reason != "abort"}.keys() == {
        "regex 3",
        "choice 4",
        "regex 5",
    }
    assert engine.core.stats().grammar_requests == {"regex compiled": 1, "regex cached": 2, "choice compiled": 2}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_matcher_that_cannot_go_on_ends_its_sequence_alone(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(World(depth=depth))
    engine.add(constrained("schema", 0), constrained("regex", 1), request("free", prompt(3, 5), max_tokens=12, eos=()))
    right, calls = Constraints._fill, []

    def fill(self: Constraints, matchers: list[Any], masks: Any) -> list[str | None]:
        errors = right(self, matchers, masks)
        calls.append(len(matchers))
        return ["grammar_too_complex: fuel", *errors[1:]] if len(calls) == 4 else errors

    monkeypatch.setattr(Constraints, "_fill", fill)
    engine.run()
    assert engine.finish == {("schema 0", 0): "error", ("regex 1", 0): "stop", ("free", 0): "length"}
    assert engine.errors["schema 0", 0] == "structured_outputs: grammar_too_complex: fuel"
    assert engine.codes["schema 0", 0] == "grammar_too_complex"


@pytest.mark.parametrize("moved", [0, 2], ids=["at their start", "some advanced"])
def test_one_filled_row_is_as_many_are(moved: int) -> None:
    """Masks of fresh matchers were computed with their grammar; no other may take those."""
    engine = Engine(World())
    states, alike = [], []
    for place, name in enumerate(CONSTRAINTS):
        made = grammars("letters")[0].constraint(params(name))
        compiled = engine.constraints._compiler.compile(made)[0].result()
        states.append(compiled.with_ends([EOS]))
        alike.append(GrammarMatcher(compiled.inner.deep_copy(), VOCAB, [EOS]))
        if place < moved:
            first = first_allowed(states[-1])
            assert states[-1].advance([first]) is None and alike[-1].advance([first]) is None
    together, apart = np.zeros((2, len(states), -(-VOCAB // 32)), dtype=np.int32)
    assert engine.constraints._fill(list(states), together) == [None] * len(states)
    for state, row in zip(alike, apart, strict=True):
        assert state.fill(row) is None
    assert (together == apart).all() and together.any(axis=1).all()
    for state, row in zip(states, apart, strict=True):
        assert state.advance([first_allowed(state)]) is None
        state.rollback(1)
        assert state.fill(row) is None
    assert (together == apart).all()


def first_allowed(state: GrammarMatcher) -> int:
    mask = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    assert state.fill(mask) is None
    return int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])


def test_processes_in_lockstep_take_a_request_in_when_it_is_compiled() -> None:
    """Each has a scheduler of its own, and must not depend on how soon its threads are done."""
    held = Held()
    constraints = Constraints(held, VOCAB, lockstep=True)
    each = constrained("choice")
    assert each.constraint is not None
    threading.Timer(0.2, held.release, [each.constraint]).start()
    engine = Engine(World(), held)
    engine.core._constraints = constraints
    engine.add(each)
    assert held.futures[each.constraint.grammar].done()
    assert engine.core.step() and engine.core.scheduler.num_running == 1


def test_an_engine_without_a_tokenizer_refuses() -> None:
    config = World().config()
    runner = World().runner()
    core = EngineCore(
        Scheduler(config.scheduler, config.cache), LocalExecutor(runner._model, runner, OneProcess()), OutputProcessor(None)
    )
    with pytest.raises(RequestError, match="needs a tokenizer"):
        core.add(constrained("regex"))
    assert not core.has_work()


@pytest.mark.parametrize(("refusal", "client"), [("grammar_too_complex: too many items", True), ("token 7 is refused", False)])
def test_a_limit_that_a_token_passes_is_the_requests_fault(refusal: str, client: bool) -> None:
    """A token that the mask should have banned is the engine's."""
    request = SimpleNamespace(sampling=SamplingParams(max_tokens=9), eos_token_ids=[])
    matcher = SimpleNamespace(advance=lambda tokens: refusal)
    seq: Any = SimpleNamespace(token_ids=[1, 7], num_prompt=1, request=request, stop_token_ids=(), max_len=9, matcher=matcher)
    stop = check_stop(seq)
    assert stop is not None and stop.error is not None and refusal in stop.error.message
    assert (stop.error.client, stop.error.code) == (client, "grammar_too_complex" if client else None)
