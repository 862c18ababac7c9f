"""LoadReport: bytes, rounding errors and decisions of loading a model's weights."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from headrace.config import Decision, MemoryLine
from headrace.layers.linear import Linear
from headrace.layers.moe import Experts
from headrace.quant.convert import Conversion


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport:
    seconds: float
    nbytes_read: int
    """Bytes that the tensors take in the files."""
    num_tensors: int
    quantization: str
    """The quantization, as ``EngineConfig`` names it."""
    memory: tuple[MemoryLine, ...]
    """Sums to all bytes of the weights, second copies and the tables of adapters included."""
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


def memory(model: nn.Module) -> tuple[MemoryLine, ...]:
    """Reports the weights' bytes by format. Tied ones count once."""
    plain = sum(parameter.nbytes for parameter in model.parameters())
    dtypes = " and ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}))
    lines = [MemoryLine("weights", plain, dtypes)]
    held: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        if isinstance(module, Linear | Experts):
            held.update({(line.name, line.detail): line.nbytes for line in module.memory()})
    lines += [MemoryLine(name, nbytes, detail) for (name, detail), nbytes in sorted(held.items())]
    return tuple(lines)


def kind_of(path: str) -> str:
    """Returns the path of a layer without its number: ``layers.*.mlp.down_proj``."""
    return re.sub(r"\.\d+\.", ".*.", path)


def decisions(conversions: Mapping[str, Conversion], *, planned: bool = False) -> tuple[Decision, ...]:
    """One for each kind of matrix: those of all layers that were treated alike are one line. ``planned``: they were not loaded,
    so no error is known."""
    alike: dict[tuple[str, str, str], list[float]] = {}
    for path, conversion in conversions.items():
        alike.setdefault((kind_of(path), conversion.format, conversion.reason), []).append(conversion.error)
    out = []
    for (kind, how, reason), errors in alike.items():
        worst = float(torch.tensor(errors).max())  # NaN if one is.
        error = "no rounding of weights" if worst == 0 else f"relative error at most {worst:.1e}"
        count = f" ({len(errors)} layer{'s' * (len(errors) > 1)})" if "*" in kind else ""
        out.append(Decision(f"format of {kind}{count}", how, reason if planned else f"{reason}; {error}"))
    return tuple(out)
