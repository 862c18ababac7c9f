"""Experts that routers chose, in the three encodings that trainers read. All of them count every layer of the model: those
without experts have zeros."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.outputs import RoutedExperts


def _array(routed: RoutedExperts) -> npt.NDArray[np.integer[Any]]:
    """``[tokens, layers of the model, top_k]`` uint8 or uint16."""
    shape = routed.shape
    chosen = np.frombuffer(routed.data, dtype="<u2" if shape.wide else np.uint8).reshape(-1, len(shape.layers), shape.top_k)
    if len(shape.layers) == shape.num_layers:
        return chosen
    array = np.zeros((len(chosen), shape.num_layers, shape.top_k), dtype=chosen.dtype)
    array[:, shape.layers] = chosen
    return array


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def routed_int32(routed: RoutedExperts, start: int, num_tokens: int) -> dict[str, Any]:
    """SGLang's fields of ``meta_info``: int32 from token ``start`` on, of the first ``num_tokens`` tokens but the last."""
    return {
        "routed_experts": _base64(_array(routed)[start : num_tokens - 1].astype("<i4").tobytes()),
        "routed_experts_start_len": start,
    }


def routed_npy(routed: RoutedExperts) -> str:
    """vLLM's form: a NumPy file."""
    file = io.BytesIO()
    np.save(file, _array(routed))
    return _base64(file.getvalue())


def routed_raw(routed: RoutedExperts) -> dict[str, Any]:
    """prime-rl's form."""
    array = _array(routed)
    return {"data": _base64(array.tobytes()), "shape": list(array.shape), "start": 0, "dtype": array.dtype.name}
