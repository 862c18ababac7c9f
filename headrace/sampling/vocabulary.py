"""Searches rows as wide as a vocabulary without sorting them, by the maxima or the sums of their blocks.

Each result depends on its row alone, never on the rest of the batch. Index space: ``[N, vocab]`` cut into blocks of ``BLOCK``
tokens; the last one may be shorter.
"""

from __future__ import annotations

import torch

from headrace.kernels import gpu, sampling

BLOCK = 128


def block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """``[N, vocab] -> [N, blocks]``. NaN spreads to its block's maximum."""
    whole = logits.shape[1] // BLOCK * BLOCK
    maxima = logits[:, :whole].reshape(len(logits), -1, BLOCK).amax(-1)
    if whole == logits.shape[1]:
        return maxima
    return torch.cat((maxima, logits[:, whole:].amax(-1, keepdim=True)), dim=1)


def log_sums(logits: torch.Tensor) -> torch.Tensor:
    """``[N, vocab] -> [N, 1]``: log-sum-exp, the normaliser of the logprobs.

    Uses our own kernel on a GPU: in a library's reduction the order of summation depends on the number of rows.
    """
    if gpu.takes(logits):
        return sampling.kernels.sample(logits).log_sums.unsqueeze(1)
    return logits.logsumexp(-1, keepdim=True)


def _block_tokens(blocks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """``[N, b]`` block numbers to ``[N, b * BLOCK]`` token ids, clamped to the last token of the vocabulary."""
    inside = torch.arange(BLOCK, device=blocks.device)
    return (blocks.unsqueeze(-1) * BLOCK + inside).clamp_(max=vocab_size - 1).flatten(1)


def argmax(logits: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row and its logit: ``[N]`` int64 and ``[N]``. Ties go to the lowest id; NaN wins."""
    tokens = _block_tokens(maxima.argmax(-1, keepdim=True), logits.shape[1])
    values = logits.gather(1, tokens)
    place = values.argmax(-1, keepdim=True)
    return tokens.gather(1, place).squeeze(1), values.gather(1, place).squeeze(1)


def candidates(logits: torch.Tensor, maxima: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest logits of each row and their tokens: ``[N, count]`` twice.

    Sorted by descending logit, then by token id. All tokens with a logit above the last candidate's are included; of those
    equal to it, some may be missing.
    """
    num_tokens, num_blocks = logits.shape[1], maxima.shape[1]
    if count >= num_tokens:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        return values, order
    if 2 * count < num_blocks and num_tokens % BLOCK == 0:
        # If a candidate were in none of these blocks, each of them would hold a token at least as good.
        blocks = maxima.topk(count, dim=-1, sorted=False).indices
        firsts = torch.arange(logits.shape[0], device=logits.device).unsqueeze(1) * num_blocks
        pool = logits.reshape(-1, BLOCK).index_select(0, (blocks + firsts).flatten()).view(logits.shape[0], -1)
        values, places = pool.topk(count, dim=-1, sorted=False)
        tokens = blocks.gather(1, places // BLOCK) * BLOCK + places % BLOCK
    else:
        values, tokens = logits.topk(count, dim=-1, sorted=False)
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)


def pick(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Samples an index by inverting the cumulative sum at ``number * sum``.

    Args:
        weights: ``[N, M]`` float64, not negative. A row of zeros gives 0.
        numbers: ``[N]`` float64 in [0, 1).

    Returns:
        ``[N]`` int64: an index of positive weight.
    """
    totals = weights.cumsum(-1)
    total = totals[:, -1:]
    return search(totals, numbers.unsqueeze(1) * total, total).squeeze(1)


def search(totals: torch.Tensor, targets: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """``[N, 1]``: the first index whose cumulative sum exceeds the target, at most the last one of positive weight."""
    last = (totals < total).sum(-1, keepdim=True)
    return torch.minimum((totals <= targets).sum(-1, keepdim=True), last).clamp_(max=totals.shape[1] - 1)


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """``[N, vocab] -> [N, blocks]`` float64."""
    whole = weights.shape[1] // BLOCK * BLOCK
    sums = weights[:, :whole].reshape(len(weights), -1, BLOCK).sum(-1)
    if whole < weights.shape[1]:
        sums = torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True)), dim=1)
    return sums.double()


def pick_wide(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """``pick`` for rows as wide as the vocabulary: selects a block, then a token in it. ``weights`` are float32."""
    totals = block_sums(weights).cumsum(-1)
    total = totals[:, -1:]
    targets = numbers.unsqueeze(1) * total
    block = search(totals, targets, total)
    before = torch.where(block > 0, totals.gather(1, (block - 1).clamp_(min=0)), 0.0)
    tokens = _block_tokens(block, weights.shape[1])
    inside = weights.gather(1, tokens).double()
    # The last block may be short: its repeated last token counts once.
    inside[:, 1:].masked_fill_(tokens[:, 1:] == tokens[:, :-1], 0.0)
    inner = inside.cumsum(-1)
    place = search(inner, targets - before, inner[:, -1:])
    return tokens.gather(1, place).squeeze(1)
