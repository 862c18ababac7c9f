"""VisionSpec: what the engine needs to know of a model that reads pictures and videos, or audio."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionSpec:
    model_type: str
    """Type of the whole model in its configuration, by which its processor and its encoder are found."""
    deepstack_layers: int = 0
    """The first layers whose outputs get separate features added."""
    bidirectional: bool = False
    """Tokens of one picture see each other both ways."""
    own_experts: bool = False
    """Mixtures have separate experts for tokens of items."""
    features_only: bool = False
    """The engine has no encoder of the model's media: prompts bring features."""
