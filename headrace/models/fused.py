"""FusedLayers: a decoder's layers in one native call, where their weights are packed for the CPU's kernels.

The call runs the kernels that the modules would run, in their order, so a result is the same, bit for bit. What it saves
is what lies between them: Python, allocations, and the waking of threads. The modules stay the reference, and run whenever
this says it cannot.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import cast

import torch

from headrace.attention.backend import AttentionBackend, LayerCache
from headrace.attention.compose import usual_of
from headrace.attention.context import ForwardContext
from headrace.attention.layer import Attention
from headrace.attention.native import NativeAttention
from headrace.config import Decision
from headrace.kernels import native
from headrace.kernels.activation import silu_mul
from headrace.kernels.native import NativeKernels
from headrace.kernels.native.library import DTYPES
from headrace.kernels.native.structs import NativeLayer, NativeMatrix, NativeStep
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm, UnitRMSNorm
from headrace.model_spec import AttentionSpec
from headrace.models.decoder import Decoder, DecoderAttention, DecoderLayer
from headrace.quant.native import NativeMethod

_GEOMETRY = frozenset(
    {
        *("layer", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "scale", "rotary_dim", "rope"),
        *("window", "soft_cap", "sinks"),
    }
)
"""The fields of a spec that the call supports."""


class FusedLayers:
    """Stands for the layers of one decoder, whose modules and parameters must stay as they are now.

    Args:
        layers: all of them, and none that ``refusals`` objects to.
    """

    def __init__(self, layers: Sequence[DecoderLayer], kernels: NativeKernels) -> None:
        self._call = kernels.layers
        self._dtype = layers[0].input_layernorm.weight.dtype
        self._kind = DTYPES[self._dtype]
        self._wide, self._narrow = _space(layers)
        self._structs = (NativeLayer * len(layers))(*(_describe(layer) for layer in layers))
        self._caches: Sequence[LayerCache] | None = None
        self._backends: Sequence[AttentionBackend] | None = None
        self._bound = False
        """Whether the call supports the caches and backends."""
        self._angles = (ctypes.c_void_p * len(layers))()

    def takes(self, ctx: ForwardContext) -> bool:
        """Returns whether the call supports the step, its caches and its backends."""
        if ctx.step.sparse is not None or ctx.step.visible_ends is not None:
            return False
        if ctx.caches is not self._caches or ctx.backends is not self._backends:
            self._bind(ctx)
        return self._bound

    def _bind(self, ctx: ForwardContext) -> None:
        self._caches, self._backends = ctx.caches, ctx.backends
        own = [(ctx.caches[index], ctx.backends[index]) for index in range(len(self._structs))]
        self._bound = all(
            type(usual_of(backend)) is NativeAttention and cache.rows.dtype == self._dtype and cache.rows[0].is_contiguous()
            for cache, backend in own
        )
        for struct, (cache, _) in zip(self._structs, own, strict=True):
            struct.rows, struct.block_size, struct.group = cache.rows.data_ptr(), cache.block_size, cache.group
            struct.block_stride = cache.rows.stride(0)

    def __call__(
        self, stream: torch.Tensor, angles: Sequence[torch.Tensor | None], ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers of one step, whose context it ``takes``.

        Args:
            stream: ``[T, hidden]``, what goes into the first layer; it is overwritten.
            angles: of each layer, ``[T, rotary_dim]``: contiguous cosines and sines.

        Returns:
            ``[T, hidden]`` twice: what the last layer adds to the residual stream, and the stream before it.
        """
        step, (tokens, hidden) = ctx.step, stream.shape
        slots = [slots.contiguous() for slots in step.slot_mapping]
        tables, groups = step.block_tables, len(slots)
        self._angles[:] = [None if angle is None else angle.data_ptr() for angle in angles]
        described = NativeStep(
            starts=step.query_start.data_ptr(),
            lengths=step.seq_lens.data_ptr(),
            slots=ctypes.addressof(at := (ctypes.c_void_p * groups)(*(slot.data_ptr() for slot in slots))),
            tables=ctypes.addressof(rows := (ctypes.c_void_p * groups)(*(table.data_ptr() for table in tables))),
            table_widths=ctypes.addressof(widths := (ctypes.c_int64 * groups)(*(table.stride(0) for table in tables))),
            angles=ctypes.addressof(self._angles),
            batch=tables[0].shape[0],
            tokens=tokens,
        )
        x = torch.empty_like(stream)
        space = torch.empty(tokens * (self._wide + self._narrow), dtype=stream.dtype)
        self._call(
            ctypes.addressof(self._structs),
            len(self._structs),
            ctypes.addressof(described),
            stream.data_ptr(),
            x.data_ptr(),
            space.data_ptr(),
            space.data_ptr() + tokens * self._wide * space.itemsize,
            hidden,
            self._kind,
        )
        del at, rows, widths  # They had to live until now.
        return x, stream


