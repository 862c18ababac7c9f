"""Decodes pictures and videos of unknown origin, within limits. Runs in the processes of ``MediaDecoder``.

The formats are those listed here, recognised by the content's first bytes, whatever a name or header says: others are not
handed to the libraries, whose rarer decoders are their weakest part. Sizes are checked before pixels are decoded.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

if TYPE_CHECKING:
    from av.video.stream import VideoStream
    from PIL.Image import Image

PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow's names."""
_MAX_RATIO = 200
"""Largest ratio of the sides of a picture or frame; the processors of several families refuse more."""
_MAX_FPS = 1000.0
_MAX_STREAMS = 64


class DecodeError(ValueError):
    """The content cannot be decoded, or exceeds a limit; the message says why, without the name of the parameter."""


class DecodeLimits(msgspec.Struct, frozen=True, array_like=True):
    """The names in parentheses are options of ``EngineArgs``."""

    image_pixels: int
    """Pixels of a picture, or of one frame of a video (max_image_pixels)."""
    video_pixels: int
    """Pixels of the frames taken of a video together (max_video_pixels)."""
    video_seconds: float
    """Length of a video (max_video_seconds)."""
    video_frames: int
    """Frames taken of a video, at most (num_video_frames)."""


class DecodeJob(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["image", "video"]
    limits: DecodeLimits
    data: memoryview


class VideoFacts(msgspec.Struct, frozen=True, array_like=True):
    """Properties of a video that processors need beside the frames that were taken of it."""

    fps: float
    total_num_frames: int
    frames_indices: list[int]
    """Indices of the frames taken, rising."""
    duration: float


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    """RGB pixels ``[frames, height, width, 3]`` (one frame of a picture), or the reason why there are none."""

    frames: int = 0
    height: int = 0
    width: int = 0
    pixels: memoryview = memoryview(b"")
    video: VideoFacts | None = None
    error: str | None = None


def decode_image(data: memoryview, limits: DecodeLimits) -> Decoded:
    """The first frame, upright, with transparent parts over white.

    Raises:
        DecodeError: see there.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=PICTURES)
    except UnidentifiedImageError:
        raise DecodeError(f"is not a picture of a supported format ({', '.join(PICTURES)})") from None
    with image:
        _check_frame(*image.size, limits)
        upright = rgb(ImageOps.exif_transpose(image))
        width, height = upright.size
        return Decoded(1, height, width, memoryview(upright.tobytes()))


def rgb(image: Image) -> Image:
    """A picture in mode RGB, transparent parts over white, 16 bits scaled to 8."""
    from PIL import Image

    if image.mode.startswith("I;16"):  # which Pillow's conversion would cut off at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    over = image.convert("RGBA")
    ground = Image.new("RGBA", image.size, "white")
    ground.alpha_composite(over)
    return ground.convert("RGB")


def _check_frame(width: int, height: int, limits: DecodeLimits) -> None:
    """Raises DecodeError for a size that no model's processor should see."""
    if width < 1 or height < 1:
        raise DecodeError("has no pixels")
    if width * height > limits.image_pixels:
        raise DecodeError(
            f"has {width} x {height} = {width * height} pixels; at most {limits.image_pixels} are allowed (max_image_pixels)"
        )
    if max(width, height) > _MAX_RATIO * min(width, height):
        raise DecodeError(f"is {width} x {height} pixels: one side may be at most {_MAX_RATIO} times the other")


def decode_video(data: memoryview, limits: DecodeLimits) -> Decoded:
    """Returns at most ``limits.video_frames`` frames, spread evenly from the first to the last, upright.

    Raises:
        DecodeError: see there.
    """
    import av

    container_format = _video_format(bytes(data[:16]))
    with av.open(io.BytesIO(data), "r", format=container_format, metadata_errors="ignore", io_open=_opens_nothing) as container:
        if len(container.streams) > _MAX_STREAMS or not container.streams.video:
            raise DecodeError("has no video stream" if not container.streams.video else f"has more than {_MAX_STREAMS} streams")
        stream = container.streams.video[0]
        _check_frame(stream.codec_context.width, stream.codec_context.height, limits)
        total = sum(packet.size > 0 for packet in container.demux(stream))
        fps, duration = _pace(stream, total)
        if duration > limits.video_seconds:
            raise DecodeError(
                f"is {duration:.1f} seconds long; at most {limits.video_seconds:g} are allowed (max_video_seconds)"
            )
        container.seek(0)
        stream.thread_type = "NONE"  # whose time is not that of this process alone
        wanted = sample_indices(total, limits.video_frames)
        return _taken(container.decode(stream), wanted, fps, limits)


def _taken(frames: Iterator[Any], wanted: list[int], fps: float, limits: DecodeLimits) -> Decoded:
    """The wanted frames. A file may hold fewer than its packets promise: then those that there are."""
    left = set(wanted)
    taken = np.empty((0, 0, 0, 3), np.uint8)
    indices: list[int] = []
    index = -1
    for index, frame in enumerate(frames):
        _check_frame(frame.width, frame.height, limits)
        if index not in left:
            continue
        if frame.width * frame.height * len(wanted) > limits.video_pixels:
            raise DecodeError(
                f"has {frame.width} x {frame.height} pixels in each of {len(wanted)} frames; "
                f"at most {limits.video_pixels} together are allowed (max_video_pixels)"
            )
        pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
        if not indices:
            taken = np.empty((len(wanted), *pixels.shape), np.uint8)
        if pixels.shape != taken.shape[1:]:
            raise DecodeError("has frames of several sizes")
        taken[len(indices)] = pixels
        indices.append(index)
    if not indices:
        raise DecodeError("has no frame that can be decoded")
    facts = VideoFacts(fps, index + 1, indices, (index + 1) / fps)
    _, height, width, _ = taken.shape
    return Decoded(len(indices), height, width, taken[: len(indices)].data.cast("B"), facts)


def sample_indices(total: int, most: int) -> list[int]:
    """``most`` frames of ``total``, evenly from the first to the last; all where there are no more."""
    if total <= most:
        return list(range(total))
    return sorted({round(index) for index in np.linspace(0, total - 1, most).tolist()})


def _pace(stream: VideoStream, total: int) -> tuple[float, float]:
    """Frames a second, and seconds, of a stream with ``total`` packets."""
    rate = stream.average_rate or stream.guessed_rate
    stated = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
    fps = float(rate) if rate else total / stated if stated > 0 else 0.0
    if not total or not 0 < fps <= _MAX_FPS or not math.isfinite(stated):
        raise DecodeError("has no frames, or no valid frame rate")
    return fps, max(stated, total / fps)


def _video_format(head: bytes) -> str:
    """ffmpeg's name of the format, which is not left to guess: it would read playlists that name other files."""
    if head[4:8] == b"ftyp":
        return "mov"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    raise DecodeError("is not a video of a supported format (MP4, MOV, WebM, Matroska, AVI)")


def _opens_nothing(url: str, flags: int, options: dict[str, Any]) -> Any:
    raise DecodeError("refers to another file")
