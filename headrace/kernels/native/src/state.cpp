// Layers with a state: causal convolution, gated delta rule, Mamba-2's and Mamba-1's recurrences, and the norms behind them.
//
// A channel, or a head, is computed token by token and always by the same instructions, so that results do not depend on how a
// sequence is cut into steps, on other rows, or on threads.

#include <vector>

#include "kernels.h"

namespace headrace {
namespace {

constexpr int64_t LEAST = 16384;  // Numbers below which another thread costs more than it gains.
constexpr int64_t CHANNELS = 64;  // Of a convolution, that are computed together.

struct Convolution {
    int64_t channels, taps, stride, block_stride;  // Elements from token to token of x, and from block to block of the cache.
    bool silu;
};

// to = a * b
template <class T>
void multiply(const T* a, const T* b, int64_t n, T* to) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] = from_float<T>(to_float(a[i]) * to_float(b[i]));
}

// GATED: x has three parts of `channels`. The first times the last is convolved, and the second multiplies the result.
template <bool GATED, class T>
void convolve(const T* x, const T* weight, const T* bias, T* cache, T* out, const StateRows& rows, const Convolution& c) {
    int64_t groups = (c.channels + CHANNELS - 1) / CHANNELS;
    int64_t work = std::max<int64_t>(1, rows.tokens() * CHANNELS * c.taps);
    parallel(groups, std::max<int64_t>(1, LEAST / work), [&](int64_t begin, int64_t end) {
        std::vector<float> taps(c.taps * CHANNELS);
        float total[CHANNELS];
        T product[CHANNELS];
        for (int64_t group = begin; group < end; ++group) {
            int64_t at = group * CHANNELS, n = std::min(CHANNELS, c.channels - at);
            for (int64_t i = 0; i < n; ++i)
                for (int64_t tap = 0; tap < c.taps; ++tap)
                    taps[tap * CHANNELS + i] = to_float(weight[(at + i) * c.taps + tap]);
            for (int64_t row = 0; row < rows.count; ++row) {
                for (int64_t t = rows.first(row); t < rows.end(row); ++t) {
                    T* y = out + t * c.channels + at;
                    if (rows.blocks[row] < 0) {
                        std::memset(y, 0, size_t(n) * sizeof(T));
                        continue;
                    }
                    T* ring = cache + rows.blocks[row] * c.block_stride + at;
                    int64_t position = rows.starts[row] + t - rows.first(row), kept = c.taps - 1;
                    const T* now = x + t * c.stride + at;
                    if (GATED) {
                        multiply(now, now + 2 * c.channels, n, product);
                        now = product;
                    }
                    for (int64_t i = 0; i < n; ++i) total[i] = bias ? to_float(bias[at + i]) : 0.0f;
                    for (int64_t tap = 0; tap < kept; ++tap) {
                        const T* old = ring + (position + tap) % kept * c.channels;
                        const float* w = taps.data() + tap * CHANNELS;
#pragma omp simd
                        for (int64_t i = 0; i < n; ++i) total[i] += to_float(old[i]) * w[i];
                    }
                    const float* w = taps.data() + kept * CHANNELS;
#pragma omp simd
                    for (int64_t i = 0; i < n; ++i) total[i] += to_float(now[i]) * w[i];
                    if (c.silu) {
#pragma omp simd
                        for (int64_t i = 0; i < n; ++i) total[i] = silu(total[i]);
                    }
#pragma omp simd
                    for (int64_t i = 0; i < n; ++i) y[i] = from_float<T>(total[i]);
                    if (GATED) multiply(x + t * c.stride + c.channels + at, y, n, y);
                    std::memcpy(ring + position % kept * c.channels, now, size_t(n) * sizeof(T));
                }
            }
        }
    });
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

inline float rounded(float x, const float*) { return x; }

inline float rounded(float x, const bf16*) { return to_float(from_float<bf16>(x)); }

// The state of one head, [outer, inner], as floats while a row's tokens are absorbed. One that is kept in another type is rounded
// to it after each token.
template <class S>
struct Held {
    S* kept;
    std::vector<float> wide;

    Held(S* state, int64_t size) : kept(state), wide(size) {
        for (int64_t i = 0; i < size; ++i) wide[i] = to_float(kept[i]);
    }
    float* floats() { return wide.data(); }
    void give_back() {
        for (size_t i = 0; i < wide.size(); ++i) kept[i] = from_float<S>(wide[i]);
    }
};

template <>
struct Held<float> {
    float* kept;

    Held(float* state, int64_t) : kept(state) {}
    float* floats() { return kept; }
    void give_back() {}
};

// s = fade * s + u * k, over n numbers, and the product of the result with q.
template <class S>
float absorb(float* s, const float* fade, float u, const float* k, const float* q, int64_t n, const S* kind) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) {
        float now = s[i] * fade[i] + u * k[i];
        sum += now * q[i];
        s[i] = rounded(now, kind);
    }
    return sum;
}

