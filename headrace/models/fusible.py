"""Finds the decoder layers that can run in one native call (``fused``), and describes them for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import torch

from headrace.attention.layer import Attention
from headrace.kernels.activation import silu_mul
from headrace.kernels.native.library import DTYPES
from headrace.kernels.native.structs import NativeLayer, NativeMatrix
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm, UnitRMSNorm
from headrace.layers.short_conv import ShortConv
from headrace.model_spec import AttentionSpec
from headrace.models.decoder import Decoder, DecoderAttention, DecoderLayer
from headrace.quant.hybrid import HybridMethod
from headrace.quant.native import NativeMethod

_GEOMETRY = frozenset(
    {
        *("layer", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "scale", "rotary_dim", "rope"),
        *("window", "soft_cap", "sinks"),
    }
)
"""The fields of a spec that the call supports."""


def refusals(decoder: Decoder) -> list[str]:
    """Returns why the layers cannot run in one call; empty: they can."""
    dtype = decoder.norm.weight.dtype
    if decoder.group.size > 1:
        return ["tensor-parallel ranks sum after each of them"]
    if dtype not in DTYPES:
        return [f"the native kernels do not compute in {str(dtype).removeprefix('torch.')}"]
    return [f"layer {index}: {why}" for index, layer in enumerate(decoder.layers) for why in _objections(layer, dtype)]


def _objections(layer: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    if not isinstance(layer, DecoderLayer) or not _inherits(layer, DecoderLayer, "forward", "mix", "run_mlp"):
        return ["it is not a plain decoder layer"]
    mixer, mlp, reasons = layer.mixer, layer.mlp, []
    if isinstance(mixer, DecoderAttention):
        reasons += _attention_objections(mixer)
    elif not isinstance(mixer, ShortConv) or not _inherits(mixer, ShortConv, "forward"):
        return [f"its mixer is of class {type(mixer).__name__}"]
    elif mixer.conv.weight.dtype != dtype:
        reasons.append("its convolution has a type of its own")
    if type(mlp) is not GatedMLP or mlp.act_mul is not silu_mul:
        reasons.append("its MLP is not gated by SiLU")
    for name, matrix in matrices(layer).items():
        method = _native_method(matrix)
        if method is None or matrix.out_dtype is not None:
            reasons.append(f"{name} is not packed for the native kernels")
        elif method.order is not None:
            reasons.append(f"the inputs of {name} are in an order of their own")
    norms: list[RMSNorm | UnitRMSNorm | None] = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [mixer.q_norm, mixer.k_norm] if isinstance(mixer, DecoderAttention) else []
    if any(norm is not None and (type(norm) is not RMSNorm or norm.weight.dtype != dtype) for norm in norms):
        reasons.append("its norms are not plain ones")
    return reasons


def _attention_objections(attention: DecoderAttention) -> list[str]:
    if not _inherits(attention, DecoderAttention, "forward") or type(attention.attention) is not Attention:
        return ["its attention has projections of its own kind"]
    changed = attention.v_norm is not None or attention.v_factor != 1
    return [*["its attention changes values"] * changed, *(f"its attention has {name}" for name in _beyond(attention.spec))]


def matrices(layer: DecoderLayer) -> dict[str, Linear]:
    """The matrices of the mixer, the one before it first, and those of a gated MLP."""
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, ShortConv):
        found: dict[str, Linear] = {"in_proj": mixer.in_proj, "out_proj": mixer.out_proj}
    else:
        attention = cast(DecoderAttention, mixer)
        found = {"qkv_proj": attention.qkv_proj, "o_proj": attention.o_proj}
    return found | {"gate_up_proj": mlp.gate_up_proj, "down_proj": mlp.down_proj} if isinstance(mlp, GatedMLP) else found


def _native_method(matrix: Linear) -> NativeMethod | None:
    method = matrix.method.packed if isinstance(matrix.method, HybridMethod) else matrix.method
    return method if isinstance(method, NativeMethod) else None


def most_rows(matrix: Linear) -> int | None:
    """The most rows that its packed weights multiply; None: any number."""
    return matrix.method.crossover if isinstance(matrix.method, HybridMethod) else None


def _inherits(module: object, base: type, *methods: str) -> bool:
    """Whether the module runs these methods as the base class defines them."""
    return all(getattr(type(module), name, None) is getattr(base, name) for name in methods)


def _beyond(spec: AttentionSpec) -> list[str]:
    """Lists the fields of the spec that the call does not support, new ones included."""
    return [
        field.name
        for field in dataclasses.fields(spec)
        if field.name not in _GEOMETRY and getattr(spec, field.name) != field.default
    ]


def space(layers: Sequence[DecoderLayer]) -> tuple[int, int]:
    """Returns the most elements a token that come out of a product, and the most that go into the next."""
    wide = narrow = 0
    for layer in layers:
        before, after, gate_up, down = matrices(layer).values()
        wide = max(wide, before.out_features, after.in_features, gate_up.out_features)
        queries = layer.mixer.spec.q_size if isinstance(layer.mixer, DecoderAttention) else 0
        narrow = max(narrow, after.in_features, queries, down.in_features)
    return wide, narrow


def describe(layer: DecoderLayer) -> NativeLayer:
    """Describes all of a layer but the cache, which the runner owns."""
    described = NativeLayer(*(_matrix(matrix) for matrix in matrices(layer).values()))
    described.input_norm, described.input_eps = _norm(layer.input_layernorm)
    described.post_norm, described.post_eps = _norm(layer.post_attention_layernorm)
    if isinstance(layer.mixer, ShortConv):
        conv = layer.mixer.conv
        described.conv, described.taps = conv.weight.data_ptr(), conv.weight.shape[-1]
        described.conv_bias = None if conv.bias is None else conv.bias.data_ptr()
        return described
    attention = cast(DecoderAttention, layer.mixer)
    spec, sinks = attention.spec, attention.attention.sinks
    described.heads, described.kv_heads = spec.num_heads, spec.num_kv_heads
    described.width, described.v_width, described.rotary = spec.head_dim, spec.v_head_dim, spec.rotary_dim
    described.window, described.scale, described.soft_cap = spec.window or 0, spec.scale, spec.soft_cap or 0.0
    described.q_norm, described.q_eps = _norm(attention.q_norm)
    described.k_norm, described.k_eps = _norm(attention.k_norm)
    described.sinks = None if sinks is None else sinks.data_ptr()
    return described


def _matrix(layer: Linear) -> NativeMatrix:
    method = cast(NativeMethod, _native_method(layer))
    weights, bias = method.addresses
    return NativeMatrix(weights, bias, layer.out_features, method.groups, method.code)


def _norm(norm: RMSNorm | UnitRMSNorm | None) -> tuple[int | None, float]:
    return (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
