// Products with weights of 4 or 8 bits in groups of 32: weight = scale * code + minimum.
//
// The activations are rounded to 15 bits, a scale for each row and group of 32, so that a group's dot product is one of
// integers. A code is 128 * high + low with both in int8, for which the CPU has products. int8 alone would lose the small
// values of a group that holds one very large one, and language models have such groups. The sum over the groups is
// kept in float32, always in the same order: a row's result does not depend on the rows beside it.
//
// For many rows in bfloat16, on a CPU that multiplies it, weights are rounded to bfloat16 on their way: half as many
// products, and no second copy of the weights.
//
// Weights lie in blocks of 16 outputs. A block holds its groups one after the other; a group holds the codes (for eight
// runs of four inputs, 16 outputs x 4 inputs; with 4 bits, runs 0-3 in the low nibbles and 4-7 in the high ones), then
// 16 scales and 16 minima in half precision.

#include <vector>

#include "common.h"

namespace headrace {
namespace {

constexpr int GROUP = 32;
constexpr int LANES = 16;
constexpr int RUNS = 8;
constexpr int64_t ROW_BLOCK = 256;  // Rows whose activations stay in the second-level cache.
constexpr int MOST_ROWS = 16;
constexpr int64_t MANY_ROWS = 64;  // From so many on, products of bfloat16 are faster, where the CPU has them.
constexpr int SHIFT = 7;  // Of the high part of an activation's code.
constexpr int LARGEST = 127 << SHIFT;
constexpr int PAIR = 2 * GROUP;  // Bytes of a group's codes: the high parts, then the low ones.

template <int BITS>
struct Layout {
    static constexpr int codes = LANES * GROUP * BITS / 8;
    static constexpr int bytes = codes + 2 * LANES * 2;
};

struct Activations {
    const int8_t* codes;  // [rows, groups, high and low, 32]
    const float* scales;  // [rows, groups]
    const float* sums;    // [rows, groups]: scale times the sum of the codes
    int64_t groups;
};

template <class T>
void quantize_row(const T* x, int64_t groups, int8_t* codes, float* scales, float* sums) {
    for (int64_t g = 0; g < groups; ++g, x += GROUP, codes += PAIR) {
        float values[GROUP];
        float largest = 0;
#pragma omp simd reduction(max : largest)
        for (int i = 0; i < GROUP; ++i) {
            values[i] = to_float(x[i]);
            largest = std::max(largest, std::fabs(values[i]));
        }
        float inverse = largest > 0 ? float(LARGEST) / largest : 0.0f;
        int32_t sum = 0;
        int32_t rounded[GROUP];
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < GROUP; ++i) {
            float shifted = values[i] * inverse + 12582912.0f;  // To nearest, in the low bits.
            int32_t bits;
            std::memcpy(&bits, &shifted, 4);
            rounded[i] = bits - 0x4b400000;
            sum += rounded[i];
        }
#pragma omp simd
        for (int i = 0; i < GROUP; ++i) {
            int32_t high = (rounded[i] + (1 << (SHIFT - 1))) >> SHIFT;  // -127 to 127, which leaves -64 to 63.
            codes[i] = int8_t(high);
            codes[GROUP + i] = int8_t(rounded[i] - (high << SHIFT));
        }
        scales[g] = largest / float(LARGEST);
        sums[g] = scales[g] * float(sum);
    }
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define HEADRACE_TILE "avx512_vnni"

template <int ROWS, int BITS>
void tile(const uint8_t* w, const Activations& a, int64_t row, float* out) {
    constexpr int CHAINS = ROWS < 4 ? 2 : 1;  // Few rows: split the chain of dependent products.
    const __m512i low = _mm512_set1_epi8(15);
    __m512 total[ROWS];
    for (int m = 0; m < ROWS; ++m) total[m] = _mm512_setzero_ps();
    const int8_t* codes = a.codes + row * a.groups * PAIR;
    const float* scales = a.scales + row * a.groups;
    const float* sums = a.sums + row * a.groups;
    for (int64_t g = 0; g < a.groups; ++g, w += Layout<BITS>::bytes) {
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
        const __m256i* tail = reinterpret_cast<const __m256i*>(w + Layout<BITS>::codes);
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(tail));
        __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(tail + 1));
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m) {
            const int8_t* x = codes + (m * a.groups + g) * PAIR;
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
    for (int m = 0; m < ROWS; ++m) _mm512_storeu_ps(out + m * LANES, total[m]);
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HEADRACE_TILE "avx2"

// 8 bits: 255 * 127 twice does not fit the 16-bit sums, so the codes are taken as signed, 128 lower, which the minimum
// makes good.
template <int BITS>
inline __m256i dot_four(__m256i c, __m256i x) {
    __m256i pairs = BITS == 4 ? _mm256_maddubs_epi16(c, x) : _mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(x, c));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

template <int ROWS, int BITS>
void half_tile(const uint8_t* w, const Activations& a, int64_t row, int half, float* out) {
    const __m256i low = _mm256_set1_epi8(15), flip = _mm256_set1_epi8(char(128));
    __m256 total[ROWS];
    for (int m = 0; m < ROWS; ++m) total[m] = _mm256_setzero_ps();
    const int8_t* codes = a.codes + row * a.groups * PAIR;
    const float* scales = a.scales + row * a.groups;
    const float* sums = a.sums + row * a.groups;
    for (int64_t g = 0; g < a.groups; ++g, w += Layout<BITS>::bytes) {
        __m256i c[RUNS];
        if (BITS == 4) {
            for (int p = 0; p < RUNS / 2; ++p) {
                __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 64 * p + 32 * half));
                c[p] = _mm256_and_si256(both, low);
                c[p + RUNS / 2] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            }
        } else {
            for (int p = 0; p < RUNS; ++p) {
                __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 64 * p + 32 * half));
                c[p] = _mm256_xor_si256(code, flip);
            }
        }
        const __m128i* tail = reinterpret_cast<const __m128i*>(w + Layout<BITS>::codes);
        __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(tail + half));
        __m256 minimum = _mm256_cvtph_ps(_mm_loadu_si128(tail + 2 + half));
        if (BITS == 8) minimum = _mm256_fmadd_ps(scale, _mm256_set1_ps(128.0f), minimum);
        for (int m = 0; m < ROWS; ++m) {
            const int8_t* x = codes + (m * a.groups + g) * PAIR;
            __m256i dot = _mm256_setzero_si256();
            for (int part = 0; part < 2; ++part) {
                dot = _mm256_slli_epi32(dot, SHIFT);
                for (int p = 0; p < RUNS; ++p) {
                    int32_t four;
                    std::memcpy(&four, x + part * GROUP + 4 * p, 4);
                    dot = _mm256_add_epi32(dot, dot_four<BITS>(c[p], _mm256_set1_epi32(four)));
                }
            }
            __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(scales[m * a.groups + g]));
            total[m] = _mm256_fmadd_ps(factor, _mm256_cvtepi32_ps(dot), total[m]);
            total[m] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(sums[m * a.groups + g]), total[m]);
        }
    }
    for (int m = 0; m < ROWS; ++m) _mm256_storeu_ps(out + m * LANES + 8 * half, total[m]);
}

