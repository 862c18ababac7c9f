// Products on CPUs with AVX2 and without AVX-512.
//
// Many rows: codes and activations meet as 16-bit integers, whose products are summed by pairs in 32 bits. A group of a
// block's weights is widened once and stays in the first-level cache while the rows pass it, four at a time.
// Few rows: nothing is widened where sums of products of bytes are exact. Those of eight runs of 4-bit codes fit 16 bits.
#pragma once

#include "packed.h"

#define HEADRACE_TILE "avx2"

namespace headrace {
namespace {

constexpr int64_t ROW_BLOCK = 128;  // Rows whose sums, and activations of a group, stay in the first-level cache.
constexpr int64_t FEW_ROWS = 3;
constexpr int64_t SIDE = 4;  // Rows whose sums are in registers.
constexpr int HALVES = 2;    // Vectors of a block's outputs.
constexpr int PAIRS = GROUP / 2;

inline __m256i load_vector(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Four bytes in every lane.
inline __m256i spread(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

#if defined(__AVXVNNI__)
constexpr bool BYTES_ARE_EXACT_WITH_8_BITS = true;

inline __m256i add_pairs(__m256i sum, __m256i c, __m256i x) { return _mm256_dpwssd_avx_epi32(sum, c, x); }

template <int BITS>
__m256i dot_bytes(const __m256i* c, const int8_t* x) {
    __m256i dot = _mm256_setzero_si256();
    for (int part = 0; part < 2; ++part) {
        dot = _mm256_slli_epi32(dot, SHIFT);
        for (int p = 0; p < RUNS; ++p) dot = _mm256_dpbusd_avx_epi32(dot, c[p], spread(x + part * GROUP + 4 * p));
    }
    return dot;
}
#else
constexpr bool BYTES_ARE_EXACT_WITH_8_BITS = false;

inline __m256i add_pairs(__m256i sum, __m256i c, __m256i x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(c, x)); }

// 4 bits: a sum is at most 8 * 2 * 15 * 127 < 2^15.
template <int BITS>
__m256i dot_bytes(const __m256i* c, const int8_t* x) {
    __m256i sums[2];
    for (int part = 0; part < 2; ++part) {
        sums[part] = _mm256_maddubs_epi16(c[0], spread(x + part * GROUP));
        for (int p = 1; p < RUNS; ++p)
            sums[part] = _mm256_add_epi16(sums[part], _mm256_maddubs_epi16(c[p], spread(x + part * GROUP + 4 * p)));
    }
    return _mm256_add_epi32(_mm256_madd_epi16(sums[0], _mm256_set1_epi16(1 << SHIFT)),
                            _mm256_madd_epi16(sums[1], _mm256_set1_epi16(1)));
}
#endif

inline bool in_parts(int bits, int64_t rows) { return rows <= FEW_ROWS && (bits == 4 || BYTES_ARE_EXACT_WITH_8_BITS); }

// The runs of one half of a group's outputs, a byte a code.
template <int BITS>
void byte_codes(const uint8_t* w, int half, __m256i* c) {
    const __m256i low = _mm256_set1_epi8(15);
    if (BITS == 8) {
        for (int p = 0; p < RUNS; ++p) c[p] = load_vector(w + 64 * p + 32 * half);
        return;
    }
    for (int p = 0; p < RUNS / 2; ++p) {
        __m256i both = load_vector(w + 64 * p + 32 * half);
        c[p] = _mm256_and_si256(both, low);
        c[p + RUNS / 2] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
}

// The same as 16-bit integers: of each run the pair of inputs 0 and 2, then that of 1 and 3, `step` vectors apart.
template <int BITS>
inline void pair_codes(const uint8_t* w, int half, int step, __m256i* c) {
    const __m256i low = _mm256_set1_epi16(BITS == 8 ? 255 : 15);
    for (int p = 0; p < RUNS * BITS / 8; ++p) {
        __m256i codes = load_vector(w + 64 * p + 32 * half);
        c[2 * p * step] = _mm256_and_si256(codes, low);
        if (BITS == 8) {
            c[(2 * p + 1) * step] = _mm256_srli_epi16(codes, 8);
        } else {
            c[(2 * p + 1) * step] = _mm256_and_si256(_mm256_srli_epi16(codes, 8), low);
            c[(2 * p + RUNS) * step] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
            c[(2 * p + 1 + RUNS) * step] = _mm256_srli_epi16(codes, 12);
        }
    }
}

struct Scales {
    __m256 scale, minimum;
};

inline Scales scales_of(const uint8_t* at, Tail tail, int half) {
    __m256 scale, offset;
    if (tail == FLOAT_ZEROS) {
        const float* floats = reinterpret_cast<const float*>(at) + 8 * half;
        scale = _mm256_loadu_ps(floats), offset = _mm256_loadu_ps(floats + BLOCK);
    } else {
        const __m128i* halves = reinterpret_cast<const __m128i*>(at) + half;
        scale = _mm256_cvtph_ps(_mm_loadu_si128(halves)), offset = _mm256_cvtph_ps(_mm_loadu_si128(halves + HALVES));
    }
    return {scale, tail == HALF_MINIMA ? offset : _mm256_fnmadd_ps(scale, offset, _mm256_setzero_ps())};
}

inline __m256 add_group(__m256 total, __m256i dot, const Scales& w, float scale, float sum) {
    __m256 factor = _mm256_mul_ps(w.scale, _mm256_set1_ps(scale));
    total = _mm256_fmadd_ps(factor, _mm256_cvtepi32_ps(dot), total);
    return _mm256_fmadd_ps(w.minimum, _mm256_set1_ps(sum), total);
}

template <int ROWS, int BITS>
void few_rows(Weights weights, const Activations& a, int64_t row, float* out) {
    __m256 total[ROWS][HALVES];
    for (int m = 0; m < ROWS; ++m) total[m][0] = total[m][1] = _mm256_setzero_ps();
    const uint8_t* w = weights.at;
    for (int64_t g = 0; g < a.groups; ++g, w += group_bytes<BITS>(weights.tail)) {
        fetch_ahead(w, group_bytes<BITS>(weights.tail));
        for (int half = 0; half < HALVES; ++half) {
            constexpr bool PARTS = BITS == 4 || BYTES_ARE_EXACT_WITH_8_BITS;
            Scales scales = scales_of(w + CODES<BITS>, weights.tail, half);
            __m256i c[PARTS ? RUNS : PAIRS];
            if (PARTS) byte_codes<BITS>(w, half, c);
            else pair_codes<BITS>(w, half, 1, c);
            for (int m = 0; m < ROWS; ++m) {
                int64_t place = (row + m) * a.across + g * a.along;
                const int8_t* x = a.codes + place * PLACE;
                __m256i dot;
                if (PARTS) {
                    dot = dot_bytes<BITS>(c, x);
                } else {
                    dot = _mm256_setzero_si256();
                    for (int p = 0; p < PAIRS; ++p) dot = add_pairs(dot, c[p], spread(x + 4 * p));
                }
                total[m][half] = add_group(total[m][half], dot, scales, a.scales[place], a.sums[place]);
            }
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int half = 0; half < HALVES; ++half) _mm256_storeu_ps(out + m * BLOCK + 8 * half, total[m][half]);
}

struct Dots {
    __m256i low, high;
};

inline void add_pairs(Dots& dots, const __m256i* c, const int8_t* x) {
    __m256i two = spread(x);
    dots.low = add_pairs(dots.low, c[0], two);
    dots.high = add_pairs(dots.high, c[1], two);
    // Compilers may reorder sums of integers, and then hold more of them than there are registers.
    asm("" : "+x"(dots.low), "+x"(dots.high));
}

inline void add_group(const Dots& dots, const Scales* w, float scale, float sum, float* total) {
    _mm256_storeu_ps(total, add_group(_mm256_loadu_ps(total), dots.low, w[0], scale, sum));
    _mm256_storeu_ps(total + 8, add_group(_mm256_loadu_ps(total + 8), dots.high, w[1], scale, sum));
}

// Adds a group's part to sums [ROWS, 16]. c: [PAIRS, HALVES]. The sums of integers have names of their own, since compilers
// keep arrays in memory.
template <int ROWS>
void add_rows(const __m256i* c, const Scales* w, const int8_t* x, const float* scales, const float* sums, float* totals) {
    Dots a{}, b{}, d{}, e{};
#pragma GCC unroll 16
    for (int p = 0; p < PAIRS; ++p) {
        const __m256i* pair = c + p * HALVES;
        const int8_t* two = x + 4 * p;
        add_pairs(a, pair, two);
        if (ROWS > 1) add_pairs(b, pair, two + PLACE);
        if (ROWS > 2) add_pairs(d, pair, two + 2 * PLACE);
        if (ROWS > 3) add_pairs(e, pair, two + 3 * PLACE);
    }
    add_group(a, w, scales[0], sums[0], totals);
    if (ROWS > 1) add_group(b, w, scales[1], sums[1], totals + BLOCK);
    if (ROWS > 2) add_group(d, w, scales[2], sums[2], totals + 2 * BLOCK);
    if (ROWS > 3) add_group(e, w, scales[3], sums[3], totals + 3 * BLOCK);
}

// Rows [first, last) lie side by side in every group.
template <int BITS>
void many_rows(Weights weights, const Activations& a, int64_t first, int64_t last, float* totals) {
    std::fill(totals, totals + (last - first) * BLOCK, 0.0f);
    const uint8_t* w = weights.at;
    for (int64_t g = 0; g < a.groups; ++g, w += group_bytes<BITS>(weights.tail)) {
        fetch_ahead(w, group_bytes<BITS>(weights.tail));
        __m256i c[PAIRS * HALVES];
        Scales scales[HALVES];
        for (int half = 0; half < HALVES; ++half) {
            pair_codes<BITS>(w, half, HALVES, c + half);
            scales[half] = scales_of(w + CODES<BITS>, weights.tail, half);
        }
        for (int64_t row = first; row < last;) {
            int64_t place = row + g * a.along;
            const int8_t* x = a.codes + place * PLACE;
            const float *xs = a.scales + place, *sums = a.sums + place;
            float* out = totals + (row - first) * BLOCK;
            switch (std::min(last - row, SIDE)) {
                case 4: add_rows<4>(c, scales, x, xs, sums, out); row += 4; break;
                case 3: add_rows<3>(c, scales, x, xs, sums, out); row += 3; break;
                case 2: add_rows<2>(c, scales, x, xs, sums, out); row += 2; break;
                default: add_rows<1>(c, scales, x, xs, sums, out); row += 1;
            }
        }
    }
}

// Products of rows [first, last), at most ROW_BLOCK, with a block of weights.
template <int BITS>
void block_rows(Weights w, const Activations& a, int64_t rows, int64_t first, int64_t last, float* out) {
    if (rows > FEW_ROWS) return many_rows<BITS>(w, a, first, last, out);
    switch (last - first) {
        case 3: return few_rows<3, BITS>(w, a, first, out);
        case 2: return few_rows<2, BITS>(w, a, first, out);
        default: return few_rows<1, BITS>(w, a, first, out);
    }
}

// Many rows lie side by side in every group.
inline void arrange(Activations& a, int64_t rows) {
    a.across = rows > FEW_ROWS ? 1 : a.groups;
    a.along = rows > FEW_ROWS ? rows : 1;
}

inline void write_codes(const Rounded& from, int bits, int64_t rows, int8_t* codes) {
    if (in_parts(bits, rows)) return write_parts(from, codes);
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12,
                                           13, 10, 11, 14, 15);
    int16_t narrow[GROUP];
#pragma omp simd
    for (int i = 0; i < GROUP; ++i) narrow[i] = int16_t(from.codes[i]);
    for (int i = 0; i < 2; ++i)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes) + i, _mm256_shuffle_epi8(load_vector(narrow + 16 * i), order));
}

}  // namespace
}  // namespace headrace
