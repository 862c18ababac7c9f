"""Checkpoint: stored tensors of any kind of file under Hugging Face's names, read one at a time."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

import torch

from headrace.config import Decision
from headrace.errors import ConfigError
from headrace.layers.stored import Codes, QuantSpec
from headrace.weights.names import Slice

DUMMY_STD = 0.02
_CHUNK = 2**22
_E8M0_NAN = 255
_KINDS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A file's metadata of a tensor."""

    shape: tuple[int, ...]
    kind: str
    """The type in the file's format: F32, BF16, Q4_1 ..."""
    nbytes: int
    """Bytes that the tensor takes in the file."""
    origin: str
    """Name of the tensor in the file, and the file, for errors."""


class Checkpoint:
    """A kind of file. A subclass overrides ``_whole``, or ``read`` where it can read parts of a tensor."""

    tensors: Mapping[str, StoredTensor]
    """Stored tensors by their name at Hugging Face."""

    def read(self, name: str, where: Slice | None = None) -> torch.Tensor:
        """Reads the tensor, or a part of it, in a float dtype; it may be a read-only view of the file."""
        whole = self._whole(name)
        return whole if where is None else where.of(whole)

    def _whole(self, name: str) -> torch.Tensor:
        raise NotImplementedError

    def codes(self, name: str) -> Codes | None:
        """Reads the codes and scales of a matrix; None: it is stored as floats, or in a form that only ``read``
        knows."""
        return None

    def spec(self, name: str) -> QuantSpec | None:
        """Reads the number format of a matrix; None: it is stored as floats."""
        return None

    def may_be_left_out(self, name: str) -> bool:
        """Returns whether a model without a place for the tensor is the same model."""
        return False

    def decisions(self) -> tuple[Decision, ...]:
        """Returns how the checkpoint is read, for the report of loading."""
        return ()

    def close(self) -> None:
        """Closes the files."""


class DummyCheckpoint(Checkpoint):
    """Random weights in place of a file: normal with a deviation of 0.02, norms 1. The same for the same seed and names on
    devices of one kind, rounded to the dtype.

    Args:
        like: name -> a tensor of the shape and dtype of the one there shall be; it may have no values.
        device: where they are made.
    """

    def __init__(self, like: Mapping[str, torch.Tensor], seed: int, device: str | torch.device = "cpu") -> None:
        self.tensors = {name: StoredTensor(tuple(one.shape), _KINDS[one.dtype], one.nbytes, name) for name, one in like.items()}
        self._dtypes = {name: one.dtype for name, one in like.items()}
        self._seed = seed
        self._device = device

    def _whole(self, name: str) -> torch.Tensor:
        shape, dtype = self.tensors[name].shape, self._dtypes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self._device)
        key = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(key, "little") >> 1)
        made = torch.empty(shape, dtype=dtype, device=self._device)
        # Numbers are made in float32, some at a time, and then rounded.
        flat = made.view(-1)
        for start in range(0, len(flat), _CHUNK):
            part = flat[start : start + _CHUNK]
            part.copy_(torch.empty(part.shape, device=self._device).normal_(std=DUMMY_STD, generator=generator))
        return made


def check_scales(name: str, scales: torch.Tensor) -> None:
    """Raises: ConfigError: a scale is NaN or infinite. Bytes are exponents (e8m0)."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        wrong = bool((scales.view(torch.uint8) == _E8M0_NAN).any())
    else:
        wrong = not bool(scales.float().isfinite().all())
    if wrong:
        raise ConfigError(f"{name} has scales that are NaN or infinite: the checkpoint is damaged", "model")
