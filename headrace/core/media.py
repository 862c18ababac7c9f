"""Tensors and encoder inputs as bytes, on their way from the process that prepares a prompt to the one that runs the model."""

from __future__ import annotations

import msgspec

from headrace.choices import Modality

DTYPE_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}


class TensorData(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous little-endian tensor. ``len(data)`` fits ``dtype`` and ``shape``."""

    dtype: str
    """One of ``DTYPE_SIZES``."""
    shape: tuple[int, ...]
    data: memoryview
    """Bytes. A view: the pixels of a picture are large, and a copy would hold up the interpreter's other threads."""


class PatchLayout(msgspec.Struct, frozen=True, array_like=True):
    """Layout of an encoder's patches, made of frames on its device: frames take a quarter of float32's size, or less."""

    shades: TensorData
    """``[3, 256]`` float32: what the encoder gets for each value of red, green and blue."""
    patch_size: int
    """Pixels of a side."""
    merge_size: int
    """Patches of a side that follow each other, since they are merged."""
    temporal_patch_size: int
    """Frames of a patch."""


class ItemInputs(msgspec.Struct, frozen=True, array_like=True):
    """The content of one item of a prompt: inputs of the vision encoder, or features that were encoded elsewhere."""

    modality: Modality
    runs: tuple[tuple[int, int], ...]
    """(offset from the item's start, length) of the tokens that take a feature row each, in order."""
    tensors: dict[str, TensorData]
    """Inputs of the encoder by name. If encoded: ``features [n, hidden]``, and ``deepstack [levels, n, hidden]`` where used."""
    encoded: bool = False
    """``tensors`` are features: the item needs no encoder."""
    patches: PatchLayout | None = None
    """Layout for the uint8 tensor in ``tensors``, frames ``[n, height, width, 3]``. None: there is no such tensor."""

    @property
    def num_rows(self) -> int:
        return sum(length for _, length in self.runs)


class RopePositions(msgspec.Struct, frozen=True, array_like=True):
    """Positions of a prompt in a model whose rotary embedding has several sections (time, height, width)."""

    prompt: bytes
    """``[3, num_prompt]`` little-endian int32."""
    delta: int
    """Rotary position less index of the tokens after the prompt, which have the same position in all sections."""
