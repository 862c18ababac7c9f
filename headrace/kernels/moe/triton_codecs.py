"""Tiles of experts' weights in their number formats, and their products with rows. References: ``headrace.kernels.moe.codes``.

A tile of rows has its channels along the axis on which the product sums them up. ``SWAP``: weights are the left factor, which
has 64 rows at least in Hopper's instructions, so that few rows of activations waste none of them, and weights that are decoded
go to the matrix units from registers.
"""

# A kernel's tuples grow.
# mypy: disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.kv_cache.triton_fp8 import to_half

FLOATS, E4M3, INT4, MXFP4, INT8 = (tl.constexpr(number) for number in range(5))
CODECS = {"e4m3": 1, "int4": 2, "mxfp4": 3, "int8": 4}
AS_FLOATS, AS_E4M3, AS_HALF = (tl.constexpr(number) for number in range(3))
"""The type of both factors of a product: that of the rows, e4m3, or float16 made of e4m3, for devices without such products."""
SYMMETRIC, ZEROS, ON_WEIGHTS, MINIMA = (tl.constexpr(number) for number in range(4))
"""Offsets of integers: none, integer zero points; none or minima, with scales that multiply weights."""


@triton.constexpr_function
def _assembler(place, codec, bf16, scaled):
    """The instructions that make two floats of the codes of 4 bits in one place of two words; int4 less 8.

    ``scaled``: each times a factor of its own.
    """
    if bf16:
        # Before SM90, bfloat16 has no other operation than this.
        multiply, subtract = "fma.rn.bf16x2 {}, {}, {}, z;", "fma.rn.bf16x2 $0, a, o, c;"
    else:
        multiply, subtract = "mul.f16x2 {}, {}, {};", "add.f16x2 $0, a, c;"
    registers = "{ .reg .b32 a, c, m, o, s, z; mov.b32 o, 0x3f803f80; mov.b32 z, 0x80008000; "
    if codec == INT4.value:
        # The code is the lowest bits of a float whose step is 1: 128 + code in bfloat16, 1024 + code in float16.
        magic, less = (0x43004300, 0xC308C308) if bf16 else (0x64006400, 0xE408E408)
        return (
            f"{registers} shr.b32 a, $1, {4 * place}; lop3.b32 a, a, 0x000f000f, {magic:#x}, 0xea;"
            f" mov.b32 c, {less:#x}; {subtract} }}"
        )
    # Exponent and mantissa move to their places, the sign to the highest bit. A factor makes up for the other bias: that of
    # e2m1 is 1.
    lowest, mask, factor = (6, 0x01C001C0, 0x7E807E80) if bf16 else (9, 0x0E000E00, 0x74007400)
    by = lowest - 4 * place
    shift = f"shl.b32 m, $1, {by}" if by >= 0 else f"shr.b32 m, $1, {-by}"
    scale = multiply.format("s", "s", "c") + multiply.format("$0", "s", "$2") if scaled else multiply.format("$0", "s", "c")
    return (
        f"{registers} shl.b32 s, $1, {12 - 4 * place}; {shift}; and.b32 m, m, {mask:#x};"
        f" lop3.b32 s, s, 0x80008000, m, 0xea; mov.b32 c, {factor:#x}; {scale} }}"
    )


