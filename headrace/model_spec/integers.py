"""What a number of a configuration may be: JSON has any type and size, and true counts as 1 elsewhere."""

from __future__ import annotations

from typing import TypeGuard

MAX_INTEGER = 2**40
MAX_NUMBER = 1e30
"""What float32 holds, and its inverse too."""


def is_integer(value: object, least: int) -> TypeGuard[int]:
    """Whether it is a whole number of at least ``least``, and no absurd one."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_INTEGER


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that float32 can hold; false for NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_NUMBER <= value <= MAX_NUMBER
