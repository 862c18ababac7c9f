"""The smallest logit that a row's top_k, top_p and min_p keep, exactly, without sorting and without a host sync.

What a filter keeps is defined in ``headrace.sampling.topk_topp``: whole logit values, from the top down. Both top_k and top_p
keep a value while what is larger, by number or by mass, is less than a limit; so each searches the last such value, in a
histogram over the bits of the logits, as a radix selection does (the family of Alabi et al., "Fast k-selection algorithms
for graphics processing units", 2012): values in the selected bin are counted again in finer bins, until a
bin is a single value. top_p comes second, since its limit is a part of what top_k left; its first histogram is the one that
top_k had.

A lower bound of the cutoff comes first, so that usually only few logits are counted:

* top_k: as many blocks of the row as it keeps tokens have their largest logit at or above it;
* top_p: the value it ends at and those below have more than ``1 - top_p`` of the mass, and are not more than all;
* min_p: its own threshold, less a margin for rounding.

Masses are integers, of ``2**-40`` of the best token's, so that sums depend on no order: a row's cutoff is the same in any
batch and in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.sampling.triton_vocabulary import CHUNK, best_of, of_slot
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_TILES = 4
"""Chunks counted by one program."""
_DIGIT = 12
_BINS = 1 << _DIGIT
_STEPS = 5
"""A logit has three digits; top_p after top_k starts at the second."""
_STATE = 9
"""int64 values of a row's search: 0 lowest key; 1 bits of a key below its digit, -1 once done; 2, 3 number and mass of the
tokens above; 4 whether by mass; 5, 6 initial values of 0 and 1; 7 total mass; 8 number of values of the digit."""


@triton.jit
def _key(value):
    """int32 that compare as the float32 do; of the two zeros one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(value, best, temperature, min_p):
    """Whether min_p and bans keep a token, and its mass."""
    weight = tl.exp((value - best) / temperature)
    alive = (weight.to(tl.float64) >= min_p) & (value > float("-inf"))
    return alive, (weight * 1099511627776.0).to(tl.int64)


@triton.jit
def _digits(span):
    """Bits of a span of keys (int64) below its first digit."""
    shift = span * 0
    for bit in tl.static_range(20):
        shift += ((span >> (12 + bit)) > 0).to(tl.int64)
    return shift


@triton.jit
def _params(temperatures, filters, slots, row, VOCAB: tl.constexpr, SLOTS: tl.constexpr):
    """Temperature (0: this row is not filtered), top_k, top_p and min_p of a row."""
    temperature = of_slot(temperatures, slots, row, 1, 0, SLOTS).to(tl.float32)
    top_k = of_slot(filters, slots, row, 4, 1, SLOTS).to(tl.int64)
    top_p = of_slot(filters, slots, row, 4, 2, SLOTS)
    min_p = of_slot(filters, slots, row, 4, 3, SLOTS)
    filtered = (top_k < VOCAB) | (top_p < 1.0) | (min_p > 0.0)
    if SLOTS:
        filtered = filtered & (tl.load(slots + row) >= 0)
    return tl.where(filtered, temperature, 0.0), top_k, top_p, min_p


