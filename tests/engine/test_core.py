"""The engine in one process, with a runner that says a script: text, stops, logprobs, aborts, failures, pipelining."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.fakes import CONTEXT, SCRIPT, make_core, said

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.engine.core import EngineCore
from headrace.errors import EngineError, RequestError
from headrace.frontend.prepare import input_processor
from headrace.frontend.streams import new_output
from headrace.outputs import OutputDelta, RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.startup.text import ModelText

ARGS = EngineArgs(stop_seqs_max_len=32)


class Bench:
    """Runs requests through a core and folds their deltas up."""

    def __init__(self, text: ModelText, *, tokenizer: bool = True, **options: object) -> None:
        self.core: EngineCore = make_core(text.tokenizer if tokenizer else None, **options)
        self.core_text = text.tokenizer.token_text if tokenizer and text.tokenizer is not None else None
        self.inputs = input_processor(text, ARGS, vocab_size=272, max_model_len=CONTEXT)
        self.outputs: dict[str, RequestOutput] = {}
        self.deltas: list[OutputDelta] = []

    def add(self, request_id: str, prompt: str = "hello", **params: object) -> Request:
        params = {"temperature": 0.0, "max_tokens": 20} | params
        request = self.inputs.request(prompt, SamplingParams(**params), request_id=request_id)
        self.core.add(request)
        self.outputs[request_id] = new_output(request)
        return request

    def fold(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            self.deltas.append(delta)
            self.outputs[delta.request_id].add(delta, self.core_text)

    def run(self, steps: int | None = None) -> None:
        while self.core.has_work() and (steps is None or steps > 0):
            self.fold(self.core.step())
            steps = None if steps is None else steps - 1
        if steps is None:
            self.core.scheduler.check_integrity()
            assert not self.core.outputs._texts
            assert self.core.stats().kv_blocks_used == 0

    def texts(self, request_id: str) -> list[str]:
        return [sample.text for sample in self.outputs[request_id].outputs]


def test_text_grows_by_whole_characters_and_ends_at_max_tokens(text: ModelText) -> None:
    bench = Bench(text)
    bench.add("a", max_tokens=len(SCRIPT))
    bench.run()
    output = bench.outputs["a"]
    assert output.finished and output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text == SCRIPT.decode()
    assert output.outputs[0].token_ids == list(SCRIPT)
    assert all("\ufffd" not in delta.text for delta in bench.deltas)
    assert output.times is not None and output.times.finished is not None
    assert output.times.arrived <= output.times.scheduled <= output.times.first_token <= output.times.finished


def test_half_a_character_at_the_end_comes_out_as_a_replacement(text: ModelText) -> None:
    cut = SCRIPT.index("€".encode()) + 1
    bench = Bench(text)
    bench.add("a", max_tokens=cut)
    bench.run()
    assert bench.texts("a") == [SCRIPT[:cut].decode("utf-8", "replace")]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_and_frees_its_blocks(text: ModelText, include: bool) -> None:
    bench = Bench(text)
    bench.add("a", max_tokens=60, stop=["turns: w", "never"], include_stop_str_in_output=include)
    bench.add("b", max_tokens=60)
    bench.run()
    sample = bench.outputs["a"].outputs[0]
    end = SCRIPT.index(b"turns: w")
    assert sample.text == SCRIPT[: end + 8 * include].decode()
    assert sample.token_ids == list(SCRIPT[: end + 8]), "the tokens of the stop string are reported"
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "turns: w")
    assert len(bench.outputs["b"].outputs[0].token_ids) == 60
    shown = "".join(delta.text for delta in bench.deltas if delta.request_id == "a")
    assert shown == sample.text, "nothing is emitted and taken back"


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(text: ModelText) -> None:
    bench = Bench(text)
    bench.add("a", max_tokens=5, stop=["mill stone"])
    bench.run()
    assert bench.texts("a") == ["The m"]


def test_min_tokens_lets_an_early_stop_string_pass(text: ModelText) -> None:
    bench = Bench(text)
    bench.add("a", max_tokens=60, stop=["e"], min_tokens=3)
    bench.run()
    assert bench.texts("a") == ["The mill wh"]


def test_a_stop_token_is_a_token_but_no_text(text: ModelText) -> None:
    bench = Bench(text)
    bench.add("a", stop_token_ids=[ord("w")])
    bench.add("b", stop_token_ids=[ord("w")], include_stop_str_in_output=True)
    bench.run()
    sample = bench.outputs["a"].outputs[0]
    assert (sample.text, bytes(sample.token_ids)) == ("The mill ", b"The mill w")
    assert (sample.finish_reason, sample.stop_reason) == ("stop", ord("w"))
    assert bench.texts("b") == ["The mill w"]


def test_samples_of_one_request_are_told_apart(text: ModelText) -> None:
    bench = Bench(text)
    bench.add("a", n=3, max_tokens=10, temperature=1.0)
    bench.run()
    assert bench.texts("a") == [said(index, 10).decode() for index in range(3)]
    assert bench.outputs["a"].finished


def test_logprobs_have_the_token_first_then_the_best(text: ModelText) -> None:
    bench = Bench(text)
    bench.add("a", "four", max_tokens=3, logprobs=2, prompt_logprobs=1)
    bench.run()
    output = bench.outputs["a"]
    sample = output.outputs[0]
    assert [list(position) for position in sample.logprobs or []] == [[token, 32, 33] for token in b"The"]
    first = (sample.logprobs or [])[0]
    assert first[ord("T")] == (-3.0, 7, "T") and first[33] == (-0.2, 2, "!")
    assert sample.cumulative_logprob == pytest.approx(-9.0)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [list(position or ()) for position in output.prompt_logprobs] == [[], *([token, 32] for token in b"our")]
    assert sum(delta.prompt_logprobs is not None for delta in bench.deltas) == 1


def test_logprobs_of_tokens_after_a_stop_string_are_dropped(text: ModelText) -> None:
    bench = Bench(text)
    bench.add("a", max_tokens=60, stop=["mill"], logprobs=0)
    bench.run()
    sample = bench.outputs["a"].outputs[0]
    assert len(sample.logprobs or []) == len(sample.token_ids) == 8


def test_no_tokenizer_gives_tokens_and_no_text(text: ModelText) -> None:
    bench = Bench(text, tokenizer=False)
    bench.add("a", max_tokens=4, logprobs=1)
    bench.run()
    sample = bench.outputs["a"].outputs[0]
    assert (sample.text, sample.token_ids) == ("", list(b"The "))
    assert (sample.logprobs or [])[0][ord("T")].decoded_token is None


def test_a_prompt_in_chunks_says_nothing_midway(text: ModelText) -> None:
    bench = Bench(text)
    bench.add("a", "x" * 200, max_tokens=2)
    bench.run(steps=3)
    assert bench.deltas == []
    bench.run()
    assert bench.texts("a") == ["Th"]


def test_abort_ends_every_sample_and_frees_every_block(text: ModelText) -> None:
    bench = Bench(text)
    bench.add("a", n=2, max_tokens=100, stop=["mill stone"])
    bench.add("b", max_tokens=10)
    bench.run(steps=7)
    bench.fold(bench.core.abort("a"))
    assert bench.core.stats().num_running == 1
    assert {sample.finish_reason for sample in bench.outputs["a"].outputs} == {"abort"}
    assert bench.texts("a")[0] == "The mil"[: len(bench.outputs["a"].outputs[0].token_ids)], "what was held back comes out"
    assert bench.core.abort("a") == [] and bench.core.abort("unknown") == []
    bench.run()
    assert bench.texts("b") == [said(0, 10).decode()]
    assert not any(delta.request_id == "a" for delta in bench.deltas[-3:])


def test_a_failing_sequence_takes_no_other_along(text: ModelText) -> None:
    bench = Bench(text)
    for name in "abc":
        bench.add(name, max_tokens=10)
    bench.run(steps=2)
    bench.core.executor.broken[1] = "a bad tensor"
    bench.run()
    assert bench.outputs["b"].outputs[0].finish_reason == "error" and bench.outputs["b"].error == "a bad tensor"
    assert bench.texts("a") == bench.texts("c") == [said(0, 10).decode()]


def test_a_failing_detokeniser_takes_no_other_along(text: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(text)
    for name in "ab":
        bench.add(name, max_tokens=10)
    bench.run(steps=2)

    def fail(tokens: list[int]) -> str:
        raise UnicodeError("no such text")

    monkeypatch.setattr(bench.core.outputs._texts[0]._detokenizer, "push", fail)
    bench.run()
    assert bench.outputs["a"].finished and "no such text" in (bench.outputs["a"].error or "")
    assert bench.texts("b") == [said(0, 10).decode()]
    assert bench.core.stats().finished == {"error": 1, "length": 1}


def test_a_request_of_a_running_id_is_refused(text: ModelText) -> None:
    bench = Bench(text)
    request = bench.add("a", max_tokens=4)
    with pytest.raises(RequestError) as caught:
        bench.core.add(request)
    assert caught.value.param == "request_id"
    bench.run()
    assert bench.texts("a") == ["The "]


def test_an_engine_failure_leaves_the_step(text: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(text)
    bench.add("a")
    monkeypatch.setattr(bench.core.executor, "execute", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.core.step()


def test_work_that_cannot_go_on_is_an_error_and_no_endless_loop(text: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(text)
    bench.add("a")
    monkeypatch.setattr(bench.core.scheduler, "schedule", lambda: None)
    with pytest.raises(EngineError, match="no step"):
        bench.core.step()


def test_stats_tell_where_the_time_went(text: ModelText) -> None:
    bench = Bench(text, seconds=0.01)
    bench.add("a", max_tokens=5)
    bench.run()
    stats = bench.core.stats()
    assert stats.step == 5 and stats.generation_tokens == 5 and stats.prompt_tokens == 5
    assert stats.forward_seconds == pytest.approx(0.05)
    assert stats.host_seconds > 0.0


def test_stats_tell_how_steps_were_launched(text: ModelText) -> None:
    bench = Bench(text)
    bench.add("a", max_tokens=5)
    bench.add("b", max_tokens=3)
    bench.run()
    stats = bench.core.stats()
    assert (stats.replayed_steps, stats.eager_steps, stats.padding_tokens) == (3, 2, 3)


WORK = st.lists(
    st.tuples(
        st.integers(1, 150),  # characters of the prompt
        st.integers(1, 40),  # max_tokens
        st.integers(1, 3),  # n
        st.sampled_from([None, ["wheel"], ["ö", "so on"]]),
        st.none() | st.integers(0, 30),  # aborted after so many steps
    ),
    min_size=1,
    max_size=8,
)


def run_work(bench: Bench, work: list, **params: object) -> set[str]:
    """Returns the names of the requests that were aborted."""
    aborts: dict[int, list[str]] = {}
    for number, (length, max_tokens, n, stop, abort) in enumerate(work):
        bench.add(str(number), "y" * length, max_tokens=max_tokens, n=n, stop=stop, temperature=1.0, **params)
        if abort is not None:
            aborts.setdefault(abort, []).append(str(number))
    step = 0
    while bench.core.has_work():
        for name in aborts.get(step, ()):
            bench.fold(bench.core.abort(name))
        bench.fold(bench.core.step())
        step += 1
    bench.run()
    assert all(output.finished for output in bench.outputs.values())
    return {name for names in aborts.values() for name in names}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(work=WORK, num_blocks=st.sampled_from([40, 512]))
def test_pipelining_changes_no_output(text: ModelText, work: list, num_blocks: int) -> None:
    results = []
    for depth in (1, 2, 3):
        bench = Bench(text, depth=depth, num_blocks=num_blocks)
        kept = bench.outputs.keys() - run_work(bench, work)
        results.append({name: (bench.texts(name), [s.finish_reason for s in bench.outputs[name].outputs]) for name in kept})
    assert results[0] == results[1] == results[2]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(work=WORK, interval=st.integers(2, 20), logprobs=st.sampled_from([None, 1]))
def test_deltas_of_several_tokens_say_the_same(text: ModelText, work: list, interval: int, logprobs: int | None) -> None:
    """Aborted requests too get all that was made for them."""
    every, apart = Bench(text), Bench(text, interval=interval)
    for bench in (every, apart):
        run_work(bench, work, logprobs=logprobs)
    for name, output in every.outputs.items():
        for ours, theirs in zip(apart.outputs[name].outputs, output.outputs, strict=True):
            assert (ours.text, ours.token_ids, ours.finish_reason) == (theirs.text, theirs.token_ids, theirs.finish_reason)
            assert ours.logprobs == theirs.logprobs and ours.stop_reason == theirs.stop_reason
    if logprobs is None:
        sizes: dict[tuple[str, int], list[int]] = {}
        for delta in apart.deltas:
            sizes.setdefault((delta.request_id, delta.index), []).append(len(delta.token_ids))
        aborted = {str(number) for number, (*_, abort) in enumerate(work) if abort is not None}
        for (name, _), counts in sizes.items():
            # What an abort finds unsent goes before its own delta.
            assert all(count == interval for count in (counts[1:-2] if name in aborted else counts[1:-1]))
