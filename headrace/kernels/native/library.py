"""NativeKernels: the compiled library, its functions as Python calls over tensors."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace.kernels.native.build import BuildError, build

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Supported dtypes, and their codes in the library."""
_SIGNATURES: dict[str, list[type]] = {
    "init": [c_void_p, c_void_p],
    "tile": [],
    "wide_rows": [],
    "matmul": [c_void_p, c_int, c_int64, c_void_p, c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int],
    "few_rows": [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64],
    "attention": [
        *(c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int64, c_int64, c_int64, c_int64, c_int64, c_int64, c_int64, c_int64, c_int64, c_int64),
        *(c_float, c_float, c_int64, c_int),
    ],
    "rms_norm": [c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int],
    "add_rms_norm": [c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int64, c_int64, c_int],
    "silu_mul": [c_void_p, c_void_p, c_int64, c_int64, c_int],
    "rotate": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int],
    "rotate_and_write": [
        *(c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int64, c_int64, c_int64, c_int64, c_int64, c_int64, c_int64, c_int64, c_int),
    ],
    "causal_conv": [*(c_void_p,) * 6, *(c_int64,) * 4, c_int, c_int, c_int],
    "delta_rule": [*(c_void_p,) * 9, c_int64, c_float, c_int, c_int],
    "state_space": [*(c_void_p,) * 9, c_float, c_float, c_int, c_int],
    "selective_scan": [*(c_void_p,) * 10, c_int, c_int],
    "gated_norm": [*(c_void_p,) * 4, *(c_int64,) * 5, c_float, c_int, c_int, c_int],
    "layers": [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int],
}
_RESULTS = {"tile": ctypes.c_char_p, "wide_rows": c_int64}
_OPENMP = ("libgomp", "libiomp5", "libomp")


class NativeKernels:
    """The library's functions, by their names. They take addresses and check nothing: callers check dtypes, shapes and strides.

    ``tile`` names the instructions that its matrix products use: avx512_vnni, avx2 or portable. From ``wide_rows`` rows on
    (None: never) they round weights to bfloat16, as products in bfloat16 do. Immutable.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., None]: ...

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"headrace_{name}")
            function.argtypes = arguments
            function.restype = _RESULTS.get(name)
            setattr(self, name, function)
        self.tile: str = library.headrace_tile().decode()
        self.wide_rows: int | None = library.headrace_wide_rows() or None
        self.threads = _share_threads(library)


def _share_threads(library: ctypes.CDLL) -> str:
    """Makes the library use torch's OpenMP threads. Returns the runtime's file name, or ``one``."""
    path = _openmp()
    if path is not None:
        runtime = ctypes.CDLL(path)
        try:
            parallel, threads = runtime.GOMP_parallel, runtime.omp_get_max_threads
        except AttributeError:
            path = None
        else:
            library.headrace_init(ctypes.cast(parallel, c_void_p), ctypes.cast(threads, c_void_p))
            return Path(path).name
    logger.warning("native kernels: torch's OpenMP runtime was not found, so they run on one thread")
    return "one"


def _openmp() -> str | None:
    """The OpenMP runtime that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        lines = []
    mapped = [line.split(maxsplit=5)[5] for line in lines if line.count("/")]
    beside = sorted(map(str, (Path(torch.__file__).parent / "lib").glob("lib*omp*")))
    return next((path for path in [*mapped, *beside] if Path(path).name.startswith(_OPENMP)), None)


@functools.cache
def load(march: str = "") -> NativeKernels | None:
    """Returns the kernels, compiling them on first use; None, with one line in the log, if that fails.

    ``HEADRACE_NATIVE`` in the environment is the instruction set where none is given, as a value of the compiler's ``-march``;
    ``0`` disables the kernels.
    """
    wanted = os.environ.get("HEADRACE_NATIVE", "native")
    if wanted == "0":
        return None
    try:
        return NativeKernels(build(march or wanted))
    except (BuildError, OSError, AttributeError) as error:
        logger.warning("native kernels are not used, PyTorch's are: %s", error)
        return None


def kernels_for(x: torch.Tensor, *others: torch.Tensor) -> NativeKernels | None:
    """The kernels if they support x's device and dtype, which the others have too, else None."""
    for other in others:
        if other.dtype != x.dtype:
            return None
    return load() if x.dtype in DTYPES and x.is_cpu else None
