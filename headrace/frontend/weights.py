"""Weights: changes the weights of a running ``AsyncLLM``, without ever answering from weights that are not whole."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from headrace.core.weights import (
    AcceptFiles,
    Begin,
    Checksums,
    DiskSource,
    Fail,
    Finish,
    GroupSource,
    GroupSpec,
    Join,
    Leave,
    Load,
    Pause,
    PauseMode,
    Rename,
    Resume,
    Source,
    TensorSpec,
    WeightCommand,
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

    def status(self) -> WeightStatus:
        """The state of the weights, their version, and the groups that were joined."""
        return self._engine.weights

    def pending(self) -> list[str]:
        """Names of the commands that are not answered."""
        return [name for name, _ in self._calls.values()]

    async def _send(self, command: WeightCommand) -> WeightResult:
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
        paused = self._send(Pause(mode))
        if mode == "abort":
            self._abort()
        return await paused

    async def resume(self) -> WeightResult:
        """Goes on with requests. Refused while an update is open or the weights are not whole."""
        return await self._send(Resume())

    async def begin(self) -> WeightResult:
        """Begins an update. An engine that serves is paused (keep) until ``finish``."""
        return await self._send(Begin())

    async def load(self, source: Source) -> WeightResult:
        """Writes the weights of a source, all or some. If that fails once something may be written, the weights are torn:
        nothing is generated until an update has written all of them."""
        return await self._send(Load(source))

    async def finish(self, version: str | None = None) -> WeightResult:
        """Ends the update. ``version``: its name, which answers report; None: its number."""
        return await self._send(Finish(0, version))

    async def fail(self, reason: str = "it was given up") -> WeightResult:
        """Gives the open update up."""
        return await self._send(Fail(reason))

    async def update_from_disk(self, path: str | Path, version: str | None = None) -> WeightResult:
        """An update from the safetensors files of a directory, which may be deleted afterwards."""
        await self.begin()
        try:
            await self.load(DiskSource(str(path)))
        except BaseException:
            await self.fail()
            raise
        return await self.finish(version)

    async def join(self, group: GroupSpec) -> WeightResult:
        """Joins a group, together with the trainer and all ranks."""
        return await self._send(Join(group))

    async def leave(self, name: str) -> WeightResult:
        return await self._send(Leave(name))

    async def receive(
        self, group: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, packed: bool = False
    ) -> WeightResult:
        """Loads tensors that rank 0 of a group broadcasts in this order. ``packed``: joined to packs of bytes."""
        tensors = [TensorSpec(*one) for one in zip(names, dtypes, map(tuple, shapes), strict=True)]
        return await self.load(GroupSource(group, tensors, self._packed_bytes if packed else None))

    async def rename(self, version: str) -> WeightResult:
        """Gives the present weights another version."""
        return await self._send(Rename(version))

    async def accept_files(self) -> WeightResult:
        """Serves the weights of the engine's files, although it had later ones before it was started again."""
        return await self._send(AcceptFiles())

    async def checksums(self) -> dict[str, int]:
        """64-bit sums of all parameters, by name, rank and replica."""
        return (await self._send(Checksums())).checksums
