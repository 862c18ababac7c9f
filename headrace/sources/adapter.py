"""AdapterFiles: a LoRA adapter in peft's format, checked, kept in a file of ours and identified by its content."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from headrace.errors import ConfigError, listed
from headrace.host.user_files import check_regular, read_input
from headrace.options import shown

PARAM = "lora_path"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_WRAPPED = ".base_layer"
_FLOATS = ("F64", "F32", "BF16", "F16")
_TAKEN = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"),
        # The names of the tensors say what these do.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"),
    }
)
"""Fields of the configuration that are read, or that the tensors repeat."""
_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config", "eva_config"),
        *("qalora_group_size", "runtime_config", "ensure_weight_tying"),
    }
)
"""Fields that change neither the names nor the product of an adapter's tensors."""
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base model's weights as they are."""
_REFUSED_TENSORS = {
    "lora_embedding": "adapters of embeddings and of the output head are not supported",
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_bias": "biases are not supported",
}


class AdapterMatrix(msgspec.Struct, frozen=True, array_like=True):
    """Low-rank addition to one matrix of a checkpoint, ``scale * B A``, or to a matrix of each expert."""

    module: str
    """Name of the matrix in the base model's checkpoints, without ``.weight``; or of the module that has the experts'."""
    a: str
    """Name of the tensor ``[rank, inputs]``, or ``[experts * rank, inputs]``."""
    b: str
    """Name of the tensor ``[outputs, rank]``, or ``[outputs, rank * experts]``."""
    scale: float
    experts: int = 1
    parameters: tuple[str, ...] = ()
    """Names of the module's parameters that stack the experts' matrices, one of which it is: its shape says which. Empty: it is
    the module's weight."""

    @property
    def stored(self) -> list[str]:
        """Names of tensors of the base model's checkpoints, one of which it adds to."""
        return [f"{self.module}.{name}" for name in self.parameters or ("weight",)]


class AdapterFiles(msgspec.Struct, frozen=True, array_like=True):
    """An adapter. The file belongs to headrace and never changes; it is there as long as the adapter is loaded."""

    digest: str
    """BLAKE2b-128 of everything that its product depends on, in hexadecimal digits."""
    weights: str
    """Path of a safetensors file with the tensors."""
    matrices: tuple[AdapterMatrix, ...]
    """Additions in the order of their modules."""


