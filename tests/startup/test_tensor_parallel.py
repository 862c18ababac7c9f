"""Engines of several ranks, as threads, serve under any traffic what an engine of one rank serves."""

from __future__ import annotations

import dataclasses
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_llama import VOCAB, write_config
from support.thread_ranks import ThreadAgreement, on_engines, on_ranks

from headrace.config import EngineArgs
from headrace.core.plan import StepResult
from headrace.errors import ConfigError
from headrace.frontend.local import LocalEngine, open_local
from headrace.outputs import OutputDelta
from headrace.parallel.group import ThreadGroup
from headrace.runner.replay import replay
from headrace.runner.runner import ModelRunner
from headrace.sampling_params import SamplingParams
from headrace.startup import environment
from headrace.startup.source import FileSource


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("ranks"), num_attention_heads=8, num_key_value_heads=2, vocab_size=VOCAB)


def args_of(folder: Path, **changes: Any) -> EngineArgs:
    values: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "device": "cpu",
        "num_threads": 1,
        "num_kv_blocks": 14,
        "block_size": 8,
        "max_model_len": 104,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 4,
    }
    return EngineArgs(**values | changes)


PARAMS = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "n": 2},
    {"temperature": 0.8, "seed": 4, "top_k": 20, "min_p": 0.01, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {5: 4.0, 250: -3.0}, "min_tokens": 2},
    {"temperature": 0.6, "seed": 9, "bad_words": ["a", "zz"], "logprobs": 1, "prompt_logprobs": 2},
    {"temperature": 0.9, "seed": 1, "allowed_token_ids": [4, 9, 33, 97, 201]},
)


