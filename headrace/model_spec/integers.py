"""Checks of numbers in a configuration: JSON has any type and size, and elsewhere true counts as 1."""

from __future__ import annotations

from typing import TypeGuard

MAX_INTEGER = 2**40
MAX_NUMBER = 1e30
"""Largest magnitude accepted: float32 holds it and its inverse."""


def is_integer(value: object, least: int) -> TypeGuard[int]:
    """Whether it is a whole number of at least ``least``, and no absurd one."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_INTEGER


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that float32 can hold; false for NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_NUMBER <= value <= MAX_NUMBER
