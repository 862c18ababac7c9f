"""Choice of the frames of a video that a model sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from headrace.errors import RequestError
from headrace.multimodal.items import MAX_FRAMES, Pixels, Video

USUAL_FPS = 24.0
"""Frames a second of a video that does not say, as transformers has it."""


@dataclasses.dataclass(frozen=True)
class SampledFrames:
    """The frames that a model sees."""

    frames: Pixels
    indices: npt.NDArray[np.int64]
    """``[n]``: their numbers in the file."""
    fps: float
    """Frames per second of the file."""
    total: int
    """Frames of the file."""

    @property
    def sampled_fps(self) -> float:
        return len(self.indices) / self.total * self.fps


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Rule by which a model samples frames."""

    option_types: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "fps": (float, int),
        "num_frames": (int,),
        "do_sample_frames": (bool,),
    }
    """Types of options; see ``MediaRules``."""

    do_sample_frames: bool
    fps: float | None
    num_frames: int | None
    min_frames: int = 1
    max_frames: int = MAX_FRAMES
    multiple: int = 1
    """The number of frames is rounded to multiples of this."""
    ends: bool = False
    """The first and the last frame are among those sampled."""
    middle: bool = False
    """The video is divided into equal parts, and the frame in the middle of each is sampled."""
    together: bool = False
    """``fps`` and ``num_frames`` may be given together."""

    def __call__(self, video: Video, options: Mapping[str, Any], where: str) -> SampledFrames:
        """Samples a video. ``options``: ``fps``, ``num_frames`` and ``do_sample_frames`` of the request."""
        metadata, given = video.metadata, len(video.frames)
        fps = float(metadata.get("fps") or USUAL_FPS)
        indices = np.asarray(metadata.get("frames_indices") or range(given), dtype=np.int64)
        total = int(metadata.get("total_num_frames") or max(given, int(indices.max()) + 1))
        asked = {name for name in ("fps", "num_frames") if name in options}
        if len(asked) == 2 and not self.together:
            raise RequestError("fps and num_frames exclude each other", "mm_processor_kwargs.fps")
        usual = bool(asked) or metadata.get("do_sample_frames", self.do_sample_frames)
        chosen: npt.NDArray[np.int64] = np.arange(given)
        if options.get("do_sample_frames", usual):
            seconds = given / (given / total * fps)
            chosen = self._chosen(given, seconds, options)
        return SampledFrames(video.frames[chosen], indices[chosen], fps, total)

    def _chosen(self, given: int, seconds: float, options: Mapping[str, Any]) -> npt.NDArray[np.int64]:
        count = options.get("num_frames", None if "fps" in options else self.num_frames)
        rate = options.get("fps", self.fps)
        if count is None and rate is not None:
            most = min(self.max_frames, given) // self.multiple * self.multiple
            count = min(max(int(seconds * rate), self.min_frames), most or given, given)
        if count is None:
            count = min(max(given, self.min_frames), self.max_frames, given)
        count = max(1, min(int(count), given))
        if count >= self.multiple:
            count = count // self.multiple * self.multiple
        if self.ends:
            return np.linspace(0, given - 1, count).round().astype(np.int64)
        if self.middle:
            return ((np.arange(count) + 0.5) * (given / count)).astype(np.int64)
        return np.arange(0, given, given / count)[:count].astype(np.int64)
