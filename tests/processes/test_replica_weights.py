"""Commands to the weights of several replicas, which all have the same or do not serve."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headrace.config import EngineArgs
from headrace.core import commands
from headrace.core.weights import DiskSource, GroupSpec, SiblingSource, SleepTag, WeightResult, WeightStatus
from headrace.errors import ConfigError, EngineDeadError
from headrace.processes.messages import ToEngine, WeightCall, WeightReply
from headrace.processes.replica_weights import ReplicaWeights

LOAD = commands.Load(DiskSource("/weights"))
GROUP = GroupSpec(name="g", address="127.0.0.1", port=1, rank_offset=1, world_size=3, protocol="torch", backend="gloo")


@dataclasses.dataclass
class FakeReplica:
    number: int
    weights: WeightStatus = dataclasses.field(default_factory=WeightStatus)
    up: bool = True
    sent: list[commands.WeightCommand] = dataclasses.field(default_factory=list)

    def send(self, message: ToEngine) -> None:
        assert isinstance(message, WeightCall)
        self.sent.append(message.command)


class Bench:
    def __init__(self, *, heals: bool = False) -> None:
        self.replicas = [FakeReplica(number) for number in range(2)]
        self.answers: list[WeightReply] = []
        self.weights = ReplicaWeights(self.replicas, self.answers.append, heals=heals)

    def call(self, command: commands.WeightCommand, *results: WeightResult) -> WeightResult | None:
        self.weights.send(WeightCall(1, command))
        for number, result in enumerate(results):
            assert not self.answers
            self.weights.answered(number, WeightReply(1, result))
        return self.answers.pop().result if self.answers else None

    @property
    def last(self) -> list[commands.WeightCommand]:
        return [replica.sent[-1] for replica in self.replicas]


@pytest.fixture
def bench() -> Bench:
    return Bench()


OK, REFUSED, FAILED = WeightResult(written=2), WeightResult(status=400, error="no"), WeightResult(status=503, error="torn")


def test_replicas_sleep_together(bench: Bench) -> None:
    """Where one of them does not, the others wake; one that starts again falls asleep as the others have."""
    tags: tuple[SleepTag, ...] = ("kv_cache", "scheduling", "weights")
    assert bench.call(commands.Sleep(1), OK, OK) == OK
    failed = bench.call(commands.Sleep(2), OK, FAILED)
    assert failed is not None and failed.error == "replica 1: torn"
    assert bench.last == [commands.Wake(), commands.Sleep(2)]
    bench.replicas[0].weights = WeightStatus(state="asleep", pause="abort", own_pause=True, asleep=tags, level=1)
    assert bench.weights.status().state == "asleep"
    bench.weights.started(bench.replicas[1])
    assert bench.replicas[1].sent[-1] == commands.Sleep(1, tags=("kv_cache", "weights"))


def test_all_answer(bench: Bench) -> None:
    assert bench.call(commands.Pause("keep"), OK, OK) == OK
    sums = WeightResult(checksums={"a": 1, "b": 2})
    assert bench.call(commands.Checksums(), sums, sums) == sums
    differing = bench.call(commands.Checksums(), sums, WeightResult(checksums={"a": 1, "b": 3}))
    assert differing is not None
    assert (differing.status, differing.error) == (409, "replicas hold different values of b")
    assert bench.call(commands.Join(GROUP), OK, OK) == OK
    assert bench.last == [commands.Join(GROUP, 0), commands.Join(GROUP, 1)]
    bench.replicas[1].weights = WeightStatus(number=4)
    assert bench.call(commands.Finish(0, "v"), OK, OK) == OK
    assert bench.last == [commands.Finish(5, "v"), commands.Finish(5, "v")]


def test_what_all_refuse_changes_nothing(bench: Bench) -> None:
    result = bench.call(LOAD, REFUSED, REFUSED)
    assert result == WeightResult(status=400, error="replica 0: no")
    assert bench.last == [LOAD, LOAD]


@pytest.mark.parametrize("bad", [REFUSED, FAILED])
def test_torn_in_one_is_torn_in_all(bench: Bench, bad: WeightResult) -> None:
    result = bench.call(LOAD, OK, bad)
    assert result is not None and result.status == bad.status and result.error.startswith("replica 1: ")
    assert bench.last == [commands.Fail(result.error), commands.Fail(result.error)]


def test_an_update_begins_in_all_or_none(bench: Bench) -> None:
    result = bench.call(commands.Begin(), OK, WeightResult(status=409, error="open"))
    assert result is not None and result.status == 409
    assert bench.last == [commands.Fail(""), commands.Begin()]


def test_a_replica_that_does_not_finish_has_lost_its_weights(bench: Bench) -> None:
    result = bench.call(commands.Finish(0, None), OK, WeightResult(status=409, error="no update is open"))
    assert result is not None and result.status == 409
    assert bench.last == [commands.Finish(1, None), commands.Lose(1, "1")]


def test_a_replica_that_is_lost_under_a_load_fails_it(bench: Bench) -> None:
    assert bench.call(LOAD, OK) is None
    bench.replicas[1].up = False
    bench.weights.lost(1)
    assert bench.answers.pop().result == WeightResult(status=503, error="replica 1: its engine is gone")
    assert bench.replicas[0].sent[-1] == commands.Fail("replica 1: its engine is gone")
    # Other commands are those of the replicas that are left.
    assert bench.call(commands.Pause("keep"), OK) == OK
    with pytest.raises(EngineDeadError, match="1 of 2 replicas"):
        bench.call(commands.Join(GROUP))
    bench.replicas[0].up = False
    with pytest.raises(EngineDeadError):
        bench.call(commands.Pause("keep"))


def test_a_replica_that_starts_again_is_told_what_the_others_have(bench: Bench) -> None:
    first, second = bench.replicas
    bench.weights.started(second)
    assert not second.sent
    first.weights = WeightStatus(state="paused", pause="wait", number=3, version="v3")
    bench.weights.started(second)
    assert second.sent == [commands.Pause("wait"), commands.Lose(3, "v3")]
    assert not first.sent


def test_a_replica_that_knows_what_it_lost_gets_it_too() -> None:
    bench = Bench(heals=True)
    first, second = bench.replicas
    first.weights = WeightStatus(state="serving", number=3, version="v3")
    second.weights = WeightStatus(state="lost", number=3, version="v3", reason="lost")
    bench.weights.started(second)
    assert [type(command) for command in second.sent] == [commands.Begin, commands.Load]


@pytest.mark.parametrize("whole", [True, False])
def test_a_replica_that_starts_again_gets_the_weights_of_another(whole: bool) -> None:
    """Commands wait meanwhile. Where the copy fails, the replica has lost its weights as before."""
    bench = Bench(heals=True)
    first, second = bench.replicas
    first.weights = WeightStatus(state="serving", number=3, version="v3")
    bench.weights.started(second)
    (export,) = first.sent
    assert isinstance(export, commands.Export) and Path(export.folder).is_dir()
    assert second.sent == [commands.Lose(3, "v3"), commands.Begin(), commands.Load(SiblingSource(export.folder))]
    assert bench.call(commands.Begin()) is None and bench.call(commands.Pause("keep"), OK, OK) == OK
    assert bench.last == [commands.Pause("keep"), commands.Pause("keep")]
    bench.weights.answered(1, WeightReply(-1, OK if whole else FAILED))
    assert second.sent[-2:] == [commands.Finish(3, "v3") if whole else commands.Lose(3, "v3"), commands.Begin()]
    assert first.sent[-1] == commands.Begin() and not Path(export.folder).exists()


def test_one_engine_has_no_sibling() -> None:
    with pytest.raises(ConfigError, match="no other replica") as caught:
        EngineArgs(heal_from_sibling=True)
    assert caught.value.param == "heal_from_sibling"


def test_no_weights_come_from_a_replica_that_changes_its_own() -> None:
    bench = Bench(heals=True)
    first, second = bench.replicas
    first.weights = WeightStatus(state="open", number=3, version="v3")
    bench.weights.started(second)
    assert second.sent == [commands.Lose(3, "v3")] and not first.sent
    first.weights = WeightStatus(state="serving", number=3, version="v3")
    bench.weights.started(second)
    bench.weights.send(WeightCall(7, commands.Begin()))
    second.up = False
    bench.weights.lost(1)
    assert first.sent[-1] == commands.Begin(), "what waited goes to the replicas that are left"


def test_the_state_of_all_is_the_worst(bench: Bench) -> None:
    first, second = bench.replicas
    first.weights = WeightStatus(state="paused", pause="keep")
    assert bench.weights.status().state == "paused"
    second.weights = WeightStatus(state="torn", reason="torn")
    assert bench.weights.status().state == "torn"
    # The others serve while one has lost its weights.
    second.weights = WeightStatus(state="lost", reason="lost")
    assert bench.weights.status().state == "paused"
    first.up = False
    assert bench.weights.status().state == "lost"
