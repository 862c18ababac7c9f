"""Sleep of the blocking ``LLM``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from headrace.core import commands
from headrace.core.weights import MEMORY_TAGS, FilesSource, SleepTag
from headrace.errors import WeightsError
from headrace.frontend.blocking import BlockingClient


class SleepCalls(BlockingClient):
    """The calls by which an engine gives memory back.

    Each raises:
        WeightsError: the state of the weights does not allow it, or there is no memory for it.
    """

    def sleep(self, level: Literal[0, 1, 2] = 1, tags: Sequence[SleepTag] = MEMORY_TAGS) -> None:
        """Gives memory back until ``wake_up``. Nothing is generated meanwhile: calls raise UnavailableError.

        Args:
            level: 0: no memory. 1: the host's memory keeps the weights. 2: the weights are dropped: after ``wake_up``,
                ``update_weights`` or ``reload_weights`` must write all of them.
            tags: the parts that give memory back: weights, kv_cache, cuda_graph.
        """
        with self._exclusive() as engine:
            engine.command(commands.Sleep(level, tags=tuple(tags)))

    def wake_up(self, tags: Sequence[SleepTag] | None = None) -> None:
        """Takes memory again: all, or that of some tags."""
        with self._exclusive() as engine:
            engine.command(commands.Wake(None if tags is None else tuple(tags)))

    @property
    def is_sleeping(self) -> bool:
        with self._exclusive() as engine:
            return bool(engine.weights.asleep)

    def reload_weights(self) -> None:
        """Reads the weights of the files that the model was loaded from again."""
        with self._exclusive() as engine:
            engine.command(commands.Begin())
            try:
                engine.command(commands.Load(FilesSource()))
            except WeightsError as error:
                engine.command(commands.Fail(str(error)))
                raise
            engine.command(commands.Finish(0))
