"""Pictures of Idefics3 and SmolVLM: rows and columns of crops, each behind its place, and the whole picture. Videos of SmolVLM:
whole frames, each behind its time."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from headrace.choices import Modality
from headrace.multimodal.backend import video_fields
from headrace.multimodal.items import Features, Video, array_of, misfit, view_data, wrong
from headrace.multimodal.rules import Expansion, Grid, PictureRules, Processed
from headrace.multimodal.sampling import Sampling

_MOST_PIXELS = 4096
"""Largest side of a picture that is split into crops, in transformers' image processor."""
_FENCE = "<fake_token_around_image>"
_WHOLE = f"{_FENCE}<global-img>"
_FRAME_EDGE = 4 * 364
"""The longest side to which transformers' video processor resizes a frame before it squares it."""
_OF_FRAMES = ("do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
"""Settings that the video processor shares with the image processor."""


class Idefics3Rules(PictureRules):
    """The pixel mask of the image processor is left out, since the crops of a single picture are whole.

    A grid has the rows and columns of crops; ``(1, 1, 1)`` is the whole picture alone.

    Args:
        folder: of the model's files.
        config: of the whole model.
    """

    placeholders: Mapping[Modality, str] = {"image": "<image>"}
    feature_tokens: Mapping[Modality, str] = {"image": "<image>"}

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__(folder)
        vision, made = config.vision_config, self._images.hf.max_image_size["longest_edge"]
        self._check_size((made, made), vision.image_size)
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
        pieces += [("\n\n" if crops else "") + _WHOLE, self._side**2, _FENCE]
        return Expansion(tuple(pieces), ((1, self._side, self._side),) * (len(crops) + 1))


def _line(row: int, column: int) -> str:
    return "\n" if row and not column else ""


class SmolVLMRules(Idefics3Rules):
    """A grid of a video has its frames; ``(n, 1, 1)``."""

    timestamped = True
    placeholders: Mapping[Modality, str] = {"image": "<image>", "video": "<video>"}
    feature_tokens: Mapping[Modality, str] = {"image": "<image>", "video": "<image>"}
    written: ClassVar[frozenset[Modality]] = frozenset({"video"})
    option_types: ClassVar[Mapping[str, tuple[type, ...]]] = Sampling.option_types

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__(folder, config)
        video = video_fields(folder)
        usual = video.get("video_sampling") or {}
        self._sample = _Sampling(bool(video.get("do_sample_frames")), usual.get("fps"), usual.get("max_frames"), together=True)
        size = video.get("size") or usual.get("video_size") or {"longest_edge": _FRAME_EDGE}
        square = {"longest_edge": config.vision_config.image_size}
        self._of_frames = {name: video[name] for name in _OF_FRAMES if video.get(name) is not None}
        self._of_frames |= {"size": size, "max_image_size": square, "do_image_splitting": False}
        self.fingerprint = self._images.fingerprint(video)

    def _video(self, video: Video, options: Mapping[str, Any], where: str) -> Processed:
        sampled = self._sample(video, options, where)
        count, seconds = len(sampled.frames), video.metadata.get("duration")
        self.check_rows(count * self._side**2, where)
        from PIL import Image

        frames = [self._images(Image.fromarray(each), where, **self._of_frames)["pixel_values"] for each in sampled.frames]
        pixels = np.concatenate(list(map(array_of, frames)), axis=1)
        expansion = self._frames((sampled.indices / sampled.fps).tolist(), seconds)
        return Processed("video", expansion, {"pixel_values": view_data(pixels)}, (count, 1, 1))

    def expansion(self, features: Features, modality: Modality, where: str) -> Expansion:
        if modality == "image":
            return super().expansion(features, modality, where)
        count = features.grid[0]
        if features.grid[1:] != (1, 1):
            raise misfit(f"{where}.grid_thw", "[frames, 1, 1]", list(features.grid))
        if features.second_per_grid is None and features.timestamps is None:
            raise wrong(f"{where}.second_per_grid", "is missing: this model's prompts say the seconds of each frame")
        self.check_rows(count * self._side**2, where)
        return self._frames(features.timestamps or [index * (features.second_per_grid or 0) for index in range(count)], None)

    def _frames(self, times: Sequence[float], seconds: float | None) -> Expansion:
        """The text of a video, as transformers' processor writes it.

        Args:
            times: of the frames, in seconds.
            seconds: the whole video's; None: not known.
        """
        length = datetime.timedelta(seconds=int(times[-1] if seconds is None else seconds))
        text = f"You are provided the following series of {in_words(len(times))} frames from a {length} [H:MM:SS] video.\n"
        pieces: list[str | int] = []
        for time in times:
            pieces += [f"{text}\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:{_WHOLE}", self._side**2]
            text = _FENCE
        return Expansion((*pieces, f"{_FENCE}\n\n"), ((1, self._side, self._side),) * len(times))


@dataclasses.dataclass(frozen=True)
class _Sampling(Sampling):
    """``fps`` frames a second, at most ``num_frames``, evenly from the first to the last; of a long video the first and the
    last second are left out."""

    def _chosen(self, given: int, seconds: float, options: Mapping[str, Any]) -> npt.NDArray[np.int64]:
        rate, most = options.get("fps", self.fps), options.get("num_frames", self.num_frames)
        count = most or given
        if rate is not None:
            count = min(round(rate * seconds), count)
        first, last, pace = 0, given - 1, given / seconds
        if rate is not None and seconds - 2 > (most or given) * rate:
            first, last = int(pace), min(int(given - pace), last)
        if first >= last:
            first, last = 0, given - 1
        chosen: npt.NDArray[np.int64] = np.unique(np.linspace(first, last, max(count, 1), dtype=np.int64))
        return chosen


_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """English words of a number from 0 to 999,999, as num2words writes them: one thousand and one."""
    if number < len(_SMALL):
        return _SMALL[number]
    if number < 100:
        ten, one = divmod(number, 10)
        return _TENS[ten - 2] + (f"-{_SMALL[one]}" if one else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    count, rest = divmod(number, size)
    joint = " and " if rest < 100 else ", "
    return f"{in_words(count)} {name}" + (f"{joint}{in_words(rest)}" if rest else "")
