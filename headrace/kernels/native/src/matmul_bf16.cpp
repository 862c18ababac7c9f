// Products of few rows with weights in bfloat16 as models store them: sums in float32, rounded once. Such a product reads its
// weights at the speed of memory, where one that is made for many rows packs them first.

#include "kernels.h"
#include "vector.h"

namespace headrace {
namespace {

constexpr int64_t SIDE = 4;  // Outputs whose weights are read side by side, so that enough of memory is on its way.

// Sums of one row of x with so many of the weights' rows. inputs: a multiple of 32.
template <int ROWS>
void dots(const bf16* x, int64_t stride, const bf16* w, int64_t inputs, float (*out)[SIDE]) {
    // Within long rows a page ahead; of short ones those of the next outputs.
    int64_t ahead = std::min<int64_t>(4096, SIDE * inputs * int64_t(sizeof(bf16)));
    Vec total[ROWS][SIDE] = {};
    for (int64_t i = 0; i < inputs; i += 32) {
        for (int n = 0; n < SIDE; ++n) __builtin_prefetch(reinterpret_cast<const char*>(w + n * inputs + i) + ahead);
        for (int64_t part = i; part < i + 32; part += LANES) {
            Vec weights[SIDE];
            for (int n = 0; n < SIDE; ++n) weights[n] = load(w + n * inputs + part);
            for (int m = 0; m < ROWS; ++m) {
                Vec one = load(x + m * stride + part);
                for (int n = 0; n < SIDE; ++n) total[m][n] += one * weights[n];
            }
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < SIDE; ++n) out[m][n] = sum(total[m][n]);
}

template <int ROWS, class Y>
void product(const bf16* x, int64_t stride, const bf16* weights, const bf16* bias, Y* y, int64_t outputs, int64_t inputs) {
    int64_t tasks = outputs / SIDE;
    parallel(tasks, chunk_of(tasks, 6, std::max<int64_t>(1, 16384 / (SIDE * inputs))), [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
            float results[ROWS][SIDE];
            dots<ROWS>(x, stride, weights + task * SIDE * inputs, inputs, results);
            for (int m = 0; m < ROWS; ++m)
                for (int n = 0; n < SIDE; ++n) {
                    int64_t output = task * SIDE + n;
                    y[m * outputs + output] = from_float<Y>(results[m][n] + (bias ? to_float(bias[output]) : 0.0f));
                }
        }
    });
}

}  // namespace

// x [rows, inputs], `stride` elements from row to row, one row or two; weights [outputs, inputs], contiguous; bias [outputs], or
// null; y [rows, outputs] of y_type, contiguous. outputs: a multiple of 4, inputs: of 32. A row comes out the same in both cases.
API void headrace_few_rows(const bf16* x, int64_t stride, const bf16* weights, const bf16* bias, void* y, int y_type,
                           int64_t rows, int64_t outputs, int64_t inputs) {
    auto run = [&](auto* out) {
        if (rows == 1) return product<1>(x, stride, weights, bias, out, outputs, inputs);
        product<2>(x, stride, weights, bias, out, outputs, inputs);
    };
    if (y_type == FLOAT32) return run(static_cast<float*>(y));
    run(static_cast<bf16*>(y));
}

}  // namespace headrace
