"""The oracle: attention as the formula says it, a row and a head at a time, in float64."""

from __future__ import annotations

import torch

from headrace.attention.backend import LayerCache, StepMetadata
from headrace.spec import AttentionSpec, Mode


class ReferenceAttention:
    """Slow and meant to be obviously right; any geometry, any device. The other backends are tested against it."""

    name = "reference"
    capturable = False
    needs_exact_lengths = True

    def __init__(self) -> None:
        self._step: StepMetadata | None = None

    @staticmethod
    def supports(spec: AttentionSpec, device: str, dtype: str, mode: Mode = "dense", kv_dtype: str | None = None) -> list[str]:
        return [] if mode == "dense" else [f"the reference attends densely only, not {mode}"]

    def plan(self, step: StepMetadata) -> None:
        self._step = step

    def run(self, q: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None) -> torch.Tensor:
        if self._step is None:
            raise RuntimeError("plan() comes before run()")
        step, spec = self._step, cache.spec
        out = q.new_zeros(len(q), spec.num_heads, spec.v_head_dim)
        for row in range(step.num_rows):
            start, end = (int(token) for token in step.query_start_host[row : row + 2])
            length = int(step.seq_lens_host[row])
            blocks = step.block_tables[cache.group][row, : -(-length // cache.block_size)].long()
            first = length - (end - start)
            # Behind the window of the first query, blocks may be another row's by now.
            low = 0 if spec.window is None else max(0, first + 1 - spec.window)
            keys = _read(cache.keys, cache.k_scale, blocks)[low:length]
            values = _read(cache.values, cache.v_scale, blocks)[low:length]
            for head in range(spec.num_heads if length else 0):
                kv_head = head // spec.group_size
                sink = None if sinks is None else sinks[head]
                out[start:end, head] = _attend(
                    q[start:end, head].double(), keys[:, kv_head], values[:, kv_head], spec, first - low, sink
                ).to(q.dtype)
        return out.flatten(1)


def _read(stored: torch.Tensor, scale: torch.Tensor | None, blocks: torch.Tensor) -> torch.Tensor:
    """``[len(blocks) * block_size, num_kv_heads, width]`` float64: what the numbers of some blocks mean."""
    meant = stored[blocks].double()
    if scale is not None:
        meant *= scale[blocks].unsqueeze(-1)
    return meant.flatten(0, 1)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec, first: int, sink: torch.Tensor | None
) -> torch.Tensor:
    """One head of one row.

    Args:
        q: ``[n, head_dim]``; q[i] stands at the place ``first + i`` among the keys.
        keys: ``[length, head_dim]``
        values: ``[length, v_head_dim]``
        sink: a scalar that joins the softmax and carries no value.

    Returns:
        ``[n, v_head_dim]``
    """
    logits = spec.scale * (q @ keys.T)
    if spec.soft_cap is not None:
        logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
    query = first + torch.arange(len(q), device=q.device)[:, None]
    key = torch.arange(len(keys), device=q.device)[None, :]
    seen = key <= query
    if spec.window is not None:
        seen &= key > query - spec.window
    logits = logits.masked_fill(~seen, -torch.inf)
    if sink is not None:
        logits = torch.cat((logits, sink.double().expand(len(q), 1)), dim=1)
    return logits.softmax(dim=-1)[:, : len(keys)] @ values
