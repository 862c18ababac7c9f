"""Kernels in CUDA C++: NVRTC compiles them when they are first needed, and the driver launches them.

NVRTC comes with PyTorch's builds for CUDA. It needs no compiler of the host's, and sources include no files but headers here.
Binaries are kept in the user's cache directory, under a digest of all that they depend on.

All kernels here are for Hopper, and start while the previous kernel still runs (``triton_pdl.py`` says what they owe it).
References: the CUDA driver API's reference, "Execution Control" and "Tensor Map Object Management"; NVRTC's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import struct
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextvars import ContextVar
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.sources.user_cache import cache_directory, keep

ARCHITECTURE = "sm_90a"
_HEADERS = sorted(Path(__file__).parent.rglob("*.cuh"))
_OPTIONS = (f"--gpu-architecture={ARCHITECTURE}", "-std=c++17", "-default-device")

compiling: ContextVar[Executor | None] = ContextVar("compiling", default=None)
"""Where launches, of Triton's kernels too, compile the kernel and do no more; None: they launch it."""

# The driver's numbers for attributes of launches and functions, and for tensor maps.
_CLUSTER, _PROGRAMMATIC = 4, 6
_MAX_SHARED, _CARVEOUT, _LARGE_CLUSTERS = 8, 9, 14
_UNSIGNED = {1: 0, 2: 1, 4: 2}
_SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {128: 2, 256: 3}

_LAUNCH = "<7I4xQQI4x"
"""``CUlaunchConfig``: grid, block, bytes of shared memory, stream, attributes and their number."""
_ATTRIBUTE = "<I4x3I52x"
"""``CUlaunchAttribute``: its number and value."""
_MAP = 128
_KINDS = {"M": f"{_MAP}s", "P": "Q", "i": "i", "q": "q", "f": "f"}


class CudaKernel:
    """A kernel of a source, for one set of macros.

    Args:
        source: the ``.cu`` file.
        name: of a function declared ``extern "C"``.
        parameters: a letter for each: M, a tensor map; P, a pointer; i and q, integers of 32 and 64 bits; f, a float32.
        macros: by name.
        threads: of a block.
        shared: bytes of a block's dynamic shared memory.
        cluster: blocks of a cluster, along the grid's first axis.
    """

    def __init__(
        self, source: Path, name: str, parameters: str, macros: Mapping[str, int], threads: int, shared: int, cluster: int = 1
    ) -> None:
        self._source, self._name, self._macros = source, name, dict(macros)
        self._block = (threads, 1, 1, shared)
        self._cluster = cluster
        attributes = struct.pack(_ATTRIBUTE, _PROGRAMMATIC, 1, 0, 0)
        if cluster > 1:
            attributes += struct.pack(_ATTRIBUTE, _CLUSTER, cluster, 1, 1)
        self._attributes = ctypes.create_string_buffer(attributes, len(attributes))
        self._attributes_at = ctypes.addressof(self._attributes), len(attributes) // struct.calcsize(_ATTRIBUTE)
        # One buffer holds the launch's settings and then the arguments, at addresses that stay.
        layout = [_LAUNCH]
        places = []
        for kind in parameters:
            places.append(struct.calcsize("".join(layout)))
            layout.append(_KINDS[kind])
        self._sizes = [struct.calcsize(part) for part in layout[1:]]
        packed = struct.Struct("".join(layout))
        self._pack = packed.pack_into
        self._buffer = ctypes.create_string_buffer(packed.size)
        self._launch_at = ctypes.addressof(self._buffer)
        self._arguments = (ctypes.c_void_p * len(places))(*(self._launch_at + place for place in places))
        self._arguments_at = ctypes.addressof(self._arguments)
        self._launching, self._compiling = threading.Lock(), threading.Lock()
        self._asked = False
        """A pool has been asked for the binary. Each of a model's layers asks."""
        self._binary: bytes | None = None
        self._functions: dict[int, int] = {}

    def launch(self, grid: tuple[int, int, int], *arguments: int | float | bytes) -> None:
        """Launches on the current device and stream, in place of which a launch within ``compiling_on`` compiles.

        Args:
            grid: blocks along each axis.
            arguments: pointers as numbers, tensor maps as ``tensor_map`` returns them.

        Raises:
            RuntimeError: NVRTC refuses the source, or the driver the launch.
        """
        pool = compiling.get()
        if pool is not None:
            if not self._asked:
                self._asked = True
                pool.submit(self.binary)
            return
        device = torch.cuda.current_device()
        function = self._functions.get(device) or self._load(device)
        stream = torch._C._cuda_getCurrentRawStream(device)
        # The driver copies the arguments before it returns.
        with self._launching:
            self._pack(self._buffer, 0, *grid, *self._block, stream, *self._attributes_at, *arguments)
            status = _driver().cuLaunchKernelEx(self._launch_at, function, self._arguments_at, None)
        if status:
            _raise(status, f"{self._name} was not launched with grid {grid}")

    def binary(self) -> bytes:
        """The compiled kernel: what this process or another has compiled, or what NVRTC compiles now."""
        with self._compiling:
            if self._binary is None:
                source = self._source.read_bytes()
                options = (*_OPTIONS, *(f"-D{name}={value}" for name, value in sorted(self._macros.items())))
                digest = hashlib.sha256(b"".join([source, *_headers()]))
                digest.update("\0".join((nvrtc_version(), *options)).encode())
                file = binaries() / f"{self._source.stem}-{digest.hexdigest()[:24]}.cubin"
                try:
                    self._binary = file.read_bytes()
                except OSError:
                    self._binary = _compile(source, self._source.name, options)
                    keep(file, self._binary)
            return self._binary

    def _load(self, device: int) -> int:
        driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(module), self.binary()), f"{self._source.name} was not loaded")
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, self._name.encode()), f"there is no {self._name}")
        # A launch would read what is behind the last argument.
        size, sizes = ctypes.c_size_t(), list[int]()
        while not driver.cuFuncGetParamInfo(function, len(sizes), ctypes.byref(ctypes.c_size_t()), ctypes.byref(size)):
            sizes.append(size.value)
        if sizes != self._sizes:
            raise RuntimeError(f"{self._name} has parameters of {sizes} bytes, and is given {self._sizes}")
        attributes = {_MAX_SHARED: self._block[3], _CARVEOUT: 100, _LARGE_CLUSTERS: int(self._cluster > 8)}
        for attribute, value in attributes.items():
            what = f"{self._name} with {self._block[3]} bytes of shared memory and clusters of {self._cluster}"
            _check(driver.cuFuncSetAttribute(function, attribute, value), what)
        return self._functions.setdefault(device, function.value or 0)