template <int ROWS, int BITS>
void tile(const uint8_t* w, const Activations& a, int64_t row, float* out) {
    half_tile<ROWS, BITS>(w, a, row, 0, out);
    half_tile<ROWS, BITS>(w, a, row, 1, out);
}

#else
#define HEADRACE_TILE "portable"

inline float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent == 0) {
        float tiny = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -tiny : tiny;
    }
    uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13);
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

template <int ROWS, int BITS>
void tile(const uint8_t* w, const Activations& a, int64_t row, float* out) {
    float total[ROWS][LANES] = {};
    const int8_t* codes = a.codes + row * a.groups * PAIR;
    const float* scales = a.scales + row * a.groups;
    const float* sums = a.sums + row * a.groups;
    for (int64_t g = 0; g < a.groups; ++g, w += Layout<BITS>::bytes) {
        float scale[LANES], minimum[LANES];
        uint16_t halves[2 * LANES];
        std::memcpy(halves, w + Layout<BITS>::codes, sizeof halves);
        for (int n = 0; n < LANES; ++n) scale[n] = half_to_float(halves[n]), minimum[n] = half_to_float(halves[LANES + n]);
        uint8_t c[RUNS][LANES * 4];
        for (int p = 0; p < RUNS; ++p) {
            int shift = BITS == 4 && p >= RUNS / 2 ? 4 : 0;
            const uint8_t* from = w + 64 * (BITS == 4 ? p % (RUNS / 2) : p);
            for (int i = 0; i < LANES * 4; ++i) c[p][i] = uint8_t(from[i] >> shift) & (BITS == 4 ? 15 : 255);
        }
        for (int m = 0; m < ROWS; ++m) {
            const int8_t* x = codes + (m * a.groups + g) * PAIR;
            int32_t dot[LANES] = {};
            for (int p = 0; p < RUNS; ++p)
                for (int n = 0; n < LANES; ++n)
                    for (int t = 0; t < 4; ++t) {
                        int i = 4 * p + t;
                        dot[n] += int32_t(c[p][4 * n + t]) * ((int32_t(x[i]) << SHIFT) + int32_t(x[GROUP + i]));
                    }
            float xs = scales[m * a.groups + g], xc = sums[m * a.groups + g];
            for (int n = 0; n < LANES; ++n) {
                total[m][n] += scale[n] * xs * float(dot[n]);
                total[m][n] += minimum[n] * xc;
            }
        }
    }
    std::memcpy(out, total, sizeof total);
}

