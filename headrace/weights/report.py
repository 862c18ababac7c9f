"""LoadReport: bytes, rounding errors and decisions of loading a model's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import nn

from headrace.config import Decision, MemoryLine


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport:
    seconds: float
    nbytes_read: int
    """Bytes that the tensors take in the files."""
    num_tensors: int
    quantization: str
    """The quantization, as ``EngineConfig`` names it."""
    memory: tuple[MemoryLine, ...]
    """Sums to all bytes of the weights, second copies included."""
    errors: Mapping[str, float]
    """Packed matrix -> root mean square of (held - exact weights) over that of the exact weights."""
    decisions: tuple[Decision, ...]

    @property
    def nbytes(self) -> int:
        return sum(line.nbytes for line in self.memory)


def unquantized_report(
    model: nn.Module, detail: str, seconds: float = 0.0, nbytes_read: int = 0, decisions: tuple[Decision, ...] = ()
) -> LoadReport:
    """Reports a foreign model, whose weights are not converted. ``detail``: their format."""
    parameters = list(model.parameters())
    return LoadReport(
        seconds=seconds,
        nbytes_read=nbytes_read,
        num_tensors=len(parameters),
        quantization="none",
        memory=(MemoryLine("weights", sum(parameter.nbytes for parameter in parameters), detail),),
        errors={},
        decisions=decisions,
    )
