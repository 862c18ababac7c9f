"""FusedLayers: a decoder's layers in one native call, where their weights are packed for the CPU's kernels.

The call runs the kernels that the modules would run, in their order, so a result is the same, bit for bit. What it saves
is what lies between them: Python, allocations, and the waking of threads. The modules stay the reference, and run whenever
this says it cannot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import torch

from headrace.attention.backend import AttentionBackend, LayerCache
from headrace.attention.compose import usual_of
from headrace.attention.context import ForwardContext
from headrace.attention.native import NativeAttention
from headrace.cache.states import LayerState
from headrace.config import Decision
from headrace.kernels import native
from headrace.kernels.native import NativeKernels
from headrace.kernels.native.library import DTYPES
from headrace.kernels.native.structs import NativeLayer, NativeStep
from headrace.kernels.state.native import state_rows
from headrace.layers.short_conv import ShortConv
from headrace.models.decoder import Decoder, DecoderAttention, DecoderLayer
from headrace.models.fusible import describe, matrices, most_rows, refusals, space


class FusedLayers:
    """Stands for the layers of one decoder, whose modules and parameters must stay as they are now.

    Args:
        layers: all of them, and none that ``refusals`` objects to.
    """

    def __init__(self, layers: Sequence[DecoderLayer], kernels: NativeKernels) -> None:
        self._call = kernels.layers
        self._dtype = layers[0].input_layernorm.weight.dtype
        self._kind = DTYPES[self._dtype]
        self._wide, self._narrow = space(layers)
        self._structs = (NativeLayer * len(layers))(*(describe(layer) for layer in layers))
        self._mixers = [cast("DecoderAttention | ShortConv", layer.mixer) for layer in layers]
        self.most_tokens = min(
            (most for layer in layers for one in matrices(layer).values() if (most := most_rows(one))), default=0
        )
        """The most tokens of a step, 0: any number; more of them are multiplied in floats."""
        self._caches: Sequence[LayerCache] | None = None
        self._backends: Sequence[AttentionBackend] | None = None
        self._states: Sequence[LayerState] | None = None
        self._bound = False
        """Whether the call supports the caches, backends and states."""
        self._angles = (ctypes.c_void_p * len(layers))()

    def takes(self, ctx: ForwardContext) -> bool:
        """Returns whether the call supports the step, its caches, its backends and its states."""
        step = ctx.step
        if step.sparse is not None or step.visible_ends is not None:
            return False
        if self.most_tokens and len(step.slot_mapping[0]) > self.most_tokens:
            return False
        states = None if ctx.states is None else ctx.states.layers
        if ctx.caches is not self._caches or ctx.backends is not self._backends or states is not self._states:
            self._caches, self._backends, self._states = ctx.caches, ctx.backends, states
            self._bound = all(self._bind(*pair, ctx) for pair in zip(self._structs, self._mixers, strict=True))
        return self._bound

    def _bind(self, struct: NativeLayer, mixer: DecoderAttention | ShortConv, ctx: ForwardContext) -> bool:
        """Describes the cache, or the states, of a layer. Returns whether the call supports them."""
        if isinstance(mixer, ShortConv):
            conv = None if ctx.states is None else ctx.states.layers[mixer.spec.index].conv
            if conv is None or conv.dtype != self._dtype:
                return False
            struct.rows, struct.block_stride = conv.data_ptr(), conv.stride(0)
            return True
        cache, backend = ctx.caches[mixer.spec.layer], ctx.backends[mixer.spec.layer]
        struct.rows, struct.block_size, struct.group = cache.rows.data_ptr(), cache.block_size, cache.group
        struct.block_stride = cache.rows.stride(0)
        usual = type(usual_of(backend)) is NativeAttention
        return usual and cache.rows.dtype == self._dtype and cache.rows[0].is_contiguous()

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
        states = None if ctx.states is None else state_rows(ctx.states.rows)
        self._angles[:] = [None if angle is None else angle.data_ptr() for angle in angles]
        described = NativeStep(
            starts=step.query_start.data_ptr(),
            lengths=step.seq_lens.data_ptr(),
            slots=ctypes.addressof(at := (ctypes.c_void_p * groups)(*(slot.data_ptr() for slot in slots))),
            tables=ctypes.addressof(rows := (ctypes.c_void_p * groups)(*(table.data_ptr() for table in tables))),
            table_widths=ctypes.addressof(widths := (ctypes.c_int64 * groups)(*(table.stride(0) for table in tables))),
            angles=ctypes.addressof(self._angles),
            states=None if states is None else ctypes.addressof(states),
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
        del at, rows, widths, states  # They had to live until now.
        return x, stream


def fuse(decoder: Decoder) -> Decision | None:
    """Lets ``decoder`` run its layers in one call, if they can; None: they are not on the CPU."""
    if decoder.norm.weight.device.type != "cpu":
        return None
    kernels = native.load()
    reasons = ["the native kernels are not available"] if kernels is None else refusals(decoder)
    if kernels is None or reasons:
        return Decision("decoder layers", "module by module", reasons[0])
    decoder.fused = fused = FusedLayers(list(decoder.layers), kernels)  # type: ignore[arg-type]
    why = "every matrix is packed for the native kernels"
    if most := fused.most_tokens:
        why += f"; more than {most} tokens go module by module"
    return Decision("decoder layers", "all in one native call", why)