def tensor_map(x: torch.Tensor, *tile: int, promotion: int = 256) -> bytes:
    """Describes a tensor to the tensor memory accelerator, which loads tiles of it, with zeros past its ends, in the swizzle of
    a tile's rows.

    Args:
        x: of 1, 2 or 4 bytes an element and at most 5 axes, the last one contiguous; its address and other strides are at
            multiples of 16 bytes.
        tile: its sizes along the last axes, at most 256 each and 16, 32, 64 or 128 bytes along the last one; along axes before
            these, 1.
        promotion: bytes that the L2 cache fetches for each row of a tile, 128 or 256.

    Raises:
        RuntimeError: the driver refuses it.
    """
    return _tensor_map(x.data_ptr(), x.shape, x.stride(), x.element_size(), tile, promotion)


@functools.lru_cache(1 << 14)
def _tensor_map(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int, tile: tuple[int, ...], promotion: int
) -> bytes:
    """A map says where a tensor is and no more, so that it serves whatever tensor is there later."""
    space = ctypes.create_string_buffer(_MAP + 64)
    place = -ctypes.addressof(space) % 64
    axes, pitches, extent = len(shape), list[int](), shape[-1] * size
    for count, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        # PyTorch gives the only place of an axis any stride.
        pitches.append(stride * size if count > 1 else extent + -extent % 16)
        extent = count * pitches[-1]
    sizes = (
        struct.pack(f"<{axes}Q", *shape[::-1]),
        struct.pack(f"<{axes - 1}Q", *pitches),
        struct.pack(f"<{axes}I", *tile[::-1], *[1] * (axes - len(tile))),
        struct.pack(f"<{axes}I", *[1] * axes),
    )
    swizzle = _SWIZZLES[tile[-1] * size]
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.addressof(space) + place, _UNSIGNED[size], axes, pointer, *sizes, 0, swizzle, _PROMOTIONS[promotion], 0
    )
    _check(status, f"no tiles of {tile} from {tuple(shape)} elements of {size} bytes, {pitches} bytes apart")
    return space.raw[place : place + _MAP]


@contextlib.contextmanager
def compiling_on(pool: Executor) -> Iterator[None]:
    """Launches of this thread within it compile their kernels on the pool, and launch none."""
    before = compiling.set(pool)
    try:
        yield
    finally:
        compiling.reset(before)


def binaries() -> Path:
    """The folder of compiled kernels."""
    return cache_directory() / "cuda"


@functools.cache
def refusals(device: torch.device) -> tuple[str, ...]:
    """Reasons why these kernels cannot run on a device; empty: they can."""
    if not support.is_hopper(device):
        return (f"the kernels in CUDA C++ need SM{support.HOPPER_SM}",)
    return (reason,) if (reason := missing()) else ()


def missing() -> str:
    """Says what these kernels lack on this machine, whatever its devices; empty: nothing."""
    try:
        _driver()
        # Compiles nothing, for which it needs its own libraries all the same.
        _compile(b"", "nothing.cu", _OPTIONS)
    except (AttributeError, OSError, RuntimeError) as error:
        return str(error)
    return ""


def nvrtc_version() -> str:
    """Raises: OSError: it is not installed."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _nvrtc() -> ctypes.CDLL:
    """The library that PyTorch has loaded: its Python package is in no folder where the loader looks."""
    name = f"libnvrtc.so.{(torch.version.cuda or '13').split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        raise OSError(f"{name} is not installed: pip install nvidia-cuda-nvrtc") from None


def _headers() -> list[bytes]:
    return [file.read_bytes() for file in _HEADERS]


def _compile(source: bytes, name: str, options: tuple[str, ...]) -> bytes:
    """Returns the binary. Threads may compile at the same time.

    Raises:
        RuntimeError: with what NVRTC says of the source.
    """
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    headers = ctypes.c_char_p * len(_HEADERS)
    texts, names = headers(*_headers()), headers(*(file.name.encode() for file in _HEADERS))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), len(_HEADERS), texts, names)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC refuses {name}: {log.value.decode(errors='replace').strip()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _driver(name: str = "libcuda.so.1") -> ctypes.CDLL:
    driver = ctypes.CDLL(name)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    driver.cuLaunchKernelEx.argtypes = [pointer] * 4
    driver.cuFuncSetAttribute.argtypes = [pointer, number, number]
    driver.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
    dimensions = [ctypes.c_char_p] * 4
    driver.cuTensorMapEncodeTiled.argtypes = [pointer, number, ctypes.c_uint, pointer, *dimensions, *[number] * 4]
    return driver


def _check(status: int, what: str) -> None:
    if status:
        _raise(status, what)


def _raise(status: int, what: str) -> None:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")
