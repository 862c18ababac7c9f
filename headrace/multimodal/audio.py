"""Audio, which is taken as features alone: they are encoded elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.choices import Modality
from headrace.errors import RequestError
from headrace.multimodal.items import Features, Picture, Video, refused
from headrace.multimodal.rules import Expansion, MediaRules, Processed


class AudioRules(MediaRules):
    """Rules of Qwen2-Audio: a token for each row of the features, which have no grid."""

    placeholders: Mapping[Modality, str] = {"audio": "<|AUDIO|>"}
    feature_tokens = placeholders

    def process(self, medium: Picture | Video, options: Mapping[str, Any], where: str) -> list[Processed]:
        raise refused(where, "this model takes features of audio alone")

    def expansion(self, features: Features, modality: Modality, where: str) -> Expansion:
        rows = features.rows.shape[0]
        self.check_rows(rows, where)
        return Expansion((rows,), ((rows, 1, 1),))

    def image_rows(self, width: int, height: int) -> int:
        raise RequestError("this model takes no images", "image")
