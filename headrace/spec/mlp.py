"""What follows attention in a layer."""

from __future__ import annotations

import dataclasses

from headrace.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DenseSpec:
    """A gated MLP: ``down(act(gate(x)) * up(x))``."""

    intermediate_size: int
    act: str = "silu"
    """By Hugging Face's name."""
    bias: bool = False
    """All three matrices have one."""

    def __post_init__(self) -> None:
        if self.intermediate_size < 1:
            raise ConfigError(f"intermediate_size must be at least 1, not {self.intermediate_size}", "intermediate_size")

    def matrices(self, hidden_size: int) -> list[tuple[int, int]]:
        """(outputs, inputs) of every matrix."""
        return [(2 * self.intermediate_size, hidden_size), (hidden_size, self.intermediate_size)]


MlpSpec = DenseSpec
"""What a layer may have there."""
