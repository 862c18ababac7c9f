"""The offline API over a real runner: a tiny model with random weights."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_llama import EOS

from headrace import LLM, SamplingParams
from headrace.engine.info import Progress
from headrace.errors import ConfigError, EngineError, RequestError
from headrace.kernels import native
from headrace.options import FLOAT32_MAX, FLOAT32_TINY, INT64_MAX, options


def build(folder: Path, **args: Any) -> LLM:
    return LLM(str(folder), **({"load_format": "dummy", "max_num_seqs": 8, "num_kv_blocks": 200} | args))


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with build(tiny_folder) as one:
        yield one


@pytest.fixture(autouse=True)
def books(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, nothing is left of it."""
    yield
    if "llm" in request.fixturenames:
        llm: LLM = request.getfixturevalue("llm")
        llm.check_integrity()
        assert llm.stats.num_running == llm.stats.num_waiting == llm.stats.kv_blocks_used == 0


def greedy(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def tokens(results: list) -> list[list[int]]:
    return [sample.token_ids for result in results for sample in result.outputs]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["one", {"prompt_token_ids": [5, 6, 7]}, {"prompt": "three"}, "x" * 100]
    together = llm.generate(prompts, [greedy(n) for n in (3, 9, 1, 6)])
    assert [len(sample) for sample in tokens(together)] == [3, 9, 1, 6]
    assert [result.prompt for result in together] == ["one", None, "three", "x" * 100]
    assert all(result.finished and result.times is not None for result in together)
    alone = [llm.generate(prompt, greedy(9))[0] for prompt in prompts]
    for one, other in zip(tokens(together), tokens(alone), strict=True):
        assert one == other[: len(one)]
    assert llm.generate([]) == []


@pytest.mark.parametrize("small", [{"kv_cache_memory": 100}, {"num_kv_blocks": 2, "max_model_len": 200}], ids=str)
def test_a_cache_that_is_too_small_is_refused_before_weights_are_loaded(
    tiny_folder: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*args: Any, **options: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("headrace.models.implementation.load_weights", loaded)
    with pytest.raises(ConfigError, match=r"set \w+ to \d+ or more"):
        build(tiny_folder, **{"num_kv_blocks": None} | small)
    with pytest.raises(AssertionError):
        build(tiny_folder)


class WatchedParams(SamplingParams, frozen=True, kw_only=True):
    """Notes which of its fields anything reads after it is made."""

    forgotten: int = 0
    """A parameter that has a declaration and no feature."""

    def __getattribute__(self, name: str) -> Any:
        READ.add(name)
        return super().__getattribute__(name)


READ: set[str] = set()


def test_every_sampling_parameter_is_read(tiny_folder: Path) -> None:
    words = {"stop": ["\n"], "bad_words": ["a"], "stop_token_ids": [5], "logit_bias": {7: 1.0}, "allowed_token_ids": [7, 8]}
    params = WatchedParams(max_tokens=2, min_tokens=1, logprobs=1, prompt_logprobs=1, seed=1, top_k=2, **words)
    READ.clear()
    with build(tiny_folder) as one:
        assert one.generate("x", params)[0].finished
    assert options(WatchedParams).keys() - READ == {"forgotten"}


def test_text_is_that_of_the_tokens(llm: LLM) -> None:
    result = llm.generate("hello", greedy(20))[0]
    assert result.outputs[0].text == llm.get_tokenizer().decode(result.outputs[0].token_ids)


def test_a_bad_prompt_stops_the_call_before_anything_runs(llm: LLM) -> None:
    before = llm.stats.step
    for prompts, params in [
        (["fine", ""], greedy()),
        (["fine"], [greedy(), greedy()]),
        ("x" * 250, greedy(100)),
        (3, greedy()),
    ]:
        with pytest.raises((RequestError, TypeError)):
            llm.generate(prompts, params)
    assert llm.stats.step == before


def test_more_prompts_than_the_queue_takes(tiny_folder: Path) -> None:
    with build(tiny_folder, max_queue_len=3, max_num_seqs=2) as llm:
        results = llm.generate([f"prompt {i}" for i in range(20)], greedy(4), progress=True)
        assert [result.prompt for result in results] == [f"prompt {i}" for i in range(20)]
        assert all(result.finished for result in results)
        with pytest.raises(RequestError) as caught:
            llm.generate(["fine", "more"], [greedy(), SamplingParams(n=4, max_tokens=2)])
        assert caught.value.param == "n"
        llm.check_integrity()
        assert llm.stats.num_running == llm.stats.num_waiting == 0


@pytest.mark.parametrize(
    ("given", "shown"),
    [({}, False), ({"progress": True}, True), ({"use_tqdm": True}, True), ({"use_tqdm": False, "progress": True}, False)],
)
def test_the_bar_has_two_names(given: dict[str, bool], shown: bool, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate("one", greedy(2), **given)
    llm.chat([{"role": "user", "content": "two"}], greedy(2), **given)
    assert ("1/1" in capsys.readouterr().err) == shown
    with pytest.raises(RequestError) as caught:
        llm.generate("one", greedy(2), use_tqdm=Path)
    assert caught.value.param == "use_tqdm"


def test_seeds(tiny_folder: Path, llm: LLM) -> None:
    def draw(one: LLM, **params: Any) -> list[list[int]]:
        return tokens(one.generate("hello", SamplingParams(max_tokens=12, ignore_eos=True, **params)))

    assert draw(llm, seed=1) == draw(llm, seed=1) != draw(llm, seed=2)
    assert draw(llm) != draw(llm), "without a seed each request draws its own"
    samples = draw(llm, seed=1, n=3)
    assert len({tuple(sample) for sample in samples}) == 3 and samples[0] == draw(llm, seed=1)[0]
    with build(tiny_folder, seed=5) as a, build(tiny_folder, seed=5) as b:
        assert draw(a) == draw(b)


@pytest.mark.parametrize("depth", [2, 3])
def test_pipelining_changes_nothing(tiny_folder: Path, llm: LLM, depth: int) -> None:
    prompts = [f"prompt number {i} " * (1 + 3 * (i % 4)) for i in range(12)]
    params = [SamplingParams(max_tokens=5 + i, seed=i, n=1 + i % 2, logprobs=2, repetition_penalty=1.2) for i in range(12)]
    with build(tiny_folder, pipeline_depth=depth, max_num_batched_tokens=40) as other:
        expected, got = llm.generate(prompts, params), other.generate(prompts, params)
        assert tokens(expected) == tokens(got)
        assert [s.finish_reason for r in expected for s in r.outputs] == [s.finish_reason for r in got for s in r.outputs]
        other.check_integrity()


def test_prefix_cache_hits_are_told_and_can_be_forgotten(llm: LLM) -> None:
    llm.reset_prefix_cache()
    first, second = (llm.generate("a common beginning " * 5, greedy())[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 80)
    assert tokens([first]) == tokens([second])
    assert llm.reset_prefix_cache()
    assert llm.generate("a common beginning " * 5, greedy())[0].num_cached_tokens == 0


def test_logprobs_have_their_shapes(llm: LLM) -> None:
    result = llm.generate("hello", greedy(6, logprobs=3, prompt_logprobs=0))[0]
    sample = result.outputs[0]
    assert sample.logprobs is not None and len(sample.logprobs) == 6
    for token, position in zip(sample.token_ids, sample.logprobs, strict=True):
        assert next(iter(position)) == token and position[token].rank == 1 and len(position) == 3
        values = [entry.logprob for entry in position.values()]
        assert values == sorted(values, reverse=True)
    assert sample.cumulative_logprob == pytest.approx(
        sum(p[t].logprob for t, p in zip(sample.token_ids, sample.logprobs, strict=True))
    )
    assert result.prompt_logprobs is not None and [len(p) if p else p for p in result.prompt_logprobs] == [None, 1, 1, 1, 1]


def test_end_of_sequence_ends_unless_it_is_ignored(llm: LLM) -> None:
    bias = {EOS: 100.0}
    ended = llm.generate("x", SamplingParams(temperature=0.0, max_tokens=9, logit_bias=bias, min_tokens=3))[0].outputs[0]
    assert (len(ended.token_ids), ended.finish_reason, ended.stop_reason) == (4, "stop", None)
    assert "<eos>" not in ended.text
    assert len(tokens(llm.generate("x", greedy(9, logit_bias=bias)))[0]) == 9


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    result = llm.chat(conversation, greedy())[0]
    assert result.prompt == "[user]hi\n[assistant]"
    assert result.prompt_token_ids == list(b"[user]hi\n[assistant]")
    several = llm.chat([conversation, conversation], greedy(), add_generation_prompt=False)
    assert [one.prompt for one in several] == ["[user]hi\n"] * 2
    template = "{{ messages[0].content }}{{ mood }}"
    other = llm.chat(conversation, greedy(), chat_template=template, chat_template_kwargs={"mood": "!"})
    assert other[0].prompt == "hi!"
    assert llm.chat(conversation, greedy())[0].prompt == "[user]hi\n[assistant]", "the template was for that call"
    with pytest.raises(RequestError):
        llm.chat([{"role": "user", "content": 3}], greedy())


def test_chat_with_tools_parses_the_answer(llm: LLM) -> None:
    """The call that the prompt begins is the answer's; what the random model adds breaks it, and is not lost."""
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = "{{ tools }}" + turns + "{% if add_generation_prompt %}[assistant]{% endif %}{# <tool_call> #}"
    begun = '<tool_call>{"name": "f", "arguments": {"a": '
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": begun}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    options: dict[str, Any] = {"chat_template": template, "add_generation_prompt": False, "continue_final_message": True}
    (answer,) = llm.chat(conversation, greedy(max_tokens=4), tools=tools, **options)
    sample = answer.outputs[0]
    assert sample.message is not None and sample.text == sample.message.content
    (call,) = sample.message.calls
    assert call.name == "f" and call.arguments.startswith('{"a":') and not call.ended
    (raw,) = llm.chat(conversation, greedy(max_tokens=4), **options)
    assert raw.outputs[0].message is None and raw.outputs[0].text
    with pytest.raises(RequestError) as caught:
        llm.chat(conversation, greedy(), tools=[{"type": "function"}], **options)
    assert caught.value.param == "tools[0].function"
    strict = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]
    with pytest.raises(RequestError) as caught:
        llm.chat(conversation[:1], greedy(), tools=strict, chat_template=template)
    with pytest.raises(RequestError, match=r"tool_choice.function.name"):
        llm.chat(conversation, greedy(), tools=tools, tool_choice={"type": "function", "function": {"name": "g"}}, **options)
    one = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    held = [{"type": "function", "function": {"name": "f", "parameters": one}}]
    forced: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "chat_template": template}
    (called,) = llm.chat(conversation[:1], greedy(max_tokens=100), tools=held, **forced)
    assert called.outputs[0].message is not None and called.outputs[0].finish_reason == "stop"
    assert [json.loads(call.arguments) for call in called.outputs[0].message.calls] == [{"a": 1}]
    (free,) = llm.chat(conversation, greedy(max_tokens=4), tools=tools, tool_choice="none", **options)
    assert free.outputs[0].message is None
    with pytest.raises(RequestError, match="reasoning_effort high"):
        llm.chat(conversation, greedy(), reasoning_effort="high")
    with pytest.raises(RequestError, match="thinking_token_budget"):
        llm.chat(conversation, greedy(), thinking_token_budget=-1)
    assert caught.value.param == "tools[0].function.parameters"
    assert {"tool calls", "reasoning"} <= {decision.name for decision in llm.info.decisions}


def test_chat_with_tools_of_a_template_that_shows_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # The context of the tiny model has no room for the whole instruction.
    monkeypatch.setattr("headrace.text.spelled_tools._INSTRUCTION", "Call: {tools}")
    one = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    held = [{"type": "function", "function": {"name": "f", "parameters": one}}]
    options: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "tools": held}
    (called,) = llm.chat([{"role": "user", "content": "hi"}], greedy(max_tokens=100), **options)
    assert (called.prompt or "").startswith('[system]Call: {"name": "f",') and called.outputs[0].message is not None
    assert [json.loads(call.arguments) for call in called.outputs[0].message.calls] == [{"a": 1}]


@pytest.mark.usefixtures("interruptible")
def test_interrupt_ends_the_call_and_leaves_the_engine_usable(llm: LLM) -> None:
    expected = tokens(llm.generate("hello", greedy()))
    steps = llm.stats.step

    def interrupt() -> None:
        while llm.stats.step < steps + 5:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], greedy(250))
    thread.join()
    assert llm.stats.num_running == 0 and llm.stats.kv_blocks_used == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens(llm.generate("hello", greedy())) == expected


