"""LoadReport: what loading a model's weights did, to the byte, and what it chose."""

from __future__ import annotations

import dataclasses

from headrace.config import Decision


@dataclasses.dataclass(frozen=True)
class WeightMemory:
    """Weights that are held in one way."""

    name: str
    nbytes: int
    detail: str


@dataclasses.dataclass(frozen=True)
class RoundingError:
    """How far a matrix that is multiplied by is from the one that the checkpoint means."""

    parameter: str
    format: str
    error: float
    """Root mean square of the difference over that of the exact weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport:
    seconds: float
    nbytes_read: int
    """As stored."""
    num_tensors: int
    quantization: str
    """none, int8 or int4."""
    memory: tuple[WeightMemory, ...]
    """Sums to all that the model's weights take, second copies among it."""
    errors: tuple[RoundingError, ...]
    """One for each matrix that was packed."""
    decisions: tuple[Decision, ...]
    waits: tuple[str, ...] = ()
    """Modules that were seen to wait for their GPU in every step."""

    @property
    def nbytes(self) -> int:
        return sum(line.nbytes for line in self.memory)

    @property
    def worst_error(self) -> RoundingError | None:
        return max(self.errors, key=lambda entry: entry.error, default=None)
