"""Pictures of InternVL: crops of one size and the whole picture, with the same number of tokens each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.media import Modality, TensorData
from headrace.errors import ConfigError
from headrace.multimodal.rules import Expansion, Grid, PictureRules

if TYPE_CHECKING:
    from PIL.Image import Image

_CROPS = {"crop_to_patches": True}
"""transformers' processor of the model always asks for it, whatever the settings say."""


class InternVLRules(PictureRules):
    """``config``: of the whole model."""

    placeholders: Mapping[Modality, str] = {"image": "<IMG_CONTEXT>"}
    feature_tokens = placeholders

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__(folder)
        vision = config.vision_config
        sizes = [size if isinstance(size, int) else size[0] for size in (vision.image_size, vision.patch_size)]
        made = self._images.hf.size
        if (made["height"], made["width"]) != (sizes[0], sizes[0]):
            raise ConfigError(
                f"the image processor makes crops of {made['width']}x{made['height']}, and the vision tower takes {sizes[0]}x"
                f"{sizes[0]}",
                "model",
            )
        self._side = int(sizes[0] // sizes[1] * config.downsample_ratio)

    def _grid(self, width: int, height: int, where: str) -> Grid:
        return self._images.hf.get_number_of_image_patches(height, width, _CROPS), self._side, self._side

    def _expected(self, grid: Grid) -> str:
        return "" if grid[1:] == (self._side, self._side) else f"[crops, {self._side}, {self._side}]"

    def _expanded(self, grid: Grid) -> Expansion:
        return Expansion(("<img>", math.prod(grid), "</img>"), (grid,))

    def _tensors(self, image: Image, where: str) -> dict[str, TensorData]:
        return {"pixel_values": self._images(image, where, **_CROPS)["pixel_values"]}
