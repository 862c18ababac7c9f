"""Executors: what one process computes, ranks in several compute too, and a rank that is lost or differs is noticed."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from support.models.export import export
from support.models.tiny_llama import VOCAB, write_config
from support.trainer import Trainer

from headrace.config import EngineArgs
from headrace.core import commands
from headrace.core.plan import SamplePlan, StepPlan, StepResult, encode_plan
from headrace.core.weights import DiskSource, GroupSource, GroupSpec, TensorSpec
from headrace.errors import ConfigError, EngineError, RankKilledError, WeightsError
from headrace.frontend.local import LocalEngine, open_local
from headrace.host.channel import Channel
from headrace.models import registry
from headrace.outputs import TokenLogprobs
from headrace.processes import rank_messages as messages
from headrace.processes.multiprocess import MultiprocessExecutor, RankAgreement, start_ranks
from headrace.processes.records import from_plain, to_plain
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
        engine.core.weights_changed("head")
    after = served(ranks)
    assert after != before
    close(after, served(alone))


def test_loads_reach_every_rank(folder: Path, ranks: LocalEngine, tmp_path: Path) -> None:
    """From files, and by broadcasts of which each rank keeps its part."""
    alone = open_local(FileSource(args_of(folder)))
    generator = torch.Generator().manual_seed(4)
    model = alone.executor.model
    stored = {name: value.clone() for name, value in export(registry.name_table(model.spec), model)}
    new = {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in stored.items()}
    save_file(new, tmp_path / "model.safetensors")
    for engine in (alone, ranks):
        before = served(engine)
        engine.core.weights.call(commands.Begin())
        assert engine.core.weights.call(commands.Load(DiskSource(str(tmp_path)))).written == len(new)
        done = engine.core.weights.call(commands.Finish(0, "files"))
        assert (done.num_kept, done.weights.version) == (0, "files")
        engine.core.weights.call(commands.Resume())
        assert served(engine) != before
    close(served(ranks), served(alone))
    trainer = Trainer(3, ("g", "g/", "cpu/"))
    group = GroupSpec(
        name="g", address="127.0.0.1", port=trainer.port, rank_offset=1, world_size=3, protocol="torch", backend="gloo"
    )
    trainer.beside(trainer.join)
    assert ranks.core.weights.call(commands.Join(group)).weights.groups == ["g"]
    trainer.wait()
    tensors = [TensorSpec(name, "float32", tuple(value.shape)) for name, value in stored.items()]
    ranks.core.weights.call(commands.Begin())
    wrong = [*tensors[:-1], TensorSpec(tensors[-1].name, "float32", (1, 1))]
    with pytest.raises(WeightsError, match="has the shape"):
        ranks.core.weights.call(commands.Load(GroupSource("g", wrong)))
    trainer.beside(lambda: trainer.send(stored))
    ranks.core.weights.call(commands.Load(GroupSource("g", tensors)))
    trainer.wait()
    ranks.core.weights.call(commands.Finish(0, None))
    ranks.core.weights.call(commands.Leave("g"))
    close(served(ranks), served(open_local(FileSource(args_of(folder)))))
    trainer.close()


def test_a_rank_that_draws_another_token_is_named(ranks: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is not used after this."""
    executor: MultiprocessExecutor = ranks.executor

    def execute(plan: StepPlan) -> int:
        other = tuple(msgspec.structs.replace(seq, seed=seq.seed + 1) for seq in plan.new)
        executor.send(messages.Plan(encode_plan(plan)), messages.Plan(encode_plan(msgspec.structs.replace(plan, new=other))))
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


@pytest.mark.slow
def test_a_killed_rank_ends_the_engine(folder: Path) -> None:
    engine = open_local(FileSource(args_of(folder, tensor_parallel_size=2)))
    executor: MultiprocessExecutor = engine.executor
    engine.core.add(engine.inputs.request({"prompt_token_ids": [1, 2, 3]}, PARAMS["greedy"], request_id="x"))
    engine.core.step()
    os.kill(executor.ranks[1].pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="rank 1 ended with signal 9"):
        while True:
            engine.core.step()
    engine.core.close()
    assert all(rank.process.returncode is not None for rank in executor.ranks)


def test_a_start_that_fails_leaves_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match=r"rank [01] ended with status 1"):
        start_ranks(args_of(folder), 2)


# The protocol, with ranks that are threads


RankThread = Callable[[Channel], None]


class FakeRank(Channel):
    """This process's end of the channel to a rank that is a thread, or to a process that says nothing."""

    def __init__(self, process: Any = None) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self.other = Channel(theirs)
        self.process = process or subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.pid, self.kill = self.process.pid, self.process.kill


def executor_of(*ranks: RankThread) -> MultiprocessExecutor:
    fakes: list[Any] = [FakeRank() for _ in ranks]
    for rank, fake in zip(ranks, fakes, strict=True):
        threading.Thread(target=rank, args=(fake.other,), daemon=True).start()
    return MultiprocessExecutor(fakes)