@triton.constexpr_function
def _affine_assembler(place, codec, bf16, scaled, minima):
    """The instructions that make two floats of the integers in one place of two words, in float32 until they are rounded once:
    less the middle code, where ``scaled`` times a scale; with ``minima`` times the scale, plus the minimum.

    Operands: words, then of both numbers the scales and the minima.
    """
    eight = codec == INT8.value
    if eight:
        # In the mantissa of 2 ** 23 a byte is itself.
        unpack = f"mov.b32 m, 0x4b000000; prmt.b32 l, $1, m, {0x7540 + place:#x}; prmt.b32 h, $2, m, {0x7540 + place:#x};"
        less = "0fCB000000" if minima else "0fCB000080"
    else:
        # Two codes are 128 more than they are in the mantissas of bfloat16, the upper half of a float32.
        unpack = (
            f"shr.b32 m, $1, {4 * place}; lop3.b32 m, m, 0x000f000f, 0x43004300, 0xea;"
            " shl.b32 l, m, 16; and.b32 h, m, 0xffff0000;"
        )
        less = "0fC3000000" if minima else "0fC3080000"
    first = 3 if eight else 2
    affine = ""
    if minima:
        affine = f"fma.rn.f32 l, l, ${first}, ${first + 2}; fma.rn.f32 h, h, ${first + 1}, ${first + 3};"
    elif scaled:
        affine = f"mul.rn.f32 l, l, ${first}; mul.rn.f32 h, h, ${first + 1};"
    pair = "bf16x2" if bf16 else "f16x2"
    return (
        f"{{ .reg .b32 l, h, m; {unpack} add.rn.f32 l, l, {less}; add.rn.f32 h, h, {less}; {affine}"
        f" cvt.rn.{pair}.f32 $0, h, l; }}"
    )


@triton.jit
def along(values, FIRST: tl.constexpr):
    """Numbers along the first of two axes, or the second."""
    if FIRST:
        return values[:, None]
    else:
        return values[None, :]


