"""SleepingMemory: one rank's memory of weights, KV and CUDA graphs, which is given back and taken again."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import nn

from headrace.core.commands import RankReply
from headrace.core.weights import DeviceMemory, SleepTag
from headrace.host import pages
from headrace.models.interface import Model
from headrace.models.kinds import model_tensors
from headrace.runner.runner import ModelRunner

logger = logging.getLogger("headrace.engine")

_CHUNK = 2**28
"""Bytes of a piece of page-locked memory. PyTorch rounds such pieces up to powers of 2."""

_WORTH = 2**18
"""Bytes from which a tensor of the runner is worth the trouble. Smaller ones share the allocator's segments of 2 MiB."""
_STACK = 0
"""CU_LIMIT_STACK_SIZE"""
_OWNERS = ("headrace", "flashinfer")
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, functools.partial, types.MethodType, types.CellType, nn.Module)


class HostCopy:
    """Page-locked memory for the bytes of several tensors, one after the other."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._chunks = [
            torch.empty(min(_CHUNK, nbytes - start), dtype=torch.uint8, pin_memory=True) for start in range(0, nbytes, _CHUNK)
        ]

    def save(self, tensors: Sequence[torch.Tensor]) -> None:
        """``tensors``: ``[n]`` uint8 on a GPU, each."""
        for piece, held in self._pieces(tensors):
            held.copy_(piece, non_blocking=True)
        torch.cuda.synchronize()

    def restore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the bytes back, to tensors of the same sizes."""
        for piece, held in self._pieces(tensors):
            piece.copy_(held, non_blocking=True)
        torch.cuda.synchronize()

    def _pieces(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        at = 0
        for tensor in tensors:
            start = 0
            while start < len(tensor):
                chunk, offset = divmod(at, _CHUNK)
                count = min(len(tensor) - start, _CHUNK - offset)
                yield tensor[start : start + count], self._chunks[chunk][offset : offset + count]
                start, at = start + count, at + count


class ReleasableMemory:
    """Memory of tensors that is given back and taken again, while the tensors and all views of them stay.

    On a CPU it stays at its addresses, and its pages are freed. On a GPU it is freed, and taken again at other addresses.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], host: HostCopy | None = None) -> None:
        """``host``: of another, which is taken over where it has the size."""
        storages = {storage.data_ptr(): storage for tensor in tensors for storage in (tensor.untyped_storage(),)}
        self._storages = [(storage, storage.nbytes()) for address, storage in storages.items() if address]
        self.host = host
        """Kept for the next time, since locking a gigabyte takes half a second, until values are dropped."""
        self.released = False
        self._saved = False

    @property
    def addresses(self) -> set[int]:
        """Addresses of what is there."""
        return {storage.data_ptr() for storage, _ in self._storages}

    def release(self, *, keep: bool) -> None:
        """Gives the memory back. What was kept before is lost unless ``keep``.

        Args:
            keep: ``restore`` brings the values back. On a CPU nothing is freed then.

        Raises:
            RuntimeError: the host has no memory for the values; nothing was given back.
        """
        if not keep:
            self.host, self._saved = None, False
        elif not self.released and (gpu := self._on_gpu()):
            needed = sum(nbytes for _, nbytes in gpu)
            if self.host is None or self.host.nbytes != needed:
                self.host = HostCopy(needed)
            self.host.save([_bytes(storage) for storage, _ in gpu])
            self._saved = True
        self.released = True
        for storage, nbytes in self._storages:
            if storage.device.type == "cuda":
                storage.resize_(0)
            elif not keep:
                pages.discard(storage.data_ptr(), nbytes)

    def restore(self, *, zero: bool = False) -> None:
        """Takes the memory again, with its values where they were kept. Does nothing if it is there.

        Args:
            zero: it is filled with zeros.

        Raises:
            torch.OutOfMemoryError: the device has no room; ``restore`` may be tried again.
        """
        if not self.released:
            return
        gpu = self._on_gpu()
        for storage, nbytes in gpu:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)
        if self._saved and self.host is not None:
            self.host.restore([_bytes(storage) for storage, _ in gpu])
        elif zero:
            for storage, nbytes in self._storages:
                if storage.device.type == "cuda":
                    _bytes(storage).zero_()
                else:  # Pages that were freed are zeros, and the ends of a run may share theirs with others.
                    _zero_ends(storage, nbytes)
        self._saved = self.released = False

    def _on_gpu(self) -> list[tuple[torch.UntypedStorage, int]]:
        return [(storage, nbytes) for storage, nbytes in self._storages if storage.device.type == "cuda"]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """``[nbytes]`` uint8 over a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _zero_ends(storage: torch.UntypedStorage, nbytes: int) -> None:
    whole, page = _bytes(storage), 4096
    whole[: min(page, nbytes)].zero_()
    whole[max(0, nbytes - page) :].zero_()


class SleepingMemory:
    """The memory of one rank that sleeps: that of a model and of the runner that runs it."""

    def __init__(self, model: Model, runner: ModelRunner, *, own_weights: bool) -> None:
        """``own_weights``: they are the engine's, and may sleep."""
        self._model, self._runner, self._own_weights = model, runner, own_weights
        self._made = False
        self._others: ReleasableMemory | None = None
        """The rest of the runner's memory while it sleeps: its tables may be others the next time."""
        self._host: HostCopy | None = None
        """Page-locked memory for it, which is kept for the next time."""
        self.own_process = False
        """Nothing else in the process runs on the GPU."""
        self._stack: int | None = None
        """The stack of GPU threads before it was given back."""

    def _make(self) -> None:
        """Looks for the tensors when they first sleep: adapters and encoders are there by then."""
        if self._made:
            return
        tensors, encoder = model_tensors(self._model), self._runner.encoder
        self._weights = ReleasableMemory(tensors.weights)
        self._kept = ReleasableMemory([*tensors.kept, *(() if encoder is None else encoder.weights())])
        planes = (plane for cache in self._runner.caches for plane in (cache.rows, cache.index_keys))
        self._kv = ReleasableMemory(plane for plane in planes if plane is not None)
        self._made = True

    def _beside(self) -> list[torch.Tensor]:
        """Tables, buffers and workspaces of the runner on a GPU. Memory that other processes map stays where it is."""
        addresses = self._weights.addresses | self._kept.addresses | self._kv.addresses
        found = owned_tensors(self._runner, beside=None if self._own_weights else self._model)
        return [
            tensor
            for tensor in found
            if tensor.is_cuda
            and (storage := tensor.untyped_storage()).resizable()
            and storage.nbytes() >= _WORTH
            and storage.data_ptr() not in addresses
        ]

    @torch.inference_mode()
    def release(self, tags: Sequence[SleepTag], *, drop: bool) -> RankReply:
        """Gives memory back. ``drop``: weights are not kept if an update can write them."""
        if "weights" in tags and not self._own_weights:
            return RankReply(error="the weights belong to the caller, who handed the model over: leave them out of the tags")
        self._make()
        # Graphs read weights and KV at their addresses.
        self._runner.drop_graphs()
        try:
            if "weights" in tags:
                self._kept.release(keep=True)
                self._weights.release(keep=not drop)
            if "kv_cache" in tags:
                self._kv.release(keep=False)
            if self._others is None and (self._weights.released or self._kv.released):
                self._others = ReleasableMemory(self._beside(), self._host)
                self._others.release(keep=True)
        except (RuntimeError, OSError) as error:
            return RankReply(error=f"no memory was given back: {type(error).__name__}: {error}".partition("\n")[0])
        finally:
            _give_back()
        all_asleep = self._weights.released and self._kv.released
        if self.own_process and all_asleep and self._runner.device.type == "cuda" and self._stack is None:
            self._stack = _set_stack(0)
        return RankReply(memory=[_in_use(self._runner.device)])

    @torch.inference_mode()
    def restore(self, tags: Sequence[SleepTag]) -> RankReply:
        """Takes memory again. What is there stays as it is."""
        self._make()
        if self._stack is not None:
            _set_stack(self._stack)
            self._stack = None
        try:
            if "weights" in tags:
                self._weights.restore()
                self._kept.restore()
            if "kv_cache" in tags:
                self._kv.restore(zero=True)
            if self._others is not None and not (self._weights.released or self._kv.released):
                self._others.restore()
                self._host, self._others = self._others.host, None
        except RuntimeError as error:
            return RankReply(error=f"{type(error).__name__}: {error}".partition("\n")[0])
        return RankReply()


def _give_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        # Workspaces of cuBLAS, which PyTorch makes again when they are needed. It has no public name for this.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    pages.trim()


def _in_use(device: torch.device) -> DeviceMemory:
    if device.type != "cuda":
        return DeviceMemory(str(device), psutil.Process().memory_info().rss, 0)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(str(device), total - free, torch.cuda.memory_reserved(device))


def _set_stack(nbytes: int) -> int | None:
    """Sets the stack of a thread of the GPU, and returns the bytes that it had; None: it is not known, and stays.

    The driver reserves it for as many threads as the GPU runs at once: of the usual 1,024 bytes, 277 MB on an H200. Kernels
    whose need is known when they are compiled get it all the same.
    """
    try:
        cuda, held = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    except OSError:
        return None
    if cuda.cuCtxGetLimit(ctypes.byref(held), _STACK):
        return None
    cuda.cuCtxSetLimit(_STACK, ctypes.c_size_t(nbytes))
    return held.value


def owned_tensors(root: object, beside: object = None) -> list[torch.Tensor]:
    """Returns the tensors that an object of this package refers to, itself or through others of this package, of FlashInfer,
    and containers. ``beside``: an object that is left out, with what only it refers to."""
    found, seen, left = list[torch.Tensor](), {id(beside)}, [root]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, types.FunctionType):
            left += [*(one.__closure__ or ()), *(one.__defaults__ or ())]
        elif isinstance(one, _CONTAINERS) or type(one).__module__.partition(".")[0] in _OWNERS:
            left += gc.get_referents(one)
    return found
