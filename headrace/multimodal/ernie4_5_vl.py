"""Pictures and videos of ERNIE 4.5 VL: Qwen2-VL's patches, one frame each, and a time drawn on every frame of a video."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from headrace.choices import Modality
from headrace.errors import ConfigError, RequestError
from headrace.multimodal.items import Features, Pixels, misfit, refused
from headrace.multimodal.qwen_vl import QwenRules
from headrace.multimodal.rules import Expansion, Grid
from headrace.multimodal.sampling import SampledFrames, Sampling

_FRAMES = 2
"""Frames of a video that make a row of tokens. transformers' module knows no other number."""
_FONT = "Roboto-Regular.ttf"
_SIZE = 0.1
"""Height of the letters, of a frame's shorter side; and width of their outline, of that."""


@dataclasses.dataclass(frozen=True)
class ErnieSampling(Sampling):
    """Spaces frames by a number that need not be whole."""

    def _chosen(self, given: int, seconds: float, options: Mapping[str, Any]) -> npt.NDArray[np.int64]:
        count = options.get("num_frames", None if "fps" in options else self.num_frames)
        rate = options.get("fps", self.fps)
        if count is not None:
            if not self.min_frames <= count <= min(self.max_frames, given):
                raise RequestError(
                    f"num_frames must be from {self.min_frames} to {min(self.max_frames, given)} for this video, not {count}",
                    "mm_processor_kwargs.num_frames",
                )
        else:
            count = min(max(given if rate is None else seconds * rate, self.min_frames), self.max_frames, given)
        return np.arange(0, given, given / count)[: math.ceil(count)].astype(np.int64)


class ErnieRules(QwenRules):
    """``vision``: the model's ``vision_config``."""

    placeholders: Mapping[Modality, str] = {"image": "<|IMAGE_PLACEHOLDER|>", "video": "<|VIDEO_PLACEHOLDER|>"}
    feature_tokens = placeholders
    markers: ClassVar[Mapping[Modality, tuple[str, str]]] = {
        "image": ("<|IMAGE_START|>", "<|IMAGE_END|>"),
        "video": ("<|VIDEO_START|>", "<|VIDEO_END|>"),
    }
    video_size: ClassVar[Mapping[str, int]] = {"shortest_edge": 299 * 28 * 28, "longest_edge": 1196 * 28 * 28}
    sampling: ClassVar[Mapping[str, Any]] = {"do_sample_frames": True, "fps": None, "min_frames": 16, "max_frames": 180}
    sampling_class = ErnieSampling
    video_tensors = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, folder: Path, vision: Any) -> None:
        super().__init__(folder, vision)
        if vision.temporal_merge_size != _FRAMES:
            raise ConfigError(
                f"temporal_merge_size of the vision part must be {_FRAMES}, not {vision.temporal_merge_size!r}", "model"
            )
        self._font: Path | None = None
        if self._video.get("draw_on_frames", True):
            self._font = folder / Path(self._video.get("font") or _FONT).name

    def _merged(self, grid: Grid) -> Grid:
        """A picture is one frame, which the model repeats; a video has an even number."""
        _, tall, wide = super()._merged(grid)
        return -(-grid[0] // _FRAMES), tall, wide

    def _video_frames(self, sampled: SampledFrames, options: Mapping[str, Any], where: str) -> Pixels:
        frames = sampled.frames if self._font is None else self._timed(sampled, self._font, where)
        frames = np.concatenate([frames, *[frames[-1:]] * (-len(frames) % _FRAMES)])
        return super()._video_frames(dataclasses.replace(sampled, frames=frames), options, where)

    def _timed(self, sampled: SampledFrames, font: Path, where: str) -> Pixels:
        """The frames with the time of each in their upper left corner."""
        from PIL import Image, ImageDraw, ImageFont

        height, width = sampled.frames.shape[1:3]
        size = int(min(height, width) * _SIZE)
        if not size:
            raise refused(where, f"frames of {width}x{height} have no room for a time")
        outline = int(size * _SIZE)
        try:
            letters = ImageFont.truetype(io.BytesIO(font.read_bytes()), size)  # By a path, it would search the system's too.
        except OSError as error:
            why = f"this model draws times on the frames of videos, and its folder has no font {font.name} that can be used"
            raise refused(where, why) from error
        frames = []
        for frame, index in zip(sampled.frames, sampled.indices.tolist(), strict=True):
            seconds = index / sampled.fps
            text = f"time: {int(seconds // 3600):02d}:{int(seconds % 3600 // 60):02d}:{seconds % 60:05.02f}"
            image = Image.fromarray(frame)
            draw = ImageDraw.Draw(image)
            draw.text((0, 0), text, font=letters, fill=(0, 0, 0), stroke_width=outline, stroke_fill=(255, 255, 255))
            frames.append(np.asarray(image))
        return np.stack(frames)

    def expansion(self, features: Features, modality: Modality, where: str) -> Expansion:
        if modality == "video" and features.grid[0] % _FRAMES:
            raise misfit(f"{where}.grid_thw", f"a multiple of {_FRAMES} frames", features.grid[0])
        return super().expansion(features, modality, where)
