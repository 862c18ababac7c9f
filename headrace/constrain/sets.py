"""Arrays whose items are unique: those of few values are written out, since no grammar remembers what it has read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from headrace.constrain.branches import constants, says

_ARRAYS = 400
"""Arrays that one schema may stand for, at most: those of five values are 326."""
_BY_TYPE: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}


def unique_arrays(schema: Mapping[str, Any], items: Any) -> list[list[Any]] | None:
    """Every array without repetitions that the schema may allow; None: they are not known, too many, or none.

    Args:
        items: the schema of the items, behind its references.
    """
    if schema.keys() & {"prefixItems", "enum", "const"} or not isinstance(items, dict):
        return None
    if any(says(name) for name in items.keys() - {"type", "enum", "const"}):
        return None
    named, kind = constants(items), items.get("type")
    values = list(named.values()) or (_BY_TYPE.get(kind, []) if isinstance(kind, str) else [])
    least, most = schema.get("minItems", 0), min(schema.get("maxItems", len(values)), len(values))
    sizes = range(least, most + 1)
    if not values or not sizes or sum(math.perm(len(values), size) for size in sizes) > _ARRAYS:
        return None
    return [list(array) for size in sizes for array in itertools.permutations(values, size)]
