"""Weights: changes the weights of a running ``AsyncLLM``, without ever answering from weights that are not whole."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from headrace.core import commands
from headrace.core.weights import (
    MEMORY_TAGS,
    DiskSource,
    FilesSource,
    GroupSource,
    GroupSpec,
    PauseMode,
    ServedWeights,
    SleepTag,
    Source,
    TensorSpec,
    WeightResult,
    WeightStatus,
)
from headrace.errors import EngineDeadError, WeightsError
from headrace.processes.messages import ToEngine, WeightCall, WeightReply


class CommandedEngine(Protocol):
    """An engine, or several."""

    @property
    def weights(self) -> WeightStatus: ...

    def send(self, message: ToEngine) -> None: ...


class Weights:
    """Commands to the weights of all ranks of all replicas: a method returns when they all have done it.

    ::

        await llm.weights.pause("keep")
        await llm.weights.update_from_disk("/checkpoints/step-17", version="17")
        await llm.weights.resume()

    Raises, each method:
        WeightsError: its ``status`` says whether the command was wrong (400: nothing was written), the state does not allow it
            (409), or it failed (503). ``status()`` tells the state that the weights are in then.
        EngineDeadError: the engine is not running, or died.
    """

    def __init__(self, engine: CommandedEngine, abort: Callable[[], None], packed_bytes: int) -> None:
        """``abort``: ends all requests, those included that no engine has yet. ``packed_bytes``: of a pack of broadcasts."""
        self._engine = engine
        self._abort = abort
        self._packed_bytes = packed_bytes
        self._calls: dict[int, tuple[str, asyncio.Future[WeightResult]]] = {}
        self._numbers = itertools.count(1)
        self.on_change: Callable[[ServedWeights], None] = lambda served: None
        """Called before each answer: the weights that an engine after this one should have."""

    def status(self) -> WeightStatus:
        """The state of the weights, their version, and the groups that were joined."""
        return self._engine.weights

    def pending(self) -> list[str]:
        """Names of the commands that are not answered."""
        return [name for name, _ in self._calls.values()]

    async def send(self, command: commands.WeightCommand) -> WeightResult:
        """Sends a command to all engines, and waits for their answer."""
        commands.check(command)
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = (type(command).__name__, reply)
        try:
            self._engine.send(WeightCall(number, command))
            result: WeightResult = await reply
        finally:
            self._calls.pop(number, None)
        if result.status != 200:
            raise WeightsError(result.error, result.status)
        return result

    def answered(self, reply: WeightReply) -> None:
        """Called with each answer of the engine."""
        self.on_change(self.status().served)
        _, future = self._calls.get(reply.call, (None, None))
        if future is not None and not future.done():
            future.set_result(reply.result)

    def lost(self, reason: str) -> None:
        """Called when the engine is gone."""
        for _, future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))

    async def pause(self, mode: PauseMode = "keep") -> WeightResult:
        """Waits until no step is in flight. A pause may be tightened by another.

        Args:
            mode: keep: requests are frozen, and go on with the KV that they have; new ones are queued. recompute: they are
                computed again from their tokens. wait: they run to their ends; new ones are refused. abort: they end with what
                they have; new ones are refused.
        """
        paused = self.send(commands.Pause(mode))
        if mode == "abort":
            self._abort()
        return await paused

    async def resume(self) -> WeightResult:
        """Goes on with requests. Refused while an update is open or the weights are not whole."""
        return await self.send(commands.Resume())

    async def sleep(
        self,
        level: Literal[0, 1, 2] = 1,
        mode: PauseMode = "abort",
        tags: Sequence[SleepTag] = MEMORY_TAGS,
        *,
        until_update: bool = False,
    ) -> WeightResult:
        """Pauses, and gives memory back. Returns once it is free. An engine that sleeps already may give back more.

        Args:
            level: 0: nothing but the pause. 1: the host's memory keeps the weights. 2: the weights are dropped, and an update
                or ``reload`` must write all of them.
            mode: of the pause. KV is dropped, so that requests that are kept are computed again.
            tags: parts that give memory back; CUDA graphs always do.
            until_update: the end of the next update wakes the engine. Weights that ``reload`` could not read again are kept at
                level 2 too.
        """
        command = commands.Sleep(level, mode, tuple(tags), until_update)
        commands.check(command)
        asleep = self.send(command)
        if mode == "abort":
            self._abort()
        return await asleep

    async def wake_up(self, tags: Sequence[SleepTag] | None = None) -> WeightResult:
        """Takes memory again, all of it or that of some tags. The engine goes on if only its sleep had paused it, once it is
        awake and its weights are whole."""
        return await self.send(commands.Wake(None if tags is None else tuple(tags)))

    async def begin(self, *, checksums: bool = False) -> WeightResult:
        """Begins an update. An engine that serves is paused (keep) until ``finish``. ``checksums``: which will have them."""
        return await self.send(commands.Begin(checksums))

    async def load(self, source: Source) -> WeightResult:
        """Writes the weights of a source, all or some. If that fails once something may be written, the weights are torn:
        nothing is generated until an update has written all of them."""
        return await self.send(commands.Load(source))

    async def finish(self, version: str | None = None, *, checksums: Mapping[str, int] | None = None) -> WeightResult:
        """Ends the update.

        Args:
            version: its name, which answers report; None: its number.
            checksums: sums of tensors as they were sent, by name, as ``headrace.weights.checksum`` makes them. Where another
                tensor came the weights are torn (409).
        """
        return await self.send(commands.Finish(0, version, dict(checksums or {})))

    async def fail(self, reason: str = "it was given up") -> WeightResult:
        """Gives the open update up."""
        return await self.send(commands.Fail(reason))

    async def update_from_disk(self, path: str | Path, version: str | None = None) -> WeightResult:
        """An update from the safetensors files of a directory, which may be deleted afterwards."""
        return await self.update(DiskSource(str(path)), version)

    async def update(self, source: Source, version: str | None = None) -> WeightResult:
        """An update from one source. If that is refused, nothing has changed."""
        commands.check(commands.Finish(0, version))
        await self.begin()
        try:
            await self.load(source)
        except BaseException:
            await self.fail()
            raise
        return await self.finish(version)

    async def reload(self, version: str | None = None) -> WeightResult:
        """An update from the files that the model was loaded from. Those of a foreign model are not read again: 400, and
        nothing has changed."""
        return await self.update(FilesSource(), version)

    async def join(self, group: GroupSpec) -> WeightResult:
        """Joins a group, together with the trainer and all ranks."""
        return await self.send(commands.Join(group))

    async def leave(self, name: str) -> WeightResult:
        return await self.send(commands.Leave(name))

    async def receive(
        self, group: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, packed: bool = False
    ) -> WeightResult:
        """Loads tensors that rank 0 of a group broadcasts in this order. ``packed``: joined to packs of bytes."""
        tensors = tensor_specs(names, dtypes, shapes)
        return await self.load(GroupSource(group, tensors, self._packed_bytes if packed else None))

    async def rename(self, version: str) -> WeightResult:
        """Gives the present weights another version."""
        return await self.send(commands.Rename(version))

    async def accept_files(self) -> WeightResult:
        """Serves the weights of the engine's files, although it had later ones before it was started again."""
        return await self.send(commands.AcceptFiles())

    async def checksums(self) -> dict[str, int]:
        """64-bit sums of all weights but those of a vision encoder, by their names in the checkpoint, as
        ``headrace.weights.checksum.checksum`` makes them of its tensors. Of weights that are kept packed, whose floats are
        gone, there is the sum of the packed form, as ``NAME#packed``.

        Raises:
            WeightsError: ranks or replicas contradict each other (409); names the weights.
        """
        return (await self.sums()).checksums

    async def sums(self) -> WeightResult:
        """Returns what ``checksums`` does, with the names of tied weights."""
        return await self.send(commands.Checksums())


def tensor_specs(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorSpec]:
    """Returns what a sender announces in three lists of one length."""
    return [TensorSpec(*one) for one in zip(names, dtypes, map(tuple, shapes), strict=True)]
