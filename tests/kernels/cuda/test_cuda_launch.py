"""Kernels in CUDA C++: how they are compiled, kept and launched."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.kernels import cuda_launch
from headrace.kernels.cuda_launch import CudaKernel, compiling_on, tensor_map

SOURCE = Path(__file__).parent / "tiles.cu"
OFFSET = 100 << 10
"""Where the tile is in shared memory: past what a launch has unless it asks for more."""
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def copies(rows: int = 64) -> CudaKernel:
    macros = {"ROWS": rows, "OFFSET": OFFSET}
    return CudaKernel(SOURCE, "copy_tiles", "MPPii", macros, threads=128, shared=OFFSET + rows * 128)


def adds() -> CudaKernel:
    return CudaKernel(SOURCE, "add_late", "PPii", {"ROWS": 64, "OFFSET": 0}, threads=256, shared=0)


# ------------------------------------------------------------------ compiling


def test_binaries_are_kept_by_all_they_depend_on(nvrtc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = copies().binary()
    assert binary.startswith(b"\x7fELF")
    (file,) = cuda_launch.binaries().iterdir()
    assert file.is_relative_to(tmp_path) and file.read_bytes() == binary
    file.write_bytes(b"of an earlier process")
    assert copies().binary() == b"of an earlier process"
    assert copies(32).binary() != binary
    changed = tmp_path / SOURCE.name
    changed.write_text(SOURCE.read_text() + "\n")
    CudaKernel(changed, "copy_tiles", "MPPii", {"ROWS": 64, "OFFSET": OFFSET}, 128, 0).binary()
    monkeypatch.setattr(cuda_launch, "nvrtc_version", lambda: "99.0")
    assert copies().binary() == binary
    *others, last = cuda_launch._HEADERS
    header = tmp_path / last.name
    header.write_bytes(last.read_bytes() + b"\n")
    monkeypatch.setattr(cuda_launch, "_HEADERS", [*others, header])
    assert copies().binary() == binary
    assert len(list(cuda_launch.binaries().iterdir())) == 5


def test_a_cache_that_cannot_be_written_is_done_without(nvrtc: None, tmp_path: Path) -> None:
    (tmp_path / "headrace").touch()
    assert copies().binary().startswith(b"\x7fELF")


def test_what_nvrtc_says_of_a_source(nvrtc: None, tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text('extern "C" __global__ void f() { nothing(); }')
    with pytest.raises(RuntimeError, match=r"NVRTC refuses wrong\.cu: (.|\n)*\"nothing\" is undefined"):
        CudaKernel(source, "f", "", {}, 32, 0).binary()


def test_launches_compile_ahead(nvrtc: None) -> None:
    """Once each, on the pool's threads, and nothing is launched: there need not be a driver."""

    class Pool(ThreadPoolExecutor):
        asked = 0

        def submit(self, *call: Any, **named: Any) -> Any:
            self.asked += 1
            return super().submit(*call, **named)

    kernels = [copies(), copies(32)]
    with Pool(2) as pool, compiling_on(pool):
        for kernel in kernels * 20:
            kernel.launch((1, 1, 1), bytes(128), 0, 0, 1, 1)
    # A layer that asks again takes no thread to wait for the first.
    assert pool.asked == len(list(cuda_launch.binaries().iterdir())) == 2
    assert all(kernel._binary for kernel in kernels)


# ------------------------------------------------------------------ packing


