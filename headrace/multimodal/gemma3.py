"""Pictures of Gemma 3: one size, a fixed number of tokens, set off by blank lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.media import Modality
from headrace.errors import ConfigError, RequestError
from headrace.multimodal.backend import ImageProcessor
from headrace.multimodal.items import Features, Picture, Video
from headrace.multimodal.rules import Expansion, MediaRules, Processed


class Gemma3Rules(MediaRules):
    """``config``: of the whole model."""

    placeholders: Mapping[Modality, str] = {"image": "<start_of_image>"}
    feature_tokens: Mapping[Modality, str] = {"image": "<image_soft_token>"}

    def __init__(self, folder: Path, config: Any) -> None:
        self._images = ImageProcessor(folder)
        self.backend = self._images.backend
        if getattr(self._images.hf, "do_pan_and_scan", None):
            raise ConfigError("do_pan_and_scan of the image processor is not supported", "model")
        self._rows = int(config.mm_tokens_per_image)
        self.fingerprint = self._images.fingerprint()

    def process(self, medium: Picture | Video, options: Mapping[str, Any], where: str) -> list[Processed]:
        if not isinstance(medium, Picture):
            raise RequestError(f"{where}: this model takes no videos", where)
        made = self._images(medium.image, where)
        return [Processed("image", self._tokens(), {"pixel_values": made["pixel_values"]})]

    def _tokens(self) -> Expansion:
        side = math.isqrt(self._rows)
        return Expansion(("\n\n<start_of_image>", self._rows, "<end_of_image>\n\n"), ((1, side, self._rows // side),))

    def expansion(self, features: Features, modality: Modality, where: str) -> Expansion:
        tokens = self._tokens()
        if features.grid != tokens.blocks[0]:
            raise RequestError(
                f"{where}.grid_thw: expected {list(tokens.blocks[0])}, not {list(features.grid)}",
                f"{where}.grid_thw",
                code="invalid_value",
            )
        return tokens

    def image_rows(self, width: int, height: int) -> int:
        return self._rows
