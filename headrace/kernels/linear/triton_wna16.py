"""Products of float activations with packed integers. Reference: ``headrace.kernels.linear.wna16_reference``.

Codes less the middle one are exact in 16-bit floats. Each group's product is summed in float32, and its scale multiplies that
sum, so that no scale is rounded; groups of 16 are too small for that, and their weights are rounded.

Words go from the memory to the matrix units by way of registers alone: ``pack`` has put them in the order in which a thread
feeds them to instructions. Which inputs an instruction takes does not matter, so long as x is taken in the same order.
"""

# A kernel's tuples grow.
# mypy: disable-error-code=assignment

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from headrace.kernels import support
from headrace.kernels.activation.triton import gated_product
from headrace.kernels.kv_cache.triton_fp8 import mode
from headrace.kernels.linear.wna16_reference import RUN, PackedWeight
from headrace.kernels.linear.wna16_tilings import PackedFewTiling, PackedManyTiling, choose_few, choose_many
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, begin, options, wait

MAX_ROWS = 8
"""``few`` takes no more rows."""
_RUN = tl.constexpr(RUN)


_GAIN = 64.0
"""The factor by which codes that ``_assembly`` makes bfloat16 are too small."""


@functools.cache
def _assembly(bits: int, dtype: torch.dtype) -> str:
    """Makes 16-bit floats of a word's codes, less the middle one; a mask takes two at once.

    In the mantissa of 1024, as float16 has it, a code is 1024 more than it is. The lowest 8 bits of a bfloat16 alone are a
    multiple of the least one, 2 ** -133, since the exponent's last bit makes the least normal number of them.
    """
    count = 32 // bits
    lines = ["{ .reg .b32 t, u, f, m;", f"mov.b32 u, ${count};"]
    for pair in range(count // 2):
        high = bits == 4 and pair % 2 == 1
        if bits * pair % 8 == 0 and pair:
            lines.append("shr.u32 u, u, 8;")
        mask = "0x00ff00ff" if bits == 8 else "0x00f000f0" if high else "0x000f000f"
        if dtype == torch.bfloat16:
            # 2 ** 127 or, for what the mask has four bits higher, 2 ** 123; -8 or -128 by the gain.
            kind, factor, less = "bf16", "0x7d007d00" if high else "0x7f007f00", "0xc000c000" if bits == 8 else "0xbe00be00"
            lines.append(f"and.b32 t, u, {mask};")
        else:
            # 1 or 1 / 16; -(1024 + 128), -(1024 + 8) or -(1024 / 16 + 8).
            kind, factor = "f16", "0x2c002c00" if high else "0x3c003c00"
            less = "0xe480e480" if bits == 8 else "0xd480d480" if high else "0xe408e408"
            lines.append(f"lop3.b32 t, u, {mask}, 0x64006400, 0xea;")
        lines.append(f"mov.b32 f, {factor}; mov.b32 m, {less}; fma.rn.{kind}x2 t, t, f, m;")
        lines.append(f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, t;")
    return " ".join([*lines, "}"])


@triton.jit
def _code(word, PLACE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    return (((word >> (BITS * PLACE)) & (2**BITS - 1)) - 2 ** (BITS - 1)).to(tl.float32).to(DTYPE)


@triton.jit
def _decode(word, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """int32 ``[...]`` -> codes less the middle one, ``[..., 2, 2, 2]`` or for 8 bits ``[..., 2, 2]``: of a code's number in its
    word, the lowest bit comes first."""
    if BITS == 4:
        if ASM != "":
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r", [word], dtype=(tl.int16,) * 8, is_pure=True, pack=1
            )
        else:
            a, b, c, d = _code(word, 0, 4, DTYPE), _code(word, 4, 4, DTYPE), _code(word, 1, 4, DTYPE), _code(word, 5, 4, DTYPE)
            e, f, g, h = _code(word, 2, 4, DTYPE), _code(word, 6, 4, DTYPE), _code(word, 3, 4, DTYPE), _code(word, 7, 4, DTYPE)
        codes = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
    else:
        if ASM != "":
            a, b, c, d = tl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,r", [word], dtype=(tl.int16,) * 4, is_pure=True, pack=1)
        else:
            a, b, c, d = _code(word, 0, 8, DTYPE), _code(word, 2, 8, DTYPE), _code(word, 1, 8, DTYPE), _code(word, 3, 8, DTYPE)
        codes = tl.join(tl.join(a, b), tl.join(c, d))
    return codes.to(DTYPE, bitcast=True)


@triton.jit
def _factors(
    base, channel, output, out, GROUPS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """Loads scales ``[SPLIT * WARPS, OUTPUTS, 1]`` of each warp's run. A small load is made by the threads that need it, in the
    places where they need it; a large one would go through shared memory."""
    output = tl.minimum(output, out - 1)[None, :]
    if SPLIT == 1:
        part = tl.load(base + tl.minimum(channel // GROUP, GROUPS - 1) * out + output)
    else:
        half: tl.constexpr = _RUN // 2
        a = tl.load(base + tl.minimum(channel // GROUP, GROUPS - 1) * out + output)
        b = tl.load(base + tl.minimum((channel + half) // GROUP, GROUPS - 1) * out + output)
        if SPLIT == 2:
            part = tl.permute(tl.join(a, b), (2, 0, 1))
        else:
            c = tl.load(base + tl.minimum((channel + half // 2) // GROUP, GROUPS - 1) * out + output)
            d = tl.load(base + tl.minimum((channel + half + half // 2) // GROUP, GROUPS - 1) * out + output)
            part = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (2, 3, 0, 1))
    return tl.reshape(part, (SPLIT * channel.shape[0], OUTPUTS, 1))


@triton.jit
def _output(number, out, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """Returns a program's output of this number. With GATED, the first half of its outputs gate the second."""
    HALF: tl.constexpr = OUTPUTS // 2
    if GATED:
        return tl.program_id(0) * HALF + number % HALF + number // HALF * (out // 2)
    else:
        return tl.program_id(0) * OUTPUTS + number


@launched(do_not_specialize=["rows"])
def _packed_few(
    x, words, scales, middles, bias, y, rows, out, x_row: tl.int64,
    IN: tl.constexpr, OUTPUTS: tl.constexpr, AHEAD: tl.constexpr, X_AHEAD: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, BITS: tl.constexpr, WARPS: tl.constexpr, MIDDLES: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr,
    GAIN: tl.constexpr, GATED: tl.constexpr, MODE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The warps share the runs of the inputs: each sums up its own, and the sums are added at the end."""
    announce(PDL)
    RUNS: tl.constexpr = (IN + _RUN - 1) // _RUN
    COUNT: tl.constexpr = (RUNS + WARPS - 1) // WARPS
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    LOADS: tl.constexpr = BITS // 4
    DTYPE: tl.constexpr = x.dtype.element_ty
    output = _output(tl.arange(0, OUTPUTS), out, OUTPUTS, GATED)
    # Words: [block of outputs, load, warp, output] x word. Blocks past the end are read as the last one, and not written.
    place = tl.arange(0, OUTPUTS * LOADS * WARPS)
    block = tl.minimum(_output(place // (8 * WARPS * LOADS) * 8, out, OUTPUTS, GATED) // 8, (out + 7) // 8 - 1)
    within = place // (8 * WARPS) % LOADS * 128 + place % 8 * 16
    run = place // 8 % WARPS
    lines = words + (block.to(tl.int64) * (RUNS * LOADS * 128) + within)[:, None] + tl.arange(0, 16)[None, :]
    # x: [quarter of a run, warp, row] x input
    place = tl.arange(0, 8 * WARPS * 4)
    x_at = ((place // 8 % WARPS) * _RUN + place // (8 * WARPS) * 32)[:, None] + tl.arange(0, 32)[None, :]
    factors = x + (tl.minimum(place % 8, rows - 1).to(tl.int64) * x_row)[:, None] + x_at
    warp_at = tl.arange(0, WARPS)[:, None] * _RUN
    HALVES: tl.constexpr = GROUP < _RUN // SPLIT
    parts, wide, shift = (), (), ()
    for step in tl.static_range(min(AHEAD, COUNT)):
        parts += (_words(lines, run + step * WARPS, RUNS, LOADS),)
        wide += (_factors(scales, warp_at + step * WARPS * _RUN, output, out, GROUPS, OUTPUTS, GROUP, SPLIT),)
        if MIDDLES and not HALVES:
            shift += (_factors(middles, warp_at + step * WARPS * _RUN, output, out, GROUPS, OUTPUTS, GROUP, SPLIT),)
    wait(PDL)
    rights = ()
    for step in tl.static_range(min(X_AHEAD, COUNT)):
        rights += (_rows(factors, x_at, step * WARPS * _RUN, IN, WARPS * _RUN),)
    ones = tl.full((SPLIT * WARPS, OUTPUTS, _RUN // SPLIT), 1.0, tl.float32).to(DTYPE)
    sums = tl.zeros([SPLIT * WARPS, OUTPUTS, 8], tl.float32)
    # Unrolled: a loop would wait for all loads in flight in each iteration.
    for step in tl.static_range(COUNT):
        if step + AHEAD < COUNT:
            parts += (_words(lines, run + (step + AHEAD) * WARPS, RUNS, LOADS),)
            ahead = warp_at + (step + AHEAD) * WARPS * _RUN
            wide += (_factors(scales, ahead, output, out, GROUPS, OUTPUTS, GROUP, SPLIT),)
            if MIDDLES and not HALVES:
                shift += (_factors(middles, ahead, output, out, GROUPS, OUTPUTS, GROUP, SPLIT),)
        if step + X_AHEAD < COUNT:
            rights += (_rows(factors, x_at, (step + X_AHEAD) * WARPS * _RUN, IN, WARPS * _RUN),)
        right = tl.reshape(rights[step], (SPLIT, 4 // SPLIT, WARPS, 8, 4, 2, 2, 2))
        if MIDDLES and not HALVES:
            # Sums of x, in the order in which the compiler lays out a factor that nothing was joined to.
            plain = tl.reshape(tl.permute(right, (0, 2, 1, 5, 6, 4, 7, 3)), (SPLIT * WARPS, _RUN // SPLIT, 8))
            sums += tl.dot(ones, plain) * shift[step]
        right = tl.reshape(tl.permute(right, (0, 2, 1, 6, 4, 5, 7, 3)), (SPLIT * WARPS, _RUN // SPLIT, 8))
        left = _left(parts[step], BITS, DTYPE, ASM, SPLIT, OUTPUTS, WARPS)
        if HALVES:
            here = warp_at + step * WARPS * _RUN
            high = _factors(scales, here + GROUP, output, out, GROUPS, OUTPUTS, GROUP, SPLIT)
            low_shift, high_shift = high, high
            if MIDDLES:
                low_shift = _factors(middles, here, output, out, GROUPS, OUTPUTS, GROUP, SPLIT)
                high_shift = _factors(middles, here + GROUP, output, out, GROUPS, OUTPUTS, GROUP, SPLIT)
            sums += tl.dot(_weights(left, wide[step], high, low_shift, high_shift, 8, MIDDLES, GAIN), right)
        else:
            sums += tl.dot(left, right) * (wide[step].to(tl.float32) * GAIN)
    total, row = tl.sum(sums, 0), tl.arange(0, 8)
    if GATED:
        _write_gated(total, y, row, rows, out // 2, OUTPUTS // 2, MODE)
    else:
        _write(total, bias, y, tl.program_id(0) * OUTPUTS, row, rows, out, OUTPUTS, BIAS)


@triton.jit
def _weights(codes, low, high, low_shift, high_shift, EACH: tl.constexpr, MIDDLES: tl.constexpr, GAIN: tl.constexpr):
    """The weights of a step ``[..., inputs]`` of two groups, in its codes' type. ``EACH`` inputs of either take turns."""
    first = tl.arange(0, codes.shape[-1]) // EACH % 2 == 0
    first = tl.reshape(first, (1,) * (len(codes.shape) - 1) + (codes.shape[-1],))
    weights = codes.to(tl.float32) * (tl.where(first, low, high).to(tl.float32) * GAIN)
    if MIDDLES:
        weights += tl.where(first, low_shift, high_shift)
    return weights.to(codes.dtype)


@triton.jit
def _rows(factors, x_at, start: tl.constexpr, IN: tl.constexpr, WIDTH: tl.constexpr):
    """Inputs of x from ``start`` on; 0 past the end."""
    if start + WIDTH <= IN:
        return tl.load(factors + start)
    return tl.load(factors + start, mask=x_at < IN - start, other=0.0)


@triton.jit
def _words(lines, run, RUNS: tl.constexpr, LOADS: tl.constexpr):
    """Runs past the end are read as the last one, and multiplied by zeros."""
    return tl.load(lines + (tl.minimum(run, RUNS - 1) * (LOADS * 128))[:, None], eviction_policy="evict_first")


@triton.jit
def _left(
    words, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, SPLIT: tl.constexpr, OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr
):  # fmt: skip
    """Decodes the words of a step to the left factor ``[SPLIT * WARPS, OUTPUTS, RUN / SPLIT]``. Of 8 neighbours [half, pair,
    one], its inputs are [quarter of a run, pair, thread, half, one]: an instruction takes two registers of x in a row."""
    if BITS == 4 and SPLIT == 1:
        codes = tl.reshape(words, (OUTPUTS // 8, WARPS, 8, 4, 2, 2))
        codes = tl.permute(_decode(codes, BITS, DTYPE, ASM), (1, 0, 2, 8, 7, 5, 3, 4, 6))
    elif BITS == 4:
        codes = tl.reshape(words, (OUTPUTS // 8, WARPS, 8, 4, SPLIT, 4 // SPLIT))
        codes = tl.permute(_decode(codes, BITS, DTYPE, ASM), (4, 1, 0, 2, 5, 7, 3, 8, 6))
    elif SPLIT == 1:
        codes = tl.reshape(words, (OUTPUTS // 8, 2, WARPS, 8, 4, 2, 2))
        codes = tl.permute(_decode(codes, BITS, DTYPE, ASM), (2, 0, 3, 1, 5, 8, 4, 6, 7))
    else:
        codes = tl.reshape(words, (OUTPUTS // 8, 2, WARPS, 8, 4, SPLIT // 2, 4 // SPLIT, 2))
        codes = tl.permute(_decode(codes, BITS, DTYPE, ASM), (1, 5, 2, 0, 3, 6, 9, 4, 7, 8))
    return tl.reshape(codes, (SPLIT * WARPS, OUTPUTS, _RUN // SPLIT))


@triton.jit
def _codes(
    words, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
    WARPS: tl.constexpr
):  # fmt: skip
    """Decodes ``[TILE * loads, words]`` to codes less the middle one, ``[TILE, RUN / SPLIT]``, with the inputs as they lie in a
    matrix instruction's registers: [w, half, half of a half, q, neighbour]."""
    LOADS: tl.constexpr = 2 if BITS == 8 and SPLIT == 1 else 1
    if BITS == 4 and SPLIT == 1:
        codes = tl.reshape(words, (TILE // (16 * WARPS), 2, WARPS, 8, 4, 2, 2))
        codes = tl.permute(_decode(codes, BITS, DTYPE, ASM), (0, 2, 1, 3, 9, 8, 5, 6, 4, 7))
    elif BITS == 4:
        codes = tl.reshape(words, (TILE // (16 * WARPS), 2, WARPS, 8, 4, 4 // SPLIT))
        codes = tl.permute(_decode(codes, BITS, DTYPE, ASM), (0, 2, 1, 3, 5, 8, 7, 4, 6))
    else:
        codes = tl.reshape(words, (TILE // (16 * WARPS), 2, LOADS, WARPS, 8, 4, 4 // SPLIT // LOADS, 2))
        codes = tl.permute(_decode(codes, BITS, DTYPE, ASM), (0, 3, 1, 4, 2, 6, 7, 9, 5, 8))
    return tl.reshape(codes, (TILE, _RUN // SPLIT))


@triton.jit
def _channel(slot):
    """Returns which input of x lies at a place of matrix instructions: of 32, [half, half of a half, q, neighbour] is
    [q, half, half of a half, neighbour]."""
    return slot // 32 * 32 + slot // 2 % 4 * 8 + slot // 16 % 2 * 4 + slot // 8 % 2 * 2 + slot % 2


@launched
def _arrange(
    x, y, sums, rows, x_row: tl.int64,
    IN: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Some inputs of a row, in the order of matrix instructions; of one past the end, zeros."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.max_contiguous(tl.multiple_of(_channel(slot), 2), 2)
    value = tl.load(x + row * x_row + channel, mask=(channel < IN) & (row < rows), other=0.0)
    tl.store(y + row * WIDTH + slot, value, mask=slot < WIDTH)
    if SUMS:
        group = tl.program_id(1) * (BLOCK // STEP) + tl.arange(0, BLOCK // STEP)
        total = tl.sum(tl.reshape(value.to(tl.float32), (BLOCK // STEP, STEP)), 1)
        tl.store(sums + group * rows + row, total, mask=(group * STEP < IN) & (row < rows))


@launched(do_not_specialize=["rows"])
def _packed_many(
    x, words, scales, middles, bias, y, x_sums, partial, arrived, rows, out, x_row: tl.int64,
    IN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr,
    WARPS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, NEAR: tl.constexpr, PART_GROUPS: tl.constexpr,
    MIDDLES: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr, GAIN: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A tile of outputs by rows, of a part of the inputs: outputs are the rows of matrix instructions, whose codes come from
    registers. The last program of a tile adds the parts, in order."""
    announce(PDL)
    STEP: tl.constexpr = _RUN // SPLIT
    RUNS: tl.constexpr = (IN + _RUN - 1) // _RUN
    STEPS: tl.constexpr = (IN + STEP - 1) // STEP
    EACH: tl.constexpr = (STEPS + PARTS - 1) // PARTS
    SIZE: tl.constexpr = BITS * 32
    LOADS: tl.constexpr = 2 if BITS == 8 and SPLIT == 1 else 1
    EVERY: tl.constexpr = BITS // LOADS // SPLIT
    DTYPE: tl.constexpr = x.dtype.element_ty
    tall = tl.cdiv(rows, ROWS)
    tile, part = tl.program_id(0), tl.program_id(1)
    first, top = tile // tall * OUTPUTS, tile % tall * ROWS
    # Codes: [16 * WARPS outputs, half of 16 outputs, load, warp, output] x [q, word]
    place = tl.arange(0, OUTPUTS * LOADS)
    pair = place // (16 * WARPS * LOADS) * WARPS + place // 8 % WARPS
    block = tl.minimum(first // 8 + pair * 2 + place // (8 * WARPS * LOADS) % 2, (out + 7) // 8 - 1)
    word = tl.arange(0, 4 * EVERY)
    lines = words + (block.to(tl.int64) * (RUNS * SIZE) + place // (8 * WARPS) % LOADS * 128 + place % 8 * 16)[:, None]
    lines += (word // EVERY * 4 + word % EVERY)[None, :]
    row = top + tl.arange(0, ROWS)
    factors = x + (row.to(tl.int64) * x_row)[None, :] + tl.arange(0, STEP)[:, None]
    output = tl.minimum(first + tl.arange(0, OUTPUTS), out - 1)
    start = part * EACH
    if PDL:
        # Scales are too small for the compiler's pipeline: they are read from the L2 cache.
        group = start * STEP // GROUP + tl.arange(0, PART_GROUPS)
        group = tl.minimum(group, (IN + GROUP - 1) // GROUP - 1)[:, None] * out
        _fetch(scales + group + tl.minimum(first + tl.arange(0, OUTPUTS // 32) * 32, out - 1)[None, :])
        if MIDDLES:
            _fetch(middles + group + tl.minimum(first + tl.arange(0, OUTPUTS // 32) * 32, out - 1)[None, :])
        if NEAR > 0:
            line = tl.minimum(first // 8 + tl.arange(0, OUTPUTS // 8), (out + 7) // 8 - 1).to(tl.int64) * (RUNS * SIZE)
            near_run = tl.minimum(start * STEP // _RUN + tl.arange(0, NEAR), RUNS - 1) * SIZE
            near = near_run[:, None] + tl.arange(0, SIZE // 32)[None, :] * 32
            _fetch(words + line[:, None] + tl.reshape(near, (1, NEAR * SIZE // 32)))
    wait(PDL)
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    stop = tl.minimum(start + EACH, STEPS)
    for step in tl.range(start, stop, num_stages=STAGES):
        own = step * STEP // GROUP * out + output
        wide = tl.load(scales + own)
        right = tl.load(factors + step * STEP)
        inside = step % SPLIT * EVERY
        left = tl.load(lines + (step // SPLIT * SIZE + inside // 4 * 128 + inside % 4))
        left = _codes(left, BITS, DTYPE, ASM, SPLIT, OUTPUTS, WARPS)
        if GROUP < STEP:
            # The second group of the last step may not be there.
            second = tl.minimum(step * STEP // GROUP + 1, (IN + GROUP - 1) // GROUP - 1) * out + output
            high = tl.load(scales + second)
            low_shift, high_shift = wide, high
            if MIDDLES:
                low_shift, high_shift = tl.load(middles + own), tl.load(middles + second)
            low_shift, high_shift = low_shift[:, None], high_shift[:, None]
            sums += tl.dot(_weights(left, wide[:, None], high[:, None], low_shift, high_shift, 4, MIDDLES, GAIN), right)
        else:
            sums += tl.dot(left, right) * (wide.to(tl.float32) * GAIN)[:, None]
        if MIDDLES and GROUP >= STEP:
            middle = tl.load(middles + own)
            sums += middle[:, None] * tl.load(x_sums + step * rows + tl.minimum(row, rows - 1))[None, :]
    if PARTS == 1:
        _write(sums, bias, y, first, row, rows, out, OUTPUTS, BIAS)
    else:
        inside = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        stored = partial + tile.to(tl.int64) * (PARTS * OUTPUTS * ROWS) + inside
        tl.store(stored + part * (OUTPUTS * ROWS), sums)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1:
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for each in tl.static_range(PARTS):
                total += tl.load(stored + each * (OUTPUTS * ROWS), cache_modifier=".cg")
            _write(total, bias, y, first, row, rows, out, OUTPUTS, BIAS)
            tl.store(arrived + tile, 0)


@triton.jit
def _write(sums, bias, y, first, row, rows, out, OUTPUTS: tl.constexpr, BIAS: tl.constexpr):
    """Writes a tile ``[outputs, rows]``, behind its bias."""
    output = first + tl.arange(0, OUTPUTS)
    if BIAS:
        sums += tl.load(bias + output, mask=output < out, other=0.0).to(tl.float32)[:, None]
    at = row.to(tl.int64)[None, :] * out + output[:, None]
    tl.store(y + at, sums.to(y.dtype.element_ty), mask=(row < rows)[None, :] & (output < out)[:, None])


@triton.jit
def _write_gated(sums, y, row, rows, out, HALF: tl.constexpr, MODE: tl.constexpr):
    """Writes ``silu(gate) * up`` of a tile ``[HALF of a gate and HALF that it gates, rows]``."""
    kind: tl.constexpr = y.dtype.element_ty
    gate, up = tl.split(tl.permute(tl.reshape(sums, (2, HALF, 8)), (1, 2, 0)))
    output = tl.program_id(0) * HALF + tl.arange(0, HALF)
    at = row.to(tl.int64)[None, :] * out + output[:, None]
    tl.store(y + at, gated_product(gate.to(kind), up.to(kind), False, MODE), mask=(row < rows)[None, :])


@triton.jit
def _fetch(place):
    """Fetches into the L2 cache. Nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@launched
def _packed_floats(
    words, scales, middles, y, out,
    IN: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr,
    MIDDLES: tl.constexpr, ASM: tl.constexpr, GAIN: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A run of some outputs as floats."""
    announce(PDL)
    RUNS: tl.constexpr = (IN + _RUN - 1) // _RUN
    LOADS: tl.constexpr = BITS // 4
    SIZE: tl.constexpr = BITS * 32
    first, run = tl.program_id(1) * OUTPUTS, tl.program_id(0)
    place = tl.arange(0, OUTPUTS * LOADS)
    block = tl.minimum(first // 8 + place // (8 * LOADS), (out + 7) // 8 - 1)
    lines = words + ((block.to(tl.int64) * RUNS + run) * SIZE + place % (8 * LOADS) * 16)[:, None] + tl.arange(0, 16)[None, :]
    left = tl.load(lines)
    if BITS == 4 and SPLIT == 1:
        codes = tl.reshape(left, (OUTPUTS, 4, 2, 2))
        codes = tl.permute(_decode(codes, BITS, y.dtype.element_ty, ASM), (0, 6, 5, 1, 2, 3, 4))
    elif BITS == 4:
        codes = tl.reshape(left, (OUTPUTS, 4, 4))
        codes = tl.permute(_decode(codes, BITS, y.dtype.element_ty, ASM), (0, 2, 1, 5, 4, 3))
    else:
        codes = tl.reshape(left, (OUTPUTS // 8, 2, 8, 4, 2, 2))
        codes = tl.permute(_decode(codes, BITS, y.dtype.element_ty, ASM), (0, 2, 1, 4, 3, 5, 7, 6))
    EACH: tl.constexpr = min(GROUP, _RUN)
    codes = tl.reshape(codes, (OUTPUTS, _RUN // EACH, EACH)).to(tl.float32)
    output = first + tl.arange(0, OUTPUTS)
    group = (run * _RUN + tl.arange(0, _RUN // EACH) * EACH) // GROUP
    at = tl.minimum(group, (IN + GROUP - 1) // GROUP - 1)[None, :] * out + tl.minimum(output, out - 1)[:, None]
    codes *= (tl.load(scales + at).to(tl.float32) * GAIN)[:, :, None]
    if MIDDLES:
        codes += tl.load(middles + at)[:, :, None]
    wait(PDL)
    channel = run * _RUN + tl.arange(0, _RUN)
    values = tl.reshape(codes, (OUTPUTS, _RUN)).to(y.dtype.element_ty)
    mask = (output < out)[:, None] & (channel < IN)[None, :]
    tl.store(y + output.to(tl.int64)[:, None] * IN + channel[None, :], values, mask=mask)


def few(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tiling: PackedFewTiling | None = None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Kernel version of ``wna16_linear_ref`` for at most ``MAX_ROWS`` rows of 16-bit floats; the last axis is contiguous.

    Args:
        gated: the result is ``silu(gate) * up`` of the product's halves, as of one without a bias and in ``out_dtype``. Outputs
            are a multiple of the tiling's.

    Raises:
        ValueError: x does not fit.
    """
    _check(x, weight, MAX_ROWS)
    rows, outputs = len(x), weight.outputs
    tiling = tiling or choose_few(weight)
    y = torch.empty(rows, outputs // 2 if gated else outputs, dtype=out_dtype, device=x.device)
    _packed_few[(cdiv(outputs, tiling.outputs),)](
        x, *_held(weight, bias), y, rows, outputs, x.stride(0), OUTPUTS=tiling.outputs, AHEAD=tiling.ahead,
        X_AHEAD=tiling.x_ahead, WARPS=tiling.warps, BIAS=bias is not None, GATED=gated, MODE=mode(x.device),
        **_shape(weight, x.dtype), num_warps=tiling.warps, num_stages=1, maxnreg=tiling.registers, **options(x.device),
    )  # fmt: skip
    return y


def many(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tiling: PackedManyTiling | None = None,
) -> torch.Tensor:
    """Kernel version of ``wna16_linear_ref`` for 16-bit floats; the last axis is contiguous.

    With one tiling for any number of rows, a row comes out bitwise the same in any batch.

    Raises:
        ValueError: x does not fit, or the inputs of too many tiles are split.
    """
    _check(x, weight, None)
    rows, outputs = len(x), weight.outputs
    tiling = tiling or choose_many(rows, weight)
    tiles, partial = cdiv(outputs, tiling.outputs) * cdiv(rows, tiling.rows), weight.words
    if tiling.parts > 1:
        if tiles > len(weight.arrived):
            raise ValueError(f"the inputs of {tiles} tiles are split, of at most {len(weight.arrived)}")
        numbers = tiles * tiling.parts * tiling.outputs * tiling.rows
        partial = torch.empty(numbers, dtype=torch.float32, device=x.device)
    y = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    arranged, x_sums = arrange(x, weight, tiling.rows)
    step = RUN // weight.split
    part = cdiv(cdiv(weight.inputs, step), tiling.parts) * step
    _packed_many[(tiles, tiling.parts)](
        arranged, *_held(weight, bias), y, x_sums, partial, weight.arrived, rows, outputs, arranged.stride(0), ROWS=tiling.rows,
        OUTPUTS=tiling.outputs, WARPS=tiling.warps, PARTS=tiling.parts, STAGES=tiling.stages, NEAR=tiling.near,
        PART_GROUPS=power_of_two(cdiv(part, weight.group)), BIAS=bias is not None,
        **_shape(weight, x.dtype), num_warps=tiling.warps, num_stages=tiling.stages, **options(x.device),
    )  # fmt: skip
    return y


def arrange(x: torch.Tensor, weight: PackedWeight, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x with its inputs in the order of matrix instructions, and the sums of its groups ``[K / group, T]``, if the
    weight has middles that multiply them.

    Args:
        multiple: rows of zeros follow until their number is a multiple of this. All programs would ask for the last row
            in their place, and wait for one part of the cache.
    """
    rows, inputs = x.shape
    width, step = weight.words.shape[1] * RUN, RUN // weight.split
    count = cdiv(rows, multiple) * multiple
    y = torch.empty(count, width, dtype=x.dtype, device=x.device)
    with_sums = weight.middles is not None and not weight.on_weights
    sums = torch.empty(width // step, rows, dtype=torch.float32, device=x.device) if with_sums else weight.words
    block = min(power_of_two(width), 1024)
    _arrange[(count, cdiv(width, block))](
        x, y, sums, rows, x.stride(0), IN=inputs, WIDTH=width, STEP=step, BLOCK=block, SUMS=with_sums, num_warps=4,
        **options(x.device),
    )  # fmt: skip
    return y, sums


def floats(weight: PackedWeight, dtype: torch.dtype, outputs: int = 32, warps: int = 4) -> torch.Tensor:
    """Kernel version of ``dequantize``, rounded to ``dtype``, a 16-bit one."""
    y = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.words.device)
    words, scales, middles, _ = _held(weight, None)
    _packed_floats[(weight.words.shape[1], cdiv(weight.outputs, outputs))](
        words, scales, middles, y, weight.outputs, OUTPUTS=outputs, **_shape(weight, dtype), num_warps=warps,
        **options(y.device),
    )  # fmt: skip
    return y


def _check(x: torch.Tensor, weight: PackedWeight, most: int | None) -> None:
    if x.shape[1] != weight.inputs or x.stride(1) != 1 or x.itemsize != 2 or (most is not None and len(x) > most):
        raise ValueError(f"x {list(x.shape)} {x.dtype} does not fit a weight of {weight.inputs} inputs")


def _held(weight: PackedWeight, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Returns what a kernel reads of a weight and its bias; words stand in for what there is not."""
    words, middles = weight.words, weight.middles
    return words, weight.scales, words if middles is None else middles, words if bias is None else bias


def _shape(weight: PackedWeight, dtype: torch.dtype) -> dict[str, int | float | str]:
    """Constants of a kernel. ``dtype``: that the codes are decoded to."""
    asm = "" if support.interpreted() else _assembly(weight.bits, dtype)
    shape: dict[str, int | float | str] = {
        "IN": weight.inputs,
        "GROUP": weight.group,
        "SPLIT": weight.split,
        "BITS": weight.bits,
    }
    return shape | {
        "MIDDLES": weight.middles is not None,
        "ASM": asm,
        "GAIN": _GAIN if asm and dtype == torch.bfloat16 else 1.0,
    }
