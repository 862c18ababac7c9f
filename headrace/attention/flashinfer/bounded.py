"""What captured steps have of FlashInfer's: rows by their places in a shape, and which of them it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import numpy as np

from headrace.attention.backend import LayerCache, Lengths, StepMetadata
from headrace.attention.flashinfer.kernels import Kernel, compiling
from headrace.attention.flashinfer.replay import LatentReplay, PagedReplay, Place, capturing

Kind = Literal["decode", "prompts"]
Replay = TypeVar("Replay", PagedReplay, LatentReplay)


@dataclasses.dataclass(frozen=True)
class Part:
    """A step's decode rows, or its prompts."""

    kind: Kind
    first: int
    end: int
    """Rows ``first`` to ``end``."""
    tokens: slice

    @staticmethod
    def of(step: StepMetadata) -> Iterator[Part]:
        """Those that have tokens."""
        yield from _parts(step.num_decode_rows, step.query_start_host)

    @property
    def place(self) -> tuple[Kind, int, int]:
        """Parts of captured steps for which this is equal are never in one step: they share what they plan with."""
        return self.kind, self.end - self.first, self.tokens.stop - self.tokens.start


def _parts(num_decode_rows: int, starts: np.ndarray) -> Iterator[Part]:
    border, end = num_decode_rows, len(starts) - 1
    kinds: list[tuple[Kind, int, int]] = [("decode", 0, border), ("prompts", border, end)]
    for kind, first, last in kinds:
        tokens = slice(int(starts[first]), int(starts[last]))
        if tokens.stop > tokens.start:
            yield Part(kind, first, last, tokens)


class Bounded:
    """The replays there are, by place and geometry. One is made, and planned, before it is captured."""

    def __init__(self) -> None:
        self._replays: dict[object, dict[object, Any]] = {}
        self._filled: set[object] = set()
        """Of this step: those whose pages are on their way."""
        self._missed: set[Kernel] = set()
        """Not ready when a step was captured that would have had it."""

    @property
    def edition(self) -> int:
        """As ``Replanned.edition``."""
        return sum(compiling(kernel).ready for kernel in self._missed)

    def next_step(self) -> None:
        self._filled.clear()

    def replay(
        self,
        part: Part,
        step: StepMetadata,
        cache: LayerCache,
        kernel: Kernel,
        key: object,
        make: Callable[[Place], Replay | None],
    ) -> Replay | None:
        """To run a part of a bounded step with, its pages filled; None: the kernel is not ready, or not for such rows.

        Args:
            key: layers for which it is equal share plans.
            make: brings None where the kernel is not for such rows.
        """
        here = self._replays.setdefault(part.place, {})
        first = (part.place, key) not in self._filled
        if first and not capturing():
            if not compiling(kernel).ready:
                self._missed.add(kernel)
            elif key not in here:
                table = step.block_tables[cache.group]
                _, rows, tokens = part.place
                here[key] = make(Place(rows, tokens, cache.block_size, table.shape[1]))
            elif here[key] is not None:
                here[key].plan_fullest()
        found: Replay | None = here.get(key)
        if first and found is not None:
            self._filled.add((part.place, key))
            found.fill(step.block_tables[cache.group][part.first : part.end])
        return found

    def replan(self, lengths: Lengths) -> None:
        """As ``Replanned.replan``."""
        shape = np.array(lengths.query_start)
        shape[lengths.num_decode_rows + 1 :] = lengths.num_tokens
        for part in _parts(lengths.num_decode_rows, shape):
            starts = lengths.query_start[part.first : part.end + 1]
            for replay in filter(None, self._replays.get(part.place, {}).values()):
                replay.plan(starts - starts[0], lengths.seq_lens[part.first : part.end])
