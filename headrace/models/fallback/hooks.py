"""Hooks of modules that last as long as a block of code."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from torch.utils.hooks import RemovableHandle


def hooked(handles: Iterable[RemovableHandle]) -> ExitStack:
    """Removes hooks at the end of the block."""
    stack = ExitStack()
    for handle in handles:
        stack.enter_context(handle)
    return stack
