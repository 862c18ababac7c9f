"""Checkpoint: stored tensors under Hugging Face's names, read one at a time, whatever the kind of file."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

import torch

from headrace.config import Decision
from headrace.layers.stored import Codes, QuantSpec
from headrace.weights.names import Slice

DUMMY_STD = 0.02


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
    """A kind of file. A subclass overrides ``_whole``, or ``read`` where it reads parts by themselves."""

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
        """Reads the number format of a matrix; None: it is stored as floats, or in a GGUF file."""
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
    devices of one kind.

    Args:
        shapes: name -> shape of every tensor there shall be.
        device: where they are made.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int, device: str | torch.device = "cpu") -> None:
        self.tensors = {name: StoredTensor(shape, "F32", 4 * torch.Size(shape).numel(), name) for name, shape in shapes.items()}
        self._seed = seed
        self._device = device

    def _whole(self, name: str) -> torch.Tensor:
        shape = self.tensors[name].shape
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        key = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(key, "little") >> 1)
        return torch.empty(shape, device=self._device).normal_(std=DUMMY_STD, generator=generator)
