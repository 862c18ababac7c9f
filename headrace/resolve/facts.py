"""DeviceFacts, the input of decisions, and DecisionLog, their record."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from headrace.config import Decision
from headrace.model_spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The device, memory and cores available to this process."""

    device: str
    name: str
    instructions: frozenset[str]
    """CPU features, as the operating system names them."""
    num_cores: int
    """Physical cores, after affinity and control group limits."""
    available_memory: int
    """Bytes."""
    native_kernels: str = ""
    """The instructions that the compiled kernels use; empty: there are none here, PyTorch's own run."""
    total_memory: int = 0
    """Bytes that a GPU has in all."""

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def keeps_copies(self) -> bool:
        """Whether a CPU keeps floats beside integers, for products of many rows: PyTorch's packed kernels need them, and matrix
        units (AMX) are faster with them."""
        return self.native_kernels in ("", "portable") or bool(self.instructions & {"amx_tile", "amx_bf16"})

    @property
    def native_bfloat16(self) -> bool:
        return self.cuda or bool(self.instructions & {"avx512_bf16", "amx_bf16", "bf16"})


class DecisionLog:
    """The decisions, in the order in which they are made."""

    def __init__(self, decisions: Sequence[Decision] = ()) -> None:
        self.entries = list(decisions)

    def note(self, name: str, value: object, reason: str) -> None:
        self.entries.append(Decision(name, str(value), reason))


def matrices(model: ModelSpec) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of every matrix of the layers."""
    for part in (*model.layers, *model.states, *model.mlps):
        yield from part.matrices(model.hidden_size)
