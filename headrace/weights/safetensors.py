"""Tensors of safetensors files, memory-mapped and read on demand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.errors import ConfigError
from headrace.weights.checkpoint import Checkpoint, StoredTensor
from headrace.weights.names import Slice

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
"""The float types and their bytes. Integers need a number format that interprets them."""
_BYTES = _FLOATS | {"F8_E8M0": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "BOOL": 1}


class SafetensorsCheckpoint(Checkpoint):
    """One file or several, whose tensors are all different ones.

    Raises:
        ConfigError: a file cannot be read, two hold a tensor of the same name, or a tensor is not of floats.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.nbytes_read = 0
        """Bytes of tensors that have been read."""
        self._handles: dict[str, Any] = {}
        self._stack = ExitStack()
        try:
            for file in files:
                self._open(file)
        except BaseException:
            self.close()
            raise

    def _open(self, file: Path) -> None:
        try:
            handle = self._stack.enter_context(safe_open(file, framework="pt"))
            for name in handle.keys():  # noqa: SIM118 (it is not a dict)
                if name in self.tensors:
                    raise ConfigError(f"{name} is in {self.tensors[name].origin} and in {file.name} too", "model")
                part = handle.get_slice(name)
                shape, kind = tuple(part.get_shape()), part.get_dtype()
                nbytes = math.prod(shape) * _BYTES.get(kind, 0)
                self.tensors[name] = StoredTensor(shape, kind, nbytes, file.name)
                self._handles[name] = handle
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} cannot be read: {error}", "model") from error

    def read(self, name: str, where: Slice | None = None) -> torch.Tensor:
        stored = self.tensors[name]
        if stored.kind not in _FLOATS:
            raise ConfigError(
                f"{name} in {stored.origin} is stored as {stored.kind}, which is not a type of weights that is read: "
                f"{', '.join(_FLOATS)} are",
                "model",
            )
        return self.raw(name, where)

    def raw(self, name: str, where: Slice | None = None) -> torch.Tensor:
        """Reads the stored tensor, or a part of it, in its own type, for number formats that interpret it."""
        handle = self._handles[name]
        if where is None:
            tensor: torch.Tensor = handle.get_tensor(name)
        else:
            before, stored = (slice(None),) * where.axis, handle.get_slice(name)
            parts = [stored[(*before, slice(start, stop))] for start, stop in where.ranges]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=where.axis)
        self.nbytes_read += tensor.nbytes
        return tensor

    def close(self) -> None:
        self._stack.close()
