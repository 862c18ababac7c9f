"""Pictures of Gemma 3: one size, a fixed number of tokens, set off by blank lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.choices import Modality
from headrace.errors import ConfigError
from headrace.multimodal.rules import Expansion, FixedRules, Grid


class Gemma3Rules(FixedRules):
    """``config``: of the whole model."""

    placeholders: Mapping[Modality, str] = {"image": "<start_of_image>"}
    feature_tokens: Mapping[Modality, str] = {"image": "<image_soft_token>"}

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__(folder)
        if getattr(self._images.hf, "do_pan_and_scan", None):
            raise ConfigError("do_pan_and_scan of the image processor is not supported", "model")
        rows = int(config.mm_tokens_per_image)
        side = math.isqrt(rows)
        self.fixed = (1, side, rows // side)

    def _expanded(self, grid: Grid) -> Expansion:
        return Expansion(("\n\n<start_of_image>", math.prod(grid), "<end_of_image>\n\n"), (grid,))
