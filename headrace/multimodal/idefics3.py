"""Pictures of Idefics3 and SmolVLM: rows and columns of crops, each behind its place, and the whole picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.media import Modality
from headrace.errors import ConfigError
from headrace.multimodal.rules import Expansion, Grid, PictureRules

_MOST_PIXELS = 4096
"""Of a side that is split into crops, in transformers' image processor."""
_FENCE = "<fake_token_around_image>"


class Idefics3Rules(PictureRules):
    """The pixel mask of the image processor is left out, since the crops of a single picture are whole.

    A grid has the rows and columns of crops; ``(1, 1, 1)`` is the whole picture alone.

    Args:
        folder: of the model's files.
        config: of the whole model.
    """

    placeholders: Mapping[Modality, str] = {"image": "<image>"}
    feature_tokens = placeholders

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__(folder)
        vision, made = config.vision_config, self._images.hf.max_image_size["longest_edge"]
        if made != vision.image_size:
            raise ConfigError(
                f"the image processor makes crops of {made} pixels a side, and the vision tower takes {vision.image_size}",
                "model",
            )
        images = self._images.hf
        most = min(images.size["longest_edge"], _MOST_PIXELS) if images.do_image_splitting else made
        self._most = math.ceil(most / made)
        """Rows, and columns, of crops."""
        self._side = vision.image_size // vision.patch_size // config.scale_factor

    def _grid(self, width: int, height: int, where: str) -> Grid:
        _, rows, columns = self._images.hf.get_number_of_image_patches(height, width)
        return 1, max(rows, 1), max(columns, 1)

    def _expected(self, grid: Grid) -> str:
        fits = grid[0] == 1 and max(grid) <= self._most
        return "" if fits else f"[1, rows, columns] of crops, at most {self._most} of each"

    def _expanded(self, grid: Grid) -> Expansion:
        _, rows, columns = grid
        crops = [(row, column) for row in range(rows) for column in range(columns)] if rows * columns > 1 else []
        pieces: list[str | int] = []
        # The lines' ends go with what follows: a tokenizer may join them.
        for row, column in crops:
            pieces += [f"{_line(row, column)}{_FENCE}<row_{row + 1}_col_{column + 1}>", self._side**2]
        pieces += [("\n\n" if crops else "") + f"{_FENCE}<global-img>", self._side**2, _FENCE]
        return Expansion(tuple(pieces), ((1, self._side, self._side),) * (len(crops) + 1))


def _line(row: int, column: int) -> str:
    return "\n" if row and not column else ""
