"""``mxfp4`` of gpt-oss: the experts' matrices in blocks of 32 4-bit floats, everything else as floats."""

from __future__ import annotations

from headrace.layers.stored import QuantSpec
from headrace.quant.formats.scheme import Fields, MatrixFormat, Rule, Scheme


def mxfp4(fields: Fields) -> Scheme:
    blocks = MatrixFormat("mxfp4_blocks", QuantSpec(codes="mxfp4", group=(1, 32), scale="e8m0"))
    return Scheme(fields.method, (*fields.floats("modules_to_not_convert"), Rule("quant_method mxfp4", blocks)))
