"""The structures that ``decoder.cpp`` and ``state.cpp`` take, field for field."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p


class NativeMatrix(ctypes.Structure):
    """A packed matrix."""

    _fields_ = [
        *((name, c_void_p) for name in ("weights", "bias")),
        *((name, c_int64) for name in ("outputs", "groups", "format")),
    ]


class NativeLayer(ctypes.Structure):
    """A decoder layer: weights, cache and geometry. Absent fields are null, or 0."""

    _fields_ = [
        *((name, NativeMatrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm", "sinks")),
        *((name, c_void_p) for name in ("conv", "conv_bias", "rows")),
        *((name, c_int64) for name in ("heads", "kv_heads", "width", "v_width", "rotary", "window", "block_size")),
        *((name, c_int64) for name in ("block_stride", "group", "taps")),
        *((name, c_float) for name in ("input_eps", "post_eps", "q_eps", "k_eps", "scale", "soft_cap")),
    ]


class NativeStep(ctypes.Structure):
    """One step: addresses of its tensors, and of the arrays of addresses a cache group, and a layer, has."""

    _fields_ = [
        *((name, c_void_p) for name in ("starts", "lengths", "slots", "tables", "table_widths", "angles", "states")),
        *((name, c_int64) for name in ("batch", "tokens")),
    ]


class NativeStateRows(ctypes.Structure):
    """The rows of a step as state layers see them: addresses of its tensors, and the number of rows."""

    _fields_ = [*((name, c_void_p) for name in ("query_start", "blocks", "starts")), ("count", c_int64)]


class NativeRecurrence(ctypes.Structure):
    """Geometry of states, and strides in elements."""

    _fields_ = [
        *((name, c_int64) for name in ("heads", "shared", "outer", "inner")),
        *((name, c_int64) for name in ("stride", "decay_stride", "beta_stride", "block_stride")),
    ]
