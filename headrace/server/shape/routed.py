"""Experts that routers chose, in the three encodings that trainers read. All of them count every layer of the model: those
without experts have zeros."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.outputs import RoutedExperts


def _arrays(routed: RoutedExperts) -> dict[str, npt.NDArray[Any]]:
    """``[tokens, layers of the model, top_k]`` each: ids, and float32 weights where they are recorded."""
    kinds: dict[str, tuple[bytes, Any]] = {"routed_experts": (routed.data, "<u2" if routed.shape.wide else np.uint8)}
    if routed.shape.weighted:
        kinds["routed_weights"] = routed.weights, "<f4"
    return {name: _whole(np.frombuffer(data, dtype), routed) for name, (data, dtype) in kinds.items()}


def _whole(numbers: npt.NDArray[Any], routed: RoutedExperts) -> npt.NDArray[Any]:
    shape = routed.shape
    chosen = numbers.reshape(-1, len(shape.layers), shape.top_k)
    if len(shape.layers) == shape.num_layers:
        return chosen
    array = np.zeros((len(chosen), shape.num_layers, shape.top_k), dtype=chosen.dtype)
    array[:, shape.layers] = chosen
    return array


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def routed_int32(routed: RoutedExperts, start: int, num_tokens: int) -> dict[str, Any]:
    """SGLang's fields of ``meta_info``: int32 from token ``start`` on, of the first ``num_tokens`` tokens but the last."""
    parts = {name: array[start : num_tokens - 1] for name, array in _arrays(routed).items()}
    encoded = {
        name: _base64(part.tobytes() if name == "routed_weights" else part.astype("<i4").tobytes())
        for name, part in parts.items()
    }
    return {**encoded, "routed_experts_start_len": start}


def routed_npy(routed: RoutedExperts) -> dict[str, Any]:
    """vLLM's form: a NumPy file."""
    encoded: dict[str, Any] = {}
    for name, array in _arrays(routed).items():
        file = io.BytesIO()
        np.save(file, array)
        encoded[name] = _base64(file.getvalue())
    return encoded


def routed_raw(routed: RoutedExperts) -> dict[str, Any]:
    """prime-rl's form."""
    return {
        name: {"data": _base64(array.tobytes()), "shape": list(array.shape), "start": 0, "dtype": array.dtype.name}
        for name, array in _arrays(routed).items()
    }
