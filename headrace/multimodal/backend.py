"""The image and video processors of transformers, and the library that they resize pictures with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.core.media import TensorData
from headrace.errors import ConfigError, import_reason
from headrace.multimodal.items import Pixels, array_of, view_data, wrong

_VIDEO = "video_preprocessor_config.json"
_IMAGE = "preprocessor_config.json"
_BOTH = "processor_config.json"

Backend = Literal["torchvision", "pil"]
"""Library that resizes pictures. They round differently, so that results differ."""
_TORCH_FILTERS = {2: "bilinear", 3: "bicubic"}
"""``PIL.Image.Resampling`` -> torch's name of the filter that torchvision uses for it."""


class ImageProcessor:
    """transformers' image processor of a model.

    Args:
        folder: of the model's files.

    Raises:
        ConfigError: the folder has none that can be read.
    """

    def __init__(self, folder: Path) -> None:
        self.backend = _usable_backend()
        try:
            from transformers import AutoImageProcessor

            self.hf: Any = AutoImageProcessor.from_pretrained(folder, backend=self.backend, local_files_only=True)
        except Exception as error:
            raise ConfigError(f"{folder} has no image processor that can be used: {import_reason(error)}", "model") from error

    def __call__(self, image: Any, where: str, **options: Any) -> dict[str, TensorData]:
        """Returns the tensors that the processor makes of one picture. Raises RequestError for pictures that it cannot
        process."""
        try:
            made = self.hf(images=[image], return_tensors="np" if self.backend == "pil" else "pt", **options)
        except (ValueError, ZeroDivisionError, TypeError) as error:
            why = " ".join(str(error).split())[:200]
            raise wrong(where, f"cannot be processed: {why}") from error
        return {name: view_data(np.ascontiguousarray(value)) for name, value in made.items()}

    def fingerprint(self, *others: Any) -> str:
        """Differs where what the processor makes would."""
        return json.dumps([self.backend, type(self.hf).__name__, self.hf.to_dict(), *others], sort_keys=True, default=str)

    def resize(self, frames: Pixels, height: int, width: int) -> Pixels:
        """Pictures ``[n, h, w, 3]`` at another size, as transformers resizes pictures."""
        if self.backend == "pil":
            return _resized_by_pil(frames, height, width, self.hf.resample)
        return self.resize_frames(frames, height, width)

    def resize_frames(self, frames: Pixels, height: int, width: int) -> Pixels:
        """Frames of a video ``[n, h, w, 3]`` at another size, as transformers' video processors resize them, which all take
        torchvision. Its filters are torch's, so that frames do not depend on whether it is there."""
        mode = _TORCH_FILTERS.get(self.hf.resample)
        if mode is None or frames.shape[1:3] == (height, width):
            return _resized_by_pil(frames, height, width, self.hf.resample)
        import torch

        pixels = torch.from_numpy(frames.copy()).permute(0, 3, 1, 2)  # torch takes no array that may not be written to.
        # torchvision computes in float32 where torch has no fast filter of bytes.
        in_bytes = mode == "bicubic" or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        given = pixels if in_bytes else pixels.float()
        made = torch.nn.functional.interpolate(given, (height, width), mode=mode, align_corners=False, antialias=True)
        made = made if in_bytes else made.round_().to(torch.uint8)
        return np.ascontiguousarray(made.permute(0, 2, 3, 1).numpy())

    def shades(self, block: int, **options: Any) -> TensorData:
        """``[3, 256]`` float32: what the processor makes of each value of red, green and blue.

        Args:
            block: pixels of a side of merged patches, which follow each other row by row.
        """
        values = np.arange(256, dtype=np.uint8).reshape(16, 16)
        picture = values.repeat(block, axis=0).repeat(block, axis=1)[:, :, None].repeat(3, axis=2)
        made = array_of(self(picture, "the picture of all shades", do_resize=False, **options)["pixel_values"])
        return view_data(np.ascontiguousarray(made.reshape(256, -1, 3, made.shape[-1] // 3)[:, 0, :, 0].T))


def _resized_by_pil(frames: Pixels, height: int, width: int, resample: int) -> Pixels:
    from PIL import Image

    if frames.shape[1:3] == (height, width):
        return frames
    filtered = Image.Resampling(resample)
    return np.stack([np.asarray(Image.fromarray(frame).resize((width, height), filtered)) for frame in frames])


def _usable_backend() -> Backend:
    """torchvision where it can be imported, as transformers chooses; else pil."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # RuntimeError: it is for another build of torch.
        return "pil"
    return "torchvision"


def video_fields(folder: Path) -> dict[str, Any]:
    """The settings of a model's video processor, in the file that transformers would read; empty: there is none."""
    both = _read(folder / _BOTH).get("video_processor")
    fields: dict[str, Any] = both or _read(folder / _VIDEO) or _read(folder / _IMAGE)
    return fields


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