@triton.jit
def _numbers(words, scale, PLACE: tl.constexpr, CODEC: tl.constexpr, DTYPE: tl.constexpr, MODE: tl.constexpr,
             SCALED: tl.constexpr):  # fmt: skip
    """The number in one place of each word, exactly; int4 less 8. SCALED: times ``scale``."""
    BF16: tl.constexpr = DTYPE is tl.bfloat16
    if MODE == 1 and (BF16 or DTYPE is tl.float16):
        CODE: tl.constexpr = _assembler(PLACE, CODEC, BF16, SCALED)
        if SCALED:
            return tl.inline_asm_elementwise(CODE, "=r,r,r", [words, scale.to(DTYPE)], dtype=DTYPE.value, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(CODE, "=r,r", [words], dtype=DTYPE.value, is_pure=True, pack=2)
    else:
        code = (words.to(tl.uint16, bitcast=True) >> (4 * PLACE)) & 15
        if CODEC == INT4:
            return (code.to(tl.float32) - 8.0).to(DTYPE)
        else:
            # Sign, exponent and mantissa at float16's places, whose bias is 15.
            bits = ((code & 8) << 12) | ((code & 7) << 9)
            number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
            return (number * scale if SCALED else number).to(DTYPE)


@triton.jit
def _affine(words, scale, minimum, PLACE: tl.constexpr, CODEC: tl.constexpr, DTYPE: tl.constexpr, MODE: tl.constexpr,
            OFFSETS: tl.constexpr):  # fmt: skip
    """The integer in one place of each word as ``OFFSETS`` has it; SYMMETRIC: without its scale."""
    BF16: tl.constexpr = DTYPE is tl.bfloat16
    LESS: tl.constexpr = OFFSETS == MINIMA
    SCALED: tl.constexpr = OFFSETS == ON_WEIGHTS
    if MODE == 1 and (BF16 or DTYPE is tl.float16):
        CODE: tl.constexpr = _affine_assembler(PLACE, CODEC, BF16, SCALED, LESS)
        WORDS: tl.constexpr = "=r,r,r" if CODEC == INT8 else "=r,r"
        if LESS:
            factors = [words, scale.to(tl.int32, bitcast=True), minimum.to(tl.int32, bitcast=True)]
            return tl.inline_asm_elementwise(CODE, WORDS + ",r,r,r,r", factors, dtype=DTYPE.value, is_pure=True, pack=2)
        elif SCALED:
            factors = [words, scale.to(tl.int32, bitcast=True)]
            return tl.inline_asm_elementwise(CODE, WORDS + ",r,r", factors, dtype=DTYPE.value, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(CODE, WORDS, [words], dtype=DTYPE.value, is_pure=True, pack=2)
    else:
        BITS: tl.constexpr = 8 if CODEC == INT8 else 4
        number = ((words.to(tl.int32) >> (BITS * PLACE)) & (2**BITS - 1)).to(tl.float32)
        if LESS:
            return (number * scale + minimum).to(DTYPE)
        number -= 2 ** (BITS - 1)
        return (number * scale if SCALED else number).to(DTYPE)


@triton.jit
def rows_tile(x, row, used, inputs, start, IN: tl.constexpr, CHANNELS: tl.constexpr, FACTOR: tl.constexpr, MODE: tl.constexpr,
              SWAP: tl.constexpr, ORDERED: tl.constexpr):  # fmt: skip
    """``CHANNELS`` of some rows from ``start`` on, as a factor. ``row``: offset of each; used: which of them count. ORDERED:
    ``inputs`` points to the channel at each place."""
    channel = start + tl.arange(0, CHANNELS)
    present = channel < IN
    if ORDERED:
        channel = tl.load(inputs + channel, mask=present, other=0)
    at = x + along(row, not SWAP) + along(channel, SWAP)
    value = tl.load(at, mask=along(used, not SWAP) & along(present, SWAP), other=0.0)
    return to_half(value, MODE) if FACTOR == AS_HALF else value


@triton.jit
def step_of_rows(x, row, used, inputs, start, IN: tl.constexpr, STEP: tl.constexpr, CODEC: tl.constexpr, FACTOR: tl.constexpr,
                 MODE: tl.constexpr, SWAP: tl.constexpr, ORDERED: tl.constexpr):  # fmt: skip
    """Loads the tiles of some rows that ``add_product`` takes: one, or one for each place in a word."""
    if CODEC > E4M3:
        tiles = ()
        for place in tl.static_range(4):
            at = start + place * (STEP // 4)
            tiles += (rows_tile(x, row, used, inputs, at, IN, STEP // 4, FACTOR, MODE, SWAP, ORDERED),)
        return tiles
    else:
        return (rows_tile(x, row, used, inputs, start, IN, STEP, FACTOR, MODE, SWAP, ORDERED),)


@triton.jit
def fetched_rows(x, first, start, FACTOR: tl.constexpr, MODE: tl.constexpr, SWAP: tl.constexpr):
    """The step of neighbouring rows of a tensor descriptor. Those past an expert's last make sums that are not written."""
    value = x.load([first, start])
    value = to_half(value, MODE) if FACTOR == AS_HALF else value
    return tl.trans(value) if SWAP else value


@triton.jit
def _dot(x, weight, sums, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    if SWAP:
        return tl.dot(weight, x, sums, input_precision=PRECISION)
    else:
        return tl.dot(x, weight, sums, input_precision=PRECISION)


@triton.jit
def for_outputs(values, expert, row, first, group, OUT: tl.constexpr, GROUPS: tl.constexpr, SHARED: tl.constexpr,
                OUTPUTS: tl.constexpr, SWAP: tl.constexpr):  # fmt: skip
    """Loads the values of a group of inputs for the outputs ``row`` of a tile that begins with ``first``.

    SHARED: outputs that have one in common.
    """
    base = values + (expert.to(tl.int64) * GROUPS + group) * (OUT // SHARED)
    if SHARED % OUTPUTS == 0:
        return tl.load(base + first // SHARED)
    else:
        return along(tl.load(base + row // SHARED, mask=row < OUT, other=0), SWAP)


@triton.jit
def as_float(scale, CODEC: tl.constexpr):
    """A scale as it is stored -> float32"""
    if CODEC == MXFP4:
        bits = scale.to(tl.int32)
        # 2 ** -127 is subnormal.
        return tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def _of_halves(
    values, expert, row, first, start, OUT: tl.constexpr, GROUPS: tl.constexpr, SHARED_IN: tl.constexpr, OUTPUTS: tl.constexpr,
    WORDS: tl.constexpr, SWAP: tl.constexpr
):  # fmt: skip
    """The values, in float32, of the groups of a place's inputs from ``start`` on, whose halves may have each its own."""
    group = tl.minimum(start // SHARED_IN, GROUPS - 1)
    low = for_outputs(values, expert, row, first, group, OUT, GROUPS, 1, OUTPUTS, SWAP).to(tl.float32)
    if SHARED_IN % WORDS == 0:
        return low
    else:
        group = tl.minimum((start + WORDS // 2) // SHARED_IN, GROUPS - 1)
        high = for_outputs(values, expert, row, first, group, OUT, GROUPS, 1, OUTPUTS, SWAP).to(tl.float32)
        return tl.where(along(tl.arange(0, WORDS) < WORDS // 2, not SWAP), low, high)


@triton.jit
def _weights(
    words, scales, offsets, expert, row, first, start, OUT: tl.constexpr, GROUPS: tl.constexpr, SHARED_IN: tl.constexpr,
    OUTPUTS: tl.constexpr, WORDS: tl.constexpr, PLACE: tl.constexpr, CODEC: tl.constexpr, DTYPE: tl.constexpr,
    MODE: tl.constexpr, OFFSETS: tl.constexpr, SWAP: tl.constexpr
):  # fmt: skip
    """The weights in one place of words of integers, whose inputs begin with ``start``, rounded."""
    scale = _of_halves(scales, expert, row, first, start, OUT, GROUPS, SHARED_IN, OUTPUTS, WORDS, SWAP)
    minimum = scale
    if OFFSETS == MINIMA:
        minimum = _of_halves(offsets, expert, row, first, start, OUT, GROUPS, SHARED_IN, OUTPUTS, WORDS, SWAP)
    return _affine(words, scale, minimum, PLACE, CODEC, DTYPE, MODE, OFFSETS)


@triton.jit
def _stored(weight, expert, row, first, start, OUT: tl.constexpr, IN: tl.constexpr, CHANNELS: tl.constexpr, SWAP: tl.constexpr,
            FETCH: tl.constexpr):  # fmt: skip
    """A tile of weights that are stored as they are multiplied. FETCH: rows past the expert's last are those of the next."""
    if FETCH:
        part = weight.load([expert * OUT + first, start])
        return part if SWAP else tl.trans(part)
    else:
        channel = start + tl.arange(0, CHANNELS)
        at = along((expert.to(tl.int64) * OUT + row) * IN, SWAP) + along(channel, not SWAP)
        return tl.load(weight + at, mask=along(row < OUT, SWAP) & along(channel < IN, not SWAP), other=0.0)


@triton.jit
def add_product(
    sums, rows, x_scale, weight, scales, offsets, expert, row, first, start, OUT: tl.constexpr, IN: tl.constexpr,
    OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, CODEC: tl.constexpr, SHARED_OUT: tl.constexpr, SHARED_IN: tl.constexpr,
    OFFSETS: tl.constexpr, FACTOR: tl.constexpr, MODE: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
    FETCH: tl.constexpr
):  # fmt: skip
    """Adds to ``sums`` the product of a tile of rows and a tile of an expert's weight ``[OUT, IN]``, over ``CHANNELS`` from
    ``start`` on: a step.

    A step lies within one group of e4m3, and is a block of words of others. Scales of groups are applied to the group's sums,
    so that products are exact; those of mxfp4 to the weights, which stay exact, and those of integers to weights as ``OFFSETS``
    says.

    Args:
        rows: the step of the rows, from ``step_of_rows``.
        x_scale: factor of the rows for this step.
        row, first: outputs of the tile, and the first of them.
        weight: with FETCH a tensor descriptor of all experts' rows.
    """
    present = row < OUT
    if CODEC == FLOATS:
        part = _stored(weight, expert, row, first, start, OUT, IN, CHANNELS, SWAP, FETCH)
        return _dot(rows[0], part, sums, SWAP, PRECISION)
    else:
        EACH: tl.constexpr = SHARED_IN < IN
        GROUPS: tl.constexpr = (IN + SHARED_IN - 1) // SHARED_IN
        zero_sums = tl.zeros([sums.shape[0], sums.shape[1]], tl.float32)
        factor = x_scale
        if CODEC == E4M3:
            if EACH:
                # A step past the end has no weights, and any group will do.
                group = tl.minimum(start // SHARED_IN, GROUPS - 1)
                factor = x_scale * for_outputs(scales, expert, row, first, group, OUT, GROUPS, SHARED_OUT, OUTPUTS, SWAP)
            part = _stored(weight, expert, row, first, start, OUT, IN, CHANNELS, SWAP, FETCH)
            if FACTOR != AS_E4M3:
                part = to_half(part, MODE).to(rows[0].dtype)
            return sums + _dot(rows[0], part, zero_sums, SWAP, PRECISION) * factor
        else:
            WORDS: tl.constexpr = CHANNELS // 4
            BLOCKS: tl.constexpr = (IN + CHANNELS - 1) // CHANNELS
            DTYPE: tl.constexpr = tl.float16 if FACTOR == AS_E4M3 else rows[0].dtype
            # Powers of two: of their type's range, only float16 is too narrow for them.
            SCALED: tl.constexpr = CODEC == MXFP4 and EACH and DTYPE is not tl.float16
            AFFINE: tl.constexpr = OFFSETS >= ON_WEIGHTS
            SPAN: tl.constexpr = SHARED_IN // WORDS if EACH and not AFFINE and SHARED_IN < CHANNELS else 4
            block = ((expert.to(tl.int64) * BLOCKS + start // CHANNELS) * OUT + row) * WORDS
            at = along(block, SWAP) + along(tl.arange(0, WORDS), not SWAP)
            words = tl.load(weight + at, mask=along(present, SWAP) & (start < IN), other=0)
            part = sums if SCALED or AFFINE else zero_sums
            scale = 1.0
            for place in tl.static_range(4):
                if EACH and not AFFINE:
                    group = tl.minimum((start + place * WORDS) // SHARED_IN, GROUPS - 1)
                if SCALED:
                    stored = for_outputs(scales, expert, row, first, group, OUT, GROUPS, SHARED_OUT, OUTPUTS, SWAP)
                    scale = as_float(stored, CODEC)
                if AFFINE:
                    number = _weights(
                        words, scales, offsets, expert, row, first, start + place * WORDS, OUT, GROUPS, SHARED_IN, OUTPUTS,
                        WORDS, place, CODEC, DTYPE, MODE, OFFSETS, SWAP,
                    )  # fmt: skip
                elif CODEC == INT8:
                    number = _affine(words, scale, scale, place, CODEC, DTYPE, MODE, SYMMETRIC)
                else:
                    number = _numbers(words, scale, place, CODEC, DTYPE, MODE, SCALED)
                if OFFSETS == ZEROS:
                    own = group if EACH else 0
                    zero = for_outputs(offsets, expert, row, first, own, OUT, GROUPS, SHARED_OUT, OUTPUTS, SWAP)
                    number -= zero.to(DTYPE)
                if FACTOR == AS_E4M3:
                    # Exact: differences of codes and zero points have 4 bits at most.
                    number = number.to(tl.float8e4nv)
                part = _dot(rows[place], number, part, SWAP, PRECISION)
                if place % SPAN == SPAN - 1 and not SCALED and not AFFINE:
                    if EACH:
                        stored = for_outputs(scales, expert, row, first, group, OUT, GROUPS, SHARED_OUT, OUTPUTS, SWAP)
                        factor = x_scale * as_float(stored, CODEC)
                    sums += part * factor
                    part = zero_sums
            return part if SCALED or AFFINE else sums