def test_from_another_thread(llm: LLM) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate("hello", greedy())))
    thread.start()
    thread.join()
    assert results[0].finished


def test_threads_that_share_an_engine_are_all_served(llm: LLM) -> None:
    prompts = [f"thread {number}" for number in range(6)]
    alone = [llm.generate(prompt, greedy(20)) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(lambda prompt: llm.generate([prompt, "more"], greedy(20)), prompts))
    assert [tokens(results[:1]) for results in together] == [tokens(results) for results in alone]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_is_told_that_the_engine_is_its_parents(llm: LLM) -> None:
    """Also where another thread held the engine, and its lock with it, at the fork."""
    with llm._lock:
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    llm.generate("hello", greedy())
                except EngineError as error:
                    status = 0 if "is a fork of it" in str(error) else 2
                llm.close()
            os._exit(status)
    end = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert llm.generate("hello", greedy())[0].finished


@pytest.mark.parametrize(
    ("prompts", "params", "named"),
    [
        *((wrong, greedy(), "prompts") for wrong in (None, 3, b"bytes", object())),
        *((["fine", wrong], greedy(), "prompts[1]") for wrong in (None, 3, ["nested"], 2.5)),
        *(("fine", wrong, "sampling_params") for wrong in (3, "greedy", {"temperature": 0}, (one for one in [greedy()]))),
        (["fine", "too"], [greedy(), None], "sampling_params[1]"),
        (["fine", "too"], [greedy()], "sampling_params"),
    ],
)
def test_what_is_no_prompt_or_parameter_is_named(prompts: Any, params: Any, named: str, llm: LLM) -> None:
    steps = llm.stats.step
    with pytest.raises((TypeError, RequestError)) as caught:
        llm.generate(prompts, params)
    assert named in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises((TypeError, RequestError), match="messages"):
        llm.chat(prompts if prompts != ["fine", "too"] else None, params)
    with pytest.raises(TypeError, match="sampling_params must be"):
        llm.inputs.request("fine", None, request_id="x")
    assert llm.stats.step == steps
    assert len(llm.generate((prompt for prompt in ["a", "b"]), greedy(2))) == 2


