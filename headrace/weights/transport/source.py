"""OpenSource: weights that can be read now, whose names, types and shapes are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from headrace.core.weights import TensorSpec
from headrace.errors import ConfigError
from headrace.weights.checkpoint import Checkpoint
from headrace.weights.matrices import CodedTensor
from headrace.weights.safetensors import SafetensorsCheckpoint
from headrace.weights.update import TensorFacts

_INDEX = "model.safetensors.index.json"
_KINDS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class OpenSource(Protocol):
    facts: list[TensorFacts]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | CodedTensor]]:
        """Reads all tensors, each once. A tensor is valid until the next is read.

        Raises:
            Exception: the sender failed, or was silent for too long.
        """
        ...

    def close(self) -> None: ...


class OpenCheckpoint(OpenSource):
    """Tensors of a checkpoint, under the names that a model has for them.

    Args:
        wanted: whether an update takes the tensor of a name.
        coded: tensors that are stored as codes are taken too.

    Raises:
        ConfigError: a tensor is stored as codes.
    """

    def __init__(
        self, checkpoint: Checkpoint, wanted: Callable[[str], bool] = lambda name: True, *, coded: bool = False
    ) -> None:
        self._checkpoint = checkpoint
        stored = {name: one for name, one in checkpoint.tensors.items() if wanted(name)}
        self._coded = {name for name, one in stored.items() if one.kind not in _KINDS} if coded else set[str]()
        self.facts = [
            TensorFacts(name, torch.float32, one.shape, coded=True)
            if name in self._coded
            else TensorFacts(name, _dtype(name, one.kind), one.shape)
            for name, one in stored.items()
        ]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | CodedTensor]]:
        for fact in self.facts:
            coded = fact.name in self._coded
            yield fact.name, CodedTensor(self._checkpoint, fact.name) if coded else self._checkpoint.read(fact.name)

    def close(self) -> None:
        self._checkpoint.close()


class OpenFiles(OpenCheckpoint):
    """The safetensors files of a directory. They stay readable when they are deleted.

    Raises:
        ConfigError: the directory has none, or lacks one that its index names; or one cannot be read.
    """

    def __init__(self, path: str) -> None:
        files = _files(Path(path))
        try:
            checkpoint = SafetensorsCheckpoint(files)
        except ConfigError as error:
            raise ConfigError(error.message, "path") from error
        super().__init__(checkpoint)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"there is no directory {folder}", "path")
    files = sorted(folder.glob("*.safetensors"))
    if (index := folder / _INDEX).is_file():
        try:
            named = msgspec.json.decode(index.read_bytes())["weight_map"].values()
            files = sorted({folder / Path(str(name)).name for name in named})
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ConfigError(f"{index} is not an index of safetensors files: {error}", "path") from error
    if absent := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{folder} lacks {', '.join(absent)}", "path")
    if not files:
        raise ConfigError(f"{folder} has no safetensors files", "path")
    return files


def _dtype(name: str, kind: str) -> torch.dtype:
    if kind not in _KINDS:
        raise ConfigError(f"{name} is stored as {kind}, and an update must have one of {', '.join(_KINDS)}", "path")
    return _KINDS[kind]


def announced(tensors: list[TensorSpec]) -> list[TensorFacts]:
    """Raises: ConfigError: a dtype is unknown."""
    return [TensorFacts(one.name, _torch_dtype(one), one.shape) for one in tensors]


def _torch_dtype(one: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, one.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{one.name} is announced as {one.dtype}, which is not a dtype of PyTorch", "dtype_names")
    if min(one.shape, default=0) < 0:
        raise ConfigError(f"{one.name} is announced with the shape {list(one.shape)}", "shapes")
    return dtype
