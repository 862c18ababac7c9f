// Products of many rows in bfloat16 on CPUs that multiply it: weights are rounded to bfloat16 on their way, which takes half
// as many products, and no second copy of the weights.
#pragma once

#include "packed.h"

namespace headrace {
namespace {

constexpr int64_t MANY_ROWS = 64;  // From so many on, products of bfloat16 are faster.
constexpr int64_t MOST_ROWS = 12;   // Of a tile.
constexpr int BESIDE = 2;           // Blocks side by side.

// A pair of inputs in each lane: the weights of inputs 2i and 2i + 1 of a run, rounded to bfloat16.
inline __m512i pair_of(__m512i codes, int shift, __m512 scale, __m512 minimum) {
    const __m512i byte = _mm512_set1_epi32(255);
    __m256bh halves[2];
    for (int i = 0; i < 2; ++i) {
        __m512i code = _mm512_and_si512(_mm512_srli_epi32(codes, unsigned(shift + 8 * i)), byte);
        halves[i] = _mm512_cvtneps_pbh(_mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(code), minimum));
    }
    __m512i even = _mm512_cvtepu16_epi32((__m256i)halves[0]), odd = _mm512_cvtepu16_epi32((__m256i)halves[1]);
    return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
}

// A block's weights in bfloat16: [groups * 16 pairs, 16 outputs], each row of 16 followed by that of the block beside it.
template <int BITS>
void widen(Weights weights, int64_t groups, __m512i* out) {
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t* w = weights.at;
    for (int64_t g = 0; g < groups; ++g, w += group_bytes<BITS>(weights.tail)) {
        fetch_ahead(w, group_bytes<BITS>(weights.tail));
        __m512 scale, minimum;
        read_tail(w + CODES<BITS>, weights.tail, scale, minimum);
        for (int p = 0; p < RUNS; ++p) {
            __m512i codes = _mm512_loadu_si512(w + 64 * (BITS == 4 ? p % (RUNS / 2) : p));
            if (BITS == 4) codes = _mm512_and_si512(p < RUNS / 2 ? codes : _mm512_srli_epi16(codes, 4), low);
            for (int half = 0; half < 2; ++half, out += BESIDE)
                _mm512_storeu_si512(out, pair_of(codes, 16 * half, scale, minimum));
        }
    }
}

// Two blocks at once, so that an activation that was fetched is used twice: out [ROWS, 32].
template <int ROWS>
void wide_tile(const __m512i* w, int64_t pairs, const bf16* x, int64_t stride, float* out) {
    __m512 total[ROWS][BESIDE];
    for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < BESIDE; ++n) total[m][n] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; ++p, w += BESIDE) {
        const __m512bh weights[BESIDE] = {(__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_loadu_si512(w + 1)};
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m) {
            int32_t two;
            std::memcpy(&two, x + m * stride + 2 * p, 4);
            __m512bh both = (__m512bh)_mm512_set1_epi32(two);
            total[m][0] = _mm512_dpbf16_ps(total[m][0], weights[0], both);
            total[m][1] = _mm512_dpbf16_ps(total[m][1], weights[1], both);
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < BESIDE; ++n) _mm512_storeu_ps(out + (m * BESIDE + n) * BLOCK, total[m][n]);
}

int64_t wide_rows(int64_t left) { return left >= MOST_ROWS ? MOST_ROWS : left >= 4 ? 4 : 1; }

void wide_tiles(int64_t rows, const __m512i* w, int64_t pairs, const bf16* x, int64_t stride, float* out) {
    if (rows == 12) return wide_tile<12>(w, pairs, x, stride, out);
    if (rows == 4) return wide_tile<4>(w, pairs, x, stride, out);
    wide_tile<1>(w, pairs, x, stride, out);
}

// The same with weights rounded to bfloat16 in passing, for so many rows that this is soon paid for.
template <int BITS, class Y>
void wide_product(const bf16* x, int64_t stride, int64_t rows, Weights weights, int64_t groups, const float* bias,
                  int64_t outputs, Y* y) {
    constexpr int64_t WIDTH = BESIDE * BLOCK;
    int64_t blocks = (outputs + WIDTH - 1) / WIDTH, row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t pairs = groups * RUNS * 2;
    parallel(row_blocks * blocks, chunk_of(row_blocks * blocks, 6, 1), [&](int64_t begin, int64_t end) {
        static thread_local std::vector<char> space;
        space.resize(size_t(pairs * BESIDE * 64));
        __m512i* wide = reinterpret_cast<__m512i*>(space.data());
        float results[MOST_ROWS * WIDTH];
        for (int64_t task = begin; task < end; ++task) {
            int64_t column = task % blocks * WIDTH, first = task / blocks * ROW_BLOCK;
            int64_t last = std::min(first + ROW_BLOCK, rows), width = std::min(WIDTH, outputs - column);
            // Beside the last block there may be none: what stands there from before is not used.
            for (int n = 0; n < BESIDE && n * BLOCK < width; ++n)
                widen<BITS>(block_of<BITS>(weights, column / BLOCK + n, groups), groups, wide + n);
            for (int64_t row = first, count; row < last; row += count) {
                count = wide_rows(last - row);
                wide_tiles(count, wide, pairs, x + row * stride, stride, results);
                for (int64_t m = 0; m < count; ++m)
                    store(results + m * WIDTH, bias ? bias + column : nullptr, width, y + (row + m) * outputs + column);
            }
        }
    });
}

template <class Y>
void wide_product(int bits, const bf16* x, int64_t stride, int64_t rows, Weights w, int64_t groups, const float* bias,
                  int64_t outputs, Y* y) {
    if (bits == 4) return wide_product<4>(x, stride, rows, w, groups, bias, outputs, y);
    wide_product<8>(x, stride, rows, w, groups, bias, outputs, y);
}

}  // namespace
}  // namespace headrace
