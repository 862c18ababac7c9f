"""WeightControl under any order of commands, requests and steps: nothing hangs, and no step runs on weights that are torn."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.engine.fakes import CONTEXT, FakeRunner, make_core

from headrace.config import EngineArgs
from headrace.core.commands import (
    Begin,
    Check,
    Fail,
    Finish,
    Forget,
    JobEnded,
    Load,
    Missing,
    Pause,
    RankCommand,
    RankReply,
    Receive,
    Release,
    Restore,
    Resume,
    Sleep,
    Wake,
    WeightCommand,
)
from headrace.core.weights import DiskSource, WeightResult
from headrace.engine.weights import WeightControl
from headrace.errors import QueueFullError, UnavailableError
from headrace.frontend.prepare import input_processor
from headrace.frontend.streams import new_output
from headrace.outputs import OutputDelta, RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.startup.text import ModelText

NAMES = {"a", "b"}
COMMANDS: tuple[WeightCommand, ...] = (
    *(Pause(mode) for mode in ("keep", "recompute", "wait", "abort")),
    *(Resume(), Begin(), Finish(0)) * 3,
    *(Load(DiskSource(path)) for path in ("whole", "half", "refused", "failing")),
    Fail("given up"),
    Sleep(1),
    Sleep(2, "keep"),
    Wake(),
    Wake(("weights",)),
)


class Ranks(FakeRunner):
    """Two tensors, which are right or wrong. A load ends after a few looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.written, self.here = set(NAMES), set[str](), True
        self._path, self._looks = "", 0

    def weights(self, command: RankCommand) -> RankReply:
        match command:
            case Check(DiskSource(path)):
                self._path = path
                return RankReply(error="it does not fit" if path == "refused" else "")
            case Receive():
                self._looks, self.right = 3, set[str]() if self._path != "half" else self.right - {"a"}
            case JobEnded():
                return self._ended()
            case Forget():
                self.written.clear()
            case Missing():
                return RankReply(written=len(self.written), missing=sorted(NAMES - self.written))
            case Release(tags, drop) if "weights" in tags:
                self.here, self.right = False, set() if drop else self.right
            case Restore(tags) if "weights" in tags:
                self.here = True
        return RankReply()

    def _ended(self) -> RankReply:
        assert self._looks > 0
        self._looks -= 1
        if self._looks:
            return RankReply(done=False)
        self.written |= {"whole": NAMES, "half": {"a"}}.get(self._path, set())
        self.right |= {"whole": NAMES, "half": {"a"}}.get(self._path, set())
        return RankReply(error="it broke" if self._path == "failing" else "")

    def execute(self, plan: Any) -> Any:
        assert self.here and not self._looks and self.right == NAMES, "a step on weights that are not whole"
        return super().execute(plan)


class World:
    def __init__(self, text: ModelText, depth: int) -> None:
        self.core, self.ranks = make_core(None, depth=depth), Ranks()
        self.core.executor = self.ranks
        self.inputs = input_processor(text, EngineArgs(), vocab_size=272, max_model_len=CONTEXT)
        self.open: set[str] = set()
        """Requests without an end."""
        self.count = self.given = 0
        """Commands that were given, and not answered; requests."""
        self.deltas: list[OutputDelta] = []

    def add(self, **more: Any) -> RequestOutput:
        name, self.given = f"{self.given}", self.given + 1
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | more)
        request = self.inputs.request({"prompt_token_ids": [1, 2, 3]}, params, request_id=name)
        try:
            self.core.add(request)
            self.open.add(name)
        except (UnavailableError, QueueFullError):
            pass
        return new_output(request)

    def command(self, command: WeightCommand) -> None:
        answers = list[WeightResult]()
        self.count += 1

        def reply(result: WeightResult) -> None:
            assert not answers, "two answers"
            answers.append(result)
            self.count -= 1
            assert result.status in (200, 400, 409, 503)
            if isinstance(command, (Pause, Sleep)) and result.status == 200:
                assert not self.core.in_flight

        self.fold(self.core.weights.submit(command, reply))

    def turn(self) -> None:
        """One turn of the engine's process."""
        if self.core.weights.busy:
            self.core.weights.poll()
        if self.core.runnable():
            self.fold(self.core.step())

    def fold(self, deltas: list[OutputDelta]) -> None:
        self.open -= {delta.request_id for delta in deltas if delta.finish_reason is not None}
        self.deltas += deltas

    def until_answered(self) -> None:
        for _ in range(500):
            if not self.count:
                return
            self.turn()
        raise AssertionError(f"{self.count} commands were not answered")


@pytest.mark.parametrize(("depth", "times"), [(1, 50), (2, 100), pytest.param(2, 1000, marks=pytest.mark.slow)])
def test_any_interleaving(text: ModelText, depth: int, times: int) -> None:
    """Commands come in random order: pauses, resumes twice and at any time, updates that fail or are not whole, and sleep.
    Requests come meanwhile."""
    states = set[str]()
    for seed in range(times):
        choose, world = random.Random(seed), World(text, depth)
        number = 0
        for _ in range(30):
            what = choose.random()
            if what < 0.25:
                world.add()
            elif what < 0.6:
                world.turn()
            else:
                world.command(choose.choice(COMMANDS))
            status = world.core.weights.status
            assert status.number >= number
            number = status.number
            states.add(status.state)
        world.until_answered()
        # The way out of whatever state: wake, a whole update, resume.
        for command in (Wake(), Begin(), Load(DiskSource("whole")), Finish(0), Resume()):
            world.command(command)
            world.until_answered()
        assert world.core.weights.status.state == "serving", seed
        for _ in range(500):
            if not world.open:
                break
            world.turn()
        assert not world.open, "a request was told nothing"
        world.core.check_integrity()
    assert states == {"serving", "paused", "open", "writing", "asleep", "hollow", "torn"}


