"""Pictures of LLaVA: one size, a token for each patch of a CLIP or SigLIP tower."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.choices import Modality
from headrace.errors import ConfigError
from headrace.multimodal.items import array_of
from headrace.multimodal.rules import Expansion, FixedRules, Grid

_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Rows of a tower beside those of patches. A tower that is not here has other inputs."""


class LlavaRules(FixedRules):
    """``config``: of the whole model."""

    placeholders: Mapping[Modality, str] = {"image": "<image>"}
    feature_tokens = placeholders

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__(folder)
        vision = config.vision_config
        if vision.model_type not in _CLASS_TOKENS:
            raise ConfigError(f"vision_config {vision.model_type} is not supported for {config.model_type}", "model")
        self._check_size(self._made_size(), vision.image_size)
        side = vision.image_size // vision.patch_size
        extra = _CLASS_TOKENS[vision.model_type] - (config.vision_feature_select_strategy == "default")
        self.fixed = (1, side, side) if not extra else (1, 1, side * side + extra)

    def _made_size(self) -> tuple[int, int]:
        """Height and width of what the processor makes of any picture."""
        from PIL import Image

        # Twice as wide as high: a processor that does not crop makes it so.
        tall, wide = array_of(self._images(Image.new("RGB", (16, 8)), "the picture")["pixel_values"]).shape[-2:]
        return tall, wide

    def _expanded(self, grid: Grid) -> Expansion:
        return Expansion((math.prod(grid),), (grid,))