#endif

template <int BITS>
void tiles(int rows, const uint8_t* w, const Activations& a, int64_t row, float* out) {
    switch (rows) {
        case 16: return tile<16, BITS>(w, a, row, out);
        case 8: return tile<8, BITS>(w, a, row, out);
        case 4: return tile<4, BITS>(w, a, row, out);
        case 3: return tile<3, BITS>(w, a, row, out);
        case 2: return tile<2, BITS>(w, a, row, out);
        default: return tile<1, BITS>(w, a, row, out);
    }
}

int64_t tile_rows(int64_t left) { return left >= 16 ? 16 : left >= 8 ? 8 : left >= 4 ? 4 : left; }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define HEADRACE_WIDENS 1

constexpr int SIDE = 2;  // Blocks side by side.

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
void widen(const uint8_t* w, int64_t groups, __m512i* out) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t g = 0; g < groups; ++g, w += Layout<BITS>::bytes) {
        const __m256i* tail = reinterpret_cast<const __m256i*>(w + Layout<BITS>::codes);
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(tail)), minimum = _mm512_cvtph_ps(_mm256_loadu_si256(tail + 1));
        for (int p = 0; p < RUNS; ++p) {
            __m512i codes = _mm512_loadu_si512(w + 64 * (BITS == 4 ? p % (RUNS / 2) : p));
            if (BITS == 4) codes = _mm512_and_si512(p < RUNS / 2 ? codes : _mm512_srli_epi16(codes, 4), low);
            for (int half = 0; half < 2; ++half, out += SIDE)
                _mm512_storeu_si512(out, pair_of(codes, 16 * half, scale, minimum));
        }
    }
}

