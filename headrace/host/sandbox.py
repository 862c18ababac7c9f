"""Isolation of a process that reads clients' data: no secrets of its owner, no network, programs or other processes."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from pathlib import Path

_LIBRARIES = ("LD_LIBRARY_PATH", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_PYTHON = ("PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
_ENVIRONMENT = frozenset(("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE", *_LIBRARIES, *_PYTHON))
"""Variables that the process gets of its owner's: keys and tokens are among the others."""
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
"""Instructions of seccomp's filters: load a word, jump if the word is k or at least k, return k."""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_OTHER_ABI = 0x40000000
"""System calls from this number on are those of x32."""
_CALLS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, 317, (41, 59, 101, 310, 311, 322, 425, 438)),
    "aarch64": (0xC00000B7, 277, (198, 221, 117, 270, 271, 281, 425, 438)),
}
"""Machine -> its number in filters, seccomp, and the refused calls: socket, execve, ptrace, process_vm_readv,
process_vm_writev, execveat, io_uring_setup, pidfd_getfd."""


def isolated_environment() -> dict[str, str]:
    """Returns the environment variables that such a process is started with."""
    environment = {name: value for name, value in os.environ.items() if name in _ENVIRONMENT}
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def isolate() -> None:
    """Takes the network, programs and other processes from all threads of this process, for good; needs no privilege.

    Files stay within reach: the filter sees no paths. Does nothing where there is no such filter.
    """
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return
    machine, seccomp, refused = _CALLS[platform.machine()]
    end = len(refused) + 4  # the place of _ALLOW, which _REFUSE follows
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 0, end - 1, machine), (_LOAD, 0, 0, 0), (_AT_LEAST, end - 3, 0, _OTHER_ABI)]
    program += [(_EQUAL, end - place, 0, call) for place, call in enumerate(refused, len(program))]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(seccomp, _SET_MODE_FILTER, _ALL_THREADS, filter_):
        why = os.strerror(ctypes.get_errno())
        sys.stderr.write(f"headrace: a process that reads clients' data keeps the network: seccomp: {why}\n")


def limit_memory(size: int) -> None:
    """Bounds the address space to what the process has now and ``size`` more (Linux)."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
