"""Takes from earlier starts on this machine what a start would find again: the profile of the largest step.

A digest of all that the memory of a step depends on names a profile: headrace's own code, versions of libraries and driver, the
device, the configuration, and the model's tensors. Where any of them differs, none is found, and the step is measured. What
depends on the moment, such as the memory of other processes, is asked for at each start.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from torch import nn

import headrace
from headrace.config import EngineConfig
from headrace.kernels import cuda_launch, support
from headrace.models.decoder import Decoder
from headrace.models.interface import Model
from headrace.parallel.agreement import Agreement
from headrace.resolve import DeviceFacts
from headrace.sources.user_cache import keep
from headrace.startup.kernel_bundle import profiles
from headrace.startup.profile import Profile, measure, profile_of

_THREADS = 16
_GRAIN = 1 << 24
_LIBRARIES = ("torch", "triton", "flashinfer-python", "nvidia-cublas")
_VARIABLES = ("CUBLAS", "CUDA", "CUDNN", "NVIDIA", "PYTORCH", "TORCH", "TRITON")
"""Beginnings of the names of environment variables that may change what a step takes, unless they say where files are kept."""
_PLACES = ("_DIR", "_HOME")
_DRIVER = Path("/proc/driver/nvidia/version")

Bytes = Annotated[int, msgspec.Meta(ge=0)]


class KnownProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a ``Profile`` that are the same at each start."""

    activations: Bytes
    workspaces: Bytes
    vision: Bytes
    libraries: Bytes


def profiled(
    model: Model, config: EngineConfig, device: DeviceFacts, ranks: Agreement, encode: Sequence[Callable[[], object]]
) -> tuple[Profile, bool]:
    """The profile of the model on its GPU, and whether it is known from an earlier start, which it is for all ranks or none.

    Args:
        encode: calls of the vision encoder, as for ``measure``.
    """
    file = None
    # Encoders, and other libraries' models, run code that is not ours.
    if isinstance(model, Decoder) and not encode and not support.refusals(device.device):
        file = profiles() / f"{_digest(model, config, device, ranks)}.json"
    known = None if file is None else _read(file)
    if not ranks.any(known is None) and known is not None:
        return profile_of(config, **msgspec.structs.asdict(known)), True
    profile = measure(model, config, encode, dry_run(model, device, ranks.size))
    if file is not None:
        found = KnownProfile(**{name: getattr(profile, name) for name in KnownProfile.__struct_fields__})
        keep(file, msgspec.json.encode(found).decode())
    return profile, False


def ask_compiler(device: DeviceFacts) -> None:
    """Lets a thread ask for what compilers need once, beside the weights. Returns before it ends."""
    if device.cuda and not support.refusals(device.device):
        threading.Thread(target=_ask_compiler, args=(torch.cuda.current_device(),), name="triton", daemon=True).start()


def _ask_compiler(device: int) -> None:
    from headrace.kernels import triton_launch

    cuda_launch.refusals(torch.device("cuda", device))
    triton_launch.ask_compiler(device)


def dry_run(model: Model, device: DeviceFacts, ranks: int) -> AbstractContextManager[object] | None:
    """Steps within it compile their kernels on this process's cores, and launch none.

    None: there is no Triton, or what kernels have not written might lead other code astray: libraries' models, and ranks that
    wait for each other.
    """
    if support.refusals(device.device) or not isinstance(model, Decoder) or ranks > 1:
        return None
    from headrace.kernels.triton_launch import compile_launches

    return compile_launches(min(_THREADS, device.num_cores))


def _read(file: Path) -> KnownProfile | None:
    """None: there is no such file, or it is damaged; or the kernels that were compiled with it are gone."""
    try:
        known = msgspec.json.decode(file.read_bytes(), type=KnownProfile)
    except (OSError, msgspec.MsgspecError):
        return None
    from headrace.kernels.triton_launch import compiled_kernels

    return known if compiled_kernels().is_dir() else None


def _digest(model: nn.Module, config: EngineConfig, device: DeviceFacts, ranks: Agreement) -> str:
    """Names the profile of a model of ours."""
    digest = hashlib.sha256()
    for fact in _facts(model, config, device, ranks):
        digest.update(f"{fact}\0".encode())
    for source in sorted(Path(headrace.__path__[0]).rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _facts(model: nn.Module, config: EngineConfig, device: DeviceFacts, ranks: Agreement) -> Iterator[object]:
    # What is free differs from start to start, and so do sizes of the cache and decisions that tell of it; a step does not.
    cache = dataclasses.replace(config.cache, nbytes=0, state_snapshot_bytes=0)
    yield dataclasses.replace(config, cache=cache, decisions=())
    # Weights, in whatever format. Loading leaves some KiB more or less of garbage.
    yield round(torch.cuda.memory_allocated() / _GRAIN)
    yield ranks.size, device.name, device.total_memory, sorted(device.instructions)
    tensors = *model.named_parameters(), *model.named_buffers()
    yield [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
    for library in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            yield library, importlib.metadata.version(library)
    yield torch.version.cuda
    with suppress(OSError):
        yield _DRIVER.read_text()
    names = sorted(name for name in os.environ if name.startswith(_VARIABLES) and not name.endswith(_PLACES))
    yield [(name, os.environ[name]) for name in names]
