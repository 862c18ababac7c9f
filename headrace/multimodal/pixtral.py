"""Pictures of Pixtral's tower, in Mistral 3 and LLaVA: at their own size, a token at the end of each row of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.choices import Modality
from headrace.core.media import TensorData
from headrace.multimodal.items import refused
from headrace.multimodal.rules import Expansion, Grid, PictureRules

if TYPE_CHECKING:
    from PIL.Image import Image


class PixtralRules(PictureRules):
    """``config``: of the whole model."""

    placeholders: Mapping[Modality, str] = {"image": "[IMG]"}
    feature_tokens = placeholders

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__(folder)
        self._merge = int(getattr(config, "spatial_merge_size", 1))
        self._unit = int(config.vision_config.patch_size) * self._merge
        """Pixels of a token's side."""
        size = self._images.hf.size
        self._most = (size["longest_edge"],) * 2 if size.get("longest_edge") else (size["height"], size["width"])
        self._merges = config.model_type == "mistral3"

    def _grid(self, width: int, height: int, where: str) -> Grid:
        ratio = max(height / self._most[0], width / self._most[1])
        if ratio > 1:
            given, (height, width) = f"{width}x{height}", (math.floor(height / ratio), math.floor(width / ratio))
            if not height or not width:
                raise refused(where, f"{given} is too narrow: its shorter side would be resized to no pixel")
        grid = (1, math.ceil(height / self._unit) * self._merge, math.ceil(width / self._unit) * self._merge)
        if fault := self._expected(grid):
            raise refused(where, f"the model takes {fault}, not {list(grid)}")
        return grid

    def _expected(self, grid: Grid) -> str:
        time, *sides = grid
        if time != 1 or any(side % self._merge for side in sides):
            return f"1 temporal patch, and height and width that are multiples of {self._merge}"
        most = [math.ceil(side / self._unit) * self._merge for side in self._most]
        if sides[0] > most[0] or sides[1] > most[1]:
            return f"pictures of at most {most[0]}x{most[1]} patches"
        # The module of Mistral 3 drops the axis of tokens where there is one alone.
        least = 2 if self._merges else 1
        if math.prod(sides) // self._merge**2 < least:
            return f"pictures of at least {least} tokens, which are {self._merge}x{self._merge} patches each"
        return ""

    def _expanded(self, grid: Grid) -> Expansion:
        tall, wide = grid[1] // self._merge, grid[2] // self._merge
        pieces: list[str | int] = [wide, "[IMG_BREAK]"] * tall
        return Expansion((*pieces[:-1], "[IMG_END]"), ((1, 1, wide),) * tall)

    def _tensors(self, image: Image, where: str) -> dict[str, TensorData]:
        made = self._images(image, where, patch_size=self._unit)
        return {name: made[name] for name in ("pixel_values", "image_sizes")}