// Two blocks at once, so that an activation that was fetched is used twice: out [ROWS, 32].
template <int ROWS>
void wide_tile(const __m512i* w, int64_t pairs, const bf16* x, int64_t stride, float* out) {
    __m512 total[ROWS][SIDE];
    for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < SIDE; ++n) total[m][n] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; ++p, w += SIDE) {
        const __m512bh weights[SIDE] = {(__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_loadu_si512(w + 1)};
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
        for (int n = 0; n < SIDE; ++n) _mm512_storeu_ps(out + (m * SIDE + n) * LANES, total[m][n]);
}

int64_t wide_rows(int64_t left) { return left >= 12 ? 12 : left >= 4 ? 4 : 1; }

void wide_tiles(int64_t rows, const __m512i* w, int64_t pairs, const bf16* x, int64_t stride, float* out) {
    if (rows == 12) return wide_tile<12>(w, pairs, x, stride, out);
    if (rows == 4) return wide_tile<4>(w, pairs, x, stride, out);
    wide_tile<1>(w, pairs, x, stride, out);
}
#endif

template <class T>
void store(const float* values, const float* bias, int64_t count, T* y) {
    if (bias) {
        for (int64_t i = 0; i < count; ++i) y[i] = from_float<T>(values[i] + bias[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) y[i] = from_float<T>(values[i]);
    }
}

template <class X>
Activations quantize(const X* x, int64_t stride, int64_t rows, int64_t groups) {
    // Kept from call to call; the other threads read it only while this one waits for them.
    static thread_local std::vector<char> space;
    size_t need = size_t(rows * groups) * (PAIR + 8);
    if (space.size() < need) space.resize(need);
    float* scales = reinterpret_cast<float*>(space.data());
    float* sums = scales + rows * groups;
    int8_t* codes = reinterpret_cast<int8_t*>(sums + rows * groups);
    parallel(rows, std::max<int64_t>(1, 32768 / (groups * GROUP)), [&](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; ++m)
            quantize_row(x + m * stride, groups, codes + m * groups * PAIR, scales + m * groups, sums + m * groups);
    });
    return {codes, scales, sums, groups};
}

template <int BITS, class Y>
void product(const Activations& a, int64_t rows, const uint8_t* weights, const float* bias, int64_t outputs, Y* y) {
    int64_t blocks = (outputs + LANES - 1) / LANES;
    int64_t row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    // The blocks of outputs run fastest, so that a block of rows stays in cache while all weights pass it by.
    parallel(row_blocks * blocks, chunk_of(row_blocks * blocks, 6, 1), [&](int64_t begin, int64_t end) {
        float results[MOST_ROWS * LANES];
        for (int64_t task = begin; task < end; ++task) {
            int64_t block = task % blocks, first = task / blocks * ROW_BLOCK;
            int64_t last = std::min(first + ROW_BLOCK, rows), column = block * LANES;
            const uint8_t* w = weights + block * a.groups * Layout<BITS>::bytes;
            for (int64_t row = first, count; row < last; row += count) {
                count = tile_rows(last - row);
                tiles<BITS>(int(count), w, a, row, results);
                int64_t width = std::min<int64_t>(LANES, outputs - column);
                for (int64_t m = 0; m < count; ++m)
                    store(results + m * LANES, bias ? bias + column : nullptr, width, y + (row + m) * outputs + column);
            }
        }
    });
}

#ifdef HEADRACE_WIDENS
// The same with weights rounded to bfloat16 in passing, for so many rows that this is soon paid for.
template <int BITS, class Y>
void wide_product(const bf16* x, int64_t stride, int64_t rows, const uint8_t* weights, int64_t groups, const float* bias,
                  int64_t outputs, Y* y) {
    constexpr int64_t WIDTH = SIDE * LANES;
    int64_t blocks = (outputs + WIDTH - 1) / WIDTH, row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t pairs = groups * RUNS * 2, size = groups * Layout<BITS>::bytes;
    parallel(row_blocks * blocks, chunk_of(row_blocks * blocks, 6, 1), [&](int64_t begin, int64_t end) {
        static thread_local std::vector<char> space;
        space.resize(size_t(pairs * SIDE * 64));
        __m512i* wide = reinterpret_cast<__m512i*>(space.data());
        float results[MOST_ROWS * WIDTH];
        for (int64_t task = begin; task < end; ++task) {
            int64_t column = task % blocks * WIDTH, first = task / blocks * ROW_BLOCK;
            int64_t last = std::min(first + ROW_BLOCK, rows), width = std::min(WIDTH, outputs - column);
            // Beside the last block there may be none: what stands there from before is not used.
            for (int n = 0; n < SIDE && n * LANES < width; ++n) widen<BITS>(weights + (column / LANES + n) * size, groups, wide + n);
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
void wide_product(int bits, const bf16* x, int64_t stride, int64_t rows, const uint8_t* w, int64_t groups, const float* bias,
                  int64_t outputs, Y* y) {
    if (bits == 4) return wide_product<4>(x, stride, rows, w, groups, bias, outputs, y);
    wide_product<8>(x, stride, rows, w, groups, bias, outputs, y);
}
#endif

template <class Y>
void product(int bits, const Activations& a, int64_t rows, const uint8_t* w, const float* bias, int64_t outputs, Y* y) {
    if (bits == 4) return product<4>(a, rows, w, bias, outputs, y);
    product<8>(a, rows, w, bias, outputs, y);
}

}  // namespace

API const char* headrace_tile() { return HEADRACE_TILE; }

// Rows from which bfloat16 activations meet weights rounded to bfloat16; 0: never.
API int64_t headrace_wide_rows() {
#ifdef HEADRACE_WIDENS
    return MANY_ROWS;
#else
    return 0;
#endif
}

// x [rows, 32 * groups] of x_type, `stride` elements from row to row -> y [rows, outputs] of y_type, contiguous.
// bias: [outputs] float32, or null. bits: 4 or 8.
API void headrace_matmul(const void* x, int x_type, int64_t stride, const void* weights, const float* bias, void* y, int y_type,
                         int64_t rows, int64_t outputs, int64_t groups, int bits) {
    if (rows <= 0) return;
    const uint8_t* w = static_cast<const uint8_t*>(weights);
#ifdef HEADRACE_WIDENS
    if (x_type == BFLOAT16 && rows >= MANY_ROWS) {
        const bf16* from = static_cast<const bf16*>(x);
        if (y_type == FLOAT32)
            return wide_product(bits, from, stride, rows, w, groups, bias, outputs, static_cast<float*>(y));
        return wide_product(bits, from, stride, rows, w, groups, bias, outputs, static_cast<bf16*>(y));
    }
#endif
    Activations a = x_type == FLOAT32 ? quantize(static_cast<const float*>(x), stride, rows, groups)
                                      : quantize(static_cast<const bf16*>(x), stride, rows, groups);
    if (y_type == FLOAT32) return product(bits, a, rows, w, bias, outputs, static_cast<float*>(y));
    product(bits, a, rows, w, bias, outputs, static_cast<bf16*>(y));
}

}  // namespace headrace
