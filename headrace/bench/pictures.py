"""Pictures of random pixels, and random features in their place, for workloads and for loads on a server."""

from __future__ import annotations

import base64
import dataclasses
import io
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.options import ImageForm
from headrace.errors import ConfigError

if TYPE_CHECKING:
    import torch

MAX_BYTES = 2**33
"""Largest size of the pictures of a load, which are made before it."""


@dataclasses.dataclass(frozen=True)
class PictureFeatures:
    """The size of a picture's features in a model."""

    rows: int
    hidden_size: int
    grid: tuple[int, int, int]
    dtype: str = "float32"
    deepstack_layers: int = 0

    def tensors(self, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Random features, as ``multi_modal_data`` and safetensors name them."""
        import torch

        def made(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape, np.float32)).to(getattr(torch, self.dtype))

        tensors = {"features": made(self.rows, self.hidden_size), "grid_thw": torch.tensor([self.grid])}
        if self.deepstack_layers:
            tensors["deepstack"] = made(self.deepstack_layers, self.rows, self.hidden_size)
        return tensors


@dataclasses.dataclass(frozen=True)
class Pictures:
    """One picture for each prompt, of random pixels, which no cache has seen."""

    width: int
    height: int
    encoded: bool = False
    """Random features stand for the pictures."""
    features: PictureFeatures | None = None
    """Features that stand for an encoded picture in the model; None: not known yet."""

    def media(self, seed: int) -> dict[str, Any]:
        """``multi_modal_data`` of one prompt."""
        rng = np.random.default_rng(seed)
        if not self.encoded:
            from PIL import Image

            return {"image": [Image.fromarray(rng.integers(0, 256, (self.height, self.width, 3), np.uint8))]}
        if self.features is None:
            raise ConfigError("features are made for a model, and none is known", "--workload")
        return {"image_embeds": self.features.tensors(rng)}


@dataclasses.dataclass(frozen=True)
class SentPictures:
    """The pictures of the requests of a load, one for each.

    Args:
        pictures: encoded for the forms that send features.
        seed: of the first.
    """

    pictures: Pictures
    form: ImageForm
    seed: int = dataclasses.field(default_factory=lambda: secrets.randbits(48))
    """Seed of the first; another one each time, since the server may still have pictures of an earlier load."""
    max_bytes: int = MAX_BYTES

    def shares(self, counts: Sequence[int]) -> list[SentPictures]:
        """Returns the shares of processes that send ``counts`` pictures each."""
        starts = [self.seed + sum(counts[:index]) for index in range(len(counts))]
        return [dataclasses.replace(self, seed=start, max_bytes=self.max_bytes // len(counts)) for start in starts]

    def files(self, count: int, tell: Callable[[str], None]) -> Iterator[bytes]:
        """The file of each: a picture, or safetensors.

        Raises:
            ConfigError: they would take too much memory; names the option.
        """
        for number in range(count):
            tell(f"making picture {number + 1} of {count}")
            file = self._file(self.seed + number)
            if len(file) * count > self.max_bytes:
                message = f"{count} pictures of {len(file)} bytes are held at once, and at most {self.max_bytes} may be"
                raise ConfigError(message, "--num-requests")
            yield file

    def _file(self, seed: int) -> bytes:
        media = self.pictures.media(seed)
        if self.pictures.encoded:
            from safetensors.torch import save

            return save(media["image_embeds"])
        file = io.BytesIO()
        # Noise has nothing to compress.
        options = {"compress_level": 1} if self.form == "png" else {"quality": 90}
        media["image"][0].save(file, self.form, **options)
        return file.getvalue()

    def part(self, file: bytes) -> dict[str, Any]:
        """The part of a message that brings a file itself."""
        data = base64.b64encode(file).decode()
        if self.pictures.encoded:
            return {"type": "image_embeds", "image_embeds": {"data": data}}
        return {"type": "image_url", "image_url": {"url": f"data:image/{self.form};base64,{data}"}}
