"""Hooks of modules that last as long as a block of code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Removes hooks at the end of the block."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