def test_every_number_at_its_extremes_is_served_or_refused_and_bothers_nobody(llm: LLM) -> None:
    extremes = [
        *(FLOAT32_MAX, 1e30, 10**30, FLOAT32_TINY, 1e-40, 5e-324, 0.0, -0.0, -2.0, 2.0, 1.0),
        *(INT64_MAX, 2**63, -(2**63)),
    ]
    neighbour = llm.generate("neighbour", greedy(4))
    admitted = []
    for name, value in itertools.product(options(SamplingParams), extremes):
        with contextlib.suppress(RequestError):
            params = SamplingParams(**{"max_tokens": 2, name: value})
            if params.max_tokens == 2 and params.n == 1 and max(params.logprobs or 0, params.prompt_logprobs or 0) <= 20:
                admitted.append(params)
    kinds = [
        SamplingParams(max_tokens=2, temperature=1e-40, **{name: FLOAT32_TINY}) for name in ("top_p", "repetition_penalty")
    ]
    kinds += [SamplingParams(max_tokens=2, repetition_penalty=FLOAT32_MAX, logit_bias={1: 100.0}, temperature=FLOAT32_MAX)]
    results = llm.generate(["neighbour"] * (len(admitted) + 4), [*admitted, *kinds, greedy(4)])
    assert len(admitted) > 30 and not [result.error for result in results if result.error]
    assert tokens(results[-1:]) == tokens(neighbour)