def test_updates_that_must_be_complete(text: ModelText) -> None:
    """A part of the weights ends no update, and more of them complete it."""
    world, results = World(text, 1), list[WeightResult]()
    world.core.weights = WeightControl(world.core, complete=True)
    for command in (Begin(), Load(DiskSource("half")), Finish(0), Load(DiskSource("whole")), Finish(0)):
        world.core.weights.submit(command, results.append)
        while world.core.weights.busy:
            world.turn()
    assert [result.status for result in results] == [200, 200, 409, 200, 200]
    assert "weights_must_be_complete" in results[2].error and "1 tensor was not written" in results[2].error


def test_an_update_that_is_given_up_counts_for_no_other(text: ModelText) -> None:
    """A load goes on after its update was given up: what it writes then is not of the next update."""
    world, results = World(text, 1), list[WeightResult]()

    def do(command: WeightCommand) -> WeightResult:
        world.core.weights.submit(command, results.append)
        while world.core.weights.busy and not isinstance(command, Load):
            world.turn()
        return results[-1]

    do(Begin())
    do(Load(DiskSource("whole")))
    assert do(Fail("its client is gone")).weights.state == "torn"
    assert (results[-1].status, len(results)) == (503, 3), "the load is answered too"
    do(Begin())
    world.core.weights.submit(Load(DiskSource("half")), results.append)
    while world.core.weights.busy:
        world.turn()
    assert do(Finish(0)).status == 409 and "1 tensor was not written" in results[-1].error
    world.core.weights.submit(Load(DiskSource("whole")), results.append)
    while world.core.weights.busy:
        world.turn()
    assert do(Finish(0)).weights.state == "serving"


@pytest.mark.parametrize("end", [Finish(0), Fail("given up")], ids=["finished", "given up"])
def test_waking_within_an_update_resumes_at_its_end(text: ModelText, end: WeightCommand) -> None:
    """Sleep had paused the engine. No step runs while the weights are written."""
    world = World(text, 1)
    world.add()
    for command in (Sleep(1, "keep"), Begin(), Wake()):
        world.command(command)
        world.until_answered()
    assert not world.core.runnable()
    if isinstance(end, Finish):
        world.command(Load(DiskSource("whole")))
        world.until_answered()
        assert not world.core.runnable()
    world.command(end)
    assert world.core.weights.status.state == "serving" and world.core.runnable()


def test_a_resume_while_kv_sleeps_is_done_when_it_wakes(text: ModelText) -> None:
    world, results = World(text, 1), list[WeightResult]()
    world.add()
    for command in (Sleep(1, "keep"), Resume(), Wake(("weights",)), Pause("keep"), Resume(), Wake(("kv_cache",))):
        world.core.weights.submit(command, results.append)
        while world.core.weights.busy:
            world.turn()
    assert [result.status for result in results] == [200, 409, 200, 200, 200, 200], "weights must be awake"
    assert (results[4].weights.state, results[5].weights.state) == ("asleep", "serving")
    assert world.core.runnable()


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("depth", [1, 2])
def test_samples_are_split_where_an_update_came_and_lose_nothing(text: ModelText, depth: int, mode: Any) -> None:
    """Three samples are frozen, or computed again. Of two requests that are aborted meanwhile, one has tokens and one waits."""
    world = World(text, depth)
    outputs = [world.add(n=3, max_tokens=100), world.add(max_tokens=100, logprobs=1)]

    def counts() -> list[int]:
        """Tokens of each sample so far."""
        for delta in world.deltas:
            outputs[int(delta.request_id)].add(delta, None)
        world.deltas.clear()
        return [len(sample.token_ids) for output in outputs for sample in output.outputs]

    def do(*commands: WeightCommand) -> None:
        for command in commands:
            world.command(command)
            world.until_answered()

    while min(counts()) < 57:
        world.turn()
    do(Pause(mode))
    outputs.append(world.add())
    *splits, count, waiting = counts()
    assert waiting == 0
    for name in ("1", "2"):
        world.fold(world.core.abort(name))
    do(Begin(), Load(DiskSource("whole")), Finish(0, "next"), Resume())
    while world.core.has_work():
        world.turn()
    assert counts() == [100, 100, 100, count, 0]
    for sample, split in zip(outputs[0].outputs, splits, strict=True):
        spans = [(span.version, span.start, span.end) for span in sample.weight_versions]
        assert spans == [("0", 0, split), ("next", split, 100)]
    for output in outputs[1:]:
        assert output.outputs[0].finish_reason == "abort"
    assert len(outputs[1].outputs[0].logprobs or []) == count
    world.core.check_integrity()
