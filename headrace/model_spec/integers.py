"""What a number of a configuration may be: JSON has any type, and true counts as 1 elsewhere."""

from __future__ import annotations

from typing import TypeGuard


def is_integer(value: object, least: int) -> TypeGuard[int]:
    """Whether it is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
