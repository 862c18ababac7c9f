"""Decoding pictures and videos: what comes out, and what is refused before or while it is decoded."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from support.media import clip, encoded, noise, picture, real_picture

from headrace.errors import RequestError
from headrace.host.jobs import ProcessLimits
from headrace.multimodal.decode import DecodeError, DecodeLimits, decode_image, decode_video, sample_indices
from headrace.multimodal.decoder import MediaDecoder

LIMITS = DecodeLimits(image_pixels=1_000_000, video_pixels=2_000_000, video_seconds=60.0, video_frames=8)


def decoded(data: bytes, limits: DecodeLimits = LIMITS, decode: Callable[..., Any] = decode_image) -> np.ndarray[Any, Any]:
    """Decodes in this process, with the functions that the decoder's processes run."""
    result = decode(memoryview(data), limits)
    return np.frombuffer(result.pixels, np.uint8).reshape(result.frames, result.height, result.width, 3)


def refused(data: bytes, limits: DecodeLimits = LIMITS, decode: Callable[..., Any] = decode_image) -> str:
    with pytest.raises(DecodeError) as error:
        decode(memoryview(data), limits)
    return str(error.value)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP"])
def test_formats(kind: str) -> None:
    image = noise(31, 17).quantize().convert("RGB")
    assert (decoded(encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})))[0] == np.asarray(image)).all()


def test_jpeg() -> None:
    image = Image.new("RGB", (33, 20), (200, 100, 50))
    assert np.abs(decoded(encoded(image, "JPEG"))[0].astype(int) - (200, 100, 50)).max() <= 3
    assert decoded(encoded(image.convert("CMYK"), "JPEG")).shape == (1, 20, 33, 3)


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "ICO", "TGA", "PCX"])
def test_other_formats_are_refused(kind: str) -> None:
    assert "supported format (PNG, JPEG, WEBP, GIF, BMP)" in refused(picture(kind=kind))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_parts_are_white(mode: str) -> None:
    color = (0, 0, 0, 128) if mode == "RGBA" else (0, 128)
    image = Image.new(mode, (4, 4), color)
    image.putpixel((0, 0), tuple([0] * len(color)))
    image.putpixel((1, 0), (*color[:-1], 255))
    pixels = decoded(encoded(image))[0]
    assert pixels[0, 0].tolist() == [255] * 3
    assert pixels[0, 1].tolist() == [0] * 3
    assert pixels[1, 1].tolist() == [127] * 3


def test_a_transparent_colour_of_a_palette_is_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    pixels = decoded(encoded(image, "PNG", transparency=1))[0]
    assert pixels.tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_16_bits_are_scaled_not_cut_off() -> None:
    image = Image.fromarray(np.array([[0, 256, 32768, 65535]], np.uint16))
    assert decoded(encoded(image))[0, 0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_other_modes(mode: str) -> None:
    image = noise(9, 8).convert(mode)
    assert (decoded(encoded(image))[0] == np.asarray(image.convert("RGB"))).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(orientation: int) -> None:
    image = Image.new("RGB", (4, 2))
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decoded(encoded(image, "PNG", exif=exif))[0]
    corner = {1: (0, 0), 2: (0, 3), 3: (1, 3), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (3, 1), 8: (3, 0)}[orientation]
    assert pixels.shape == ((2, 4, 3) if orientation < 5 else (4, 2, 3))
    assert np.argwhere(pixels[:, :, 0]).tolist() == [list(corner)]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_an_animated_picture_is_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {}))
    assert decoded(data)[0, 0, 0].tolist() == [255, 0, 0]


def test_sizes_are_refused_before_decoding() -> None:
    bomb = encoded(Image.new("1", (20_000, 4_000)))
    assert len(bomb) < 20_000
    assert "20000 x 4000 = 80000000 pixels; at most 1000000 are allowed (max_image_pixels)" in refused(bomb)
    assert decoded(encoded(Image.new("RGB", (1000, 1000)))).shape == (1, 1000, 1000, 3)
    assert "max_image_pixels" in refused(encoded(Image.new("RGB", (1001, 1000))))
    assert "200 times" in refused(picture(201, 1))
    assert decoded(picture(200, 1)).shape == (1, 1, 200, 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_truncated_pictures_are_refused(kind: str) -> None:
    data = picture(64, 64, kind)
    for end in (0, 1, 10, len(data) // 4, len(data) // 2, len(data) * 9 // 10):
        with pytest.raises((DecodeError, OSError, SyntaxError, ValueError)):
            decoded(data[:end])


def test_real_pictures() -> None:
    for name in ("astronaut.png", "rocket.jpg", "camera.png"):
        data = real_picture(name)
        assert (decoded(data)[0] == np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))).all()


