"""What a trainer sends is read as data: no pickle is loaded, and no handle reaches memory that it does not describe."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save
from support.server.fakes import FakeLLM
from support.server.harness import Api
from torch._C._distributed_c10d import HashStore, TCPStore

from headrace.core.weights import GroupSpec, IpcHandle, IpcSource, TensorSpec
from headrace.errors import ConfigError
from headrace.server.settings import ServerSettings
from headrace.weights.transport import nccl
from headrace.weights.transport.group import join_group
from headrace.weights.transport.nccl import DirectGroup, unique_id
from headrace.weights.transport.shared import OpenHandles, OpenSegment, _check
from headrace.weights.transport.sibling import OpenSibling, send_weights


class ncclUniqueId(ctypes.Structure):
    """The class of this name in vLLM, of which its trainer leaves a pickle in the store."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class OtherStructure(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Malicious:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return __import__, ("antigravity",)


ID = bytes(range(128))
HANDLE = IpcHandle(b"m", 4 * 12, 0, b"/torch_1_2_3", 7, b"e", True, (4, 1), 0)


@pytest.fixture
def imports() -> Iterator[list[str]]:
    """Names of the modules whose import begins, as an audit hook sees them."""
    seen, on = list[str](), [True]
    sys.addaudithook(lambda event, args: seen.append(args[0]) if event == "import" and on else None)
    yield seen
    on.clear()


@pytest.mark.parametrize("protocol", [4, 5])
def test_an_id_of_nccl_is_read(protocol: int) -> None:
    assert unique_id(pickle.dumps(ncclUniqueId.from_buffer_copy(ID), protocol=protocol)) == ID


class FakeNccl:
    """Notes who joins; ``mute``: members never come together."""

    def __init__(self, mute: bool) -> None:
        self.joined = list[tuple[bytes, int, int]]()
        self._state = 7 if mute else 0

    def ncclCommInitRankConfig(self, comm: Any, size: int, raw: Any, rank: int, config: Any) -> int:
        comm._obj.value = 1
        self.joined.append((bytes(raw), size, rank))
        return 7

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:
        state._obj.value = self._state
        return 0

    def ncclBroadcast(self, *arguments: Any) -> int:
        return 0

    def ncclCommAbort(self, comm: Any) -> int:
        return 0


@pytest.mark.parametrize("mute", [False, True])
def test_torch_s_members_meet_at_the_first_broadcast(monkeypatch: pytest.MonkeyPatch, mute: bool) -> None:
    """PyTorch's side has no id before. What does not come in time is given up, and ends no process."""
    library, store = FakeNccl(mute), HashStore()
    monkeypatch.setattr(nccl, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(DirectGroup, "_stream", lambda self: None)
    monkeypatch.setattr(DirectGroup, "_wait", lambda self, what: None)
    spec = GroupSpec(name="g", address="", port=0, rank_offset=1, world_size=3, protocol="torch", backend="nccl")
    group = DirectGroup(spec, store, 2, torch.device("cuda"), 0.05)
    assert not library.joined
    store.set("0", ID)
    for _ in range(2):
        if mute:
            with pytest.raises(RuntimeError, match="joining the group g: not within" if not group._left else "was left"):
                group.broadcast(torch.zeros(1))
        else:
            group.broadcast(torch.zeros(1))
    assert library.joined == [(ID, 3, 2)]


@pytest.mark.parametrize(
    "pickled",
    [
        pickle.dumps(ncclUniqueId.from_buffer_copy(ID), protocol=2),
        pickle.dumps(OtherStructure.from_buffer_copy(ID), protocol=4),
        pickle.dumps(ID, protocol=4),
        pickle.dumps(Malicious(), protocol=4),
        pickle.dumps([ncclUniqueId.from_buffer_copy(ID), Malicious()], protocol=5),
        b"",
        b"\x80\x04no pickle",
    ],
    ids=["text", "another structure", "bytes", "a call", "a call beside it", "empty", "rubbish"],
)
def test_other_pickles_are_not(pickled: bytes, imports: list[str]) -> None:
    with pytest.raises(ValueError, match="NCCL id is not read"):
        unique_id(pickled)
    assert "antigravity" not in imports


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/update_weights", {"update_info": {"ipc_handles_pickled": "PICKLE"}}),
        ("/update_weights", {"update_info": {"names": ["a"], "ipc_handles": [{"uuid": "PICKLE"}]}}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["PICKLE"], "load_format": None}),
        ("/update_weights_from_ipc", {"zmq_handles": {"uuid": "PICKLE"}}),
    ],
)
def test_pickles_in_bodies_are_refused_by_name(path: str, fields: dict[str, Any], imports: list[str]) -> None:
    text = msgspec.json.encode(fields).decode()
    body = msgspec.json.decode(text.replace("PICKLE", base64.b64encode(pickle.dumps(Malicious())).decode()))
    answer = Api(FakeLLM(), ServerSettings(enable_rl_api=True)).post(path, body)
    assert answer.status_code == 400
    assert "a pickle may run anything" in answer.text and "ipc_handles_json" in answer.text
    assert "antigravity" not in imports


