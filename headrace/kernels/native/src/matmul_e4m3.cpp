// Products with weights of e4m3 in groups of 32 with a scale each: weight = scale * code, in float32.
//
// Codes are exact in float32, and so is their decoding. A group's dot product is scaled once and added to those before it: a
// row's result does not depend on the rows beside it.
//
// Weights lie in blocks of 16 outputs. A block holds its groups one after the other; a group holds the codes, 32 inputs x 16
// outputs, then 16 scales in float32. No code is NaN.

#include <vector>

#include "kernels.h"
#include "vector.h"

namespace headrace {
namespace {

constexpr int GROUP = 32;
constexpr int BLOCK = 16;  // Outputs.
constexpr int WIDTH = BLOCK / LANES;  // Vectors of a block's outputs.
constexpr int SIDE = std::max(1, 8 / WIDTH);  // Rows whose sums are in registers.
constexpr int64_t GROUP_BYTES = GROUP * BLOCK + 4 * BLOCK;
constexpr int64_t ROW_BLOCK = 128;  // Rows whose sums stay in the first-level cache.

// 2^-8 times the number: its bits are those of half precision with four bits of exponent, which has a bias of 15 and not 7.
inline uint32_t half_bits(uint8_t code) { return uint32_t(code & 127) << 7 | uint32_t(code & 128) << 8; }

constexpr float UNIT = 256.0f;

#if defined(__F16C__)
inline void decode(const uint8_t* codes, float* out) {
    for (int i = 0; i < GROUP * BLOCK; i += 16) {
        __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
        __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(128)), 8);
        __m256i halves = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(127)), 7), sign);
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
        _mm256_storeu_ps(out + i + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
    }
}
#else
struct Table {
    float values[256];

    Table() {
        for (int code = 0; code < 256; ++code) {
            int exponent = code >> 3 & 15, fraction = code & 7;
            float size = exponent ? std::ldexp(float(8 + fraction), exponent - 10) : std::ldexp(float(fraction), -9);
            values[code] = (code & 128 ? -size : size) / UNIT;
        }
    }
};

inline void decode(const uint8_t* codes, float* out) {
    static const Table table;
    for (int i = 0; i < GROUP * BLOCK; ++i) out[i] = table.values[codes[i]];
}
#endif

// Adds a group's part to sums [ROWS, 16]. w: [32, 16].
template <int ROWS>
void add_rows(const float* w, const float* scales, const float* x, int64_t stride, float* totals) {
    Vec dot[ROWS][WIDTH] = {};
    for (int i = 0; i < GROUP; ++i) {
        Vec weights[WIDTH];
        for (int n = 0; n < WIDTH; ++n) weights[n] = load(w + i * BLOCK + n * LANES);
        for (int m = 0; m < ROWS; ++m) {
            Vec one = splat(x[m * stride + i]);
            for (int n = 0; n < WIDTH; ++n) dot[m][n] += one * weights[n];
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < WIDTH; ++n) {
            float* total = totals + m * BLOCK + n * LANES;
            store(total, load(total) + load(scales + n * LANES) * dot[m][n]);
        }
}

void block_rows(const uint8_t* w, int64_t groups, const float* x, int64_t stride, int64_t rows, float* totals) {
    std::fill(totals, totals + rows * BLOCK, 0.0f);
    for (int64_t g = 0; g < groups; ++g, w += GROUP_BYTES, x += GROUP) {
        fetch_ahead(w, GROUP_BYTES);
        float decoded[GROUP * BLOCK], scales[BLOCK];
        decode(w, decoded);
        std::memcpy(scales, w + GROUP * BLOCK, sizeof scales);
        for (float& scale : scales) scale *= UNIT;
        int64_t row = 0;
        for (; row + SIDE <= rows; row += SIDE) add_rows<SIDE>(decoded, scales, x + row * stride, stride, totals + row * BLOCK);
        for (; row < rows; ++row) add_rows<1>(decoded, scales, x + row * stride, stride, totals + row * BLOCK);
    }
}

template <class Y>
void product(const float* x, int64_t stride, int64_t rows, const uint8_t* weights, int64_t groups, const float* bias,
             int64_t outputs, Y* y) {
    int64_t blocks = (outputs + BLOCK - 1) / BLOCK, row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    parallel(row_blocks * blocks, chunk_of(row_blocks * blocks, 6, 1), [&](int64_t begin, int64_t end) {
        float results[ROW_BLOCK * BLOCK];
        for (int64_t task = begin; task < end; ++task) {
            int64_t block = task % blocks, first = task / blocks * ROW_BLOCK, column = block * BLOCK;
            int64_t count = std::min(ROW_BLOCK, rows - first), width = std::min<int64_t>(BLOCK, outputs - column);
            block_rows(weights + block * groups * GROUP_BYTES, groups, x + first * stride, stride, count, results);
            for (int64_t m = 0; m < count; ++m)
                for (int64_t n = 0; n < width; ++n)
                    y[(first + m) * outputs + column + n] =
                        from_float<Y>(results[m * BLOCK + n] + (bias ? bias[column + n] : 0.0f));
        }
    });
}

}  // namespace

void e4m3_matmul(const void* x, int x_type, int64_t stride, const void* weights, const float* bias, void* y, int y_type,
                 int64_t rows, int64_t outputs, int64_t groups) {
    const float* wide = static_cast<const float*>(x);
    if (x_type == BFLOAT16) {
        // Kept from call to call; the other threads read it only while this one waits for them.
        static thread_local std::vector<float> space;
        int64_t inputs = groups * GROUP;
        if (space.size() < size_t(rows * inputs)) space.resize(size_t(rows * inputs));
        float* to = space.data();
        parallel(rows, std::max<int64_t>(1, 32768 / inputs), [&](int64_t begin, int64_t end) {
            for (int64_t m = begin; m < end; ++m)
                for (int64_t i = 0; i < inputs; ++i) to[m * inputs + i] = to_float(static_cast<const bf16*>(x)[m * stride + i]);
        });
        wide = to;
        stride = inputs;
    }
    const uint8_t* w = static_cast<const uint8_t*>(weights);
    if (y_type == FLOAT32) return product(wide, stride, rows, w, groups, bias, outputs, static_cast<float*>(y));
    product(wide, stride, rows, w, groups, bias, outputs, static_cast<bf16*>(y));
}

}  // namespace headrace
