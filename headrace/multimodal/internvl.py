"""Pictures of InternVL: crops of one size and the whole picture, with the same number of tokens each. Videos: whole frames."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headrace.choices import Modality
from headrace.core.media import TensorData
from headrace.multimodal.backend import video_fields
from headrace.multimodal.items import Features, Video, array_of, view_data
from headrace.multimodal.rules import Expansion, Grid, PictureRules, Processed
from headrace.multimodal.sampling import Sampling

if TYPE_CHECKING:
    from PIL.Image import Image

_CROPS = {"crop_to_patches": True}
"""transformers' processor of the model always asks for it, whatever the settings say."""


class InternVLRules(PictureRules):
    """``config``: of the whole model."""

    placeholders: Mapping[Modality, str] = {"image": "<IMG_CONTEXT>", "video": "<video>"}
    feature_tokens: Mapping[Modality, str] = {"image": "<IMG_CONTEXT>", "video": "<IMG_CONTEXT>"}
    option_types: ClassVar[Mapping[str, tuple[type, ...]]] = Sampling.option_types

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__(folder)
        vision = config.vision_config
        sizes = [size if isinstance(size, int) else size[0] for size in (vision.image_size, vision.patch_size)]
        made = self._images.hf.size
        self._made = int(made["height"]), int(made["width"])
        self._check_size(self._made, sizes[0])
        self._side = int(sizes[0] // sizes[1] * config.downsample_ratio)
        video = video_fields(folder)
        self._sample = Sampling(bool(video.get("do_sample_frames")), video.get("fps"), video.get("num_frames"), middle=True)
        self.fingerprint = self._images.fingerprint(video)

    def _video(self, video: Video, options: Mapping[str, Any], where: str) -> Processed:
        frames = self._images.resize_frames(self._sample(video, options, where).frames, *self._made)
        grid = (len(frames), self._side, self._side)
        self.check_rows(math.prod(grid), where)
        made = [array_of(self._images(frame, where, crop_to_patches=False)["pixel_values"]) for frame in frames]
        return Processed("video", _frames(grid), {"pixel_values": view_data(np.concatenate(made))}, grid)

    def expansion(self, features: Features, modality: Modality, where: str) -> Expansion:
        whole = super().expansion(features, modality, where)
        return whole if modality == "image" else _frames(features.grid)

    def _grid(self, width: int, height: int, where: str) -> Grid:
        return self._images.hf.get_number_of_image_patches(height, width, _CROPS), self._side, self._side

    def _expected(self, grid: Grid) -> str:
        return "" if grid[1:] == (self._side, self._side) else f"[crops, {self._side}, {self._side}]"

    def _expanded(self, grid: Grid) -> Expansion:
        return Expansion(("<img>", math.prod(grid), "</img>"), (grid,))

    def _tensors(self, image: Image, where: str) -> dict[str, TensorData]:
        return {"pixel_values": self._images(image, where, **_CROPS)["pixel_values"]}


def _frames(grid: Grid) -> Expansion:
    """Frames with their numbers, one on each line."""
    count, tall, wide = grid
    texts = (f"{chr(10) if index else ''}Frame{index + 1}: <img>" for index in range(count))
    pieces = [piece for text in texts for piece in (text, tall * wide, "</img>")]
    return Expansion(tuple(pieces), ((1, tall, wide),) * count)