def traffic(engine: LocalEngine) -> dict[tuple[str, int], tuple[list[int], list[Any], str | None]]:
    """Requests that come while others run, with prefixes in common; some are aborted, and the cache is too small for all."""
    chance = random.Random(0)
    prefix = [chance.randrange(256) for _ in range(40)]
    core, found = engine.core, {}
    waiting = []
    for number in range(18):
        prompt = prefix[: chance.choice((0, 16, 40))] + [chance.randrange(256) for _ in range(chance.randint(1, 30))]
        params = SamplingParams(**PARAMS[number % len(PARAMS)], max_tokens=chance.randint(2, 24), ignore_eos=True)
        waiting.append((f"r{number}", {"prompt_token_ids": prompt}, params))

    def take(deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            tokens, logprobs, _ = found.get((delta.request_id, delta.index), ([], [], None))
            tokens += delta.token_ids
            logprobs += delta.logprobs or []
            found[delta.request_id, delta.index] = tokens, logprobs, delta.finish_reason

    while waiting or core.has_work():
        for _ in range(min(len(waiting), chance.randint(0, 2))):
            name, prompt, params = waiting.pop(0)
            core.add(engine.inputs.request(prompt, params, request_id=name))
            if name in ("r7", "r11"):
                take(core.step())
                take(core.abort(name))
        take(core.step())
    core.scheduler.check_integrity()
    assert core.stats().num_preemptions > 0
    assert core.stats().prefix_hit_tokens > 0
    return found


def check_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for key, (tokens, logprobs, reason) in expected.items():
        assert (found[key][0], found[key][2]) == (tokens, reason), key
        for ours, theirs in zip(found[key][1], logprobs, strict=True):
            assert (ours.token_ids, ours.rank) == (theirs.token_ids, theirs.rank)
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_traffic_is_served_as_by_one_rank(folder: Path) -> None:
    (expected,) = on_engines(args_of(folder), 1, traffic)
    assert len(expected) == 21
    for size in (2, 4):
        ranks = on_engines(args_of(folder), size, traffic)
        for found in ranks:
            check_same(found, expected)


def test_ranks_with_other_arguments_are_refused(folder: Path) -> None:
    def one(group: ThreadGroup) -> Any:
        args = args_of(folder, tensor_parallel_size=2, max_num_seqs=3 + group.rank)
        return open_local(FileSource(args, ThreadAgreement(group), group))

    with pytest.raises(ConfigError, match=r"the same arguments; theirs differ in scheduler, max_num_seqs$"):
        on_ranks(2, one)


def test_ranks_of_other_versions_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Version(str):
        """Version of each thread."""

        def __repr__(self) -> str:
            return threading.current_thread().name

    monkeypatch.setattr("headrace.__version__", Version("0"))

    def one(group: ThreadGroup) -> Any:
        threading.current_thread().name = f"version {group.rank}"
        return open_local(FileSource(args_of(folder, tensor_parallel_size=2), ThreadAgreement(group), group))

    with pytest.raises(ConfigError, match=r"theirs differ in version$"):
        on_ranks(2, one)


def test_recorded_steps_are_replayed_on_every_rank(folder: Path, tmp_path: Path) -> None:
    """The record of one rank, with preemption and aborts, makes the steps of all."""
    path = tmp_path / "steps"

    def recorded(group: ThreadGroup) -> list[StepResult]:
        args = args_of(folder, tensor_parallel_size=2, record_steps=None if group.rank else str(path))
        engine = open_local(FileSource(args, ThreadAgreement(group), group))
        collect, results = engine.executor.collect, list[StepResult]()
        engine.executor.collect = lambda handle: results.append(collect(handle)) or results[-1]
        traffic(engine)
        engine.core.close()
        return results

    def replayed(group: ThreadGroup) -> list[StepResult]:
        args = args_of(folder, tensor_parallel_size=2)
        config = open_local(FileSource(args, ThreadAgreement(group), group)).config
        chosen = FileSource(args, ThreadAgreement(group), group).implementation
        text = FileSource(args).text()
        model, _ = chosen(text.files).load(text.files, config, lambda *_: None)
        return list(replay(path, ModelRunner(model, config, text.tokenizer.token_bytes)))

    expected = on_ranks(2, recorded)[0]
    for found in on_ranks(2, replayed):
        tail = found[-len(expected) :]
        assert [(r.step, r.seq_ids, r.token_ids) for r in tail] == [(r.step, r.seq_ids, r.token_ids) for r in expected]


def test_the_least_memory_of_all_ranks_counts(folder: Path) -> None:
    """Block numbers are the same on all ranks."""
    least = 2**21

    class Less(ThreadAgreement):
        def least(self, number: int) -> int:
            return super().least(min(number, least) if self._group.rank else number)

    def one(group: ThreadGroup) -> tuple[int, int]:
        args = args_of(folder, tensor_parallel_size=2, num_kv_blocks=None, max_model_len="auto")
        engine = open_local(FileSource(args, Less(group), group))
        return engine.config.cache.nbytes, engine.config.scheduler.max_model_len

    assert environment.probe("cpu").available_memory > 2 * least
    found = on_ranks(2, one)
    assert found[0] == found[1]
    assert found[0][0] < least // 2


def test_ranks_with_other_numbers_of_experts_have_equal_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = dataclasses.replace(environment.probe("cpu"), available_memory=200 * 2**20)
    monkeypatch.setattr(environment, "probe", lambda device: here)
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4096,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 2**17,
    }
    write_config(tmp_path, **experts)

    def served(engine: LocalEngine) -> tuple[int, list[int]]:
        engine.core.add(engine.inputs.request({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=5), request_id="x"))
        tokens = []
        while engine.core.has_work():
            tokens += [token for delta in engine.core.step() for token in delta.token_ids]
        return engine.config.cache.nbytes, tokens

    # A quarter of what is free is the cache's: a rank with more weights must not come to another size.
    options = {"enable_expert_parallel": True, "num_kv_blocks": None, "max_model_len": "auto"}
    (alone,) = on_engines(args_of(tmp_path, **options), 1, served)
    ranks = on_engines(args_of(tmp_path, **options), 2, served)
    assert ranks[0] == ranks[1]
    assert ranks[0][1] == alone[1]


def test_experts_apart_without_effect_are_said_to_be(folder: Path) -> None:
    (config,) = on_engines(args_of(folder, enable_expert_parallel=True), 1, lambda engine: engine.config)
    (line,) = (decision for decision in config.decisions if decision.name == "enable_expert_parallel")
    assert (line.value, line.reason) == ("no effect", "there is one rank, which holds all experts")


def test_foreign_models_are_refused(folder: Path) -> None:
    args = args_of(folder, tensor_parallel_size=2, model_impl="transformers")
    with pytest.raises(ConfigError, match="2 is for native models: transformers' modules are not cut") as refused:
        open_local(FileSource(args))
    assert refused.value.param == "tensor_parallel_size"


def test_sizes_that_do_not_divide_are_refused_before_a_process_starts(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"8 query heads cannot be dealt to 3 ranks; sizes that work: 1, 2, 4, 8$"):
        open_local(FileSource(args_of(folder, tensor_parallel_size=3)))


def test_threads_and_memory_are_shared_by_the_ranks(folder: Path) -> None:
    (alone,) = on_engines(args_of(folder, num_threads=4), 1, lambda engine: engine.config)
    ranks = on_engines(args_of(folder, num_threads=4), 2, lambda engine: engine.config)
    assert alone.num_threads == 4
    assert [config.num_threads for config in ranks] == [2, 2]
    decisions = {decision.name: decision for decision in ranks[0].decisions}
    assert decisions["tensor parallelism"].value == "2 ranks"
    assert decisions["heads of a rank"].value == "4 of 8"
    assert decisions["decoder layers"].value == "module by module"