def test_handles_are_for_gpus() -> None:
    source = IpcSource([TensorSpec("w", "float32", (3, 4))], [{"uuid": HANDLE}])
    with pytest.raises(ConfigError, match="CUDA IPC needs the model on a GPU"):
        OpenHandles(source, torch.device("cpu"))


@pytest.mark.parametrize(
    "changes",
    [
        {"storage_size": 4 * 11},
        {"offset": 1},
        {"offset": -1},
        {"storage_offset": -8},
        {"stride": (1,)},
        {"stride": (-4, 1)},
        {"ref_counter_offset": 10_000},
        {"ref_counter_offset": -1},
        {"ref_counter_handle": b"/../etc/passwd"},
    ],
    ids=str,
)
def test_handles_stay_within_what_is_shared(changes: dict[str, Any]) -> None:
    _check("w", HANDLE, (3, 4), 4)
    with pytest.raises(ConfigError, match=r"the handle of w is not that of a tensor of the shape \[3, 4\]"):
        _check("w", msgspec.structs.replace(HANDLE, **changes), (3, 4), 4)


def test_handles_are_json() -> None:
    text = msgspec.json.encode({"uuid": HANDLE})
    assert msgspec.convert(msgspec.json.decode(text), dict[str, IpcHandle]) == {"uuid": HANDLE}


def test_a_segment_of_shared_memory() -> None:
    name = f"headrace-test-{id(object())}"
    path = Path("/dev/shm") / name
    path.write_bytes(save({"w": torch.arange(6.0).view(2, 3)}))
    try:
        opened = OpenSegment(name)
        path.unlink()
        ((found, tensor),) = opened.tensors()
        assert found == "w" and isinstance(tensor, torch.Tensor) and tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
        opened.close()
        path.write_bytes(b"no safetensors")
        with pytest.raises(ConfigError):
            OpenSegment(name)
        (link := path.with_name(f"{name}-link")).symlink_to(path)
        for other in (link.name, "nowhere", f"../shm/{name}", ""):
            with pytest.raises(ConfigError, match="there is no segment"):
                OpenSegment(other)
        link.unlink()
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("same", [True, False])
def test_weights_of_a_sibling(tmp_path: Path, same: bool) -> None:
    """All storages are copied as they lie, each once; another model's are refused before any is."""
    base = torch.arange(24.0)
    ours, theirs = [base[:12], base[12:], torch.arange(5)], [torch.zeros(24), torch.zeros(5 if same else 6, dtype=torch.int64)]
    path = str(tmp_path / "0")

    def send() -> None:
        with contextlib.suppress(OSError):
            send_weights(path, ours, 10.0)

    sender = threading.Thread(target=send)
    sender.start()
    if same:
        OpenSibling(path, 10.0).copy(theirs)
        assert torch.equal(theirs[0], base) and theirs[1].tolist() == [0, 1, 2, 3, 4]
    else:
        with pytest.raises(ConfigError, match="has others than this one"):
            OpenSibling(path, 10.0).copy(theirs)
        assert not theirs[0].any()
    sender.join()


def test_a_sibling_that_does_not_send(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        OpenSibling(str(tmp_path / "0"), 0.05).copy([torch.zeros(1)])
    with pytest.raises(TimeoutError):
        send_weights(str(tmp_path / "1"), [torch.zeros(1)], 0.05)


@pytest.mark.parametrize("protocol", ["vllm", "torch"])
@pytest.mark.parametrize("hosted", [False, True], ids=["no host", "no members"])
def test_a_group_that_nobody_joins_fails_in_time(protocol: Any, hosted: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    wait = timedelta(seconds=1)
    libuv = protocol == "torch"
    store = TCPStore("127.0.0.1", port, 2, True, wait, wait_for_workers=False, use_libuv=libuv) if hosted else None
    fields: dict[str, Any] = {"rank_offset": 1, "world_size": 2, "protocol": protocol, "backend": "gloo"}
    spec, start = GroupSpec(name="g", address="127.0.0.1", port=port, **fields), time.monotonic()
    with pytest.raises((TimeoutError, RuntimeError), match=r"time|no store was reached at 127\.0\.0\.1"):
        join_group(spec, 1, torch.device("cpu"), 2.0)
    assert 1.9 < time.monotonic() - start < 3.0
    del store
