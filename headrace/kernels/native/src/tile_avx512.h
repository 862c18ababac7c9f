// Products on CPUs with the byte products of AVX-512: a code is met by the high and the low part of an activation.
#pragma once

#include "packed.h"

#define HEADRACE_TILE "avx512_vnni"

namespace headrace {
namespace {

inline void read_tail(const uint8_t* at, Tail tail, __m512& scale, __m512& minimum) {
    if (tail == FLOAT_ZEROS) {
        scale = _mm512_loadu_ps(at);
        minimum = _mm512_loadu_ps(at + 4 * BLOCK);
    } else {
        const __m256i* halves = reinterpret_cast<const __m256i*>(at);
        scale = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
        minimum = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1));
    }
    if (tail != HALF_MINIMA) minimum = _mm512_fnmadd_ps(scale, minimum, _mm512_setzero_ps());
}

template <int ROWS, int BITS>
void tile(Weights weights, const Activations& a, int64_t row, float* out) {
    constexpr int CHAINS = ROWS < 4 ? 2 : 1;  // Few rows: split the chain of dependent products.
    const __m512i low = _mm512_set1_epi8(15);
    __m512 total[ROWS];
    for (int m = 0; m < ROWS; ++m) total[m] = _mm512_setzero_ps();
    const int8_t* codes = a.codes + row * a.groups * PLACE;
    const float* scales = a.scales + row * a.groups;
    const float* sums = a.sums + row * a.groups;
    const uint8_t* w = weights.at;
    for (int64_t g = 0; g < a.groups; ++g, w += group_bytes<BITS>(weights.tail)) {
        fetch_ahead(w, group_bytes<BITS>(weights.tail));
        __m512i c[RUNS];
        if (BITS == 4) {
            for (int p = 0; p < RUNS / 2; ++p) {
                __m512i both = _mm512_loadu_si512(w + 64 * p);
                c[p] = _mm512_and_si512(both, low);
                c[p + RUNS / 2] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            }
        } else {
            for (int p = 0; p < RUNS; ++p) c[p] = _mm512_loadu_si512(w + 64 * p);
        }
        __m512 scale, minimum;
        read_tail(w + CODES<BITS>, weights.tail, scale, minimum);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m) {
            const int8_t* x = codes + (m * a.groups + g) * PLACE;
            __m512i dot[CHAINS];
            for (int i = 0; i < CHAINS; ++i) dot[i] = _mm512_setzero_si512();
            for (int part = 0; part < 2; ++part) {
                for (int i = 0; i < CHAINS; ++i) dot[i] = _mm512_slli_epi32(dot[i], SHIFT);
                for (int p = 0; p < RUNS; ++p) {
                    int32_t four;
                    std::memcpy(&four, x + part * GROUP + 4 * p, 4);
                    dot[p % CHAINS] = _mm512_dpbusd_epi32(dot[p % CHAINS], c[p], _mm512_set1_epi32(four));
                }
            }
            if (CHAINS == 2) dot[0] = _mm512_add_epi32(dot[0], dot[CHAINS - 1]);
            __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(scales[m * a.groups + g]));
            total[m] = _mm512_fmadd_ps(factor, _mm512_cvtepi32_ps(dot[0]), total[m]);
            total[m] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[m * a.groups + g]), total[m]);
        }
    }
    for (int m = 0; m < ROWS; ++m) _mm512_storeu_ps(out + m * BLOCK, total[m]);
}

template <int BITS>
int64_t tile_of(int64_t left, Weights w, const Activations& a, int64_t row, float* out) {
    if (left >= 16) return tile<16, BITS>(w, a, row, out), 16;
    if (left >= 8) return tile<8, BITS>(w, a, row, out), 8;
    if (left >= 4) return tile<4, BITS>(w, a, row, out), 4;
    if (left == 3) return tile<3, BITS>(w, a, row, out), 3;
    if (left == 2) return tile<2, BITS>(w, a, row, out), 2;
    return tile<1, BITS>(w, a, row, out), 1;
}

}  // namespace
}  // namespace headrace

#include "tile_rows.h"
