"""The results of a comparison."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Line:
    """One implementation in one dtype, against the reference."""

    name: str
    """native, transformers or megatron (on our attention), or a library's own forward."""
    dtype: str
    max_error: float = 0.0
    """Largest difference of logprobs, over all positions and tokens of the vocabulary."""
    mean_error: float = 0.0
    agreement: float = 0.0
    """Share of positions where the most likely token is the same."""
    diverging: str = ""
    """The first layer whose error exceeds rounding; empty: none."""
    passed: bool | None = None
    """None: not judged."""
    note: str = ""
    broken: int = 0
    """Positions with a number that is not finite where the reference has one that is; the errors leave it out."""


@dataclasses.dataclass(frozen=True)
class Parity:
    architecture: str
    tokens: int
    """Compared, over all prompts."""
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    """Deviations from the usual comparison, with reasons."""
    reference: str = "transformers' own forward, float32"
    """The reference of the lines."""

    @property
    def passed(self) -> bool:
        judged = [line.passed for line in self.lines if line.passed is not None]
        return bool(judged) and all(judged)
