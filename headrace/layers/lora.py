"""Low-rank additions (LoRA) to a linear layer's product, of one adapter or another for each token."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from headrace.kernels.lora import Factors, Segment
from headrace.kernels.moe.reference import ExpertFactors

NO_ADAPTER = -1
"""Place of tokens that the base model serves."""


_ALIGNED = 64
"""Numbers of whose multiples tables begin: kernels read 16 bytes at once."""


def _aligned(numbers: int) -> int:
    return -(-numbers // _ALIGNED) * _ALIGNED


@dataclasses.dataclass(slots=True)
class LoraRows:
    """Adapters of the tokens of the forward pass under way. All layers of a model share one.

    A layer's call has no argument for it: layers of every family call their matrices with the hidden states alone.
    """

    segments: Sequence[Segment] = ()
    """Runs of tokens with one adapter; empty: every token is the base model's."""
    places: torch.Tensor | None = None
    """``[T]`` int32 on a GPU: token -> place of its adapter, or ``NO_ADAPTER``; None on a CPU."""
    wanted: LoraRows | None = None
    """Those of the wanted tokens, which the last matrices of the pass get alone; None: they get all."""
    num_wanted: int = 0

    def clear(self) -> None:
        """Gives every token to the base model."""
        self.segments, self.places, self.wanted = (), None, None

    def want(self, tokens: torch.Tensor) -> None:
        """Matrices get all tokens of the pass, or those of ``tokens [N]`` alone, which are fewer."""
        if self.places is not None:
            self.wanted = LoraRows(self.segments, self.places[tokens])
        else:
            held = {token: place for start, end, place in self.segments for token in range(start, end)}
            places = enumerate(held.get(token) for token in tokens.tolist())
            self.wanted = LoraRows([Segment(index, index + 1, place) for index, place in places if place is not None])
        self.num_wanted = len(tokens)

    def of(self, count: int) -> LoraRows:
        """Returns the adapters of a matrix's ``count`` rows."""
        return self if self.wanted is None or count != self.num_wanted else self.wanted


@dataclasses.dataclass(frozen=True)
class LoraPart:
    """Rows of one layer's addition: of a matrix, or of one of those that are fused."""

    part: int
    """Index of the fused matrix; 0 where the layer has one."""
    row: int
    """First output of the layer that ``b`` adds to."""
    a: torch.Tensor
    """``[rank, in_features]``"""
    b: torch.Tensor
    """``[rows, rank]``, multiplied by the adapter's scale."""


class LoraTables:
    """The additions to one layer of the adapters on the device, ``y += B (A x)``, in memory that never moves.

    Each of the layer's fused matrices has an A: their products lie side by side, and each row of B reads that of its matrix.
    """

    def __init__(self, rows: LoraRows, in_features: int, parts: Sequence[int], max_rank: int, memory: torch.Tensor) -> None:
        """
        Args:
            parts: outputs of each fused matrix.
            memory: ``[places, size]``, zeros, each place contiguous.
        """
        self._rows = rows
        self.rank = max_rank
        self.ends = tuple(itertools.accumulate(parts))
        """End of the outputs of each fused matrix."""
        self._shapes = (len(parts) * max_rank, in_features), (self.ends[-1], max_rank)
        self._memory = memory
        self.a, self.b = self._matrices(memory)
        """``[places, parts * rank, in_features]`` and ``[places, out_features, rank]``"""

    @staticmethod
    def size(in_features: int, parts: Sequence[int], max_rank: int) -> int:
        """Returns how many numbers of a place the tables have."""
        return _aligned(len(parts) * max_rank * in_features) + _aligned(sum(parts) * max_rank)

    def _matrices(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B in ``[..., size]``."""
        of_a, of_b = self._shapes
        numbers = of_a[0] * of_a[1]
        start = _aligned(numbers)
        a, b = memory[..., :numbers], memory[..., start : start + of_b[0] * of_b[1]]
        return a.view(*memory.shape[:-1], *of_a), b.view(*memory.shape[:-1], *of_b)

    def put(self, place: int, parts: Sequence[LoraPart]) -> None:
        """Fills a place, instead of what it held."""
        self.fill(self._memory[place], parts)

    def fill(self, memory: torch.Tensor, parts: Sequence[LoraPart]) -> None:
        """Fills ``[size]`` with what a place is to hold. Lower ranks are padded with zeros."""
        a, b = self._matrices(memory.zero_())
        for part in parts:
            first, rank = part.part * self.rank, len(part.a)
            a[first : first + rank].copy_(part.a)
            b[part.row : part.row + len(part.b), :rank].copy_(part.b)

    def factors(self, count: int) -> Factors | None:
        """Returns those of a call with so many tokens; None: none of them has an adapter."""
        rows = self._rows.of(count)
        return Factors(self.a, self.b, self.ends, rows.segments, rows.places) if rows.segments else None


@dataclasses.dataclass(frozen=True)
class ExpertTables:
    """The additions to the experts of a mixture, whose matrices lie one behind the other in the tables."""

    rows: LoraRows
    gate_up: LoraTables
    down: LoraTables

    def factors(self, count: int) -> ExpertFactors | None:
        """Returns those of a call with so many tokens; None: none of them has an adapter."""
        rows, gate_up, down = self.rows.of(count), self.gate_up, self.down
        if not rows.segments:
            return None
        return ExpertFactors((gate_up.a, gate_up.b), (down.a, down.b), rows.segments, rows.places)