class Driver:
    """Records what the driver is given."""

    def __init__(self, kinds: str) -> None:
        self.kinds, self.loads, self.attributes, self.launched = kinds, 0, {}, []
        self.status = 0

    def cuModuleLoadData(self, module: object, binary: bytes) -> int:
        self.loads += 1
        return 0

    def cuModuleGetFunction(self, function: object, module: object, name: bytes) -> int:
        function._obj.value = 7 * self.loads  # type: ignore[attr-defined]
        return 0

    def cuFuncSetAttribute(self, function: object, attribute: int, value: int) -> int:
        self.attributes[attribute] = value
        return 0

    def cuFuncGetParamInfo(self, function: object, index: int, offset: object, size: object) -> int:
        if index == len(self.kinds):
            return 1
        size._obj.value = {"M": 128, "P": 8, "q": 8}.get(self.kinds[index], 4)  # type: ignore[attr-defined]
        return 0

    def cuGetErrorString(self, status: int, text: object) -> int:
        text._obj.value = b"refused"  # type: ignore[attr-defined]
        return 0

    def cuLaunchKernelEx(self, config: int, function: int, arguments: int, extra: None) -> int:
        *sizes, stream, attributes, count = struct.unpack("<7I4xQQI4x", ctypes.string_at(config, 56))
        given = [struct.unpack("<4I56x", ctypes.string_at(attributes + 72 * place, 72)) for place in range(count)]
        places = (ctypes.c_void_p * len(self.kinds)).from_address(arguments)
        values = []
        for kind, place in zip(self.kinds, places, strict=True):
            layout = "<" + {"M": "128s", "P": "Q"}.get(kind, kind)
            values += struct.unpack(layout, ctypes.string_at(place or 0, struct.calcsize(layout)))
        self.launched.append((function, sizes, stream, given, values))
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver("MPifq")
    monkeypatch.setattr(cuda_launch, "_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
    return made


def test_what_the_driver_is_given(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = CudaKernel(SOURCE, "f", driver.kinds, {}, threads=384, shared=200_000, cluster=2)
    monkeypatch.setattr(kernel, "_binary", b"compiled")
    kernel.launch((132, 2, 1), bytes(range(128)), 1 << 40, -5, 0.5, -(1 << 40))
    kernel.launch((4, 1, 1), bytes(128), 0, 1, 2.0, 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel.launch((4, 1, 1), bytes(128), 0, 1, 2.0, 3)
    first, second, other_device = driver.launched
    programmatic, clusters = (6, 0, 1, 0), (4, 0, 2, 1)
    values = [bytes(range(128)), 1 << 40, -5, 0.5, -(1 << 40)]
    assert first == (7, [132, 2, 1, 384, 1, 1, 200_000], 1001, [programmatic, clusters], values)
    assert second[:2] == (7, [4, 1, 1, 384, 1, 1, 200_000]) and second[4] == [bytes(128), 0, 1, 2.0, 3]
    # Each device has the kernel once.
    assert (other_device[0], other_device[2], driver.loads) == (14, 1000, 2)
    assert driver.attributes == {8: 200_000, 9: 100, 14: 0}


def test_launches_that_the_driver_refuses(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = CudaKernel(SOURCE, "f", driver.kinds, {}, threads=384, shared=0)
    monkeypatch.setattr(kernel, "_binary", b"compiled")
    driver.kinds = "MPPifq"
    with pytest.raises(
        RuntimeError, match=r"f has parameters of \[128, 8, 8, 4, 4, 8\] bytes, and is given \[128, 8, 4, 4, 8\]"
    ):
        kernel.launch((1, 1, 1), bytes(128), 0, 0, 0.0, 0)
    driver.kinds = "MPifq"
    driver.status = 1
    with pytest.raises(RuntimeError, match=r"f was not launched with grid \(0, 1, 1\): refused \(1\)"):
        kernel.launch((0, 1, 1), bytes(128), 0, 0, 0.0, 0)


def test_maps_are_of_places(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor's values may change beneath its map, and a tensor that takes its place has the same one. One elsewhere, as a
    weight is that has slept, and one of another shape have their own."""
    made = []

    def encode(place: int, kind: int, axes: int, pointer: int, sizes: bytes, *others: Any) -> int:
        assert place % 64 == 0
        made.append((pointer, *struct.unpack("<2Q", sizes)))
        ctypes.memmove(place, struct.pack("<2Q", pointer, len(made)), 16)
        return 0

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode, raising=False)
    cuda_launch._tensor_map.cache_clear()
    memory = torch.zeros(4, 32, 64, dtype=torch.bfloat16)
    first = tensor_map(memory[0], 8, 64)
    memory.fill_(1.0)
    assert tensor_map(memory[0].clone().set_(memory[0]), 8, 64) == first and len(first) == 128
    others = [tensor_map(x, 8, 64) for x in (memory[1], memory[0, :16], memory[0, ::2], memory[0].view(torch.int16)[:, :32])]
    assert len({first, *others}) == 5 == len(made)
    assert made[:3] == [(memory.data_ptr(), 64, 32), (memory[1].data_ptr(), 64, 32), (memory.data_ptr(), 64, 16)]
    cuda_launch._tensor_map.cache_clear()


def test_devices_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_launch.refusals(torch.device("cpu")) == ("the kernels in CUDA C++ need SM90",)
    monkeypatch.setattr(cuda_launch, "support", SimpleNamespace(is_hopper=lambda device: True))
    monkeypatch.setattr(cuda_launch, "missing", lambda: "libnvrtc.so.13 is not installed")
    assert cuda_launch.refusals.__wrapped__(torch.device("cpu")) == ("libnvrtc.so.13 is not installed",)
    monkeypatch.setattr(cuda_launch, "missing", lambda: "")
    assert cuda_launch.refusals.__wrapped__(torch.device("cpu")) == ()


def test_machines_without_the_kernels(nvrtc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No NVRTC, one that cannot compile for the device, no driver, and one that is too old."""

    def fails(error: Exception) -> Any:
        def call(*given: object) -> Any:
            raise error

        return call

    missing = cuda_launch.missing
    monkeypatch.setattr(cuda_launch, "_driver", lambda: None)
    assert missing() == ""
    with monkeypatch.context() as other:
        other.setattr(cuda_launch, "_nvrtc", fails(OSError("libnvrtc.so.13 is not installed")))
        assert missing() == "libnvrtc.so.13 is not installed"
    with monkeypatch.context() as other:
        other.setattr(cuda_launch, "_OPTIONS", ("--gpu-architecture=sm_10",))
        assert missing().startswith("NVRTC refuses nothing.cu: ") and "--gpu-architecture" in missing()
    for error in (OSError("libcuda.so.1: no such file"), AttributeError("libcuda.so.1: undefined symbol: cuFuncGetParamInfo")):
        monkeypatch.setattr(cuda_launch, "_driver", fails(error))
        assert missing() == str(error)


# ------------------------------------------------------------------ on a GPU


@dataclasses.dataclass
class Copy:
    """x with rows that are apart, and what a copy of it goes to."""

    x: torch.Tensor
    out: torch.Tensor
    times: torch.Tensor

    @classmethod
    def of(cls, rows: int, columns: int, device: str = "cuda") -> Copy:
        x = torch.randn(rows, columns + 24, device=device).bfloat16()[:, 8 : 8 + columns]
        return cls(x, torch.empty_like(x).contiguous(), torch.zeros(2, dtype=torch.int64, device=device))

    def run(self, kernel: CudaKernel, tile: int) -> None:
        rows, columns = self.x.shape
        grid = (-(-columns // 64), -(-rows // tile), 1)
        kernel.launch(grid, tensor_map(self.x, tile, 64), self.out.data_ptr(), self.times.data_ptr(), rows, columns)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("shape", [(64, 64), (8, 4096), (5, 1000), (200, 72)], ids=str)
@pytest.mark.parametrize("tile", [8, 64, 256])
def test_tiles(shape: tuple[int, int], tile: int, nvrtc: None) -> None:
    """Tiles of a part of a wider tensor, past its ends as well, in shared memory beyond 48 KB."""
    copy = Copy.of(*shape)
    copy.run(copies(tile), tile)
    assert torch.equal(copy.out, copy.x)


@pytest.mark.gpu
@GPU
@pytest.mark.captures
def test_captured_launches_follow_late_writes(nvrtc: None) -> None:
    """The kernel starts while the previous one still runs, and reads what that one writes, in a CUDA graph and without."""
    copy, kernel, late = Copy.of(8, 4096), copies(8), adds()
    x = copy.x
    base = torch.empty(8, 4096, dtype=x.dtype, device="cuda")
    copy.x = base

    def run(wait: int) -> None:
        ended = copy.times[1:].data_ptr()
        late.launch((16, 1, 1), base.data_ptr(), ended, base.numel(), wait)
        copy.run(kernel, 8)

    def check() -> None:
        torch.cuda.synchronize()
        assert torch.equal(copy.out.view(torch.int16), before + 1)
        started, ended = copy.times.tolist()
        assert started < ended

    base.copy_(x)
    run(0)  # Loads them.
    before = base.view(torch.int16).clone()
    torch.cuda.synchronize()
    run(300_000)
    check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(300_000)
    for values in (x, -x, x * 3):
        base.copy_(values)
        before = base.view(torch.int16).clone()
        torch.cuda.synchronize()
        graph.replay()
        check()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
def test_two_devices(nvrtc: None) -> None:
    kernel = copies(8)
    for device in (1, 0):
        copy = Copy.of(8, 256, f"cuda:{device}")
        with torch.cuda.device(device):
            copy.run(kernel, 8)
        assert torch.equal(copy.out, copy.x)


@pytest.mark.gpu
@GPU
def test_maps_that_the_driver_refuses() -> None:
    x = torch.empty(8, 1000, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match="no tiles of 8 x 64 from 8 x 999"):
        tensor_map(x[:, 1:], 8, 64)
    with pytest.raises(RuntimeError, match="no tiles of 512 x 64 from 8 x 1000 elements of 2 bytes, rows 2000 bytes apart"):
        tensor_map(x, 512, 64)
