"""ReplicaWeights: commands to the weights of several replicas, which all have the same or do not serve."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, cast

import msgspec

from headrace.core import commands
from headrace.core.weights import MEMORY_TAGS, SiblingSource, WeightResult, WeightStatus
from headrace.errors import EngineDeadError, listed
from headrace.processes.messages import ToEngine, WeightCall, WeightReply

_STATES = ("serving", "paused", "open", "writing", "asleep", "hollow", "lost", "torn")
"""From the best to the worst: a set of replicas is in the worst state of them."""
_UNANSWERED, _COPIED = 0, -1
"""Numbers of calls that wait for no answer, and of that which copies a replica's weights."""


class WeighedReplica(Protocol):
    number: int

    def send(self, message: ToEngine) -> None: ...

    @property
    def weights(self) -> WeightStatus: ...

    @property
    def up(self) -> bool:
        """Whether its engine runs."""
        ...


@dataclasses.dataclass
class _Call:
    number: int
    command: commands.WeightCommand
    unanswered: set[int]
    results: dict[int, WeightResult]


@dataclasses.dataclass
class _Healing:
    sibling: int
    number: int
    version: str
    folder: tempfile.TemporaryDirectory[str]


class ReplicaWeights:
    """Sends each command to every replica, and answers once all have.

    Args:
        answer: takes the answers.
        heals: a replica that was started again gets the weights of another.
    """

    def __init__(
        self, replicas: Sequence[WeighedReplica], answer: Callable[[WeightReply], None], *, heals: bool = False
    ) -> None:
        self._replicas = replicas
        self._answer = answer
        self._heals = heals
        self._calls: dict[int, _Call] = {}
        self._healing: dict[int, _Healing] = {}
        """Replica that gets the weights of another -> how."""
        self._held: list[WeightCall] = []
        """Commands that wait until no weights are copied."""

    def status(self) -> WeightStatus:
        """State of all replicas that run: the worst of them. None runs: of all."""
        known = [one.weights for one in self._replicas if one.up] or [one.weights for one in self._replicas]
        worst = max(known, key=lambda one: _STATES.index(one.state))
        # A replica that lost its weights does not serve, and the others do.
        serving = [one for one in known if not one.reason]
        return max(serving, key=lambda one: _STATES.index(one.state)) if serving and worst.state == "lost" else worst

    def pending_at(self, number: int) -> list[str]:
        return [type(call.command).__name__ for call in self._calls.values() if number in call.unanswered]

    def send(self, message: WeightCall) -> None:
        """Raises: EngineDeadError: no replica runs, or one that must join a group does not."""
        command = message.command
        up = [replica for replica in self._replicas if replica.up]
        if self._healing and not isinstance(command, commands.Pause):
            self._held.append(message)
            return
        if not up or (isinstance(command, commands.Join) and len(up) < len(self._replicas)):
            raise EngineDeadError(f"{len(up)} of {len(self._replicas)} replicas are up")
        if isinstance(command, commands.Finish):
            highest = max(replica.weights.number for replica in self._replicas)
            command = msgspec.structs.replace(command, number=highest + 1)
        self._calls[message.call] = _Call(message.call, command, {replica.number for replica in up}, {})
        for replica in up:
            if isinstance(command, commands.Join):
                command = msgspec.structs.replace(command, replica=replica.number)
            replica.send(WeightCall(message.call, command))

    def answered(self, number: int, reply: WeightReply) -> None:
        """Takes one replica's answer."""
        if reply.call == _COPIED:
            self._copied(number, reply.result)
        if (call := self._calls.get(reply.call)) is not None and number in call.unanswered:
            call.unanswered.discard(number)
            call.results[number] = reply.result
            self._end(call)

    def lost(self, number: int) -> None:
        """A replica is gone. Its next engine has the weights of its files."""
        self._end_healing(number)
        for call in list(self._calls.values()):
            if number in call.unanswered:
                call.unanswered.discard(number)
                if isinstance(call.command, (commands.Load, commands.Join)) or not (call.unanswered or call.results):
                    call.results[number] = WeightResult(status=503, error="its engine is gone")
                self._end(call)

    def started(self, replica: WeighedReplica) -> None:
        """A replica runs again: it must have what the others have."""
        others = [other.weights for other in self._replicas if other is not replica and other.up]
        if not others:
            return
        pause = next((other.pause for other in others if other.pause is not None and not other.own_pause), None)
        newest = max(others, key=lambda one: one.number)
        if pause is not None and replica.weights.pause is None:
            replica.send(WeightCall(_UNANSWERED, commands.Pause(pause)))
        if (sleeper := next((other for other in others if other.asleep), None)) is not None and not replica.weights.asleep:
            level, tags = cast(Literal[0, 1, 2], sleeper.level), sleeper.asleep
            replica.send(WeightCall(_UNANSWERED, commands.Sleep(level, tags=tuple(tag for tag in tags if tag in MEMORY_TAGS))))
        if newest.number > replica.weights.number:
            replica.send(WeightCall(_UNANSWERED, commands.Lose(newest.number, newest.version)))
        if self._heals and (newest.number > replica.weights.number or replica.weights.state == "lost"):
            self._heal(replica, newest.number)

    def _heal(self, replica: WeighedReplica, number: int) -> None:
        """Copies the weights of a replica that has them whole, and has no update under way."""
        for sibling in self._replicas:
            weights = sibling.weights
            if sibling is replica or not sibling.up or weights.number != number or weights.state not in ("serving", "paused"):
                continue
            folder = tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True)
            self._healing[replica.number] = _Healing(sibling.number, number, weights.version, folder)
            sibling.send(WeightCall(_UNANSWERED, commands.Export(folder.name)))
            replica.send(WeightCall(_UNANSWERED, commands.Begin()))
            replica.send(WeightCall(_COPIED, commands.Load(SiblingSource(folder.name))))
            return

    def _copied(self, number: int, result: WeightResult) -> None:
        if (healing := self._healing.get(number)) is not None:
            whole = result.status == 200
            end = commands.Finish(healing.number, healing.version) if whole else commands.Lose(healing.number, healing.version)
            self._replicas[number].send(WeightCall(_UNANSWERED, end))
            self._end_healing(number)

    def _end_healing(self, number: int) -> None:
        if (healing := self._healing.pop(number, None)) is not None:
            healing.folder.cleanup()
        if not self._healing:
            held, self._held = self._held, []
            for message in held:
                try:
                    self.send(message)
                except EngineDeadError as error:
                    self._answer(WeightReply(message.call, WeightResult(status=503, error=str(error))))

    def _end(self, call: _Call) -> None:
        if call.unanswered:
            return
        del self._calls[call.number]
        failed = {number: result for number, result in call.results.items() if result.status != 200}
        results = list(call.results.values())
        if not failed:
            sums = results[0].checksums
            if differing := [name for name in sums if any(one.checksums.get(name) != sums[name] for one in results)]:
                error = f"replicas hold different values of {listed(differing)}"
                refused = msgspec.structs.replace(results[0], status=409, error=error, checksums={})
                self._answer(WeightReply(call.number, refused))
                return
            memory = [one for _, result in sorted(call.results.items()) for one in result.memory]
            self._answer(WeightReply(call.number, msgspec.structs.replace(results[0], memory=memory)))
            return
        number, first = next(iter(failed.items()))
        error = f"replica {number}: {first.error}"
        self._mend(call, failed, error)
        self._answer(WeightReply(call.number, msgspec.structs.replace(first, error=error)))

    def _mend(self, call: _Call, failed: dict[int, WeightResult], error: str) -> None:
        """Some replicas failed: brings all of them to a state without an update, or with torn weights."""
        succeeded = [replica for replica in self._replicas if replica.number in call.results.keys() - failed.keys()]
        refused = all(result.status == 400 for result in failed.values())
        match call.command:
            case commands.Begin():
                for replica in succeeded:
                    replica.send(WeightCall(_UNANSWERED, commands.Fail("")))
            case commands.Sleep():
                for replica in succeeded:
                    replica.send(WeightCall(_UNANSWERED, commands.Wake()))
            case commands.Load() if succeeded or not refused:
                for replica in self._replicas:
                    if replica.up and replica.number in call.results:
                        replica.send(WeightCall(_UNANSWERED, commands.Fail(error)))
            case commands.Finish(version_number, version) if succeeded:
                for replica in self._replicas:
                    if replica.number in failed:
                        name = str(version_number) if version is None else version
                        replica.send(WeightCall(_UNANSWERED, commands.Lose(version_number, name)))