class _Stored(msgspec.Struct, frozen=True):
    """A tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_adapter(path: str | Path, max_rank: int, directory: Path) -> AdapterFiles:
    """Copies the weights of an adapter to a directory of ours, checks all that can be checked without the model, and computes
    the digest.

    Args:
        path: a directory with peft's files, or a safetensors file with ``adapter_config.json`` beside it.
        max_rank: the largest rank that the engine has room for (``max_lora_rank``).

    Raises:
        ConfigError: it is not an adapter, or has parts that are not supported. Names the field or tensor at fault.
    """
    folder, weights = _find(Path(path).expanduser())
    config = _read_config(folder / CONFIG)
    descriptor, name = tempfile.mkstemp(dir=directory, suffix=".part")
    os.close(descriptor)
    kept = Path(name)
    try:
        shutil.copyfile(weights, kept)
        digest, matrices = _read_weights(kept, weights, config, max_rank)
        # The same content may be there already, under another name.
        os.replace(kept, target := directory / f"{digest}.safetensors")
    except OSError as error:
        raise ConfigError(f"{weights} cannot be copied to {directory}: {error.strerror}", PARAM) from error
    finally:
        kept.unlink(missing_ok=True)
    return AdapterFiles(digest, str(target), matrices)


def _find(path: Path) -> tuple[Path, Path]:
    """The directory of the configuration, and the file of the weights."""
    if path.is_dir():
        folder, weights = path, path / WEIGHTS
        if not weights.exists() and (pickled := sorted(path.glob("adapter_model.bin"))):
            raise ConfigError(
                f"{pickled[0]} is pickled, and unpickling runs code that is in the file: save the adapter as safetensors", PARAM
            )
    else:
        folder, weights = path.parent, path
        if path.suffix != ".safetensors":
            raise ConfigError(f"{path} is neither a directory with {CONFIG} nor a safetensors file", PARAM)
    check_regular(folder / CONFIG, PARAM)
    check_regular(weights, PARAM)
    return folder, weights


def _read_config(path: Path) -> dict[str, Any]:
    """The configuration, once everything in it is known to be supported."""
    try:
        config = json.loads(read_input(path, PARAM))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", PARAM) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object, not {shown(config)}", PARAM)
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type is {shown(config.get('peft_type'))}, and must be 'LORA'", PARAM)
    if (bias := config.get("bias", "none")) != "none":
        raise ConfigError(f"{path}: bias is {shown(bias)}: adapters that train biases are not supported", PARAM)
    if (start := config.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        raise ConfigError(
            f"{path}: init_lora_weights is {shown(start)}, which changes the base model's weights: convert the adapter with "
            "peft (path_initial_model_for_weight_conversion)",
            PARAM,
        )
    unsupported = [name for name, value in config.items() if name not in _TAKEN | _WITHOUT_EFFECT and value]
    if unsupported:
        values = [f"{name} {shown(config[name])}" for name in sorted(unsupported)]
        raise ConfigError(f"{path}: not supported: {listed(values)}", PARAM)
    _check_numbers(path, config)
    return config


def _check_numbers(path: Path, config: Mapping[str, Any]) -> None:
    def is_number(value: Any, kinds: tuple[type, ...]) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(float(value))  # type: ignore[arg-type]

    for name, kinds, wanted in (("r", (int,), "an integer"), ("lora_alpha", (int, float), "a number")):
        if not is_number(config.get(name, 8), kinds) or (name == "r" and config.get(name, 8) < 1):
            raise ConfigError(f"{path}: {name} is {shown(config.get(name))}, and must be {wanted}", PARAM)
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) and "." in target for target in targets):
        raise ConfigError(f"{path}: target_parameters must be a list of names, each with a module and a dot before it", PARAM)
    if not isinstance(config.get("use_rslora", False), bool):
        raise ConfigError(f"{path}: use_rslora must be true or false", PARAM)
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict) or not all(is_number(value, (int, float)) for value in patterns.values()):
            raise ConfigError(f"{path}: {name} must be an object of numbers", PARAM)
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"{path}: {name} has {shown(pattern)}, which is not a regular expression: {error}", PARAM
                ) from error


def _read_weights(kept: Path, origin: Path, config: Mapping[str, Any], max_rank: int) -> tuple[str, tuple[AdapterMatrix, ...]]:
    """The digest and the matrices of a file, which is named ``origin`` in messages."""
    try:
        with safe_open(kept, framework="numpy") as checked:  # Checks that offsets, shapes and the file's size agree.
            checked.keys()
    except SafetensorError as error:
        raise ConfigError(f"{origin} is not a safetensors file: {error}", PARAM) from error
    with kept.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as whole:
        size = int.from_bytes(whole[:8], "little")
        entries = json.loads(bytes(whole[8 : 8 + size]))
        entries.pop("__metadata__", None)
        stored = {name: msgspec.convert(entry, _Stored) for name, entry in entries.items()}
        matrices = tuple(_matrices(origin, stored, config, max_rank))
        digest = hashlib.blake2b(digest_size=16)
        for matrix in matrices:
            digest.update(msgspec.msgpack.encode((matrix.module, matrix.scale, matrix.experts, matrix.parameters)))
            for tensor in (stored[matrix.a], stored[matrix.b]):
                digest.update(msgspec.msgpack.encode((tensor.dtype, tensor.shape)))
                start, end = tensor.data_offsets
                with whole[8 + size + start : 8 + size + end] as content:
                    digest.update(content)
        return digest.hexdigest(), matrices


def _matrices(origin: Path, stored: Mapping[str, _Stored], config: Mapping[str, Any], max_rank: int) -> Sequence[AdapterMatrix]:
    if not stored:
        raise ConfigError(f"{origin} has no tensors", PARAM)
    found = []
    for name, tensor in stored.items():
        if tensor.dtype not in _FLOATS or len(tensor.shape) != 2:
            raise ConfigError(f"{origin}: {name} is {tensor.dtype} {list(tensor.shape)}, and must be a matrix of floats", PARAM)
        if not name.startswith(_PREFIX) or not name.endswith((_A, _B)):
            why = next((why for part, why in _REFUSED_TENSORS.items() if part in name), "it is not a low-rank part of a matrix")
            raise ConfigError(f"{origin}: {name}: {why}", PARAM)
        other = name.removesuffix(_B) + _A if name.endswith(_B) else name.removesuffix(_A) + _B
        if other not in stored:
            raise ConfigError(f"{origin} has {name}, and no {other}", PARAM)
        if name.endswith(_A):
            found.append(_matrix(origin, name, other, tensor.shape, stored[other].shape, config, max_rank))
    return sorted(found, key=lambda matrix: (matrix.module, matrix.a))


def _matrix(
    origin: Path, a: str, b: str, of_a: tuple[int, ...], of_b: tuple[int, ...], config: Mapping[str, Any], max_rank: int
) -> AdapterMatrix:
    module, parameters = _adapted(a.removeprefix(_PREFIX).removesuffix(_A), config.get("target_parameters") or ())
    rank = _by_pattern(config.get("rank_pattern") or {}, module, config.get("r", 8))
    alpha = _by_pattern(config.get("alpha_pattern") or {}, module, config.get("lora_alpha", 8))
    experts = of_a[0] // rank if parameters else 1
    if of_a[0] != of_b[1] or of_a[0] != rank * experts or not experts:
        raise ConfigError(f"{origin}: {a} {list(of_a)} and {b} {list(of_b)} must have the rank {rank}, as {CONFIG} says", PARAM)
    if rank > max_rank:
        raise ConfigError(
            f"{origin}: {a} has the rank {rank}, and --max-lora-rank is {max_rank}: start with {rank} or more", PARAM
        )
    scale = alpha / math.sqrt(rank) if config.get("use_rslora", False) else alpha / rank
    return AdapterMatrix(module, a, b, scale, experts, parameters)


def _adapted(module: str, target_parameters: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The module that peft's name means, and those of its parameters that may be meant. One whose weight is meant has none."""
    inner = module
    # peft wraps a module once more for each further parameter of it.
    while inner.endswith(_WRAPPED):
        inner = inner.removesuffix(_WRAPPED)
    found = []
    for target in target_parameters:
        owner, _, name = target.rpartition(".")
        if inner == owner or inner.endswith(f".{owner}"):
            found.append(name)
    return (inner, tuple(found)) if found and found != ["weight"] else (module, ())


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as peft reads them."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), default)
