"""The media of a prompt, decoded: pictures, videos, and features that were encoded elsewhere, as audio always is.

``MultiModalData`` is what a prompt carries under ``multi_modal_data``; ``MultiModalData.of`` makes one of the dict that vLLM
documents. Media have been fetched and decoded before (``media.py``): nothing here opens a URL or a path.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from headrace.choices import Modality
from headrace.core.media import DTYPE_SIZES, TensorData
from headrace.errors import RequestError
from headrace.multimodal.decode import rgb
from headrace.options import shown

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]

VIDEO_METADATA = frozenset(
    {"fps", "total_num_frames", "frames_indices", "do_sample_frames", "duration", "width", "height", "video_backend"}
)
_EMBEDS = ("features", "grid_thw", "deepstack", "second_per_grid", "timestamps")
AUDIO_ALONE = "audio is taken as features alone, [n, hidden size] of the language model"
_LARGEST = {"float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38, "float16": 65504.0}
_LARGEST_BITS, _LARGEST_BITS_IN_FLOAT16 = 0x7F7F, 0x477F
"""Bits of positive numbers of bfloat16: the largest, and the largest that float16 holds."""
MAX_FRAMES = 1 << 16
"""Maximum number of frames of a video."""
_MAX_SECONDS = 10_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """One picture in RGB, alpha composited over white. Files are turned upright (EXIF) where they are decoded."""

    source: Image | Pixels
    """Picture of PIL, or pixels ``[height, width, 3]``, contiguous. Never written to."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.source.shape[1::-1] if isinstance(self.source, np.ndarray) else self.source.size

    @property
    def pixels(self) -> Pixels:
        """``[height, width, 3]``: a copy of each call's own if the source is PIL's."""
        return np.asarray(self.source)

    @property
    def image(self) -> Image:
        """A copy of each call's own if the source is an array."""
        from PIL import Image

        return Image.fromarray(self.source) if isinstance(self.source, np.ndarray) else self.source