// x / |x| * factor
template <class T>
void unit(const T* x, float factor, float* out, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += to_float(x[i]) * to_float(x[i]);
    float inverse = factor / std::sqrt(sum + 1e-6f);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = to_float(x[i]) * inverse;
}

// Geometry of a recurrence: `heads` states of [outer, inner], of which consecutive ones share one of `shared` inputs.
struct Recurrence {
    int64_t heads, shared, outer, inner;
    int64_t stride, decay_stride, beta_stride;  // Elements from token to token.
    int64_t block_stride;                       // Elements from block to block of the states.
};

// Calls f(row, head) for each state; padding rows get zeros.
template <class F>
void each_state(const StateRows& rows, const Recurrence& r, float* out, const F& f) {
    int64_t work = std::max<int64_t>(1, rows.tokens() * r.outer * r.inner / std::max<int64_t>(1, rows.count));
    parallel(rows.count * r.heads, std::max<int64_t>(1, LEAST / work), [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
            int64_t row = task / r.heads, head = task % r.heads;
            if (rows.blocks[row] >= 0) {
                f(row, head);
                continue;
            }
            for (int64_t t = rows.first(row); t < rows.end(row); ++t)
                std::memset(out + (t * r.heads + head) * r.outer, 0, size_t(r.outer) * sizeof(float));
        }
    });
}

template <class T, class S>
void delta_rule(const T* qkv, const T* decay, const T* beta, const float* a_log, const float* dt_bias, S* state, float* out,
                const StateRows& rows, const Recurrence& r, int64_t fades, float beta_factor) {
    each_state(rows, r, out, [&](int64_t row, int64_t head) {
        std::vector<float> buffer(3 * r.inner);
        float *q = buffer.data(), *k = q + r.inner, *fade = k + r.inner;
        int64_t own = head / (r.heads / r.shared) * r.inner, keys = r.shared * r.inner;
        float rate = -std::exp(a_log[head]), scale = 1.0f / std::sqrt(float(r.inner));
        Held<S> held(state + rows.blocks[row] * r.block_stride + head * r.outer * r.inner, r.outer * r.inner);
        for (int64_t t = rows.first(row); t < rows.end(row); ++t) {
            const T* token = qkv + t * r.stride;
            unit(token + own, scale, q, r.inner);
            unit(token + keys + own, 1.0f, k, r.inner);
            for (int64_t i = 0; i < fades; ++i) {
                int64_t channel = head * fades + i;
                fade[i] = std::exp(rate * softplus(to_float(decay[t * r.decay_stride + channel]) + dt_bias[channel]));
            }
            for (int64_t i = fades; i < r.inner; ++i) fade[i] = fade[0];
            float strength = beta_factor * sigmoid(to_float(beta[t * r.beta_stride + head]));
            const T* v = token + 2 * keys + head * r.outer;
            float* y = out + (t * r.heads + head) * r.outer;
            for (int64_t i = 0; i < r.outer; ++i) {
                float *s = held.floats() + i * r.inner, sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < r.inner; ++j) sum += s[j] * fade[j] * k[j];
                y[i] = absorb(s, fade, strength * (to_float(v[i]) - sum), k, q, r.inner, held.kept);
            }
        }
        held.give_back();
    });
}

