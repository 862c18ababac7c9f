"""Pages of memory that are given back to the system while their addresses stay."""

from __future__ import annotations

import ctypes
import mmap
import sys

_DONTNEED = 4
"""MADV_DONTNEED: of private memory without a file, pages are freed at once, and read as zeros when they are touched again."""


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def discard(address: int, nbytes: int) -> int:
    """Frees the whole pages in a run of private memory, whose values are lost: they are zeros from then on.

    Returns:
        Bytes that were freed; 0 where the system cannot.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    libc = _libc()
    if libc is None or size <= 0:
        return 0
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _DONTNEED):
        raise OSError(ctypes.get_errno(), "pages cannot be given back")
    return size


def trim() -> None:
    """Gives memory back that has been freed, and that the allocator holds."""
    if (libc := _libc()) is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
