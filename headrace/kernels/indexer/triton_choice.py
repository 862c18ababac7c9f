"""Scores of index keys, and the choice of the highest. Reference: ``headrace.kernels.indexer.reference``.

The choice is a radix selection: four histograms over the bytes of the scores find the least score that is chosen, and a last
pass writes the places of the scores above it and of the first ones that equal it, in order. Nothing depends on other tokens.
Many scores are dealt to several programs, and a launch counts one byte: the next one adds up what the programs counted.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.attention.triton_tile import load_part
from headrace.kernels.indexer.reference import ChoiceRule, TokenPlaces
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_KEYS = 128
"""Keys of a tile of scores, at least."""
_TILES = 8
"""Tiles of a program where there are many programs anyway."""
_MANY = 1024
"""Programs from which on there are many."""
_AT_ONCE = 2048
"""Scores that a program of the choice reads at a time."""
_PIECES = 32
"""Programs that scores of one list are dealt to, at most: each reads what all of them counted."""
_ENOUGH = 4096
"""Programs of a launch for which lists are divided."""
_SPACE = 32 << 20
"""Scores that are held at a time."""


@launched(do_not_specialize=["first", "longest", "tiles", "top_k"])
def _score_keys(
    q, weights, keys, tables, rows, positions, scores, first, longest, tiles, top_k, q_token: tl.int64, q_head: tl.int64,
    weight_token: tl.int64, key_block: tl.int64, key_offset: tl.int64, table_row: tl.int64, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, HEADS_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr, GROUPS: tl.constexpr, LOCAL: tl.constexpr, WEIGHTED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """Scores of some tiles of ``GROUPS`` blocks for one token. ``first``: the first token of the launch."""
    begin(PDL)
    place = tl.program_id(0).to(tl.int64)
    token = first + place
    row = tl.load(rows + token).to(tl.int64)
    position = tl.load(positions + token)
    blocks = (position + BLOCK) // BLOCK
    begin_tile = tl.program_id(1) * tiles
    # Where all that a token sees is chosen, no score is read.
    end = tl.where(blocks > top_k, blocks, 0)
    if begin_tile * GROUPS < end:
        head = tl.arange(0, HEADS_P)
        present = head < HEADS
        index_q = load_part(q + token * q_token + head * q_head, present, 0, D, D_P, 1, True, True)
        if WEIGHTED:
            weight = tl.load(weights + token * weight_token + head, mask=present, other=0.0)
        n = tl.arange(0, GROUPS * BLOCK_P)
        group = tl.arange(0, GROUPS)
        for tile in range(begin_tile, tl.minimum(begin_tile + tiles, tl.cdiv(end, GROUPS))):
            number = tile * GROUPS + n // BLOCK_P
            key = number * BLOCK + n % BLOCK_P
            seen = (n % BLOCK_P < BLOCK) & (key <= position)
            key = tl.where(seen, key, 0)
            block = tl.load(tables + row * table_row + key // BLOCK_SIZE).to(tl.int64)
            base = keys + block * key_block + (key % BLOCK_SIZE) * key_offset
            index_k = load_part(base, seen, 0, D, D_P, 1, False, True)
            products = tl.dot(index_q, index_k, input_precision=PRECISION)
            wanted = tile * GROUPS + group
            local = (wanted < blocks) & (wanted >= blocks - LOCAL)
            if WEIGHTED:
                total = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
                total = tl.where(seen, total, float("-inf"))
                best = tl.max(tl.reshape(total, [GROUPS, BLOCK_P]), 1)
                best = tl.where(local, float("inf"), best)
                tl.store(scores + place * longest + wanted, best, mask=wanted < blocks)
            else:
                products = tl.where(seen[None, :], products, float("-inf"))
                best = tl.max(tl.reshape(products, [HEADS_P, GROUPS, BLOCK_P]), 2)
                best = tl.where(local[None, :], float("inf"), best)
                target = scores + (place * HEADS + head)[:, None] * longest + wanted[None, :]
                tl.store(target, best, mask=present[:, None] & (wanted < blocks)[None, :])


@triton.jit
def _ordered(value):
    """uint32 that compare as the float32 do; of the two zeros one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits.to(tl.uint32, bitcast=True) ^ tl.where(bits < 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _digit(counts, left):
    """The highest byte that fewer than ``left`` scores are above and that, with these, at least as many have; and how many of
    ``left`` are to be chosen among those that have it."""
    bins = tl.arange(0, 256)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    digit = tl.sum(tl.where((above < left) & (above + counts >= left), bins, 0), 0)
    return digit, left - tl.sum(tl.where(bins == digit, above, 0), 0)


@triton.jit
def _write(target, value, number, inside, least, left, kept, equals):
    """Writes the numbers of chosen scores. ``kept``, ``equals``: of the scores before, those that are chosen, and those that
    equal the least one; both are returned with these added."""
    equal = (inside & (value == least)).to(tl.int32)
    among = equals + tl.cumsum(equal, 0)
    taken = inside & ((value > least) | ((equal > 0) & (among <= left)))
    ones = taken.to(tl.int32)
    tl.store(target + kept + tl.cumsum(ones, 0) - 1, number, mask=taken)
    return kept + tl.sum(ones, 0), equals + tl.sum(equal, 0)


@launched(do_not_specialize=["first", "longest", "top_k"])
def _choose_keys(
    scores, positions, chosen, first, longest, top_k, LISTS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """Writes one list of one token."""
    begin(PDL)
    place = tl.program_id(0).to(tl.int64)
    token = first + place // LISTS
    position = tl.load(positions + token)
    count = (position + BLOCK) // BLOCK
    base = scores + place * longest
    target = chosen + (first * LISTS + place) * top_k
    n = tl.arange(0, AT_ONCE)
    kept = count * 0
    if count <= top_k:
        for start in range(0, count, AT_ONCE):
            tl.store(target + start + n, start + n, mask=start + n < count)
        kept = count
    else:
        # The bytes of the least chosen score that are known, and the scores that are still to be chosen among their like.
        least = (count * 0).to(tl.uint32)
        left = top_k + count * 0
        for level in tl.static_range(4):
            counts = tl.zeros([256], tl.int32)
            for start in range(0, count, AT_ONCE):
                inside = start + n < count
                value = _ordered(tl.load(base + start + n, mask=inside, other=0.0))
                if level > 0:
                    inside = inside & ((value >> (32 - 8 * level)) == least)
                counts += tl.histogram(((value >> (24 - 8 * level)) & 255).to(tl.int32), 256, mask=inside)
            digit, left = _digit(counts, left)
            least = (least << 8) | digit.to(tl.uint32)
        equals = count * 0
        for start in range(0, count, AT_ONCE):
            inside = start + n < count
            value = _ordered(tl.load(base + start + n, mask=inside, other=0.0))
            kept, equals = _write(target, value, start + n, inside, least, left, kept, equals)
    for start in range(0, top_k, AT_ONCE):
        tl.store(target + start + n, -1, mask=(start + n >= kept) & (start + n < top_k))


@triton.jit
def _counted(counts, found, place, top_k, pieces, LEVEL: tl.constexpr, PIECES: tl.constexpr):
    """Returns the ``LEVEL`` known bytes of a list's least chosen score, how many scores are to be chosen among their like, the
    last of these bytes, and the counts of it ``[PIECES, 256]``."""
    part, bins = tl.arange(0, PIECES)[:, None], tl.arange(0, 256)[None, :]
    each = tl.load(counts + (place * PIECES + part) * 256 + bins, mask=part < pieces, other=0)
    least, left = tl.full([], 0, tl.uint32), top_k
    if LEVEL > 1:
        least = tl.load(found + place * 4).to(tl.uint32, bitcast=True)
        left = tl.load(found + place * 4 + 1)
    digit, left = _digit(tl.sum(each, 0), left)
    return (least << 8) | digit.to(tl.uint32), left, digit, each


@launched(do_not_specialize=["first", "longest", "top_k", "pieces", "span"])
def _count_byte(
    scores, positions, before, counts, found, now_found, higher, first, longest, top_k, pieces, span, LEVEL: tl.constexpr,
    LISTS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Counts byte ``LEVEL`` of a part of one list's scores, of those that have the bytes that the launches before found."""
    begin(PDL)
    place, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + first + place // LISTS)
    count = (position + BLOCK) // BLOCK
    if count > top_k:
        bins = tl.arange(0, 256)
        least = tl.full([], 0, tl.uint32)
        if LEVEL > 0:
            least, left, digit, each = _counted(before, found, place, top_k, pieces, LEVEL, PIECES)
            mine = (tl.arange(0, PIECES)[:, None] == own) & (bins[None, :] > digit)
            more = tl.sum(tl.sum(tl.where(mine, each, 0), 1), 0)
            if LEVEL > 1:
                more += tl.load(higher + place * PIECES + own)
            tl.store(higher + place * PIECES + own, more)
            if own == 0:
                tl.store(now_found + place * 4, least.to(tl.int32, bitcast=True))
                tl.store(now_found + place * 4 + 1, left)
        n = tl.arange(0, AT_ONCE)
        total = tl.zeros([256], tl.int32)
        end = tl.minimum(own * span + span, count)
        for start in range(own * span, end, AT_ONCE):
            inside = start + n < end
            value = _ordered(tl.load(scores + place * longest + start + n, mask=inside, other=0.0))
            if LEVEL > 0:
                inside = inside & ((value >> (32 - 8 * LEVEL)) == least)
            total += tl.histogram(((value >> (24 - 8 * LEVEL)) & 255).to(tl.int32), 256, mask=inside)
        tl.store(counts + (place * PIECES + own) * 256 + bins, total)


@launched(do_not_specialize=["first", "longest", "top_k", "pieces", "span"])
def _write_chosen(
    scores, positions, counts, found, higher, chosen, first, longest, top_k, pieces, span, LISTS: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Writes what is chosen of a part of one list's scores."""
    begin(PDL)
    place, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + first + place // LISTS)
    count = (position + BLOCK) // BLOCK
    target = chosen + (first * LISTS + place) * top_k
    n = tl.arange(0, AT_ONCE)
    if count > top_k:
        least, left, digit, each = _counted(counts, found, place, top_k, pieces, 4, PIECES)
        part, bins = tl.arange(0, PIECES), tl.arange(0, 256)[None, :]
        above = tl.load(higher + place * PIECES + part, mask=part < pieces, other=0)
        above += tl.sum(tl.where(bins > digit, each, 0), 1)
        equals = tl.sum(tl.where(part < own, tl.sum(tl.where(bins == digit, each, 0), 1), 0), 0)
        kept = tl.sum(tl.where(part < own, above, 0), 0) + tl.minimum(equals, left)
        end = tl.minimum(own * span + span, count)
        for start in range(own * span, end, AT_ONCE):
            inside = start + n < end
            value = _ordered(tl.load(scores + place * longest + start + n, mask=inside, other=0.0))
            kept, equals = _write(target, value, start + n, inside, least, left, kept, equals)
    else:
        for start in range(own * span, tl.minimum(own * span + span, top_k), AT_ONCE):
            number = start + n
            tl.store(target + number, tl.where(number < count, number, -1), mask=number < tl.minimum(own * span + span, top_k))


def choose(
    q: torch.Tensor,
    weights: torch.Tensor | None,
    index_keys: torch.Tensor,
    block_table: torch.Tensor,
    places: TokenPlaces,
    rule: ChoiceRule,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.indexer.choose``."""
    (tokens, heads, width), lists = q.shape, 1 if weights is not None else q.shape[1]
    chosen = torch.empty(tokens, lists, rule.top_k, dtype=torch.int32, device=q.device)
    longest = cdiv(places.longest, rule.block)
    at_once = max(1, _SPACE // (lists * longest))
    block = power_of_two(rule.block)
    groups = max(1, _KEYS // block)
    scores = torch.empty(min(tokens, at_once) * lists * longest, dtype=torch.float32, device=q.device)
    for first in range(0, tokens, at_once):
        count = min(at_once, tokens - first)
        tiles = _TILES if count * cdiv(longest, groups) >= _MANY * _TILES else 1
        _score_keys[(count, cdiv(longest, groups * tiles))](
            q, q if weights is None else weights, index_keys, block_table, places.rows, places.positions, scores,
            first, longest, tiles, rule.top_k, q.stride(0), q.stride(1), 0 if weights is None else weights.stride(0),
            index_keys.stride(0), index_keys.stride(1), block_table.stride(0),
            BLOCK_SIZE=index_keys.shape[1], HEADS=heads, HEADS_P=max(16, power_of_two(heads)), D=width,
            D_P=max(16, power_of_two(width)), BLOCK=rule.block, BLOCK_P=block, GROUPS=groups, LOCAL=rule.local,
            WEIGHTED=weights is not None, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=4, **options(q.device),
        )  # fmt: skip
        _choose_highest(scores, places.positions, chosen, first, count, longest, rule)
    return chosen


def _choose_highest(
    scores: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor, first: int, tokens: int, longest: int, rule: ChoiceRule
) -> None:
    """Writes the choices of ``tokens`` tokens from ``first`` on, whose scores are ``[tokens * lists, longest]``."""
    lists, device = chosen.shape[1], chosen.device
    count, top_k = tokens * lists, rule.top_k
    constants: dict[str, Any] = {"LISTS": lists, "BLOCK": rule.block, "AT_ONCE": _AT_ONCE, "num_warps": 8, **options(device)}
    pieces = min(_PIECES, cdiv(longest, _AT_ONCE), cdiv(_ENOUGH, count))
    if pieces == 1:
        _choose_keys[(count,)](scores, positions, chosen, first, longest, top_k, **constants)
        return
    span = cdiv(max(longest, top_k), pieces * _AT_ONCE) * _AT_ONCE
    most = power_of_two(pieces)
    before, counts = torch.empty(2, count, most, 256, dtype=torch.int32, device=device)
    found, now_found = torch.empty(2, count, 4, dtype=torch.int32, device=device)
    higher = torch.empty(count, most, dtype=torch.int32, device=device)
    sizes = first, longest, top_k, pieces, span
    for level in range(4):
        _count_byte[(count, pieces)](
            scores, positions, before, counts, found, now_found, higher, *sizes, LEVEL=level, PIECES=most, **constants
        )
        before, counts, found, now_found = counts, before, now_found, found
    _write_chosen[(count, pieces)](scores, positions, before, found, higher, chosen, *sizes, PIECES=most, **constants)