@dataclasses.dataclass(frozen=True, slots=True)
class Video:
    """Decoded frames of one video.

    ``metadata`` has ``fps`` (of the file), ``total_num_frames`` and ``frames_indices`` (of the frames given, in the file) where
    they are known, and ``do_sample_frames``: false for frames that are already a sample.
    """

    frames: Pixels
    """``[n, height, width, 3]``, never written to."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Features:
    """The features of one picture, video or audio clip, encoded elsewhere. ``MultiModalProcessor`` checks that they fit."""

    rows: TensorData
    """``[n, hidden]``: a row for each token of the language model."""
    grid: tuple[int, int, int]
    """Temporal patches, and patches of height and width before they are merged; of audio rows, 1 and 1."""
    deepstack: TensorData | None = None
    """``[levels, n, hidden]``, for models whose first layers get features too."""
    second_per_grid: float | None = None
    """Seconds between temporal patches, for models whose positions depend on them."""
    timestamps: tuple[float, ...] | None = None
    """Seconds of each temporal patch, for models whose prompts say them. Without, patches are taken as evenly spaced and whole:
    the last one of an odd number of frames is not."""


@dataclasses.dataclass(frozen=True, slots=True)
class MultiModalData:
    """The media of one prompt, of each modality in the order of its placeholders in the prompt."""

    images: Sequence[Picture | Features] = ()
    videos: Sequence[Video | Features] = ()
    audios: Sequence[Features] = ()

    def __bool__(self) -> bool:
        return any(self.by_modality.values())

    @property
    def by_modality(self) -> dict[Modality, Sequence[Picture | Video | Features]]:
        return {"image": self.images, "video": self.videos, "audio": self.audios}

    def items(self) -> Iterator[tuple[Modality, Picture | Video | Features]]:
        for modality, media in self.by_modality.items():
            for medium in media:
                yield modality, medium

    @classmethod
    def of(cls, data: Any) -> MultiModalData:
        """Makes the media of a prompt of vLLM's dict.

        Args:
            data: ``{"image": one or a list, "video": one or a list, "audio": one or a list, "image_embeds": {...},
                "video_embeds": {...}}`` with PIL pictures or arrays ``[h, w, 3]`` uint8, arrays ``[n, h, w, 3]`` or (array,
                metadata), for audio ``{"features": [n, hidden]}``, and for ``*_embeds``
                ``{"features": [n, hidden], "grid_thw": [k, 3], "deepstack"?: [levels, n, hidden], "second_per_grid"?: [k],
                "timestamps"?: [temporal patches of all]}``, or a list of those. ``MediaLoader.load_features`` has replaced
                URLs of features.

        Raises:
            RequestError: names the entry.
        """
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise wrong("multi_modal_data", f"must be a dict, not {shown(data)}")
        known = {"image", "video", "audio", "image_embeds", "video_embeds"}
        if unknown := sorted(map(str, set(data) - known)):
            raise wrong("multi_modal_data", f"has no part named {unknown[0]!r}; it may have {', '.join(sorted(known))}")
        media: dict[Modality, list[Any]] = {}
        for modality, read in _READERS.items():
            plain, embeds = data.get(modality), data.get(f"{modality}_embeds")
            if plain is not None and embeds is not None:
                raise wrong(
                    f"multi_modal_data.{modality}_embeds", f"and {modality} in one prompt have no order: give one of them"
                )
            where = f"multi_modal_data.{modality}"
            media[modality] = (
                split_features(embeds, f"{where}_embeds")
                if embeds is not None
                else [read(one, f"{where}[{index}]") for index, one in enumerate(_listed(plain, modality))]
            )
        return cls(*(tuple(media[modality]) for modality in _READERS))


def tensor_data(value: Any, where: str) -> TensorData:
    """A copy of a torch tensor or of what numpy takes as an array.

    Raises:
        RequestError: it is not a tensor, or of no dtype that is read; names ``where``.
    """
    if isinstance(value, TensorData):
        return value
    if type(value).__module__.split(".")[0] == "torch":
        value = value.detach().cpu().contiguous()
        if str(value.dtype) == "torch.bfloat16":
            return view_data(value.view(value.new_empty(0).short().dtype).numpy().copy(), "bfloat16")
        value = value.numpy()
    try:
        array = np.array(value, order="C", ndmin=1)
    except (ValueError, TypeError, MemoryError) as error:
        raise wrong(where, f"must be a tensor, not {shown(value)}") from error
    if array.dtype.name not in DTYPE_SIZES:
        raise wrong(where, f"has dtype {array.dtype.name}; expected one of {', '.join(DTYPE_SIZES)}")
    return view_data(array)


def view_data(array: npt.NDArray[Any], dtype: str | None = None) -> TensorData:
    """A contiguous array, not copied: nothing may write to it any more. ``dtype``: of its bytes, where numpy has none."""
    return TensorData(dtype or array.dtype.name, array.shape, array.reshape(-1).view(np.uint8).data)


def rounded(tensor: TensorData, dtype: str) -> TensorData:
    """A tensor of float32 in the dtype to which the encoder would round it: half as much to copy on its way there."""
    if tensor.dtype != "float32" or dtype == "float32":
        return tensor
    import torch

    made = torch.from_numpy(array_of(tensor)).to(getattr(torch, dtype))
    return view_data(made.view(torch.int16).numpy(), dtype)


def split_features(embeds: Any, where: str) -> list[Features]:
    """Splits the features of several pictures or videos, one after the other, by their grids.

    Only what the split needs is checked here: the sum of the grids. ``merge`` patches make one row; all grids have the same.
    A single grid may also count larger parts than rows, such as crops, since nothing is split by it.

    Args:
        embeds: as in ``MultiModalData.of``, or a list of those; or ``TensorData`` in place of tensors; or ``Features``.

    Raises:
        RequestError: names the part, what was expected and what came.
    """
    if isinstance(embeds, list):
        return [one for index, part in enumerate(embeds) for one in split_features(part, f"{where}[{index}]")]
    if isinstance(embeds, Features):
        return [embeds]
    if not isinstance(embeds, Mapping):
        raise wrong(where, f"must be a dict with features and grid_thw, not {shown(embeds)}")
    if unknown := sorted(map(str, set(embeds) - set(_EMBEDS))):
        raise wrong(where, f"has no part named {unknown[0]!r}; it may have {', '.join(_EMBEDS)}")
    for name in ("features", "grid_thw"):
        if embeds.get(name) is None:
            raise wrong(f"{where}.{name}", "is missing: the features need their grids" if name == "grid_thw" else "is missing")
    rows = _checked(tensor_data(embeds["features"], f"{where}.features"), 2, f"{where}.features")
    grids = _grids(tensor_data(embeds["grid_thw"], f"{where}.grid_thw"), f"{where}.grid_thw")
    deep = embeds.get("deepstack")
    deepstack = None if deep is None else _checked(tensor_data(deep, f"{where}.deepstack"), 3, f"{where}.deepstack")
    if deepstack is not None and deepstack.shape[1] != rows.shape[0]:
        raise wrong(f"{where}.deepstack", f"has {deepstack.shape[1]} rows, and features has {rows.shape[0]}")
    seconds = _seconds(embeds.get("second_per_grid"), len(grids), f"{where}.second_per_grid")
    times = _timestamps(embeds.get("timestamps"), grids, f"{where}.timestamps")
    patches, given = [math.prod(grid) for grid in grids], rows.shape[0]
    if len(grids) == 1 and patches[0] < given:
        return [Features(rows, grids[0], deepstack, seconds[0], times[0])]
    if not given or sum(patches) % given:
        raise wrong(f"{where}.features", f"has {given} rows, which do not divide the {sum(patches)} patches of grid_thw")
    merge = sum(patches) // given
    ends = np.cumsum([count // merge for count in patches]).tolist()
    if any(count % merge for count in patches):
        raise wrong(
            f"{where}.features", f"has {given} rows for grids of {patches} patches: not the same number of patches a row"
        )
    return [
        Features(
            view_data(array_of(rows)[start:end], rows.dtype),
            grid,
            None if deepstack is None else view_data(np.ascontiguousarray(array_of(deepstack)[:, start:end]), deepstack.dtype),
            second,
            own_times,
        )
        for start, end, grid, second, own_times in zip([0, *ends], ends, grids, seconds, times, strict=False)
    ]


def array_of(tensor: TensorData) -> npt.NDArray[Any]:
    """A view of a tensor's bytes; bfloat16 as uint16."""
    dtype = "uint16" if tensor.dtype == "bfloat16" else tensor.dtype
    return np.frombuffer(tensor.data, dtype=np.dtype(dtype).newbyteorder("<")).reshape(tensor.shape)


