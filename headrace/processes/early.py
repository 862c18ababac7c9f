"""Work of an engine's process that needs no interpreter, begun beside its imports: these take seconds.

A thread opens the GPU, which does not hold the interpreter's lock meanwhile. Another one reads the weights' files, so that they
are in memory when they are asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from headrace.config import EngineArgs

_CHUNK = 8 << 20
_SHARE = 0.5
"""Share of the machine's memory that files are read into at most."""


def hints(args: EngineArgs) -> list[str]:
    """Words of the command line of an engine's process for ``begin``: its first message comes later."""
    # Replicas and ranks choose their devices later.
    alone = args.device != "cpu" and args.data_parallel_size == args.tensor_parallel_size == 1
    device = "gpu" if alone else "none"
    return [device] if args.model is None or args.load_format == "dummy" else [device, args.model]


def begin(words: Sequence[str]) -> None:
    """Starts the threads, and does not wait for them. ``words``: of ``hints``."""
    device, *models = words or ["none"]
    if device == "gpu":
        threading.Thread(target=open_device, name="open-device", daemon=True).start()
    for model in models:
        threading.Thread(target=read_weights, args=(model,), name="read-ahead", daemon=True).start()
    # PyTorch would look through the metadata of all that is installed for backends of devices that headrace has no use for.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def open_device() -> bool:
    """Makes the context of the first CUDA device, which PyTorch uses later. Returns whether there is one."""
    with contextlib.suppress(OSError):
        driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        return not driver.cuInit(0) and not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    return False


def read_weights(model: str) -> int:
    """Reads the weights in a model's folder, if there is one, and drops what it reads: the system keeps it in memory. Returns
    the number of bytes."""
    files, count = sorted(Path(model).glob("*.safetensors")), 0
    with contextlib.suppress(OSError):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if sum(file.stat().st_size for file in files) > _SHARE * memory:
            return 0
        chunk = bytearray(_CHUNK)
        for name in files:
            with name.open("rb", buffering=0) as file:
                while read := file.readinto(chunk):
                    count += read
    return count