def fuse(decoder: Decoder) -> Decision | None:
    """Lets ``decoder`` run its layers in one call, if they can; None: they are not on the CPU."""
    if decoder.norm.weight.device.type != "cpu":
        return None
    kernels = native.load()
    reasons = ["the native kernels are not available"] if kernels is None else refusals(decoder)
    if kernels is None or reasons:
        return Decision("decoder layers", "module by module", reasons[0])
    decoder.fused = FusedLayers(list(decoder.layers), kernels)  # type: ignore[arg-type]
    return Decision("decoder layers", "all in one native call", "every matrix is packed for the native kernels")


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
    attention, mlp, reasons = layer.mixer, layer.mlp, []
    plain = _inherits(attention, DecoderAttention, "forward")
    if not isinstance(attention, DecoderAttention) or not plain or type(attention.attention) is not Attention:
        return ["its attention has projections of its own kind"]
    if attention.v_norm is not None or attention.v_factor != 1:
        reasons.append("its attention changes values")
    reasons += [f"its attention has {name}" for name in _beyond(attention.spec)]
    if type(mlp) is not GatedMLP or mlp.act_mul is not silu_mul:
        reasons.append("its MLP is not gated by SiLU")
    matrices = {"qkv_proj": attention.qkv_proj, "o_proj": attention.o_proj}
    if type(mlp) is GatedMLP:
        matrices |= {"gate_up_proj": mlp.gate_up_proj, "down_proj": mlp.down_proj}
    for name, matrix in matrices.items():
        if not isinstance(matrix.method, NativeMethod) or matrix.out_dtype is not None:
            reasons.append(f"{name} is not packed for the native kernels")
        elif matrix.method.order is not None:
            reasons.append(f"the inputs of {name} are in an order of their own")
    norms = (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)
    if any(norm is not None and (type(norm) is not RMSNorm or norm.weight.dtype != dtype) for norm in norms):
        reasons.append("its norms are not plain ones")
    return reasons


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


def _space(layers: Sequence[DecoderLayer]) -> tuple[int, int]:
    """Returns the most elements a token that come out of a product, and the most that go into the next."""
    wide = narrow = 0
    for layer in layers:
        attention, mlp = cast(DecoderAttention, layer.self_attn), cast(GatedMLP, layer.mlp)
        wide = max(wide, attention.qkv_proj.out_features, attention.spec.out_size, mlp.gate_up_proj.out_features)
        narrow = max(narrow, attention.spec.q_size, mlp.down_proj.in_features)
    return wide, narrow


def _describe(layer: DecoderLayer) -> NativeLayer:
    """Describes all of a layer but the cache, which the runner owns."""
    attention, mlp = cast(DecoderAttention, layer.self_attn), cast(GatedMLP, layer.mlp)
    spec, sinks = attention.spec, attention.attention.sinks
    described = NativeLayer(
        qkv=_matrix(attention.qkv_proj),
        o=_matrix(attention.o_proj),
        gate_up=_matrix(mlp.gate_up_proj),
        down=_matrix(mlp.down_proj),
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        width=spec.head_dim,
        v_width=spec.v_head_dim,
        rotary=spec.rotary_dim,
        window=spec.window or 0,
        scale=spec.scale,
        soft_cap=spec.soft_cap or 0.0,
    )
    described.input_norm, described.input_eps = _norm(layer.input_layernorm)
    described.post_norm, described.post_eps = _norm(layer.post_attention_layernorm)
    described.q_norm, described.q_eps = _norm(attention.q_norm)
    described.k_norm, described.k_eps = _norm(attention.k_norm)
    described.sinks = None if sinks is None else sinks.data_ptr()
    return described


def _matrix(layer: Linear) -> NativeMatrix:
    method = cast(NativeMethod, layer.method)
    weights, bias = method.addresses
    return NativeMatrix(weights, bias, layer.out_features, method.groups, method.code)


def _norm(norm: RMSNorm | UnitRMSNorm | None) -> tuple[int | None, float]:
    return (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