@launched
def _totals(
    logits, peaks, temperatures, filters, slots, totals, row_stride: tl.int64, VOCAB: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The mass of what min_p keeps of some chunks, for rows with top_p that no top_k limits."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p = _params(temperatures, filters, slots, row, VOCAB, SLOTS)
    if (temperature > 0.0) & (top_k >= VOCAB) & (top_p < 1.0):
        best, _, _ = best_of(peaks, row, CHUNKS, CHUNKS_P)
        total = tl.zeros((CHUNK,), tl.int64)
        first = tl.program_id(1) * TILES
        for tile in range(first, tl.minimum(first + TILES, CHUNKS)):
            token = tile * CHUNK + tl.arange(0, CHUNK)
            value = tl.load(logits + row * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
            alive, mass = _weigh(value, best, temperature, min_p)
            total += tl.where(alive, mass, 0)
        tl.store(totals + row * tl.num_programs(1) + tl.program_id(1), tl.sum(total, 0))


@triton.jit
def _below(best, temperature, share):
    """A logit that is surely below those of ``share`` of the best one's weight, and below the best one."""
    apart = temperature * tl.log(tl.minimum(share.to(tl.float32), 1.0))
    return best + apart - (tl.abs(best) - apart) * 1e-5 - temperature * 1e-6


@launched
def _start(
    peaks, maxima, temperatures, filters, slots, totals, counts, masses, state, cutoffs, VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr, PARTS: tl.constexpr,
    PARTS_P: tl.constexpr, BINS: tl.constexpr, STATE: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Bounds a row's cutoff and initialises its search."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p = _params(temperatures, filters, slots, row, VOCAB, SLOTS)
    best, _, _ = best_of(peaks, row, CHUNKS, CHUNKS_P)
    searched = (temperature > 0.0) & (tl.abs(best) < float("inf"))
    # A requested temperature that is not used: only the best logit is kept.
    only_best = (of_slot(filters, slots, row, 4, 0, SLOTS) > 0.0) & (of_slot(temperatures, slots, row, 1, 0, SLOTS) == 0.0)
    tl.store(cutoffs + row, tl.where(only_best, best, float("-inf")))
    tl.store(state + row * STATE + 1, tl.where(searched, 0, -1).to(tl.int64))
    if searched:
        bin = tl.arange(0, BINS)
        for level in tl.static_range(2):
            tl.store(counts + (row * 2 + level) * BINS + bin, tl.zeros((BINS,), tl.int32))
            tl.store(masses + (row * 2 + level) * BINS + bin, tl.zeros((BINS,), tl.int64))
        by_mass = (top_p < 1.0) & (top_k >= VOCAB)
        part = tl.arange(0, PARTS_P)
        total = tl.sum(tl.load(totals + row * PARTS + part, mask=part < tl.where(by_mass, PARTS, 0), other=0), 0)
        lowest = tl.where(min_p > 0.0, _below(best, temperature, min_p), float("-inf"))
        share = (1.0 - top_p) * (total.to(tl.float64) / 1099511627776.0) / VOCAB
        lowest = tl.where(by_mass, tl.maximum(lowest, _below(best, temperature, share)), lowest)
        low = _key(lowest)
        # The largest half key that as many blocks' maxima reach as top_k keeps.
        block = tl.arange(0, BLOCKS_P)
        halves = _key(tl.load(maxima + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))) >> 16
        half = (top_k * 0 - 32768).to(tl.int32)
        for step in tl.static_range(16):
            higher = half + (1 << (15 - step))
            enough = tl.sum((halves >= higher).to(tl.int32), 0) >= top_k
            half = tl.where(enough, higher, half)
        low = tl.where(top_k < VOCAB, tl.maximum(low, half << 16), low).to(tl.int64)
        high = _key(best).to(tl.int64)
        low = tl.minimum(low, high)
        shift = _digits(high - low)
        tl.store(state + row * STATE + 0, low)
        tl.store(state + row * STATE + 1, shift)
        tl.store(state + row * STATE + 2, low * 0)
        tl.store(state + row * STATE + 3, low * 0)
        tl.store(state + row * STATE + 4, by_mass.to(tl.int64))
        tl.store(state + row * STATE + 5, low)
        tl.store(state + row * STATE + 6, shift)
        tl.store(state + row * STATE + 7, total)
        tl.store(state + row * STATE + 8, low * 0 + BINS)


@launched
def _count(
    logits, peaks, temperatures, filters, slots, counts, masses, state, row_stride: tl.int64, VOCAB: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr,
    STATE: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Number and mass of the tokens of some chunks by the digit that is searched."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    shift = tl.load(state + row * STATE + 1)
    if shift >= 0:
        low = tl.load(state + row * STATE).to(tl.int32)
        values = tl.load(state + row * STATE + 8).to(tl.uint32)
        temperature, _, _, min_p = _params(temperatures, filters, slots, row, VOCAB, SLOTS)
        best, _, _ = best_of(peaks, row, CHUNKS, CHUNKS_P)
        base = (row * 2 + PART) * BINS
        first = tl.program_id(1) * TILES
        for tile in range(first, tl.minimum(first + TILES, CHUNKS)):
            token = tile * CHUNK + tl.arange(0, CHUNK)
            value = tl.load(logits + row * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
            key = _key(value)
            # Two int32 are never farther apart than a uint32 can say.
            digit = (key - low).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
            alive, mass = _weigh(value, best, temperature, min_p)
            inside = (key >= low) & (digit < values) & alive
            place = tl.where(inside, digit, 0).to(tl.int32)
            tl.atomic_add(counts + base + place, tl.full((CHUNK,), 1, tl.int32), mask=inside, sem="relaxed")
            tl.atomic_add(masses + base + place, mass, mask=inside & (mass > 0), sem="relaxed")


@triton.jit
def _last(counts, masses, before_count, before_mass, by_mass, top_k, limit, BINS: tl.constexpr):
    """The last bin, from the top, before which there is less than the limit; what is before it, and what is in it."""
    order = tl.arange(0, BINS)
    count = tl.load(counts + (BINS - 1 - order)).to(tl.int64)
    mass = tl.load(masses + (BINS - 1 - order))
    ahead_count = tl.cumsum(count, 0) - count + before_count
    ahead_mass = tl.cumsum(mass, 0) - mass + before_mass
    less = tl.where(by_mass, ahead_mass.to(tl.float64) < limit, ahead_count < top_k)
    kept = (count > 0) & (less | (ahead_count == 0))
    last = tl.max(tl.where(kept, order, 0), 0)
    here = order == last
    return (
        (BINS - 1 - last).to(tl.int64),
        tl.sum(tl.where(here, ahead_count, 0), 0),
        tl.sum(tl.where(here, ahead_mass, 0), 0),
        tl.sum(tl.where(here, mass, 0), 0),
    )


@launched
def _narrow(
    temperatures, filters, slots, counts, masses, state, cutoffs, VOCAB: tl.constexpr, BINS: tl.constexpr, DIGIT: tl.constexpr,
    STATE: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Advances the search to the next digit, from top_k to top_p, or ends it."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    own = state + row * STATE
    shift = tl.load(own + 1)
    if shift >= 0:
        _, top_k, top_p, _ = _params(temperatures, filters, slots, row, VOCAB, SLOTS)
        by_mass = tl.load(own + 4)
        total = tl.load(own + 7)
        first = row * 2 * BINS
        base = first + PART * BINS
        digit, ahead_count, ahead_mass, mass = _last(
            counts + base, masses + base, tl.load(own + 2), tl.load(own + 3), by_mass > 0, top_k,
            top_p * total.to(tl.float64), BINS,
        )  # fmt: skip
        low = tl.load(own) + (digit << shift)
        if PART == 1:
            bin = tl.arange(0, BINS)
            tl.debug_barrier()
            tl.store(counts + base + bin, tl.zeros((BINS,), tl.int32))
            tl.store(masses + base + bin, tl.zeros((BINS,), tl.int64))
        found = shift == 0
        if found & (by_mass == 0) & (top_p < 1.0):
            total = ahead_mass + mass
            by_mass = by_mass * 0 + 1
            shift = tl.load(own + 6)
            digit, ahead_count, ahead_mass, mass = _last(
                counts + first, masses + first, ahead_count * 0, ahead_mass * 0, by_mass > 0, top_k,
                top_p * total.to(tl.float64), BINS,
            )  # fmt: skip
            low = tl.load(own + 5) + (digit << shift)
            found = shift == 0
        if found:
            tl.store(cutoffs + row, _value(low))
        tl.store(own, low)
        tl.store(own + 1, tl.where(found, -1, tl.maximum(shift - DIGIT, 0)))
        tl.store(own + 2, ahead_count)
        tl.store(own + 3, ahead_mass)
        tl.store(own + 4, by_mass)
        tl.store(own + 7, total)
        tl.store(own + 8, tl.minimum((shift * 0 + 1) << shift, BINS))


def cutoffs(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    maxima: torch.Tensor,
    temperatures: torch.Tensor,
    filters: torch.Tensor,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    """``[N]`` float32: each row's smallest logit that its filters keep, as ``headrace.kernels.filter.cutoffs``.

    Args:
        logits: ``[N, vocab]``, last axis contiguous.
        peaks: ``[N, chunks]`` float32: the largest logit of each chunk, NaN if there is one.
        maxima: ``[N, blocks]`` float32: the largest logit of each block; -inf beyond the vocabulary.
        temperatures: ``[N]`` float; 0: greedy, the first of equals.
        filters: ``[N, 4]`` float64, contiguous: the requested temperature, top_k, top_p, min_p.
        slots: ``[N]`` int, row -> its place in ``temperatures`` and ``filters``; -1: a padding row. None: row i reads entry i.
    """
    rows, vocab = logits.shape
    device = logits.device
    chunks, blocks = peaks.shape[1], maxima.shape[1]
    parts = cdiv(chunks, _TILES)
    totals = torch.empty(rows, parts, dtype=torch.int64, device=device)
    counts = torch.empty(rows, 2, _BINS, dtype=torch.int32, device=device)
    masses = torch.empty(rows, 2, _BINS, dtype=torch.int64, device=device)
    state = torch.empty(rows, _STATE, dtype=torch.int64, device=device)
    result = torch.empty(rows, dtype=torch.float32, device=device)
    places = result if slots is None else slots
    pdl = options(device)
    common = {"VOCAB": vocab, "SLOTS": slots is not None, **pdl}
    cut = {"CHUNKS": chunks, "CHUNKS_P": power_of_two(chunks)}
    wide = {"CHUNK": CHUNK, "TILES": _TILES, **cut, "num_warps": 8}
    stride = logits.stride(0)
    _totals[(rows, parts)](logits, peaks, temperatures, filters, places, totals, stride, **wide, **common)
    _start[(rows,)](
        peaks, maxima, temperatures, filters, places, totals, counts, masses, state, result, **cut, BLOCKS=blocks,
        BLOCKS_P=power_of_two(blocks), PARTS=parts, PARTS_P=power_of_two(parts), BINS=_BINS,
        STATE=_STATE, num_warps=8, **common,
    )  # fmt: skip
    for step in range(_STEPS):
        part = min(step, 1)
        _count[(rows, parts)](
            logits, peaks, temperatures, filters, places, counts, masses, state, stride, **wide, BINS=_BINS, STATE=_STATE,
            PART=part, **common,
        )  # fmt: skip
        _narrow[(rows,)](
            temperatures, filters, places, counts, masses, state, result, BINS=_BINS, DIGIT=_DIGIT, STATE=_STATE, PART=part,
            num_warps=16, **common,
        )  # fmt: skip
    return result
