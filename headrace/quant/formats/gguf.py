"""Types of matrices in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.layers.stored import QuantSpec

PLAIN_TYPES = frozenset({"F32", "F16", "BF16"})
"""GGUF types that are floats."""


def _integers(bits: int, group: int, *, minima: bool) -> QuantSpec:
    return QuantSpec(codes="int4" if bits == 4 else "int8", group=(1, group), zero="min" if minima else "none")


SPECS: Mapping[str, QuantSpec] = {
    **{name: _integers(4, 32, minima=name != "Q4_0") for name in ("Q4_0", "Q4_1", "Q4_K")},
    **{name: _integers(4, 16, minima=name == "Q2_K") for name in ("Q2_K", "Q3_K")},
    **{
        name: _integers(8, 32, minima=name in ("Q5_1", "Q5_K")) for name in ("Q5_0", "Q5_1", "Q5_K", "Q8_0", "IQ4_NL", "IQ4_XS")
    },
    "Q6_K": _integers(8, 16, minima=False),
    "MXFP4": QuantSpec(codes="mxfp4", group=(1, 32), scale="e8m0"),
}
"""GGUF types that are integers in groups, or MXFP4 -> the number format in which they are read."""
INT4_TYPES = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""GGUF types whose integers PyTorch's packed int4 kernel holds: groups of 32, each with a scale and a minimum."""
INT8_TYPES = frozenset({"Q5_0", "Q5_1", "Q5_K", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"})
"""GGUF types that the compiled kernels hold in addition; PyTorch's int8 kernel has one scale for each row."""
