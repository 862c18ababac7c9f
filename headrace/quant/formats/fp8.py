"""Matrices of e4m3: ``fp8`` of DeepSeek, Qwen and transformers, ``fbgemm_fp8``, ``modelopt``, and ``w4afp8``, whose experts
have 4 bits."""

from __future__ import annotations

import dataclasses

from headrace.layers.stored import ActivationCodes, ActivationScale, QuantSpec, ScaleGroup
from headrace.quant.formats.scheme import Fields, MatrixFormat, Rule, Scheme

_IGNORED = ("modules_to_not_convert", "ignored_layers")
_INSTEAD = "save the checkpoint as compressed-tensors or in one of these"


def fp8(fields: Fields) -> Scheme:
    fields.choice("fmt", ("e4m3",), "e4m3")
    fields.choice("scale_fmt", ("float", "ue8m0"), "float")
    tile = fields.tile("weight_block_size")
    static = fields.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    return _with_floats(fields, _scaled(tile or "tensor", "static" if static else "group128" if tile else "token"))


def fbgemm_fp8(fields: Fields) -> Scheme:
    return _with_floats(fields, _scaled("channel", "token"))


def modelopt(fields: Fields) -> Scheme:
    """Reads the fields of ``config.json``, or of ``hf_quant_config.json``, where they lie in ``quantization``."""
    inner = fields.within("quantization") if fields.get("quantization") is not None else fields
    formats = {
        "FP8": _scaled("tensor", "static"),
        "FP8_PER_CHANNEL_PER_TOKEN": _scaled("channel", "token"),
        "FP8_PB_WO": _scaled((128, 128), "none"),
        "FP8_BLOCK_SCALES": _scaled((128, 128), "group128"),
        "NVFP4": MatrixFormat("fp4", QuantSpec(codes="nvfp4", group=(1, 16), scale="e4m3", activation_codes="fp4")),
    }
    algorithm = str(inner.get("quant_algo"))
    if algorithm not in formats:
        raise inner.refuse("quant_algo", f"supported are: {', '.join(formats)}; {_INSTEAD}")
    scheme = _with_floats(inner, formats[algorithm], "exclude_modules", "ignore")
    rounds_kv = inner.get("kv_cache_quant_algo") == "FP8" or inner.within("kv_cache_scheme").get("type") == "float"
    return dataclasses.replace(scheme, rounds_kv=rounds_kv)


def w4afp8(fields: Fields) -> Scheme:
    """Experts of 4 bits with static activations, everything else FP8 in tiles."""
    group = fields.group("group_size") if fields.get("group_size") is not None else (1, 128)
    experts = QuantSpec(codes="int4", group=group, activations="static", activation_codes="e4m3")
    rules = (
        *fields.floats(*_IGNORED),
        Rule("quant_method w4afp8", MatrixFormat("int4_bytes", experts), "experts"),
        Rule("quant_method w4afp8", _scaled(fields.tile("weight_block_size") or (128, 128), "group128")),
    )
    return Scheme(fields.method, rules)


def _scaled(group: ScaleGroup, activations: ActivationScale) -> MatrixFormat:
    codes: ActivationCodes = "none" if activations == "none" else "e4m3"
    spec = QuantSpec(codes="e4m3", group=group, activations=activations, activation_codes=codes)
    return MatrixFormat("scaled", spec)


def _with_floats(fields: Fields, format_: MatrixFormat, *lists: str) -> Scheme:
    """Every matrix in one format but those that a list names."""
    return Scheme(fields.method, (*fields.floats(*(lists or _IGNORED)), Rule(f"quant_method {fields.method}", format_)))