@pytest.mark.parametrize(
    ("codec", "container"),
    [("mpeg4", "mp4"), ("mpeg4", "avi"), ("mpeg4", "mov"), ("mpeg4", "matroska"), ("libvpx-vp9", "webm")],
)
def test_videos(codec: str, container: str) -> None:
    result = decode_video(memoryview(clip(30, codec=codec, container=container)), LIMITS)
    pixels = np.frombuffer(result.pixels, np.uint8).reshape(result.frames, result.height, result.width, 3)
    assert pixels.shape == (8, 48, 64, 3)
    facts = result.video
    assert facts is not None
    assert (facts.fps, facts.total_num_frames, facts.duration) == (10.0, 30, 3.0)
    assert facts.frames_indices == [0, 4, 8, 12, 17, 21, 25, 29]
    assert np.abs(pixels[:, 20, 20, 0] - 4.0 * np.array(facts.frames_indices)).max() < 6


@pytest.mark.parametrize(("total", "most"), [(1, 8), (5, 8), (8, 8), (9, 8), (100, 8), (100_000, 32), (7, 1), (3, 2)])
def test_frames_are_taken_evenly(total: int, most: int) -> None:
    indices = sample_indices(total, most)
    assert len(indices) == min(total, most)
    assert indices[0] == 0
    assert most == 1 or indices[-1] == total - 1
    steps = np.diff(indices)
    assert not len(steps) or steps.max() - steps.min() <= 1


def test_limits_of_videos() -> None:
    data = clip(20)
    assert "max_image_pixels" in refused(data, DecodeLimits(64 * 48 - 1, 10**9, 60.0, 8), decode_video)
    assert "max_video_pixels" in refused(data, DecodeLimits(10**6, 8 * 64 * 48 - 1, 60.0, 8), decode_video)
    assert "2.0 seconds long" in refused(data, DecodeLimits(10**6, 10**9, 1.9, 8), decode_video)
    assert decoded(data, DecodeLimits(64 * 48, 8 * 64 * 48, 2.0, 8), decode_video).shape[0] == 8


@pytest.mark.parametrize(
    "head", [b"#EXTM3U\n", b"ffconcat version 1.0\nfile /etc/passwd\n", b"<?xml version='1.0'?><MPD", b"", b"GIF89a"]
)
def test_playlists_and_others_are_no_videos(head: bytes) -> None:
    assert "not a video of a supported format" in refused(head + b" " * 100, decode=decode_video)


def test_broken_videos_are_refused() -> None:
    data = clip(20)
    for end in (4, 100, len(data) // 2):
        with pytest.raises((DecodeError, OSError, ValueError)):
            decoded(data[:end], decode=decode_video)


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    decoder = MediaDecoder(LIMITS, ProcessLimits(5.0, 2**28), workers=1)
    yield decoder
    decoder.close()


def error_of(decoder: MediaDecoder, kind: str, data: bytes) -> str:
    with pytest.raises(RequestError) as error:
        asyncio.run(getattr(decoder, kind)(data, "messages[0]"))
    assert error.value.param == "messages[0]"
    return error.value.message


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """20 kilobytes of 400 megapixels."""
    return encoded(Image.new("1", (20_000, 20_000)))


def test_the_processes_answer_as_the_functions_do(decoder: MediaDecoder, bomb: bytes) -> None:
    data = picture(40, 30)
    taken = asyncio.run(decoder.image(data, "messages[0]")).image
    assert taken.mode == "RGB"
    assert (np.asarray(taken) == decoded(data)[0]).all()
    video = asyncio.run(decoder.video(clip(20), "messages[0]"))
    assert video.frames.shape == (8, 48, 64, 3)
    assert video.metadata["do_sample_frames"] is False
    assert len(video.metadata["frames_indices"]) == 8
    for kind in ("image", "video"):
        for data in (b"", b"no picture", picture()[:-30]):
            error_of(decoder, kind, data)
    assert "400000000 pixels" in error_of(decoder, "image", bomb)


def test_a_job_that_ends_its_process_ends_no_other(bomb: bytes) -> None:
    """Limits of time and memory, on a picture that no limit of pixels refuses."""
    limits = DecodeLimits(10**9, 10**9, 60.0, 8)
    slow = MediaDecoder(limits, ProcessLimits(0.05, 2**32), workers=1)
    small = MediaDecoder(limits, ProcessLimits(20.0, 2**26), workers=1)
    try:
        assert "media_decode_seconds" in error_of(slow, "image", bomb)
        assert "media_decode_memory" in error_of(small, "image", bomb)
        for decoder in (slow, small):
            assert asyncio.run(decoder.image(picture(4, 4), "messages[0]")).image.size == (4, 4)
    finally:
        slow.close()
        small.close()
    limits_of_both = (["0.05", str(2**32)], ["20.0", str(2**26)])
    # Of a process that other tests have ended and not waited for, there is no command line.
    running = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in running if child.cmdline()[-2:] in limits_of_both]