template <class T, class S>
void state_space(const T* xbc, const T* dt, const float* a_log, const float* d, const float* dt_bias, S* state, float* out,
                 const StateRows& rows, const Recurrence& r, float least, float most) {
    each_state(rows, r, out, [&](int64_t row, int64_t head) {
        std::vector<float> buffer(3 * r.inner);
        float *b = buffer.data(), *c = b + r.inner, *fade = c + r.inner;
        int64_t values = r.heads * r.outer, own = head / (r.heads / r.shared) * r.inner, inputs = r.shared * r.inner;
        float rate = -std::exp(a_log[head]);
        Held<S> held(state + rows.blocks[row] * r.block_stride + head * r.outer * r.inner, r.outer * r.inner);
        for (int64_t t = rows.first(row); t < rows.end(row); ++t) {
            const T *token = xbc + t * r.stride, *x = token + head * r.outer;
            float delta = softplus(to_float(dt[t * r.decay_stride + head]) + dt_bias[head]);
            delta = std::min(std::max(delta, least), most);
            float faded = std::exp(rate * delta);
            for (int64_t i = 0; i < r.inner; ++i) {
                b[i] = to_float(token[values + own + i]);
                c[i] = to_float(token[values + inputs + own + i]);
                fade[i] = faded;
            }
            float* y = out + (t * r.heads + head) * r.outer;
            for (int64_t i = 0; i < r.outer; ++i) {
                float value = to_float(x[i]);
                float sum = absorb(held.floats() + i * r.inner, fade, delta * value, b, c, r.inner, held.kept);
                y[i] = sum + d[head] * value;
            }
        }
        held.give_back();
    });
}

// Each channel is a head of its own, with a rate for each number of its state; `bc` has b and then c of a token.
template <class T, class S>
void selective_scan(const T* x, const T* dt, const T* bc, const float* rate, const float* d, const float* dt_bias, S* state,
                    float* out, const StateRows& rows, const Recurrence& r) {
    each_state(rows, r, out, [&](int64_t row, int64_t channel) {
        std::vector<float> buffer(3 * r.inner);
        float *b = buffer.data(), *c = b + r.inner, *fade = c + r.inner;
        const float* own = rate + channel * r.inner;
        Held<S> held(state + rows.blocks[row] * r.block_stride + channel * r.inner, r.inner);
        for (int64_t t = rows.first(row); t < rows.end(row); ++t) {
            float delta = softplus(to_float(dt[t * r.decay_stride + channel]) + dt_bias[channel]);
            const T* token = bc + t * r.beta_stride;
            for (int64_t i = 0; i < r.inner; ++i) {
                b[i] = to_float(token[i]);
                c[i] = to_float(token[r.inner + i]);
                fade[i] = std::exp(own[i] * delta);
            }
            float value = to_float(x[t * r.stride + channel]);
            float sum = absorb(held.floats(), fade, delta * value, b, c, r.inner, held.kept);
            out[t * r.heads + channel] = sum + d[channel] * value;
        }
        held.give_back();
    });
}

struct GatedNorm {
    int64_t tokens, channels, width, weights, stride;  // `weights`: channels of the weight; elements from token to token of z.
    float eps;
    bool sigmoid_gate, gate_first;
};

template <class T>
void open_gates(const T* z, float* out, int64_t n, bool by_sigmoid) {
    if (by_sigmoid) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) out[i] = sigmoid(to_float(z[i]));
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) out[i] = silu(to_float(z[i]));
    }
}

