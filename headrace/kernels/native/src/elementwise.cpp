// Norms, gated activation, rotary embedding with the write to the KV cache; and what the library is set up with.

#include "kernels.h"

namespace headrace {

Parallel gomp_parallel = nullptr;
MaxThreads omp_max_threads = nullptr;
thread_local Team* own_team = nullptr;

namespace {

constexpr int64_t LEAST = 16384;  // Elements below which another thread costs more than it gains.

int64_t rows_of(int64_t width) { return std::max<int64_t>(1, LEAST / std::max<int64_t>(1, width)); }

template <class T>
void norm_row(const T* x, const T* weight, float eps, int64_t n, T* out) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += to_float(x[i]) * to_float(x[i]);
    float inverse = 1.0f / std::sqrt(sum / float(n) + eps);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        float normed = to_float(from_float<T>(to_float(x[i]) * inverse));
        out[i] = from_float<T>(normed * to_float(weight[i]));
    }
}

template <class T>
void rms_norm(const T* x, const T* weight, float eps, T* out, int64_t rows, int64_t n) {
    parallel(rows, rows_of(n), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) norm_row(x + r * n, weight, eps, n, out + r * n);
    });
}

template <class T>
void add_rms_norm(const T* x, const T* residual, const T* weight, float eps, T* out, T* total, int64_t rows, int64_t n) {
    parallel(rows, rows_of(n), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const T *a = x + r * n, *b = residual + r * n;
            T* sum = total + r * n;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) sum[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
            norm_row(sum, weight, eps, n, out + r * n);
        }
    });
}

template <class T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t n) {
    parallel(rows, rows_of(2 * n), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const T *gate = gate_up + r * 2 * n, *up = gate + n;
            T* y = out + r * n;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                float activated = to_float(from_float<T>(silu(to_float(gate[i]))));
                y[i] = from_float<T>(activated * to_float(up[i]));
            }
        }
    });
}

template <class T>
void rotate_head(const T* x, const float* cos, const float* sin, int64_t half, int64_t width, T* out) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        float a = to_float(x[i]), b = to_float(x[half + i]);
        out[i] = from_float<T>(a * cos[i] - b * sin[i]);
        out[half + i] = from_float<T>(b * cos[i] + a * sin[i]);
    }
    if (out != x)
        for (int64_t i = 2 * half; i < width; ++i) out[i] = x[i];
}

struct Heads {
    int64_t tokens, heads, kv_heads, width, v_width, rotary;
    int64_t block_size, block_stride;  // Of the cache.
};

template <class T>
void rotate(const T* x, int64_t stride, const float* cos_sin, T* out, int64_t tokens, int64_t heads, int64_t width,
            int64_t rotary) {
    parallel(tokens, rows_of(heads * width), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
            for (int64_t h = 0; h < heads; ++h)
                rotate_head(x + t * stride + h * width, cos_sin + t * rotary, cos_sin + t * rotary + rotary / 2, rotary / 2,
                            width, out + (t * heads + h) * width);
    });
}

template <class T>
void write_kv(const T* k, int64_t k_stride, const T* v, int64_t v_stride, const float* cos_sin, const int64_t* slots, T* rows,
              const Heads& s) {
    int64_t row = s.width + s.v_width;
    parallel(s.tokens, rows_of(s.kv_heads * row), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            if (slots[t] < 0) continue;
            const float* cos = cos_sin + t * s.rotary;
            T* first = rows + slots[t] / s.block_size * s.block_stride + slots[t] % s.block_size * s.kv_heads * row;
            for (int64_t h = 0; h < s.kv_heads; ++h) {
                T* to = first + h * row;
                const T* from = k + t * k_stride + h * s.width;
                rotate_head(from, cos, cos + s.rotary / 2, s.rotary / 2, s.width, to);
                std::memcpy(to + s.width, v + t * v_stride + h * s.v_width, size_t(s.v_width) * sizeof(T));
            }
        }
    });
}

}  // namespace

API void headrace_init(void* parallel, void* threads) {
    gomp_parallel = reinterpret_cast<Parallel>(parallel);
    omp_max_threads = reinterpret_cast<MaxThreads>(threads);
}

API void headrace_rms_norm(const void* x, const void* weight, float eps, void* out, int64_t rows, int64_t n, int type) {
    DISPATCH(type, T, rms_norm(IN(T, x), IN(T, weight), eps, OUT(T, out), rows, n))
}

void norm_heads(void* x, int64_t stride, const void* weight, float eps, int64_t tokens, int64_t heads, int64_t width, int type) {
    DISPATCH(type, T, parallel(tokens, rows_of(heads * width), [&](int64_t begin, int64_t end) {
                 for (int64_t t = begin; t < end; ++t)
                     for (int64_t h = 0; h < heads; ++h) {
                         T* head = OUT(T, x) + t * stride + h * width;
                         norm_row(head, IN(T, weight), eps, width, head);
                     }
             }))
}

API void headrace_add_rms_norm(const void* x, const void* residual, const void* weight, float eps, void* out, void* total,
                               int64_t rows, int64_t n, int type) {
    DISPATCH(type, T, add_rms_norm(IN(T, x), IN(T, residual), IN(T, weight), eps, OUT(T, out), OUT(T, total), rows, n))
}

API void headrace_silu_mul(const void* gate_up, void* out, int64_t rows, int64_t n, int type) {
    DISPATCH(type, T, silu_mul(IN(T, gate_up), OUT(T, out), rows, n))
}

// x [tokens, heads, width], `stride` elements from token to token -> out, contiguous.
API void headrace_rotate(const void* x, int64_t stride, const float* cos_sin, void* out, int64_t tokens, int64_t heads,
                         int64_t width, int64_t rotary, int type) {
    DISPATCH(type, T, rotate(IN(T, x), stride, cos_sin, OUT(T, out), tokens, heads, width, rotary))
}

// Rotates q to `out`, contiguous, and k to its slot among the cache's rows [blocks, block_size, kv_heads, width + v_width],
// `block_stride` elements from block to block, where v goes too; a negative slot writes nothing.
API void headrace_rotate_and_write(const void* q, int64_t q_stride, const void* k, int64_t k_stride, const void* v,
                                   int64_t v_stride, const float* cos_sin, const int64_t* slots, void* rows, void* out,
                                   int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width, int64_t v_width,
                                   int64_t rotary, int64_t block_size, int64_t block_stride, int type) {
    Heads shape{tokens, heads, kv_heads, width, v_width, rotary, block_size, block_stride};
    DISPATCH(type, T, rotate(IN(T, q), q_stride, cos_sin, OUT(T, out), tokens, heads, width, rotary);
             write_kv(IN(T, k), k_stride, IN(T, v), v_stride, cos_sin, slots, OUT(T, rows), shape))
}

}  // namespace headrace
