// Kernels of the library that other kernels call. Their definitions describe the arguments.
#pragma once

#include "common.h"

namespace headrace {

// Rows of a step as state layers see them, as Python describes them too.
struct StateRows {
    const int32_t *query_start, *blocks, *starts;  // [count + 1], [count], [count]
    int64_t count;

    int64_t first(int64_t row) const { return query_start[row]; }
    int64_t end(int64_t row) const { return query_start[row + 1]; }
    int64_t tokens() const { return query_start[count]; }
};

}  // namespace headrace

// Runs `call`, in which T is the type. Nothing is checked: Python has checked dtypes, shapes and strides.
#define DISPATCH(type, T, call)          \
    if (type == FLOAT32) {               \
        using T = float;                 \
        call;                            \
    } else {                             \
        using T = bf16;                  \
        call;                            \
    }
#define IN(T, p) static_cast<const T*>(p)
#define OUT(T, p) static_cast<T*>(p)

API void headrace_rms_norm(const void* x, const void* weight, float eps, void* out, int64_t rows, int64_t n, int type);
API void headrace_add_rms_norm(const void* x, const void* residual, const void* weight, float eps, void* out, void* total,
                               int64_t rows, int64_t n, int type);
API void headrace_silu_mul(const void* gate_up, void* out, int64_t rows, int64_t n, int type);
API void headrace_rotate_and_write(const void* q, int64_t q_stride, const void* k, int64_t k_stride, const void* v,
                                   int64_t v_stride, const float* cos_sin, const int64_t* slots, void* rows, void* out,
                                   int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width, int64_t v_width,
                                   int64_t rotary, int64_t block_size, int64_t block_stride, int type);
API void headrace_matmul(const void* x, int x_type, int64_t stride, const void* weights, const float* bias, void* y, int y_type,
                         int64_t rows, int64_t outputs, int64_t groups, int format);
API void headrace_attention(const void* q, int64_t q_stride, const void* rows, const int32_t* table, const int32_t* starts,
                            const int32_t* lengths, const float* sinks, void* out, int64_t batch, int64_t tokens, int64_t heads,
                            int64_t kv_heads, int64_t width, int64_t v_width, int64_t row_width, int64_t block_size,
                            int64_t block_stride, int64_t table_width, float scale, float soft_cap, int64_t window, int type);
API void headrace_causal_conv(const void* x, const void* weight, const void* bias, void* cache, void* out,
                              const headrace::StateRows* rows, int64_t channels, int64_t taps, int64_t stride,
                              int64_t block_stride, int gated, int silu, int type);

namespace headrace {

constexpr int E4M3 = 3 * 256 + 8;  // The format, for headrace_matmul.

// As headrace_matmul, for weights of that format.
void e4m3_matmul(const void* x, int x_type, int64_t stride, const void* weights, const float* bias, void* y, int y_type,
                 int64_t rows, int64_t outputs, int64_t groups);

// RMS norm of each of the `heads` that lie side by side in a token's row, in place.
void norm_heads(void* x, int64_t stride, const void* weight, float eps, int64_t tokens, int64_t heads, int64_t width, int type);

}  // namespace headrace
