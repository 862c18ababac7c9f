"""Tensors of feature files."""

from __future__ import annotations

from typing import Any

import numpy as np


def tensors(**changes: Any) -> dict[str, Any]:
    """Of one picture of 2 x 4 patches, 4 of which make a row. None leaves a tensor out."""
    good = {"features": np.ones((2, 8), np.float32), "grid_thw": np.array([[1, 2, 4]])} | changes
    return {name: value for name, value in good.items() if value is not None}


def nan(value: float, *shape: int) -> Any:
    array = np.zeros(shape, np.float32)
    array.flat[-1] = value
    return array
