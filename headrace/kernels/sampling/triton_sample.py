"""Samples a token for each row, greedily or at random, in three passes over the logits; filters take some more.

Random numbers are Philox-4x32-10 (Salmon et al., 2011) of (seed, sample, position), as ``headrace.sampling.random`` has
them to the last bit, and tokens are sampled by inverting the cumulative sum as ``headrace.sampling.vocabulary`` does: block
by block, and then within one. Sums are taken in another order, so a random number at the border of two tokens
may select the other one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headrace.kernels.sampling.triton_filter import cutoffs as find_cutoffs
from headrace.kernels.sampling.triton_vocabulary import BLOCK, CHUNK, best_of, of_slot
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options


class SampleOutput(NamedTuple):
    """Per row, ``[N]``."""

    tokens: torch.Tensor
    """int64; any token of the vocabulary where ``best`` is not finite."""
    best: torch.Tensor
    """The row's largest logit, float32: NaN if there is a NaN, -inf if every token is banned."""
    log_sums: torch.Tensor
    """log of the sum of ``exp(logit)``, float32: a token's logprob is its logit less this."""
    cutoffs: torch.Tensor | None
    """The smallest logit that the filters kept, float32; -inf where nothing was filtered. None: there were no filters."""


@triton.jit
def uniform(seed_low, seed_high, sample, position):
    """A number in [0, 1) of 53 random bits, float64. The words are int64 that hold 32 bits."""
    key_0 = seed_low.to(tl.uint32)
    key_1 = seed_high.to(tl.uint32)
    even_0 = position.to(tl.uint32)
    odd_0 = sample.to(tl.uint32)
    even_1 = even_0 * 0
    odd_1 = even_0 * 0
    for _ in tl.static_range(10):
        product_0 = even_0.to(tl.uint64) * 0xD2511F53
        product_1 = even_1.to(tl.uint64) * 0xCD9E8D57
        even_0 = (product_1 >> 32).to(tl.uint32) ^ odd_0 ^ key_0
        even_1 = (product_0 >> 32).to(tl.uint32) ^ odd_1 ^ key_1
        odd_0 = product_1.to(tl.uint32)
        odd_1 = product_0.to(tl.uint32)
        key_0 = (key_0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        key_1 = (key_1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    bits = ((even_0 >> 5).to(tl.uint64) << 26) | (odd_0 >> 6).to(tl.uint64)
    return bits.to(tl.float64) * 1.1102230246251565e-16


_ALIGNED = 16
"""Bytes: where logits must begin. Allocations do."""


@triton.jit
def _search(totals, target, total, index):
    """The first index whose cumulative sum exceeds the target, at most the last one of positive weight."""
    last = tl.sum((totals < total).to(tl.int32), 0)
    place = tl.sum((totals <= target).to(tl.int32), 0)
    place = tl.minimum(place, last)
    before = tl.sum(tl.where(index == place - 1, totals, 0.0), 0)
    return place, before


@launched
def _peaks(
    logits, peaks, places, masses, maxima, row_stride: tl.int64, VOCAB: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, FILTERS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Reduces one row's chunk to the largest logit, NaN if there is one, its first place, and the sum of exp relative to it.

    For filters the largest logit of each block, too.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    broken = tl.max((value != value).to(tl.int32), 0) > 0
    value = tl.where(value != value, float("inf"), value)
    peak = tl.max(value, 0)
    place = tl.min(tl.where(value == peak, token, VOCAB - 1), 0)
    pivot = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + row * CHUNKS + chunk, tl.where(broken, float("nan"), peak))
    tl.store(places + row * CHUNKS + chunk, place)
    tl.store(masses + row * CHUNKS + chunk, tl.sum(tl.exp(value - pivot), 0))
    if FILTERS:
        block = tl.arange(0, CHUNK // BLOCK)
        largest = tl.max(tl.reshape(value, (CHUNK // BLOCK, BLOCK)), 1)
        tl.store(maxima + (row * CHUNKS + chunk) * (CHUNK // BLOCK) + block, largest)


@launched
def _sums(
    logits, peaks, temperatures, slots, cutoffs, sums, row_stride: tl.int64, VOCAB: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, FILTERS: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """Sums of the weights ``exp((logit - best) / temperature)`` of a chunk's blocks, for rows that sample."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = of_slot(temperatures, slots, row, 1, 0, SLOTS).to(tl.float32)
    if temperature > 0.0:
        best, _, _ = best_of(peaks, row, CHUNKS, CHUNKS_P)
        block = tl.arange(0, CHUNK // BLOCK)
        token = tl.program_id(1) * CHUNK + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        value = tl.load(logits + row * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        weights = tl.exp((value - best) / temperature)
        if FILTERS:
            weights = tl.where(value >= tl.load(cutoffs + row), weights, 0.0)
        place = row * CHUNKS * (CHUNK // BLOCK) + tl.program_id(1) * (CHUNK // BLOCK) + block
        tl.store(sums + place, tl.sum(weights, 1))


@launched
def _choose(
    logits, peaks, places, masses, temperatures, keys, slots, positions, cutoffs, sums, tokens, bests, log_sums, token_ids,
    num_tokens, outcome, row_stride: tl.int64, ids_slot: tl.int64, VOCAB: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_P: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr, BLOCK: tl.constexpr, DRAW: tl.constexpr,
    SLOTS: tl.constexpr, FILTERS: tl.constexpr, ADVANCE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row from its chunks and blocks. ``ADVANCE``: its slot takes the token."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    best, peak, whole = best_of(peaks, row, CHUNKS, CHUNKS_P)
    chunk = tl.arange(0, CHUNKS_P)
    inside = chunk < CHUNKS
    pivot = tl.where(best == float("-inf"), 0.0, best)
    mass = tl.load(masses + row * CHUNKS + chunk, mask=inside, other=0.0)
    tl.store(log_sums + row, tl.log(tl.sum(mass * tl.exp(whole - pivot), 0)) + pivot)
    broken = tl.max((peak != peak).to(tl.int32), 0) > 0
    tl.store(bests + row, tl.where(broken, float("nan"), best))
    place = tl.load(places + row * CHUNKS + chunk, mask=inside, other=VOCAB - 1)
    token = tl.min(tl.where((whole == best) & inside, place, VOCAB - 1), 0)
    if DRAW:
        temperature = of_slot(temperatures, slots, row, 1, 0, SLOTS).to(tl.float32)
        if temperature > 0.0:
            number = uniform(
                of_slot(keys, slots, row, 3, 0, SLOTS),
                of_slot(keys, slots, row, 3, 1, SLOTS),
                of_slot(keys, slots, row, 3, 2, SLOTS),
                tl.load(positions + row),
            )
            block = tl.arange(0, BLOCKS_P)
            totals = tl.cumsum(tl.load(sums + row * BLOCKS + block, mask=block < BLOCKS, other=0.0).to(tl.float64), 0)
            total = tl.max(totals, 0)
            picked, before = _search(totals, number * total, total, block)
            picked = tl.minimum(picked, (VOCAB - 1) // BLOCK)
            lane = tl.arange(0, BLOCK)
            here = picked * BLOCK + lane
            value = tl.load(logits + row * row_stride + here, mask=here < VOCAB, other=float("-inf")).to(tl.float32)
            weights = tl.exp((value - best) / temperature)
            if FILTERS:
                weights = tl.where(value >= tl.load(cutoffs + row), weights, 0.0)
            inner = tl.cumsum(weights.to(tl.float64), 0)
            within, _ = _search(inner, number * total - before, tl.max(inner, 0), lane)
            token = tl.minimum(picked * BLOCK + within, VOCAB - 1)
    tl.store(tokens + row, token.to(tl.int64))
    if ADVANCE:
        slot = tl.load(slots + row).to(tl.int64)
        position = tl.load(positions + row).to(tl.int64)
        # A NaN counts as infinite here.
        finite = tl.abs(best) != float("inf")
        tl.store(outcome + 2 * row, tl.where((slot >= 0) & finite, token, -1).to(tl.int32))
        tl.store(token_ids + slot * ids_slot + position, tl.where(finite, token, 0).to(tl.int32), mask=slot >= 0)
        tl.store(num_tokens + slot, position + 1, mask=slot >= 0)


class SlotTokens(NamedTuple):
    """Tensors that sampling updates: one row per slot. Where no logit is finite, token 0 stands in. Padding rows change
    nothing."""

    token_ids: torch.Tensor
    """``[S, L]`` int32: the token goes to the row's position."""
    num_tokens: torch.Tensor
    """``[S]`` int64"""
    outcome: torch.Tensor
    """``[N or more, 2]`` int32. Column 0: the token; -1 where there is none."""


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    filters: torch.Tensor | None = None,
    advances: SlotTokens | None = None,
) -> SampleOutput:
    """Samples a token for each row in proportion to ``exp(logit / temperature)``, among those that its filters keep.

    Args:
        logits: ``[N, vocab]`` float32 or 16-bit, last axis contiguous; not modified.
        temperatures: ``[N]`` float; 0: greedy, the first of equals. None: greedy for all rows.
        keys: ``[N, 3]`` int64: low and high word of the seed, and the sample's index.
        positions: ``[N]`` int: where in its sequence the token will stand.
        slots: ``[N]`` int64, row -> its place in ``temperatures [S]``, ``keys [S, 3]`` and ``filters [S, 4]``; -1: a padding
            row. None: row i reads entry i.
        filters: ``[N, 4]`` float64, contiguous: the requested temperature, top_k (vocab: no limit), top_p, min_p. A row with a
            temperature there and none in ``temperatures`` keeps its best tokens alone. None: no row filters.
        advances: updated with each slot's token; None: only the return value carries tokens.
    """
    rows, vocab = logits.shape
    device = logits.device
    chunks = cdiv(vocab, CHUNK)
    blocks = chunks * (CHUNK // BLOCK)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    best, log_sums = torch.empty(2, rows, dtype=torch.float32, device=device)
    sampling = temperatures is not None and keys is not None and positions is not None
    filtering = sampling and filters is not None
    if not rows:
        return SampleOutput(tokens, best, log_sums, best if filtering else None)
    if logits.data_ptr() % _ALIGNED:
        # Triton would compile another kernel for these, which loads less at once and sums up in another order.
        logits = logits.clone()
    peaks, masses = torch.empty(2, rows, chunks, dtype=torch.float32, device=device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    maxima = torch.empty(rows, blocks, dtype=torch.float32, device=device) if filtering else best
    sizes = {"VOCAB": vocab, "CHUNKS": chunks, "CHUNKS_P": power_of_two(chunks)}
    grid, pdl = (rows, chunks), {"FILTERS": filtering, **options(device)}
    _peaks[grid](
        logits, peaks, places, masses, maxima, logits.stride(0), VOCAB=vocab, CHUNK=CHUNK, CHUNKS=chunks, BLOCK=BLOCK,
        num_warps=8, **pdl,
    )  # fmt: skip
    sums = torch.empty(rows, blocks, dtype=torch.float32, device=device) if sampling else best
    cutoffs = None
    if filtering and temperatures is not None and filters is not None:
        cutoffs = find_cutoffs(logits, peaks, maxima, temperatures, filters, slots)
    least = best if cutoffs is None else cutoffs
    ids_slot = 0 if advances is None else advances.token_ids.stride(0)
    if sampling:
        _sums[grid](
            logits, peaks, temperatures, best if slots is None else slots, least, sums, logits.stride(0), **sizes,
            CHUNK=CHUNK, BLOCK=BLOCK, SLOTS=slots is not None, num_warps=8, **pdl,
        )  # fmt: skip
    else:
        temperatures = keys = positions = best
    _choose[(rows,)](
        logits, peaks, places, masses, temperatures, keys, best if slots is None else slots, positions, least, sums, tokens,
        best, log_sums, *(advances or (best, best, best)), logits.stride(0), ids_slot, **sizes,
        BLOCKS=blocks, BLOCKS_P=power_of_two(blocks), BLOCK=BLOCK,
        DRAW=sampling, SLOTS=slots is not None, ADVANCE=advances is not None, num_warps=4, **pdl,
    )  # fmt: skip
    return SampleOutput(tokens, best, log_sums, cutoffs)
