// Products with packed weights: the choice of instructions, and the work that is the same for all.

#include "kernels.h"
#include "packed.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include "tile_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "tile_avx2.h"
#else
#include "tile_portable.h"
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define HEADRACE_WIDENS 1
#include "wide_bf16.h"
#endif

namespace headrace {
namespace {

template <class X>
Activations quantize(const X* x, int64_t stride, int64_t rows, int64_t groups, int bits) {
    // Kept from call to call; the other threads read it only while this one waits for them.
    static thread_local std::vector<char> space;
    size_t need = size_t(rows * groups) * (PLACE + 8);
    if (space.size() < need) space.resize(need);
    float* scales = reinterpret_cast<float*>(space.data());
    float* sums = scales + rows * groups;
    int8_t* codes = reinterpret_cast<int8_t*>(sums + rows * groups);
    Activations out{codes, scales, sums, groups, 0, 0};
    arrange(out, rows);
    parallel(rows, std::max<int64_t>(1, 32768 / (groups * GROUP)), [&](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; ++m)
            for (int64_t g = 0; g < groups; ++g) {
                Rounded rounded = round_group(x + m * stride + g * GROUP);
                int64_t place = m * out.across + g * out.along;
                write_codes(rounded, bits, rows, codes + place * PLACE);
                scales[place] = rounded.scale;
                sums[place] = rounded.scale * float(rounded.sum);
            }
    });
    return out;
}

template <int BITS, class Y>
void product(const Activations& a, int64_t rows, Weights weights, const float* bias, int64_t outputs, Y* y) {
    int64_t blocks = (outputs + BLOCK - 1) / BLOCK;
    int64_t row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    // The blocks of outputs run fastest, so that a block of rows stays in cache while all weights pass it by.
    parallel(row_blocks * blocks, chunk_of(row_blocks * blocks, 6, 1), [&](int64_t begin, int64_t end) {
        float results[ROW_BLOCK * BLOCK];
        for (int64_t task = begin; task < end; ++task) {
            int64_t block = task % blocks, first = task / blocks * ROW_BLOCK;
            int64_t last = std::min(first + ROW_BLOCK, rows), column = block * BLOCK;
            block_rows<BITS>(block_of<BITS>(weights, block, a.groups), a, rows, first, last, results);
            int64_t width = std::min<int64_t>(BLOCK, outputs - column);
            for (int64_t row = first; row < last; ++row)
                store(results + (row - first) * BLOCK, bias ? bias + column : nullptr, width, y + row * outputs + column);
        }
    });
}

template <class Y>
void product(int bits, const Activations& a, int64_t rows, Weights w, const float* bias, int64_t outputs, Y* y) {
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
// bias: [outputs] float32, or null. format: of packed weights, 4 or 8 bits, plus 256 times the Tail; or that of e4m3.
API void headrace_matmul(const void* x, int x_type, int64_t stride, const void* weights, const float* bias, void* y, int y_type,
                         int64_t rows, int64_t outputs, int64_t groups, int format) {
    if (rows <= 0) return;
    if (format == E4M3) return e4m3_matmul(x, x_type, stride, weights, bias, y, y_type, rows, outputs, groups);
    Weights w{static_cast<const uint8_t*>(weights), Tail(format >> 8)};
    int bits = format & 255;
#ifdef HEADRACE_WIDENS
    if (x_type == BFLOAT16 && rows >= MANY_ROWS) {
        const bf16* from = static_cast<const bf16*>(x);
        if (y_type == FLOAT32)
            return wide_product(bits, from, stride, rows, w, groups, bias, outputs, static_cast<float*>(y));
        return wide_product(bits, from, stride, rows, w, groups, bias, outputs, static_cast<bf16*>(y));
    }
#endif
    Activations a = x_type == FLOAT32 ? quantize(static_cast<const float*>(x), stride, rows, groups, bits)
                                      : quantize(static_cast<const bf16*>(x), stride, rows, groups, bits);
    if (y_type == FLOAT32) return product(bits, a, rows, w, bias, outputs, static_cast<float*>(y));
    product(bits, a, rows, w, bias, outputs, static_cast<bf16*>(y));
}

}  // namespace headrace
