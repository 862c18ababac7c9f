"""Reference attention over a paged cache: a row at a time, in float64."""

from __future__ import annotations

import torch


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    visible_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed queries, the last tokens of their rows; ``visible_ends`` extends what they see.

    Args:
        q: ``[T, num_heads, d]``
        keys: ``[blocks, block_size, kv_heads, d]``
        values: ``[blocks, block_size, kv_heads, dv]``
        block_tables: ``[R, B]`` int32.
        query_start: ``[R + 1]`` int32: first token of each row in the packed batch. Tokens of no row come out as 0.
        seq_lens: ``[R]`` int32: tokens of each row in the cache, this step's included.
        window: a token sees itself and the ``window - 1`` before it; None: all.
        chunked: the window does not slide: it begins at the last multiple of ``window``.
        soft_cap: ``logits = soft_cap * tanh(logits / soft_cap)``
        sinks: ``[num_heads]``: a logit a head that joins the softmax and carries no value.
        k_scale, v_scale: ``[blocks, block_size, kv_heads]`` float32, for keys and values in e4m3.
        visible_ends: ``[T]`` int32: the position before which a token sees keys; None: up to its own.

    Returns:
        ``[T, num_heads, dv]`` in q's dtype.
    """
    out = q.new_zeros(len(q), q.shape[1], values.shape[3])
    starts = query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        start, end = starts[row : row + 2]
        if start == end or not length:
            continue
        # Blocks before the window of a row's first query may belong to another row.
        low = int(first_seen(torch.tensor(length - (end - start)), window, chunked))
        blocks = block_tables[row].long()
        k, v = (side[blocks].double().flatten(0, 1)[low:length] for side in (keys, values))
        if k_scale is not None and v_scale is not None:
            k = k * k_scale[blocks].flatten(0, 1)[low:length].unsqueeze(-1)
            v = v * v_scale[blocks].flatten(0, 1)[low:length].unsqueeze(-1)
        shares = row_weights(
            q[start:end].double(),
            k,
            low,
            scale=scale,
            window=window,
            chunked=chunked,
            soft_cap=soft_cap,
            sinks=sinks,
            visible_ends=None if visible_ends is None else visible_ends[start:end],
        )
        out[start:end] = torch.einsum("hgqk,khd->qhgd", shares, v).flatten(1, 2).to(q.dtype)
    return out


def first_seen(position: torch.Tensor, window: int | None, chunked: bool) -> torch.Tensor:
    """Returns the first position that the token at each position sees."""
    if window is None:
        return torch.zeros_like(position)
    return position - position % window if chunked else (position - window + 1).clamp(min=0)


def row_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    low: int = 0,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    visible_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention weights of one row's last tokens; options as in ``paged_attention``.

    Args:
        q: ``[Q, num_heads, d]`` float64.
        k: ``[K, kv_heads, d]`` float64: the row's keys from position ``low`` on.
        visible_ends: ``[Q]`` int32.

    Returns:
        ``[kv_heads, group, Q, K]`` float64. With sinks, the weights of a query sum to less than 1.
    """
    kv_heads, length = k.shape[1], low + len(k)
    grouped = q.view(len(q), kv_heads, -1, q.shape[2])
    logits = torch.einsum("qhgd,khd->hgqk", grouped, k) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    position = torch.arange(length - len(q), length, device=q.device)[:, None]
    key = torch.arange(low, length, device=q.device)
    seen = key < (position + 1 if visible_ends is None else visible_ends[:, None])
    seen &= key >= first_seen(position, window, chunked)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.double().view(kv_heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, sink), dim=-1)
    return logits.softmax(-1)[..., : len(k)]
