"""DirectGroup: a group over NCCL, called directly: PyTorch ends the process when a broadcast does not come in time."""

from __future__ import annotations

import ctypes
import pickletools
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._C._distributed_c10d import Store

from headrace.core.weights import GroupSpec

_ID_BYTES = 128
_ID_KEYS = {"vllm": "broadcast_from/0/0", "torch": "0"}
"""Key of the id in the store, by protocol. PyTorch's is the number of the communicator."""
_IN_PROGRESS = 7
_SUM = 0
_SENDER = 0
_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_UNSET = -(2**31)
_WAIT_SECONDS = 0.0005
_PICKLE_NAMES = ("_ctypes", "_unpickle")
"""The one function that a pickled id calls. It is compared, and never called."""
_HARMLESS = {"PROTO", "FRAME", "MEMOIZE", "BINGET", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "MARK", "REDUCE"}


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


class _Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.18, which later versions take."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


def unique_id(pickled: bytes) -> bytes:
    """Returns NCCL's id of a group, which vLLM sends as a pickled ``ctypes`` structure. The pickle is read, and not loaded.

    Raises:
        ValueError: it is anything else.
    """
    strings, ids, protocol, calls = list[str](), list[bytes](), 0, 0
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            match opcode.name:
                case "PROTO":
                    protocol = int(str(argument))
                case "SHORT_BINUNICODE":
                    strings.append(str(argument))
                case "SHORT_BINBYTES":
                    ids.append(cast(bytes, argument))
                case "STACK_GLOBAL":
                    calls += 1
                case "STOP":
                    break
                case name if name not in _HARMLESS:
                    raise ValueError(f"it has the opcode {name}")
    except Exception as error:
        raise ValueError(f"the trainer's NCCL id is not read: {error}") from None
    known = len(strings) == 4 and tuple(strings[:2]) == _PICKLE_NAMES and strings[3] == "ncclUniqueId" and calls == 2
    if protocol not in (4, 5) or not known or [len(one) for one in ids] != [_ID_BYTES]:
        raise ValueError("the trainer's NCCL id is not read: it is not a pickled ncclUniqueId of protocol 4 or 5")
    return ids[0]


class DirectGroup:
    """One rank's membership. Nothing waits longer than ``seconds``: then the communicator is given up.

    Members of torch's groups find each other at the first broadcast, since only then PyTorch's side makes its id.

    Raises:
        RuntimeError: NCCL is not there, or the members did not come together in time.
    """

    def __init__(self, spec: GroupSpec, store: Store | None, rank: int, device: torch.device, seconds: float) -> None:
        """``store``: in which the trainer leaves its id; None: the spec has it."""
        self.spec, self.device, self._seconds = spec, device, seconds
        if device.type != "cuda":
            raise RuntimeError(f"nccl joins GPUs, and the model is on {device}: use the backend gloo")
        self._store, self._rank = store, rank
        self._nccl = _library()
        self._comm = ctypes.c_void_p()
        self._left = False
        if spec.protocol == "vllm":
            with torch.cuda.device(device):
                self._connect()
                # vLLM's side makes this sum, and waits in it.
                one, what = torch.zeros(1, device=device), "the first sum"
                place, kind = one.data_ptr(), _TYPES[one.dtype]
                self._do(what, self._nccl.ncclAllReduce, place, place, 1, kind, _SUM, self._comm, self._stream())
                self._wait(what)

    def _connect(self) -> None:
        raw = _UniqueId.from_buffer_copy(self._id())
        # Not blocking, so that it can be given up.
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21800, 0, _UNSET, _UNSET, _UNSET, None, _UNSET)
        where, how, join = ctypes.byref(self._comm), ctypes.byref(config), self._nccl.ncclCommInitRankConfig
        self._do(f"joining the group {self.spec.name}", join, where, self.spec.world_size, raw, self._rank, how)

    def _id(self) -> bytes:
        if self._store is None:
            return self.spec.unique_id
        found = self._store.get(_ID_KEYS[self.spec.protocol])
        return unique_id(found) if self.spec.protocol == "vllm" else found

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fills the tensor with that of the trainer. Raises: RuntimeError: it was not sent in time."""
        if self._left:
            raise RuntimeError(f"the group {self.spec.name} was left")
        with torch.cuda.device(self.device):
            if not self._comm:
                self._connect()
            place, kind, stream = tensor.data_ptr(), _TYPES[tensor.dtype], self._stream()
            self._do("a broadcast", self._nccl.ncclBroadcast, place, place, tensor.numel(), kind, _SENDER, self._comm, stream)
            self._wait("a broadcast")

    def close(self) -> None:
        """Leaves the group. A transfer that is under way fails."""
        comm, self._comm, self._left = self._comm, ctypes.c_void_p(), True
        if comm:
            self._nccl.ncclCommAbort(comm)

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)

    def _do(self, what: str, function: Any, *arguments: Any) -> None:
        code = function(*arguments)
        if code not in (0, _IN_PROGRESS):
            self._give_up(what, self._text(code))
        self._until(what, lambda: self._state(what) != _IN_PROGRESS)

    def _wait(self, what: str) -> None:
        """Waits for what was launched."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

        def done() -> bool:
            self._state(what)
            return bool(event.query())

        self._until(what, done)

    def _state(self, what: str) -> int:
        state = ctypes.c_int()
        self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state))
        if state.value not in (0, _IN_PROGRESS):
            self._give_up(what, self._text(state.value))
        return state.value

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._seconds
        while not condition():
            if time.monotonic() > deadline:
                self._give_up(what, f"not within {self._seconds:g} s (where GPUs hang in peer access, set NCCL_P2P_DISABLE=1)")
            time.sleep(_WAIT_SECONDS)

    def _give_up(self, what: str, why: str) -> None:
        self.close()
        raise RuntimeError(f"{what}: {why}")

    def _text(self, code: int) -> str:
        return str(self._nccl.ncclGetErrorString(code).decode())


def _library() -> Any:
    """NCCL as PyTorch has loaded it."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError(f"NCCL is not there: {error}") from error
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    nccl.ncclCommInitRankConfig.argtypes = (pointer, integer, _UniqueId, integer, pointer)
    nccl.ncclAllReduce.argtypes = (pointer, pointer, size, integer, integer, pointer, pointer)
    nccl.ncclBroadcast.argtypes = (pointer, pointer, size, integer, integer, pointer, pointer)
    nccl.ncclCommGetAsyncError.argtypes = (pointer, pointer)
    nccl.ncclCommAbort.argtypes = (pointer,)
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return nccl
