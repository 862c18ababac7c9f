"""Pictures and videos of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches at the picture's own size, merged two by two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace.choices import Modality
from headrace.core.media import PatchLayout
from headrace.errors import ConfigError
from headrace.multimodal.backend import ImageProcessor, video_fields
from headrace.multimodal.items import Features, Picture, Pixels, Video, misfit, refused, view_data, wrong
from headrace.multimodal.rules import Expansion, Grid, MediaRules, Processed
from headrace.multimodal.sampling import SampledFrames, Sampling

_MOST_RATIO = 200
OPENAI_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
OPENAI_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


class QwenRules(MediaRules):
    """Rules of Qwen2-VL: its video frames follow each other one position apart.

    Args:
        folder: of the model's files.
        vision: the model's ``vision_config``.
    """

    placeholders: Mapping[Modality, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    feature_tokens = placeholders
    option_types: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "min_pixels": (int,),
        "max_pixels": (int,),
        **Sampling.option_types,
    }
    shades: ClassVar[tuple[list[float], list[float]]] = (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    """Mean and deviation of a video's colours, where its processor's settings have none."""
    video_size: ClassVar[Mapping[str, int]] = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
    sampling: ClassVar[Mapping[str, Any]] = {"do_sample_frames": False, "fps": None, "multiple": 2}
    sampling_class: ClassVar[type[Sampling]] = Sampling
    video_tensors: ClassVar[tuple[str, str]] = ("pixel_values", "image_grid_thw")
    """The encoder's inputs of a video: its patches, and their grid."""

    def __init__(self, folder: Path, vision: Any) -> None:
        self._process = ImageProcessor(folder)
        self._images = self._process.hf
        self.backend = self._process.backend
        self._video = video_fields(folder)
        self._merge = int(self._images.merge_size)
        self._patch = int(self._images.patch_size)
        self._temporal = int(self._images.temporal_patch_size)
        self._vision = vision
        limits = {name: self._video.get(name) for name in ("min_pixels", "max_pixels")}
        self._video_limits = {name: value for name, value in limits.items() if value is not None}
        shades = {"image_mean": self.shades[0], "image_std": self.shades[1]}
        self._video_options = {name: self._video.get(name) or value for name, value in shades.items()}
        defaults = dict(self.sampling)
        for name in ("do_sample_frames", "fps", "num_frames", "min_frames", "max_frames"):
            if self._video.get(name) is not None:
                defaults[name] = self._video[name]
        self._sample = self.sampling_class(**{"num_frames": None, "min_frames": 4, "max_frames": 768} | defaults)
        if not self._images.do_resize:
            raise ConfigError("do_resize of the image processor must be true: patches are cut out of resized pictures", "model")
        self._shades = {
            "image": self._process.shades(self._patch * self._merge),
            "video": self._process.shades(self._patch * self._merge, **self._video_options),
        }
        self.fingerprint = self._process.fingerprint(self._video)

    def options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        found = super().options(kwargs)
        if found.get("min_pixels", 0) > found.get("max_pixels", math.inf):
            what = f"is {found['min_pixels']}, above max_pixels, which is {found['max_pixels']}"
            raise wrong("mm_processor_kwargs.min_pixels", what)
        return found

    # One medium

    def process(self, medium: Picture | Video, options: Mapping[str, Any], where: str) -> list[Processed]:
        if isinstance(medium, Picture):
            tall, wide = self._picture_size(*medium.size, options, where)
            self.check_rows(tall * wide // (self._patch * self._merge) ** 2, where)
            frames = self._process.resize(medium.pixels[None], tall, wide)
            return [self._made("image", frames, self._blocks(self._grid(frames)), ("pixel_values", "image_grid_thw"))]
        sampled = self._sample(medium, options, where)
        frames = self._video_frames(sampled, options, where)
        seconds = self._temporal / sampled.sampled_fps
        expansion = self._video_expansion(self._grid(frames), seconds, self._times(sampled))
        return [self._made("video", frames, expansion, self.video_tensors)]

    def _made(self, modality: Modality, frames: Pixels, expansion: Expansion, names: tuple[str, str]) -> Processed:
        grid = self._grid(frames)
        tensors = {names[0]: view_data(frames), names[1]: view_data(np.array([grid], dtype=np.int64))}
        layout = PatchLayout(self._shades[modality], self._patch, self._merge, self._temporal)
        return Processed(modality, expansion, tensors, grid, patches=layout)

    def _grid(self, frames: Pixels) -> Grid:
        """Returns the grid of resized frames, of which the last is repeated up to a whole temporal patch."""
        count, height, width, _ = frames.shape
        return -(-count // self._temporal), height // self._patch, width // self._patch

    def _pixel_limits(self, size: dict[str, Any], options: Mapping[str, Any]) -> dict[str, int]:
        """The least and the most pixels of a resized picture."""
        least = options.get("min_pixels", size.get("shortest_edge") or size.get("min_pixels"))
        most = options.get("max_pixels", size.get("longest_edge") or size.get("max_pixels"))
        return {"shortest_edge": least, "longest_edge": most}

    def _target(self, height: int, width: int, frames: int, size: Mapping[str, int], where: str) -> tuple[int, int]:
        """Returns the size to which a picture, or each of ``frames`` frames, is resized: multiples of merged patches."""
        factor = self._patch * self._merge
        if max(height, width) > _MOST_RATIO * min(height, width):
            raise refused(where, f"{width}x{height} has sides of a ratio above {_MOST_RATIO}, which this model cannot take")
        return _resized(height, width, factor, size["shortest_edge"], size["longest_edge"])

    def _picture_size(self, width: int, height: int, options: Mapping[str, Any], where: str) -> tuple[int, int]:
        """Height and width to which a picture is resized."""
        return self._target(height, width, 1, self._pixel_limits(dict(self._images.size), options), where)

    def image_rows(self, width: int, height: int) -> int:
        tall, wide = self._picture_size(width, height, {}, "the picture")
        return tall * wide // (self._patch * self._merge) ** 2

    # Videos

    def _video_frames(self, sampled: SampledFrames, options: Mapping[str, Any], where: str) -> Pixels:
        """The frames of a video, resized as by transformers' video processor."""
        size = {**self.video_size, **(self._video.get("size") or {})}
        size = self._pixel_limits(size, {**self._video_limits, **options})
        frames = sampled.frames
        height, width = frames.shape[1:3]
        tall, wide = self._target(height, width, len(frames), self._capped(size, len(frames)), where)
        expected = -(-len(frames) // self._temporal), tall // self._patch, wide // self._patch
        self.check_rows(math.prod(self._merged(expected)), where)
        return np.ascontiguousarray(self._process.resize_frames(frames, tall, wide))

    def _capped(self, size: dict[str, int], frames: int) -> dict[str, int]:
        """The limits of pixels where all frames of a video share a budget."""
        if not self._video.get("cap_pixels_per_frame"):
            return size
        factor = self._patch * self._merge
        budget = int(int(self._video.get("max_video_tokens") or 128_000) * factor * factor * 0.9)
        most = max(min(size["longest_edge"], budget * self._temporal // frames), int(size["shortest_edge"] * 1.05))
        return {**size, "longest_edge": most}

    def _times(self, sampled: SampledFrames) -> list[float]:
        """Seconds of each temporal patch: the mean of its first and last frame."""
        indices = list(sampled.indices)
        indices += [indices[-1]] * (-len(indices) % self._temporal)
        seconds = [int(index) / sampled.fps for index in indices]
        return [(seconds[at] + seconds[at + self._temporal - 1]) / 2 for at in range(0, len(seconds), self._temporal)]

    # Tokens

    def _merged(self, grid: Grid) -> Grid:
        return grid[0], grid[1] // self._merge, grid[2] // self._merge

    def _blocks(self, grid: Grid, interval: float = 1.0) -> Expansion:
        block = self._merged(grid)
        return Expansion((math.prod(block),), (block,), interval)

    def _video_expansion(self, grid: Grid, seconds: float, times: list[float]) -> Expansion:
        """Tokens of a video. ``seconds``: between temporal patches; ``times``: of each."""
        return self._blocks(grid)

    def expansion(self, features: Features, modality: Modality, where: str) -> Expansion:
        grid, seconds = features.grid, features.second_per_grid
        if grid[1] % self._merge or grid[2] % self._merge:
            raise refused(f"{where}.grid_thw", f"height and width of {list(grid)} must be multiples of {self._merge}")
        self.check_rows(math.prod(self._merged(grid)), where)
        if modality == "image":
            if grid[0] != 1:
                raise misfit(f"{where}.grid_thw", "1 temporal patch of a picture", grid[0])
            return self._blocks(grid)
        if features.timestamps is not None:
            return self._video_expansion(grid, seconds or 1.0, list(features.timestamps))
        if seconds is None and self.timed:
            why = "is missing: this model's prompts depend on the seconds between temporal patches"
            raise wrong(f"{where}.second_per_grid", why)
        seconds = seconds or 1.0
        # Frames of a patch are evenly spaced, and its time is the mean of the first and the last.
        shift = seconds * (self._temporal - 1) / self._temporal / 2
        return self._video_expansion(grid, seconds, [index * seconds + shift for index in range(grid[0])])

    timed: ClassVar[bool] = False
    """Prompts depend on the seconds of a video."""


class Qwen25Rules(QwenRules):
    """Rules of Qwen2.5-VL: temporal patches are as many positions apart as their seconds say."""

    timed = True

    def _video_expansion(self, grid: Grid, seconds: float, times: list[float]) -> Expansion:
        rate = np.float32(self._vision.tokens_per_second)
        return self._blocks(grid, float(rate * np.float32(seconds)))


class Qwen3Rules(QwenRules):
    """Rules of Qwen3-VL: each temporal patch is a picture behind a text that says its seconds."""

    timed = timestamped = True
    shades: ClassVar[tuple[list[float], list[float]]] = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    video_size: ClassVar[Mapping[str, int]] = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
    sampling: ClassVar[Mapping[str, Any]] = {"do_sample_frames": True, "fps": 2, "ends": True}

    def _target(self, height: int, width: int, frames: int, size: Mapping[str, int], where: str) -> tuple[int, int]:
        if frames == 1:
            return super()._target(height, width, frames, size, where)
        factor, least, most = self._patch * self._merge, size["shortest_edge"], size["longest_edge"]
        if frames < self._temporal:
            raise wrong(where, f"has {frames} frames; expected at least {self._temporal}")
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        super()._target(height, width, 1, size, where)
        return _resized(height, width, factor, least, most, frames, round(frames / self._temporal) * self._temporal)

    def _capped(self, size: dict[str, int], frames: int) -> dict[str, int]:
        if not self._video.get("cap_pixels_per_frame"):
            return size
        factor = self._patch * self._merge
        most = int(self._video.get("max_video_tokens") or 768) * factor * factor
        each = max(min(most, size["longest_edge"] // frames), int(size["shortest_edge"] * 1.05))
        return {**size, "longest_edge": each * frames}

    def _video_expansion(self, grid: Grid, seconds: float, times: list[float]) -> Expansion:
        _, tall, wide = self._merged(grid)
        pieces: list[str | int] = []
        for time in times:
            pieces += [f"<{time:.1f} seconds><|vision_start|>", tall * wide, "<|vision_end|>"]
        return Expansion(tuple(pieces), ((1, tall, wide),) * len(times))


def _resized(
    height: int, width: int, factor: int, least: int, most: int, frames: int = 1, rounded_frames: int = 1
) -> tuple[int, int]:
    """The multiples of ``factor`` that are closest to a size and have between ``least`` and ``most`` pixels in all frames."""
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    pixels = frames * height * width
    if rounded_frames * tall * wide > most:
        beta = math.sqrt(pixels / most)
        tall, wide = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif rounded_frames * tall * wide < least:
        beta = math.sqrt(least / pixels)
        tall, wide = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return tall, wide
