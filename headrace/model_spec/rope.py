"""RopeSpec: how the positions of a layer's tokens turn its queries and keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: the base and, where the model scales it, the parameters under their Hugging Face names."""

    theta: float
    kind: str = "default"
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    sections: tuple[int, ...] = ()
    """M-RoPE: numbers of angles that follow the token's position in time, height and width; empty: there is one position."""
    interleaved: bool = False
    """The angles of the sections take turns, instead of following each other."""
    time_last: bool = False
    """The angles of height and width take turns, and those of time follow."""
    long_factors: bool = False
    """Longrope: every sequence turns by the factors for contexts beyond the length that the model was trained for."""

    @property
    def logit_factor(self) -> float:
        """The factor of ``mscale_all_dim`` on the logits of MLA, which the rotary table divides out of the cosines."""
        mscale = self.parameters.get("mscale_all_dim")
        factor = self.parameters.get("factor") or 1
        if self.kind == "default" or not mscale or factor <= 1:
            return 1.0
        return (0.1 * float(mscale) * math.log(factor) + 1.0) ** 2
