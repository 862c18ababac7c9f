"""Distributed checkpoints of Megatron-core: which tensors there are, read without running anything that a file asks for.

Such a checkpoint says where its tensors lie in ``.metadata``, which is a pickle, and PyTorch reads it as one: whoever wrote
it could have code run. So it is read here first, by a reader that knows the classes of an honest one by name and makes none
of them; anything else in it is refused. ``common.pt`` and the tensors are read by loaders of plain data alone.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec

from headrace.errors import ConfigError
from headrace.options import INT64_MAX
from headrace.sources.fields import Experts, Layers, Positions, Size, Width, read_json, typed
from headrace.sources.locate import refuse_irregular

COMMON = "common.pt"
_INDEX = ".metadata"
_FORMAT = "metadata.json"
_LATEST = "latest_checkpointed_iteration.txt"
_NAME_BYTES = 20
"""Most bytes of the file: more than the number of an iteration has."""
_DCP = "torch.distributed.checkpoint"
_CLASSES = frozenset(
    {
        *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((f"{_DCP}.metadata", name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
        *((f"{_DCP}.metadata", name) for name in ("_MEM_FORMAT_ENCODING",)),
        *((f"{_DCP}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        *((f"{_DCP}.filesystem", name) for name in ("_StorageInfo",)),
        *(("megatron.core.dist_checkpointing.strategies.torch", name) for name in ("MCoreMetadata", "MCoreSavePlan")),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
    }
)
_DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("uint8", "int8", "int16", "int32", "int64", "bool"),
    }
)


_SHAPE = tuple[Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)], ...]
_ARGUMENTS: dict[str, Any] = {
    "num_layers": Layers,
    **dict.fromkeys(("hidden_size", "num_attention_heads"), Size),
    "max_position_embeddings": Positions,
    **dict.fromkeys(("ffn_hidden_size", "kv_channels", "num_query_groups", "moe_ffn_hidden_size"), Size | None),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), Width | None),
    **dict.fromkeys(("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), Width | None),
    "num_experts": Experts | None,
}


def check_arguments(arguments: Mapping[str, Any], file: Path) -> None:
    """Checks the arguments of a training run that decide how large its model is.

    Raises:
        ConfigError: one is missing, of another type or out of range; names file and argument.
    """
    for name, kind in _ARGUMENTS.items():
        typed(arguments.get(name), kind, file, f"args.{name}")


@dataclasses.dataclass(frozen=True)
class MegatronFiles:
    """A distributed checkpoint that was looked at."""

    directory: Path
    """Directory with ``metadata.json``."""
    tensors: dict[str, tuple[int, ...]]
    """Name -> shape. Layers that are alike are one tensor, with an axis for the layers."""
    files: list[Path]


def is_megatron(path: Path) -> bool:
    """Whether a directory is a distributed checkpoint, or one of a training run, which has one for each iteration."""
    return (path / _FORMAT).exists() or (path / _LATEST).exists()


def find_megatron(path: Path) -> MegatronFiles:
    """Looks at a checkpoint, of a run's directory at the latest.

    Raises:
        ConfigError: it is none, or of a format that is not read, or its index asks for something other than tensors.
    """
    directory = _latest(path)
    refuse_irregular(directory)
    names = (("sharded_backend", None), ("common_backend", "torch"))
    try:
        described = read_json(directory / _FORMAT)
        backend = tuple(typed(described.get(name, default), str, directory / _FORMAT, name) for name, default in names)
    except ConfigError as error:
        raise ConfigError(f"{directory} is not a distributed checkpoint of Megatron: {error.message}", "model") from error
    if backend != ("torch_dist", "torch"):
        raise ConfigError(f"{directory} is stored as {' and '.join(backend)}: only torch_dist and torch are read", "model")
    for name in (_INDEX, COMMON):
        if not (directory / name).is_file():
            raise ConfigError(f"{directory} is not a distributed checkpoint of Megatron: it has no {name}", "model")
    index = _read_index(directory / _INDEX)
    return MegatronFiles(directory, _tensors(index, directory / _INDEX), _places(index, directory))


def _latest(path: Path) -> Path:
    file = path / _LATEST
    if (path / _FORMAT).exists() or not file.exists():
        return path
    text = file.read_bytes()[:_NAME_BYTES].decode("utf-8", "replace").strip()
    if text != "release" and not (text.isdecimal() and len(text) < _NAME_BYTES):
        raise ConfigError(f"{file} names no iteration: {text[:40]!r}", "model")
    return path / ("release" if text == "release" else f"iter_{int(text):07d}")


class _Object:
    """Stands for every class that a pickle names, and keeps the values and fields that it is given."""

    kind = ""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.fields[key] = value

    def __hash__(self) -> int:
        return id(self)


class _Reader(pickle.Unpickler):
    """Makes stand-ins of known classes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module == "torch" and name in _DTYPES) or (module, name) in _CLASSES:
            return type(name, (_Object,), {"kind": name})
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to other data")


def _read_index(file: Path) -> _Object:
    try:
        index = _Reader(io.BytesIO(file.read_bytes())).load()
    except Exception as error:
        # What a pickle raises is up to whoever wrote it.
        raise ConfigError(f"{file} is not the index of a checkpoint of tensors, and is not read: {error}", "model") from error
    if not isinstance(index, _Object) or index.kind != "Metadata":
        raise ConfigError(f"{file} is not the index of a checkpoint", "model")
    return index


def _tensors(index: _Object, file: Path) -> dict[str, tuple[int, ...]]:
    described = index.fields.get("state_dict_metadata")
    if not isinstance(described, dict):
        raise ConfigError(f"{file} lists no tensors", "model")
    return {
        typed(name, str, file, "a tensor's name"): typed(entry.fields.get("size"), _SHAPE, file, f"the size of {name}")
        for name, entry in described.items()
        if isinstance(entry, _Object) and entry.kind == "TensorStorageMetadata"
    }


def _places(index: _Object, directory: Path) -> list[Path]:
    """The files that tensors lie in: of this directory alone."""
    stored = index.fields.get("storage_data")
    infos = stored.values() if isinstance(stored, dict) else ()
    names = {info.fields.get("relative_path") for info in infos if isinstance(info, _Object)}
    foreign = [name for name in names if not isinstance(name, str) or PurePosixPath(name).name != name]
    if foreign:
        raise ConfigError(f"{directory / _INDEX} names {foreign[0]!r}, which is not a file of its directory", "model")
    files = [directory / str(name) for name in sorted(map(str, names))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{directory} lacks {', '.join(missing[:5])}", "model")
    return files