@pytest.mark.parametrize("place", ["sampler", "scheduler", "text"])
def test_a_request_that_cannot_be_taken_in_fails_alone(place: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the exception is, and wherever the request is taken in."""
    alone = llm.generate(["a", "b"], greedy())
    core: Any = llm._engine.core
    owner, name = {
        "sampler": (core.executor.runner.sampler._penalties, "add"),
        "scheduler": (core.scheduler, "_make_sequence"),
        "text": (core.outputs, "open"),
    }[place]
    real = getattr(owner, name)

    def taken_in(*args: Any) -> Any:
        if any(getattr(one, "presence_penalty", 0) for one in samplings(args)):
            raise ZeroDivisionError("no such luck")
        return real(*args)

    monkeypatch.setattr(owner, name, taken_in)
    before = llm.stats.generation_tokens
    results = llm.generate(["a", "bad", "b"], [greedy(), greedy(n=2, presence_penalty=1.0), greedy()])
    assert tokens([results[0], results[2]]) == tokens(alone)
    assert results[1].finished and "ZeroDivisionError: no such luck" in (results[1].error or "")
    assert [sample.finish_reason for sample in results[1].outputs] == ["error"] * 2
    assert llm.stats.generation_tokens - before == 16, "nothing was generated for it"


def samplings(args: tuple[Any, ...]) -> Iterator[SamplingParams]:
    """Yields the sampling parameters of a Request, a NewSequence, or sequences."""
    for arg in args:
        for one in arg if isinstance(arg, list) else [arg]:
            yield getattr(getattr(one, "request", one), "sampling", None)


def test_constraints_that_leave_no_token_are_the_clients_error(llm: LLM) -> None:
    core = llm._engine.core
    params = greedy(allowed_token_ids=[65], stop_token_ids=[65], min_tokens=2)
    core.add(llm.inputs.request("a", params, request_id="x"))
    (last,) = [delta for _ in range(2) if core.has_work() for delta in core.step()]
    assert last.finish_reason == "error" and last.client_error and "allowed_token_ids" in (last.error or "")


def test_without_a_tokenizer(tiny_folder: Path) -> None:
    with build(tiny_folder, skip_tokenizer_init=True) as llm:
        result = llm.generate({"prompt_token_ids": [1, 2, 3]}, greedy(4))[0]
        assert len(result.outputs[0].token_ids) == 4 and result.outputs[0].text == ""
        with pytest.raises(RequestError, match="tokenizer"):
            llm.generate("text", greedy())
        with pytest.raises(RequestError, match="tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_arguments_are_engine_arguments(tiny_folder: Path) -> None:
    with pytest.raises(TypeError, match="max_modellen, tensor"):
        build(tiny_folder, tensor=3, max_modellen=5)
    with pytest.raises(ConfigError) as caught:
        build(tiny_folder, dtype="int3")
    assert caught.value.param == "dtype"


def test_start_up_keeps_account(tiny_folder: Path) -> None:
    seen: list[Progress] = []
    with build(tiny_folder, on_progress=seen.append, num_threads=1) as llm:
        info = llm.info
        names = ["tokenizer", "config", "weights", "cache", "warm-up"]
        assert [phase.name for phase in info.timeline] == names
        assert list(dict.fromkeys(progress.phase for progress in seen)) == names
        assert all(progress.fraction is None or 0 <= progress.fraction <= 1 for progress in seen)
        cache = next(line for line in info.memory if line.name == "KV cache")
        assert cache.nbytes == 201 * 16 * 2 * 2 * 32 * 4  # blocks, tokens, layers, KV heads, widths, bytes
        runner: Any = llm._engine.executor.runner
        assert dict(runner.memory())["KV cache"] == cache.nbytes
        model: Any = runner._model
        held = sum(parameter.nbytes for parameter in model.parameters()) + sum(buffer.nbytes for buffer in model.buffers())
        told = sum(line.nbytes for line in info.memory) - cache.nbytes - sum(b for n, b in runner.memory() if n != "KV cache")
        assert told == held
        assert [line.layer for line in info.layers] == [0, 1] and all(line.backend and line.reason for line in info.layers)
        assert info.environment["threads"] == "1"
        stats = llm.stats
        assert (stats.step, stats.generation_tokens, stats.finished, stats.prompt_tokens) == (0, 0, {}, 0), (
            "the warm-up is not work"
        )
        assert llm.generate("hello", greedy())[0].num_cached_tokens == 0


def test_after_close_and_after_a_failure(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build(tiny_folder)
    monkeypatch.setattr(llm._engine.core.executor, "execute", lambda plan: 1 / 0)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        llm.generate("a", greedy())
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        llm.generate("a", greedy())
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("a", greedy())


@pytest.mark.skipif(
    getattr(native.load(), "tile", "portable") == "portable", reason="no native kernels with vector instructions"
)
@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_packed_weights_with_any_activations(bits: str, tiny_folder: Path) -> None:
    """The same packed weights whatever the activations' dtype is: what differs is its rounding."""
    found, chosen = {}, {}
    for dtype in ("float32", "bfloat16", "float16"):
        with build(tiny_folder, dtype=dtype, quantization=bits, seed=3) as llm:
            (result,) = llm.generate("to be packed", greedy(1, prompt_logprobs=0))
            chosen[dtype] = {decision.name: decision.value for decision in llm.info.decisions}
        positions = [next(iter(entry.values())).logprob for entry in result.prompt_logprobs if entry]
        found[dtype] = positions
    assert found["float32"] != found["bfloat16"]
    for dtype, bound in (("bfloat16", 0.05), ("float16", 0.01)):
        assert found[dtype] == pytest.approx(found["float32"], abs=bound)
    layers = {dtype: decisions["decoder layers"] for dtype, decisions in chosen.items()}
    fused, apart = "all in one native call", "module by module"
    assert layers == {"float32": fused, "bfloat16": fused, "float16": apart}