def is_finite(tensor: TensorData, dtype: str) -> bool:
    """Whether all numbers of a float tensor, which is not empty, are finite, in another float dtype too."""
    array = array_of(tensor)
    if tensor.dtype == "bfloat16":
        return bool((array & 0x7FFF).max() <= (_LARGEST_BITS_IN_FLOAT16 if dtype == "float16" else _LARGEST_BITS))
    if tensor.dtype == "float16":
        return bool(np.isfinite(array).all())
    most = _LARGEST[dtype]
    return bool(-most <= array.min() <= array.max() <= most)  # false for NaN


def _listed(value: Any, modality: Modality) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, list):
        return value
    # A tuple is one video with its metadata, or several media.
    single = not isinstance(value, tuple) or (modality == "video" and len(value) == 2 and isinstance(value[1], Mapping))
    return [value] if single else cast("tuple[Any, ...]", value)


def _picture(value: Any, where: str) -> Picture:
    from PIL import Image

    if isinstance(value, Picture):
        return value
    if not isinstance(value, Image.Image):
        return Picture(_pixels(value, 3, where))
    if not (value.width and value.height):
        raise wrong(where, "has no pixels")
    return Picture(rgb(value))


def _video(value: Any, where: str) -> Video:
    if isinstance(value, Video):
        return value
    metadata: Any = {}
    if isinstance(value, tuple):
        if len(value) != 2 or not isinstance(value[1], Mapping):
            raise wrong(where, "must be an array of frames, or (array, metadata)")
        value, metadata = value
    if isinstance(value, list):
        value = np.stack([_picture(frame, f"{where}[{index}]").pixels for index, frame in enumerate(value)])
    frames = _pixels(value, 4, where)
    if not 0 < len(frames) <= MAX_FRAMES:
        raise wrong(where, f"has {len(frames)} frames; expected 1 to {MAX_FRAMES}")
    return Video(frames, checked_metadata(metadata, len(frames), f"{where}.metadata"))


def audio_features(value: Any, where: str) -> Features:
    """The features of one audio clip, of ``{"features": [n, hidden]}``, also with ``TensorData`` in place of the tensor.

    Raises:
        RequestError: it is none; names the part.
    """
    if isinstance(value, Features):
        return value
    if not isinstance(value, Mapping) or value.get("features") is None:
        raise refused(where, f'{AUDIO_ALONE}: give {{"features": tensor}}')
    if unknown := sorted(map(str, set(value) - {"features"})):
        raise wrong(where, f"has no part named {unknown[0]!r}: audio has features alone")
    rows = _checked(tensor_data(value["features"], f"{where}.features"), 2, f"{where}.features")
    if not rows.shape[0]:
        raise wrong(f"{where}.features", "has no rows")
    return Features(rows, (rows.shape[0], 1, 1))


_READERS: dict[Modality, Callable[[Any, str], Picture | Video | Features]] = {
    "image": _picture,
    "video": _video,
    "audio": audio_features,
}
"""Read one medium, in the order of the fields of ``MultiModalData``."""


