"""Weights in memory of another process of the host: safetensors in a segment of shared memory, and tensors on its GPU."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from headrace.core.weights import IpcHandle, IpcSource
from headrace.errors import ConfigError
from headrace.weights.safetensors import SafetensorsCheckpoint
from headrace.weights.transport.source import OpenCheckpoint, OpenSource, announced

_SEGMENTS = Path("/dev/shm")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_COUNTERS = re.compile(rb"/?[A-Za-z0-9_.-]{1,200}")
_MOST_COUNTERS = 10_000
"""Numbers of a segment in which PyTorch counts references: an index beyond would be written outside of it."""


class OpenSegment(OpenCheckpoint):
    """A segment of shared memory that has the bytes of a safetensors file.

    Raises:
        ConfigError: no segment has this name, or it cannot be read.
    """

    def __init__(self, name: str) -> None:
        path = _SEGMENTS / name
        if not _SEGMENT.fullmatch(name) or not path.exists() or not stat.S_ISREG(path.lstat().st_mode):
            raise ConfigError(f"there is no segment of shared memory {name!r}", "shm_name")
        try:
            super().__init__(SafetensorsCheckpoint([path]))
        except ConfigError as error:
            raise ConfigError(error.message, "shm_name") from error


class OpenHandles(OpenSource):
    """Tensors on the model's GPU that another process shares. Each allocation is mapped once, and released once.

    Raises:
        ConfigError: the model is on no GPU, a tensor is on none of its own, or cannot be shared.
    """

    def __init__(self, source: IpcSource, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError(f"CUDA IPC needs the model on a GPU, and it is on {device}", "ipc_handles_json")
        self._device = device
        self.facts = announced(source.tensors)
        uuid = device_uuid(device)
        self._handles: list[IpcHandle] = []
        for fact, handles in zip(self.facts, source.handles, strict=True):
            own = {name.removeprefix("GPU-"): handle for name, handle in handles.items()}.get(uuid)
            if own is None:
                raise ConfigError(f"{fact.name} is not shared on the GPU {uuid} of this rank", "ipc_handles_json")
            _check(fact.name, own, fact.shape, fact.dtype.itemsize)
            self._handles.append(own)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        storages: dict[object, torch.UntypedStorage] = {}
        try:
            for fact, handle in zip(self.facts, self._handles, strict=True):
                key = handle.memory_handle, handle.storage_offset, handle.ref_counter_handle, handle.ref_counter_offset
                if key not in storages:
                    storages[key] = _mapped(handle, self._device)
                tensor = torch.empty(0, dtype=fact.dtype, device=self._device)
                yield fact.name, tensor.set_(storages[key], handle.offset, fact.shape, handle.stride)
            # Its owner may write the memory once it is released.
            torch.cuda.synchronize(self._device)
        finally:
            storages.clear()

    def close(self) -> None:
        pass


def _mapped(handle: IpcHandle, device: torch.device) -> torch.UntypedStorage:
    return torch.UntypedStorage._new_shared_cuda(
        device.index if device.index is not None else torch.cuda.current_device(),
        handle.memory_handle,
        handle.storage_size,
        handle.storage_offset,
        handle.ref_counter_handle,
        handle.ref_counter_offset,
        handle.event_handle,
        handle.event_sync_required,
    )


def _check(name: str, handle: IpcHandle, shape: tuple[int, ...], itemsize: int) -> None:
    """Raises: ConfigError: PyTorch would write or read outside of what is shared."""
    strides = len(handle.stride) == len(shape) and min(handle.stride, default=0) >= 0
    last = handle.offset + sum((size - 1) * step for size, step in zip(shape, handle.stride, strict=False))
    fits = handle.offset >= 0 and handle.storage_offset >= 0 and (0 in shape or (last + 1) * itemsize <= handle.storage_size)
    counted = _COUNTERS.fullmatch(handle.ref_counter_handle) and 0 <= handle.ref_counter_offset < _MOST_COUNTERS
    if not (strides and fits and counted):
        raise ConfigError(f"the handle of {name} is not that of a tensor of the shape {list(shape)}", "ipc_handles_json")


def device_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def ipc_handle(tensor: torch.Tensor) -> dict[str, IpcHandle]:
    """Shares a tensor on a GPU, which must be kept until its receiver has answered. Returns the handle by the GPU's UUID."""
    storage: Any = tensor.untyped_storage()
    _, memory, size, offset, counters, counter, event, event_needed = storage._share_cuda_()
    stride, first = tuple(tensor.stride()), int(tensor.storage_offset())
    handle = IpcHandle(memory, size, offset, counters, counter, event, event_needed, stride, first)
    return {device_uuid(tensor.device): handle}