template <class T>
void gated_norm(const float* x, const T* z, const T* weight, T* out, const GatedNorm& g) {
    parallel(g.tokens, std::max<int64_t>(1, LEAST / g.channels), [&](int64_t begin, int64_t end) {
        std::vector<float> gates(g.width), gated(g.width);
        for (int64_t t = begin; t < end; ++t)
            for (int64_t at = 0; at < g.channels; at += g.width) {
                const float* from = x + t * g.channels + at;
                const T *gate = z + t * g.stride + at, *w = weight + (g.weights == g.width ? 0 : at);
                T* to = out + t * g.channels + at;
                open_gates(gate, gates.data(), g.width, g.sigmoid_gate);
                float sum = 0;
                const float* values = from;
                if (g.gate_first) {
#pragma omp simd
                    for (int64_t i = 0; i < g.width; ++i) gated[i] = from[i] * gates[i];
                    values = gated.data();
                }
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < g.width; ++i) sum += values[i] * values[i];
                float inverse = 1.0f / std::sqrt(sum / float(g.width) + g.eps);
#pragma omp simd
                for (int64_t i = 0; i < g.width; ++i) gated[i] = values[i] * inverse * to_float(w[i]);
                if (!g.gate_first) {
#pragma omp simd
                    for (int64_t i = 0; i < g.width; ++i) gated[i] *= gates[i];
                }
#pragma omp simd
                for (int64_t i = 0; i < g.width; ++i) to[i] = from_float<T>(gated[i]);
            }
    });
}

}  // namespace

// weight [channels, taps], cache [blocks, taps - 1, channels], out [tokens, channels]. bias may be null.
// gated: x [tokens, 3, channels] has the gate of the inputs, that of the results, and the inputs.
API void headrace_causal_conv(const void* x, const void* weight, const void* bias, void* cache, void* out,
                              const StateRows* rows, int64_t channels, int64_t taps, int64_t stride, int64_t block_stride,
                              int gated, int silu, int type) {
    Convolution c{channels, taps, stride, block_stride, silu != 0};
    DISPATCH(type, T, (gated ? convolve<true, T> : convolve<false, T>)(IN(T, x), IN(T, weight), IN(T, bias), OUT(T, cache),
                                                                        OUT(T, out), *rows, c))
}

// state [blocks, heads, value_dim, key_dim]; fades: numbers of a head's decay, 1 or key_dim; out [tokens, heads * value_dim].
API void headrace_delta_rule(const void* qkv, const void* decay, const void* beta, const float* a_log, const float* dt_bias,
                             void* state, float* out, const StateRows* rows, const Recurrence* shape, int64_t fades,
                             float beta_factor, int type, int state_type) {
    DISPATCH(type, T, DISPATCH(state_type, S, delta_rule(IN(T, qkv), IN(T, decay), IN(T, beta), a_log, dt_bias, OUT(S, state), out,
                                                          *rows, *shape, fades, beta_factor)))
}

// state [blocks, heads, width, size], out [tokens, heads * width].
API void headrace_state_space(const void* xbc, const void* dt, const float* a_log, const float* d, const float* dt_bias,
                              void* state, float* out, const StateRows* rows, const Recurrence* shape, float least, float most,
                              int type, int state_type) {
    DISPATCH(type, T, DISPATCH(state_type, S, state_space(IN(T, xbc), IN(T, dt), a_log, d, dt_bias, OUT(S, state), out, *rows,
                                                           *shape, least, most)))
}

// rate [heads, size], state [blocks, heads, size], out [tokens, heads].
API void headrace_selective_scan(const void* x, const void* dt, const void* bc, const float* rate, const float* d,
                                 const float* dt_bias, void* state, float* out, const StateRows* rows, const Recurrence* shape,
                                 int type, int state_type) {
    DISPATCH(type, T, DISPATCH(state_type, S, selective_scan(IN(T, x), IN(T, dt), IN(T, bc), rate, d, dt_bias, OUT(S, state), out,
                                                              *rows, *shape)))
}

// x [tokens, channels] float, weight [width] or [channels], out [tokens, channels].
API void headrace_gated_norm(const float* x, const void* z, const void* weight, void* out, int64_t tokens, int64_t channels,
                             int64_t width, int64_t weights, int64_t stride, float eps, int sigmoid_gate, int gate_first,
                             int type) {
    GatedNorm g{tokens, channels, width, weights, stride, eps, sigmoid_gate != 0, gate_first != 0};
    DISPATCH(type, T, gated_norm(x, IN(T, z), IN(T, weight), OUT(T, out), g))
}

}  // namespace headrace
