"""State of the weights of a running engine, and the sources of new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

PauseMode = Literal["keep", "recompute", "wait", "abort"]
"""Ordered from the loosest to the tightest. keep: sequences are frozen, and go on with their KV. recompute: they are preempted.
wait: they run to their ends. abort: they end with what they have."""
PAUSE_MODES: tuple[PauseMode, ...] = ("keep", "recompute", "wait", "abort")
WeightState = Literal["serving", "paused", "open", "writing", "asleep", "hollow", "torn", "lost"]
"""open: an update has begun. writing: a load is under way. asleep: memory was given back. hollow: the memory of the weights is
there again, and their values are not. torn: an update failed after it had written something. lost: the engine was started
again, with the weights of its files in place of later ones."""
SleepTag = Literal["scheduling", "weights", "kv_cache", "cuda_graph"]
"""Parts of an engine that sleep and wake: its steps, and three kinds of memory."""
MEMORY_TAGS: tuple[SleepTag, ...] = ("weights", "kv_cache", "cuda_graph")


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a sender announces."""

    name: str
    dtype: str
    """PyTorch's name of it, without ``torch.``."""
    shape: tuple[int, ...]


# Sources of weights


class DiskSource(msgspec.Struct, frozen=True, array_like=True, tag="disk"):
    """The safetensors files of a directory."""

    path: str


class GroupSource(msgspec.Struct, frozen=True, array_like=True, tag="group"):
    """Broadcasts from rank 0 of a group that the engine has joined."""

    group: str
    tensors: list[TensorSpec]
    packed_bytes: int | None = None
    """Tensors come in packs: one is sent once it has more bytes than this. None: one by one."""


class SegmentSource(msgspec.Struct, frozen=True, array_like=True, tag="shm"):
    """A segment of shared memory with the bytes of a safetensors file."""

    name: str


class IpcHandle(msgspec.Struct, frozen=True):
    """A tensor on a GPU that its process shares, as PyTorch's ``_share_cuda_`` describes its storage."""

    memory_handle: bytes
    storage_size: int
    storage_offset: int
    """Place of the storage in its allocation, in bytes."""
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool
    stride: tuple[int, ...]
    offset: int
    """Place of the tensor in its storage, in elements."""


class IpcSource(msgspec.Struct, frozen=True, array_like=True, tag="ipc"):
    """Tensors in the memory of the GPUs that the ranks are on."""

    tensors: list[TensorSpec]
    handles: list[dict[str, IpcHandle]]
    """Handles of each tensor, by the UUID of a GPU."""


class SiblingSource(msgspec.Struct, frozen=True, array_like=True, tag="sibling"):
    """All weights of a replica, which its ranks send at sockets in a directory."""

    folder: str


class FilesSource(msgspec.Struct, frozen=True, array_like=True, tag="files"):
    """The files that the engine's model was loaded from."""


Source = DiskSource | GroupSource | SegmentSource | IpcSource | SiblingSource | FilesSource


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A group of a trainer and all ranks of all replicas, in which the trainer's rank 0 holds the store."""

    name: str
    address: str
    port: int
    rank_offset: int
    """Rank of the first of the engine's ranks."""
    world_size: int
    protocol: Literal["vllm", "torch"]
    """Keys under which the members find each other in the store: those of vLLM, or those of torch's process groups."""
    backend: Literal["gloo", "nccl"]
    unique_id: bytes = b""
    """NCCL's id of the group, with ``vllm`` and ``nccl``; empty: the trainer leaves it in the store."""


class ServedWeights(msgspec.Struct, frozen=True, array_like=True):
    """The weights that a restarted engine should have, and whether it should be paused."""

    number: int = 0
    version: str = "0"
    pause: PauseMode | None = None
    of_files: bool = True
    """They are those of the model's files, which a restarted engine has."""


OF_FILES = ServedWeights()
"""The weights of the model's files."""


class WeightStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine's weights."""

    state: WeightState = "serving"
    pause: PauseMode | None = None
    own_pause: bool = False
    """The update that is open paused the engine, or sleep did: its end resumes."""
    updating: bool = False
    """An update has begun and not ended. ``state`` may name sleep or damage instead."""
    asleep: tuple[SleepTag, ...] = ()
    """Parts of the engine that sleep."""
    level: int = 0
    """Level of the last sleep."""
    number: int = 0
    """Counts the versions. It is in the identity of all KV."""
    version: str = "0"
    """Name of the version."""
    of_files: bool = True
    """The version is that of the model's files."""
    reason: str = ""
    """Reason why no weights can be served; empty: they can."""
    groups: list[str] = []
    """Names of the groups that were joined."""
    num_tensors: int = 0
    """Tensors that loads have written so far."""

    @property
    def served(self) -> ServedWeights:
        """The weights that an engine after this one should have."""
        return ServedWeights(self.number, self.version, None if self.own_pause else self.pause, self.of_files)


class DeviceMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory that is in use on the device of a rank."""

    device: str
    used: int
    """Bytes: on a GPU, of all processes; on a CPU, of this one."""
    pytorch: int
    """Bytes of these that PyTorch's allocator for the GPU holds. The others are CUDA's context, code of kernels, memory of
    libraries, and other processes."""


class PartSum(msgspec.Struct, frozen=True, array_like=True):
    """The sum of a rank's part of a tensor: of ``[start, stop)`` along the axis that ranks cut."""

    start: int
    stop: int
    size: int
    """Length of the whole axis; 0: each rank has a part of its own."""
    value: int


PACKED = "#packed"
"""Follows the name of a weight in that of the sum of its packed form."""


def whole_sum(parts: Sequence[PartSum]) -> int | None:
    """Adds the parts of all ranks, of which several may hold the same. None: they contradict each other, or some lack."""
    found = {(part.start, part.stop): part for part in parts}
    end = 0
    for start, stop in sorted(found):
        if start != end:
            return None
        end = stop
    if any(part.size not in (0, end) or part != found[part.start, part.stop] for part in parts):
        return None
    return sum(part.value for part in found.values()) % 2**64


class WeightResult(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a command."""

    status: int = 200
    """HTTP's: 400 the command is wrong, 409 the state does not allow it, 503 it failed."""
    error: str = ""
    weights: WeightStatus = WeightStatus()
    written: int = 0
    """Tensors that the command, or the update that it ended, wrote."""
    kept: list[str] = []
    """The first of the tensors that the update did not write."""
    num_kept: int = 0
    checksums: dict[str, int] = {}
    """64-bit sums of all weights, by their names in the checkpoint; of those that are kept packed, of the packed form, by
    that name and ``PACKED``."""
    tied: dict[str, str] = {}
    """Names that a checkpoint may have besides, and the names of the tensors that they equal."""
    memory: list[DeviceMemory] = []
    """With ``Sleep``: of each rank of each replica, once it is asleep."""
