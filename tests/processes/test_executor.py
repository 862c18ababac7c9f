"""Executors: what one process computes, ranks in several compute too, and a rank that is lost or differs is noticed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine.tiny import VOCAB, write_config

from headrace.config import EngineArgs
from headrace.core.plan import SamplePlan, StepPlan, StepResult, encode_plan
from headrace.errors import ConfigError, EngineError, RankKilledError
from headrace.frontend.local import LocalEngine, open_local
from headrace.outputs import TokenLogprobs
from headrace.processes.multiprocess import MultiprocessExecutor, PipeAgreement, digest, start_ranks
from headrace.processes.watchdog import Watchdog
from headrace.sampling_params import SamplingParams
from headrace.startup.source import FileSource

PROMPTS = {"greedy": list(range(20, 60)), "random": [7, 8, 9], "shared": list(range(20, 50))}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12, logprobs=2),
    "random": SamplingParams(temperature=1.0, top_p=0.9, max_tokens=9, seed=5, repetition_penalty=1.2),
    "shared": SamplingParams(temperature=0.7, top_k=9, max_tokens=6, seed=1, n=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("executor"))


def args_of(folder: Path, **changes: Any) -> EngineArgs:
    values: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "device": "cpu",
        "num_threads": 1,
        "num_kv_blocks": 40,
        "block_size": 8,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 4,
    }
    return EngineArgs(**values | changes)


Served = dict[str, dict[int, tuple[list[int], list[TokenLogprobs]]]]


def served(engine: LocalEngine) -> Served:
    """Tokens and logprobs of each sample."""
    core, found = engine.core, {name: {} for name in PROMPTS}
    for name, prompt in PROMPTS.items():
        core.add(engine.inputs.request({"prompt_token_ids": prompt}, PARAMS[name], request_id=name))
    while core.has_work():
        for delta in core.step():
            tokens, logprobs = found[delta.request_id].setdefault(delta.index, ([], []))
            tokens += delta.token_ids
            logprobs += delta.logprobs or []
    return found


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[LocalEngine]:
    engine = open_local(FileSource(args_of(folder, tensor_parallel_size=2)))
    yield engine
    engine.core.close()


def empty(step: int) -> StepPlan:
    return StepPlan(step, (), (), (), 0)


def close(found: Served, expected: Served) -> None:
    """Equal tokens, and logprobs but for the order of sums."""
    for name, samples in expected.items():
        for index, (tokens, logprobs) in samples.items():
            assert found[name][index][0] == tokens
            for ours, theirs in zip(found[name][index][1], logprobs, strict=True):
                assert (ours.token_ids, ours.rank) == (theirs.token_ids, theirs.rank)
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_ranks_serve_what_one_process_serves(folder: Path, ranks: LocalEngine) -> None:
    alone = open_local(FileSource(args_of(folder)))
    expected = served(alone)
    close(served(ranks), expected)
    assert len(expected["shared"]) == 2
    assert [layer.num_heads for layer in ranks.info.layers] == [2, 2]
    assert [layer.num_heads for layer in alone.info.layers] == [4, 4]
    assert ranks.info.num_blocks == alone.info.num_blocks
    (cache,) = (line.nbytes for line in ranks.info.memory if line.name == "KV cache")
    assert 2 * cache == next(line.nbytes for line in alone.info.memory if line.name == "KV cache")
    # An empty plan is a step as any other, between steps that are not.
    for executor in (alone.executor, ranks.executor):
        handles = []
        for step in (1000, 1001):
            handles.append(executor.execute(empty(step)))
            executor.sample(handles[-1], SamplePlan(step))
        for step, handle in zip((1000, 1001), handles, strict=True):
            result = executor.collect(handle)
            assert (result.step, result.seq_ids, result.token_ids, result.errors) == (step, [], [], {})
    close(served(ranks), served(alone))


def test_new_weights_reach_every_rank(folder: Path, ranks: LocalEngine) -> None:
    before = served(ranks)
    head = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(3))
    with pytest.raises(ConfigError, match="no weight"):
        ranks.executor.update_weights({"nothing": head})
    alone = open_local(FileSource(args_of(folder)))
    for engine in (alone, ranks):
        assert engine.executor.update_weights({"lm_head.weight": head}) == 1
        engine.core.weights_changed()
    after = served(ranks)
    assert after != before
    close(after, served(alone))


def test_a_rank_that_draws_another_token_is_named(ranks: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is not used after this."""
    executor: MultiprocessExecutor = ranks.executor  # type: ignore[assignment]

    def execute(plan: StepPlan) -> int:
        other = tuple(msgspec.structs.replace(seq, seed=seq.seed + 1) for seq in plan.new)
        executor.send(("plan", encode_plan(plan)), ("plan", encode_plan(msgspec.structs.replace(plan, new=other))))
        return plan.step

    monkeypatch.setattr(executor, "execute", execute)
    hot = SamplingParams(temperature=5.0, max_tokens=8, seed=1)
    for name in ("a", "b"):
        ranks.core.add(ranks.inputs.request({"prompt_token_ids": [1, 2, 3]}, hot, request_id=name))
    with pytest.raises(EngineError, match=r"ranks 0 and 1 differ at step \d+, row 0 \(sequence \d+\): they sampled"):
        while True:
            ranks.core.step()


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_refused_as_in_one_process(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 100000 is longer") as refused:
        open_local(FileSource(args_of(folder, max_model_len=100000, tensor_parallel_size=2)))
    assert refused.value.param == "max_model_len"


def test_a_killed_rank_ends_the_engine(folder: Path) -> None:
    engine = open_local(FileSource(args_of(folder, tensor_parallel_size=2)))
    executor: MultiprocessExecutor = engine.executor  # type: ignore[assignment]
    engine.core.add(engine.inputs.request({"prompt_token_ids": [1, 2, 3]}, PARAMS["greedy"], request_id="x"))
    engine.core.step()
    os.kill(executor.processes[1].pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="rank 1 ended with signal 9"):
        while True:
            engine.core.step()
    engine.core.close()
    assert all(process.returncode is not None for process in executor.processes)


def test_a_start_that_fails_leaves_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.processes.multiprocess.sys.executable", "/bin/false")
    with pytest.raises(EngineError, match=r"rank [01] ended with status 1"):
        start_ranks(args_of(folder), 2)


# The protocol, with ranks that are threads


RankThread = Callable[[Connection], None]


def executor_of(*ranks: RankThread) -> MultiprocessExecutor:
    pairs = [Pipe() for _ in ranks]
    for rank, (_, theirs) in zip(ranks, pairs, strict=True):
        threading.Thread(target=rank, args=(theirs,), daemon=True).start()
    return MultiprocessExecutor([ours for ours, _ in pairs], [])


def sampling(*tokens: int) -> RankThread:
    """A rank that samples these in the second of two rows, one a step."""

    def serve(connection: Connection) -> None:
        for step, token in enumerate(tokens):
            while connection.recv()[0] != "collect":
                pass
            result = StepResult(step, [4, 9], [[1], [token]])
            connection.send(("done", (digest(result), msgspec.msgpack.encode(result))))
        assert connection.recv() == ("tokens", len(tokens) - 1)
        connection.send(("done", (result.seq_ids, result.token_ids, [])))

    return serve


def test_ranks_that_sample_other_tokens_are_noticed() -> None:
    executor = executor_of(sampling(5, 6, 7), sampling(5, 6, 7), sampling(5, 6, 8))
    for step, token in enumerate((5, 6)):
        assert executor.collect(executor.execute(empty(step))).token_ids == [[1], [token]]
    why = r"ranks 0 and 2 differ at step 2, row 1 \(sequence 9\): they sampled \[7\] and \[8\]"
    with pytest.raises(EngineError, match=why):
        executor.collect(executor.execute(empty(2)))


def test_ranks_agree_through_the_executor() -> None:
    found: list[list[object]] = [[], []]

    def asking(index: int, number: int, value: bytes) -> RankThread:
        def serve(connection: Connection) -> None:
            ranks = PipeAgreement(connection, 2)
            found[index] += [ranks.least(number), ranks.any(index == 1), ranks.any(False)]
            found[index] += [ranks.alike(b"same"), ranks.alike(value)]
            connection.send(("done", index))

        return serve

    assert executor_of(asking(0, 7, b"a"), asking(1, 3, b"b")).gather() == [0, 1]
    assert found == [[3, True, False, True, False]] * 2


def test_ranks_that_ask_different_questions_are_out_of_step() -> None:
    def least(connection: Connection) -> None:
        connection.send(("least", 1))

    def done(connection: Connection) -> None:
        connection.send(("done", None))

    with pytest.raises(EngineError, match="out of step: they sent done and least"):
        executor_of(least, done).gather()


def test_a_rank_that_ends_while_nothing_is_asked_of_it_is_noticed() -> None:
    ours, theirs = Pipe()
    rank = subprocess.Popen([sys.executable, "-c", ""])
    executor = MultiprocessExecutor([ours], [rank])
    assert not select.select(executor.sentinels(), [], [], 0)[0]
    executor.check()
    theirs.close()
    assert select.select(executor.sentinels(), [], [], 0)[0]
    with pytest.raises(EngineError, match="rank 0 ended with status 0"):
        executor.check()


def test_ranks_that_do_not_finish_a_step_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.processes.multiprocess._LOOK_SECONDS", 0.01)

    over = threading.Event()

    def silent(connection: Connection) -> None:
        over.wait()

    def answering(connection: Connection) -> None:
        connection.send(("done", None))
        over.wait()

    with pytest.raises(RankKilledError, match=r"rank 1 did not finish a step: it has hardly used the processor for 0\.05 s"):
        executor_of(answering, silent).gather(Watchdog(0.05, dict))
    over.set()


def test_a_rank_that_fails_because_another_was_killed_is_not_blamed() -> None:
    """It may be heard first: the connection of the one that was killed is still open here."""

    def failing(connection: Connection) -> None:
        connection.send(("failed", "RuntimeError: Connection closed by peer"))

    (ours, theirs), (other, _) = Pipe(), Pipe()
    sleepers = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    executor = MultiprocessExecutor([ours, other], sleepers)
    failing(theirs)
    sleepers[1].kill()
    with pytest.raises(RankKilledError, match="rank 1 ended with signal 9"):
        executor.gather()
    for sleeper in sleepers:
        sleeper.communicate()


def test_what_went_wrong_in_a_rank_is_told() -> None:
    def failing(connection: Connection) -> None:
        connection.send(("failed", "ValueError: a bad plan"))

    with pytest.raises(EngineError, match="rank 0: ValueError: a bad plan"):
        executor_of(failing).gather()
