"""``gptq``, ``awq``, and ``auto-round`` checkpoints in the layout of either: integers in 32-bit words, transposed."""

from __future__ import annotations

from typing import Literal

from headrace.layers.stored import QuantSpec
from headrace.model_spec.integers import is_integer
from headrace.quant.formats.scheme import Fields, MatrixFormat, Rule, Scheme

_BITS = (4, 8)


def gptq(fields: Fields) -> Scheme:
    named = fields.get("checkpoint_format") or fields.get("format")
    name = "checkpoint_format" if fields.get("checkpoint_format") else "format"
    version: Literal["gptq", "gptq_v2"] = fields.choice(name, ("gptq", "gptq_v2")) if named else "gptq"
    fields.choice("pack_dtype", ("int32",), "int32")
    if fields.flag("is_marlin_format", False):
        raise fields.refuse("is_marlin_format", "save the checkpoint with checkpoint_format gptq")
    rules = [*_dynamic(fields, version)]
    if not fields.flag("lm_head", False):
        rules.append(Rule("lm_head false:", None, "lm_head"))
    rules += fields.floats("modules_to_not_convert")
    return Scheme(fields.method, (*rules, Rule("quant_method gptq", _format(fields, version))))


def awq(fields: Fields) -> Scheme:
    fields.choice("version", ("gemm", "GEMM"), "gemm")
    fields.choice("bits" if fields.get("bits") is not None else "w_bit", (4,))
    if not fields.flag("zero_point", True):
        raise fields.refuse("zero_point", "symmetric matrices are read from checkpoints of gptq and compressed-tensors")
    group = fields.group("group_size" if fields.get("group_size") is not None else "q_group_size")
    everything = Rule("quant_method awq", MatrixFormat("awq", QuantSpec(codes="int4", group=group, zero="int")))
    return Scheme(fields.method, (*fields.floats("modules_to_not_convert"), everything))


def auto_round(fields: Fields) -> Scheme:
    packing = str(fields.get("packing_format")).removeprefix("auto_round:").removeprefix("auto_")
    if packing not in ("gptq", "awq"):
        raise fields.refuse("packing_format", "supported are: auto_round:auto_gptq and auto_round:auto_awq")
    fields.choice("data_type", ("int",), "int")
    layout: Literal["gptq", "awq"] = "gptq" if packing == "gptq" else "awq"
    rules = []
    extra = fields.within("extra_config")
    for pattern in extra.values:
        own = extra.within(pattern)
        field = "extra_config"
        floats = is_integer(own.get("bits"), 16)
        merged = Fields(fields.method, {**fields.values, **own.values}, own.where)
        rules.append(Rule(field, None if floats else _format(merged, layout), pattern, fields.matcher(field, pattern)))
    rules.append(Rule("quant_method auto-round", _format(fields, layout)))
    return Scheme(fields.method, tuple(rules))


def _dynamic(fields: Fields, version: Literal["gptq", "gptq_v2"]) -> list[Rule]:
    """Rules of ``dynamic``: ``-:`` and a regular expression for matrices that are floats, ``+:`` or nothing before it for those
    with other fields than the rest."""
    rules = []
    dynamic = fields.within("dynamic")
    for pattern in dynamic.values:
        own = dynamic.within(pattern)
        field, floats = "dynamic", pattern.startswith("-:")
        regex = fields.regex(field, pattern.removeprefix("-:").removeprefix("+:"))
        merged = Fields(fields.method, {**fields.values, **own.values}, own.where)
        rules.append(Rule(field, None if floats else _format(merged, version), pattern, regex.match))
    return rules


def _format(fields: Fields, layout: Literal["gptq", "gptq_v2", "awq"]) -> MatrixFormat:
    bits = fields.choice("bits", _BITS if layout != "awq" else (4,))
    # AWQ stores zero points of symmetric matrices too.
    symmetric = fields.flag("sym", True) and layout != "awq"
    spec = QuantSpec(
        codes="int4" if bits == 4 else "int8",
        group=fields.group("group_size"),
        zero="none" if symmetric else "int",
        order="none" if layout == "awq" else "g_idx",
    )
    return MatrixFormat(layout, spec)
