"""The reference backend: attention by its definition, a row at a time, in float64."""

from __future__ import annotations

import torch

from headrace.attention.backend import VISIBLE_ENDS, AttentionBackend, AttentionInputs
from headrace.attention.compose import output_of
from headrace.kernels.attention.reference import paged_attention


class ReferenceAttention(AttentionBackend):
    """Slow and simple; any geometry, any device. The other backends are tested against it."""

    name = "reference"
    kinds = frozenset({"window", "chunked", "soft_cap", "sinks"})
    modes = frozenset({VISIBLE_ENDS})

    def run(self, inputs: AttentionInputs) -> torch.Tensor:
        q, cache, sinks, visible_ends, *_ = inputs
        step, spec, out = self.step, cache.spec, output_of(self.step, inputs)
        result = paged_attention(
            q,
            cache.keys,
            cache.values,
            step.block_tables[cache.group],
            step.query_start,
            step.seq_lens,
            scale=spec.scale,
            window=spec.window,
            chunked=spec.chunked,
            soft_cap=spec.soft_cap,
            sinks=sinks,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            visible_ends=visible_ends,
        )
        out[step.tokens] = result[step.tokens]
        return out.flatten(1)