def reply(rank: Channel, message: messages.FromRank) -> None:
    rank.send(messages.encode(message))


def sampling(*tokens: int) -> RankThread:
    """A rank that samples these in the second of two rows, one a step."""

    def serve(rank: Channel) -> None:
        for step, token in enumerate(tokens):
            while messages.decode_to_rank(rank.receive()) != messages.Collect(step):
                pass
            result = StepResult(step, [4, 9], [[1], [token]])
            reply(rank, messages.Done.of(messages.Collected(messages.digest(result), result)))
        assert messages.decode_to_rank(rank.receive()) == messages.ShowTokens(len(tokens) - 1)
        reply(rank, messages.Done.of(messages.Tokens.of(result)))

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
        def serve(rank: Channel) -> None:
            ranks = RankAgreement(rank, 2)
            found[index] += [ranks.least(number), ranks.any(index == 1), ranks.any(False)]
            found[index] += [ranks.alike(b"same"), ranks.alike(value)]
            reply(rank, messages.Done.of(index))

        return serve

    executor = executor_of(asking(0, 7, b"a"), asking(1, 3, b"b"))
    assert executor.gather(int) == [0, 1]
    assert found == [[3, True, False, True, False]] * 2
    executor._broken("the end")


def test_ranks_that_ask_different_questions_are_out_of_step() -> None:
    executor = executor_of(lambda rank: reply(rank, messages.Least(1)), lambda rank: reply(rank, messages.Done.of(None)))
    with pytest.raises(EngineError, match="out of step: they sent Done and Least"):
        executor.gather(type(None))


def test_a_rank_that_ends_while_nothing_is_asked_of_it_is_noticed() -> None:
    rank: Any = FakeRank(subprocess.Popen([sys.executable, "-c", ""]))
    executor = MultiprocessExecutor([rank])
    assert not select.select(executor.sentinels(), [], [], 0)[0]
    executor.check()
    rank.other.close()
    assert select.select(executor.sentinels(), [], [], 0)[0]
    with pytest.raises(EngineError, match="rank 0 ended with status 0"):
        executor.check()


def test_ranks_that_do_not_finish_a_step_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.processes.multiprocess._LOOK_SECONDS", 0.01)
    over = threading.Event()

    def silent(rank: Channel) -> None:
        over.wait()

    def answering(rank: Channel) -> None:
        reply(rank, messages.Done.of(None))
        over.wait()

    with pytest.raises(RankKilledError, match=r"rank 1 did not finish a step: it has hardly used the processor for 0\.05 s"):
        executor_of(answering, silent).gather(type(None), Watchdog(0.05, dict))
    over.set()


def test_a_rank_that_does_not_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is longer than its socket holds does not hold up the engine."""
    monkeypatch.setattr("headrace.processes.multiprocess._LOOK_SECONDS", 0.01)
    rank: Any = FakeRank()
    executor = MultiprocessExecutor([rank])
    rank.process.send_signal(signal.SIGSTOP)
    executor.send(messages.Plan(bytes(10_000_000)))
    assert rank.unsent
    with pytest.raises(RankKilledError, match="rank 0 was stopped by a signal"):
        executor.gather(type(None))


def test_a_rank_that_fails_because_another_was_killed_is_not_blamed() -> None:
    """It may be heard first: the channel of the one that was killed is still open here."""
    ranks: list[Any] = [FakeRank(), FakeRank()]
    executor = MultiprocessExecutor(ranks)
    reply(ranks[0].other, messages.Failed("RuntimeError: Connection closed by peer"))
    ranks[1].kill()
    with pytest.raises(RankKilledError, match="rank 1 ended with signal 9"):
        executor.gather(type(None))


def test_what_went_wrong_in_a_rank_is_told() -> None:
    with pytest.raises(EngineError, match="rank 0: ValueError: a bad plan"):
        executor_of(lambda rank: reply(rank, messages.Failed("ValueError: a bad plan"))).gather(type(None))


def test_a_configuration_comes_back_equal(folder: Path) -> None:
    """The configuration has specs without tags, and a selector's config, which is of a subclass."""
    executor: Any = open_local(FileSource(args_of(folder, sparse_prefill="mean", max_num_batched_tokens=256))).executor
    config = executor.runner.config
    copy = from_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(to_plain(config))))
    assert copy == config and copy.sparse is not None and type(copy.sparse.selector) is type(config.sparse.selector)
    for data in (["os:environ", 1], ["headrace.errors:listed", "x"], ["headrace.host.child:ChildProcess"]):
        with pytest.raises(TypeError, match="is not a record"):
            from_plain(data)
    with pytest.raises(TypeError, match="is not a record"):
        to_plain(folder)
