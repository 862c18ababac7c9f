"""Choice of keys by an indexer, and attention to the keys that were chosen, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

_SPACE = 16 << 20
"""Numbers of scores, or of gathered keys, that are held at a time."""


class TokenPlaces(NamedTuple):
    """The tokens of some rows, in order."""

    rows: torch.Tensor
    """``[N]`` int32: the row of each, an index into block tables."""
    positions: torch.Tensor
    """``[N]`` int32: its place in its row; -1: it is of no row, and sees nothing."""
    longest: int
    """No row has more tokens in the cache."""

    def part(self, first: int, end: int) -> TokenPlaces:
        return TokenPlaces(self.rows[first:end], self.positions[first:end], self.longest)


class ChoiceRule(NamedTuple):
    """The rule by which blocks of keys are chosen, given the scores of their index keys."""

    top_k: int
    """Blocks that a token attends to."""
    block: int = 1
    """Keys of a block, whose score is the highest of those that the token sees."""
    local: int = 0
    """Blocks, the token's own and those before it, that are chosen whatever their scores."""


def choose(
    q: torch.Tensor,
    weights: torch.Tensor | None,
    index_keys: torch.Tensor,
    block_table: torch.Tensor,
    places: TokenPlaces,
    rule: ChoiceRule,
) -> torch.Tensor:
    """Chooses the blocks of keys that tokens attend to. Of equal scores the earlier ones win.

    Args:
        q: ``[N, heads, d]``, the index queries.
        weights: ``[N, heads]`` float32: a key's score is ``sum(weights * relu(q . key))`` over the heads. None: each head
            chooses for itself, by ``q . key``.
        index_keys: ``[blocks, block_size, d]``
        block_table: ``[R, B]`` int32.

    Returns:
        ``[N, 1 or heads, top_k]`` int32: numbers of blocks, ascending; -1 behind the last.
    """
    lists = q.shape[1] if weights is None else 1
    chosen = torch.full((len(q), lists, rule.top_k), -1, dtype=torch.int32, device=q.device)
    for row, first, end, length in _rows(places):
        used = block_table[row, : -(-length // index_keys.shape[1])].long()
        keys = index_keys[used].flatten(0, 1)[:length].float()
        for start in range(first, end, max(1, _SPACE // (q.shape[1] * length))):
            stop = min(end, start + max(1, _SPACE // (q.shape[1] * length)))
            scores = torch.matmul(q[start:stop].float(), keys.T)
            if weights is not None:
                scores = torch.matmul(weights[start:stop, None], torch.relu(scores))
            chosen[start:stop] = _highest(_of_blocks(scores, places.positions[start:stop], rule), rule.top_k)
    return chosen


def _rows(places: TokenPlaces) -> Iterator[tuple[int, int, int, int]]:
    """The row, the first token, the token behind the last and the keys that they see, for each run of tokens of one row."""
    numbers, counts = torch.unique_consecutive(places.rows, return_counts=True)
    first = 0
    for row, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        length = int(places.positions[first : first + count].max()) + 1
        if length:
            yield row, first, first + count, length
        first += count


def _of_blocks(scores: torch.Tensor, positions: torch.Tensor, rule: ChoiceRule) -> torch.Tensor:
    """``[n, lists, keys]`` -> ``[n, lists, blocks]``: minus infinity where a token sees nothing of a block."""
    keys, position = torch.arange(scores.shape[2], device=scores.device), positions.long()[:, None, None]
    scores = scores.masked_fill(keys > position, -torch.inf)
    if rule.block > 1:
        behind = -scores.shape[2] % rule.block
        scores = torch.nn.functional.pad(scores, (0, behind), value=-torch.inf).view(*scores.shape[:2], -1, rule.block).amax(3)
    if rule.local:
        own = position // rule.block
        block = torch.arange(scores.shape[2], device=scores.device)
        scores = scores.masked_fill((block <= own) & (block > own - rule.local) & (position >= 0), torch.inf)
    return scores


def _highest(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """``[n, lists, top_k]`` int32: the places of the highest scores, ascending; -1 behind the last."""
    count = min(top_k, scores.shape[2])
    least = scores.topk(count, dim=2).values[..., -1:]
    above, equal = scores > least, scores == least
    kept = above | (equal & (equal.cumsum(2) <= count - above.sum(2, keepdim=True)))
    kept &= scores > -torch.inf
    token, head, place = kept.nonzero(as_tuple=True)
    chosen = torch.full((*scores.shape[:2], top_k), -1, dtype=torch.int32, device=scores.device)
    chosen[token, head, kept.cumsum(2)[token, head, place] - 1] = place.int()
    return chosen


def attend_chosen(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    places: TokenPlaces,
    chosen: torch.Tensor,
    rule: ChoiceRule,
    *,
    scale: float,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Attention of tokens to the keys of their chosen blocks, those that they see.

    Args:
        q: ``[N, num_heads, d]``
        keys: ``[blocks, block_size, kv_heads, d]``
        values: ``[blocks, block_size, kv_heads, dv]``
        chosen: ``[N, lists, top_k]`` int32, as ``choose`` returns it: KV heads share the lists evenly, in order.
        batch_invariant: a token comes out bitwise the same in any batch; on a GPU.

    Returns:
        ``[N, num_heads, dv]`` in q's dtype; 0 for a token of no row.
    """
    (count, lists, _), (num_heads, width) = chosen.shape, q.shape[1:]
    kv_heads, block_size = keys.shape[2], keys.shape[1]
    out = q.new_zeros(count, num_heads, values.shape[3])
    if not count:
        return out
    used = max(1, int((chosen >= 0).sum(2).max()))
    inside = torch.arange(rule.block, device=q.device)
    at_once = max(1, _SPACE // (used * rule.block * kv_heads * width))
    head = torch.arange(kv_heads, device=q.device)[:, None]
    for first in range(0, count, at_once):
        part = slice(first, first + at_once)
        number = chosen[part, :, :used].long().repeat_interleave(kv_heads // lists, dim=1)
        key = (number.unsqueeze(3) * rule.block + inside).flatten(2)
        seen = (number >= 0).repeat_interleave(rule.block, dim=2) & (key <= places.positions[part, None, None])
        key = torch.where(seen, key, 0)
        block = block_table[places.rows[part].long()[:, None, None], key // block_size].long()
        k, v = (side[block, key % block_size, head].float() for side in (keys, values))
        grouped = q[part].float().view(-1, kv_heads, num_heads // kv_heads, width)
        logits = torch.matmul(grouped, k.mT) * scale
        shares = logits.masked_fill(~seen.unsqueeze(2), -torch.inf).softmax(-1)
        shares = torch.where(seen.any(2)[..., None, None], shares, 0.0)
        v = torch.where(seen.unsqueeze(3), v, 0.0)
        out[part] = torch.matmul(shares, v).flatten(1, 2).to(q.dtype)
    return out