def checked_metadata(metadata: Mapping[str, Any], num_frames: int, where: str) -> dict[str, Any]:
    """Metadata of a video with ``num_frames`` frames, with values of the right type. Raises RequestError."""
    if unknown := sorted(map(str, set(metadata) - VIDEO_METADATA)):
        raise wrong(where, f"has no part named {unknown[0]!r}; it may have {', '.join(sorted(VIDEO_METADATA))}")
    out = {name: value for name, value in metadata.items() if value is not None}
    fps = out.get("fps")
    if fps is not None and not (isinstance(fps, int | float) and not isinstance(fps, bool) and 1e-3 <= fps <= 1e4):
        raise wrong(f"{where}.fps", f"must be a number from 0.001 to 10000, not {shown(fps)}")
    total = out.get("total_num_frames")
    if total is not None and not (type(total) is int and total >= num_frames):
        raise wrong(f"{where}.total_num_frames", f"must be a whole number of at least {num_frames}, not {shown(total)}")
    duration = out.get("duration")
    if duration is not None and not (type(duration) in (int, float) and 0 <= duration <= _MAX_SECONDS):
        raise wrong(f"{where}.duration", f"must be a number of seconds from 0 to {_MAX_SECONDS}, not {shown(duration)}")
    if not isinstance(out.get("do_sample_frames", False), bool):
        raise wrong(f"{where}.do_sample_frames", "must be true or false")
    if "frames_indices" in out:
        indices = np.asarray(out["frames_indices"])
        if indices.shape != (num_frames,) or indices.dtype.kind not in "iu" or indices.min() < 0:
            raise wrong(f"{where}.frames_indices", f"must be {num_frames} frame numbers, one for each frame")
        out["frames_indices"] = indices.tolist()
    return out


def _pixels(value: Any, rank: int, where: str) -> Pixels:
    if type(value).__module__.split(".")[0] == "torch":
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # a list whose parts differ in length
        array = np.asarray(None)
    if array.dtype != np.uint8 or array.ndim != rank or array.shape[-1] != 3 or not array.size:
        expected = (
            "a PIL picture or a uint8 array [height, width, 3]" if rank == 3 else "a uint8 array [frames, height, width, 3]"
        )
        came = f"{array.dtype.name} {list(array.shape)}" if array.dtype.kind in "biuf" else shown(value)
        raise wrong(where, f"must be {expected}, not {came}")
    return np.array(array, order="C")  # Caches keep it, and the caller may write to its own.


def _checked(tensor: TensorData, rank: int, where: str) -> TensorData:
    if tensor.dtype not in ("float32", "float16", "bfloat16"):
        raise wrong(where, f"has dtype {tensor.dtype}; expected float32, float16 or bfloat16")
    if len(tensor.shape) != rank:
        raise wrong(where, f"has shape {list(tensor.shape)}; expected {rank} dimensions")
    return tensor


def _grids(tensor: TensorData, where: str) -> list[tuple[int, int, int]]:
    if tensor.dtype not in ("int64", "int32"):
        raise wrong(where, f"has dtype {tensor.dtype}; expected int64 or int32")
    if len(tensor.shape) != 2 or tensor.shape[1] != 3 or not tensor.shape[0]:
        raise wrong(where, f"has shape {list(tensor.shape)}; expected [number of items, 3]")
    grids = array_of(tensor)
    if grids.min() < 1 or grids.max() > 1 << 20:
        raise wrong(where, f"must hold numbers from 1 to {1 << 20}, not {grids.min()} to {grids.max()}")
    return [(int(t), int(h), int(w)) for t, h, w in grids]


def _seconds(value: Any, count: int, where: str) -> list[float | None]:
    if value is None:
        return [None] * count
    seconds = _numbers(value, where)
    if seconds is None or seconds.shape != (count,) or not (seconds > 0).all():
        raise wrong(where, f"must be {count} positive numbers, one for each grid")
    return [float(second) for second in seconds]


def _timestamps(value: Any, grids: Sequence[tuple[int, int, int]], where: str) -> list[tuple[float, ...] | None]:
    if value is None:
        return [None] * len(grids)
    times, ends = _numbers(value, where), np.cumsum([grid[0] for grid in grids]).tolist()
    if times is None or times.shape != (ends[-1],) or not ((times >= 0) & (times <= _MAX_SECONDS)).all():
        raise wrong(where, f"must be {ends[-1]} seconds from 0 to {_MAX_SECONDS}, one for each temporal patch")
    return [tuple(times[start:end].tolist()) for start, end in zip([0, *ends], ends, strict=False)]


def _numbers(value: Any, where: str) -> npt.NDArray[np.float64] | None:
    """A list of numbers, or a tensor; None: they are not finite, or of bfloat16."""
    if isinstance(value, list | tuple) and all(isinstance(one, int | float) for one in value):
        value = np.asarray(value, dtype=np.float64)
    tensor = tensor_data(value, where)
    numbers = array_of(tensor).astype(np.float64)
    return numbers if tensor.dtype != "bfloat16" and np.isfinite(numbers).all() else None


def wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where} {what}", where)


def refused(where: str, why: str) -> RequestError:
    return RequestError(f"{where}: {why}", where)


def misfit(where: str, expected: str, actual: object) -> RequestError:
    return refused(where, f"expected {expected}, not {actual}")
