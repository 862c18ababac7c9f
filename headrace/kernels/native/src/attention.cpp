// Attention over the paged cache, for rows of one query and of many, of any geometry.
//
// The work is cut into tasks: some queries of a row, one KV head with the query heads that share it, and a range of keys.
// A task walks its keys in chunks with a running softmax (Milakov and Gimelshein, 2018), in float32 throughout. Where there
// are fewer rows than would keep all threads busy, the keys of a row with one query are split among tasks whose partial
// results are merged at the end.

#include <vector>

#include "common.h"

namespace headrace {
namespace {

constexpr int LANES = 16;
constexpr int CHUNK = 64;      // Keys at a time.
constexpr int MOST_ROWS = 96;  // Query vectors of a task: its queries times the heads that share the KV head.
constexpr int64_t LEAST_SPLIT = 256;
constexpr int64_t MOST_SPLITS = 64;
constexpr int FEW_ROWS = 8;  // Up to so many query vectors, a dot product each is cheaper than transposing the keys.

// Compilers make of it whatever the CPU has.
typedef float Vec __attribute__((vector_size(4 * LANES)));

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec splat(float x) { return x - Vec{}; }

inline float sum(Vec v) {
    typedef float Half __attribute__((vector_size(2 * LANES)));
    Half half[2];
    std::memcpy(half, &v, sizeof v);
    half[0] += half[1];
    typedef float Quarter __attribute__((vector_size(LANES)));
    Quarter quarter[2];
    std::memcpy(quarter, half, sizeof half[0]);
    quarter[0] += quarter[1];
    return (quarter[0][0] + quarter[0][2]) + (quarter[0][1] + quarter[0][3]);
}

struct Shape {
    int64_t heads, kv_heads, width, v_width, block_size, table_width;
    float scale, soft_cap;  // No cap: 0.
    int64_t window;         // No window: 0.
};

template <class T>
struct Problem {
    const T* q;  // [tokens, heads, width], `q_stride` from token to token
    int64_t q_stride;
    const T* rows;         // [blocks, block_size, kv_heads, width + v_width]
    const int32_t* table;  // [batch, table_width]
    const int32_t* starts;
    const int32_t* lengths;
    const float* sinks;  // [heads], or null
    T* out;              // [tokens, heads * v_width]
    Shape s;

    int64_t group() const { return s.heads / s.kv_heads; }
    int64_t padded() const { return (s.v_width + LANES - 1) / LANES * LANES; }

    const T* row(int64_t sequence, int64_t position, int64_t kv_head) const {
        int64_t block = table[sequence * s.table_width + position / s.block_size];
        int64_t place = block * s.block_size + position % s.block_size;
        return rows + (place * s.kv_heads + kv_head) * (s.width + s.v_width);
    }
};

struct Task {
    int64_t sequence, first, count;  // Queries [first, first + count) of the sequence's.
    int64_t kv_head, begin, end;     // Keys [begin, end).
    int64_t partial;                 // Where its results wait to be merged; -1: they are final.
};

// Running results of R query vectors: sums of exp(logit - max) times values [R, padded], and of the weights alone.
struct Running {
    float *values, *max, *total;
};

struct Scratch {
    std::vector<float> space;
    float *q, *keys, *values, *logits, *max, *total, *results;

    template <class T>
    void reserve(const Problem<T>& p, int64_t rows) {
        int64_t sizes[] = {rows * p.s.width, p.s.width * CHUNK, CHUNK * p.padded(), rows * CHUNK, rows, rows, rows * p.padded()};
        size_t need = 0;
        for (int64_t size : sizes) need += size_t(size + LANES);
        if (space.size() < need) space.resize(need);
        float* at = space.data();
        float** places[] = {&q, &keys, &values, &logits, &max, &total, &results};
        for (int i = 0; i < 7; at += sizes[i] + LANES, ++i) *places[i] = at;
    }
};

// logits[R, CHUNK] = q[R, width] . keys, whose width x CHUNK floats lie transposed.
template <int R>
void products(const float* q, const float* keys, int64_t width, float* logits) {
    constexpr int N = CHUNK / LANES;
    Vec acc[R][N] = {};
    for (int64_t c = 0; c < width; ++c) {
        Vec k[N];
        for (int n = 0; n < N; ++n) k[n] = load(keys + c * CHUNK + n * LANES);
        for (int r = 0; r < R; ++r) {
            Vec x = splat(q[r * width + c]);
            for (int n = 0; n < N; ++n) acc[r][n] += x * k[n];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) store(logits + r * CHUNK + n * LANES, acc[r][n]);
}

// values[R, padded] += weights[R, CHUNK] . chunk[count, padded]
template <int R, int N>
void accumulate(const float* weights, const float* chunk, int64_t count, int64_t padded, float* values) {
    Vec acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) acc[r][n] = load(values + r * padded + n * LANES);
    for (int64_t j = 0; j < count; ++j) {
        Vec v[N];
        for (int n = 0; n < N; ++n) v[n] = load(chunk + j * padded + n * LANES);
        for (int r = 0; r < R; ++r) {
            Vec w = splat(weights[r * CHUNK + j]);
            for (int n = 0; n < N; ++n) acc[r][n] += w * v[n];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) store(values + r * padded + n * LANES, acc[r][n]);
}

template <int R>
void accumulate_wide(const float* weights, const float* chunk, int64_t count, int64_t padded, float* values) {
    int64_t at = 0;
    for (; at + 4 * LANES <= padded; at += 4 * LANES) accumulate<R, 4>(weights, chunk + at, count, padded, values + at);
    for (; at < padded; at += LANES) accumulate<R, 1>(weights, chunk + at, count, padded, values + at);
}

template <class T>
float dot(const float* q, const T* k, int64_t width) {
    Vec acc = {};
    int64_t c = 0;
    for (; c + LANES <= width; c += LANES) {
        float wide[LANES];
        for (int i = 0; i < LANES; ++i) wide[i] = to_float(k[c + i]);
        acc += load(q + c) * load(wide);
    }
    float rest = 0;
    for (; c < width; ++c) rest += q[c] * to_float(k[c]);
    return sum(acc) + rest;
}

inline float capped(float x, float cap) {
    float e = exp_negative(-2.0f * std::fabs(x / cap));
    return std::copysign(cap * (1.0f - e) / (1.0f + e), x);
}

// Turns the logits of keys [lo, hi) of a chunk into weights (others get 0) and carries the running results along.
inline void soften(float* logits, int64_t lo, int64_t hi, const Shape& s, int64_t padded, float* values, float& max, float& total) {
    if (lo >= hi) {
        std::fill(logits, logits + CHUNK, 0.0f);
        return;
    }
    std::fill(logits, logits + lo, 0.0f);
    std::fill(logits + hi, logits + CHUNK, 0.0f);
    if (s.soft_cap > 0)
        for (int64_t j = lo; j < hi; ++j) logits[j] = capped(logits[j], s.soft_cap);
    float largest = max;
#pragma omp simd reduction(max : largest)
    for (int64_t j = lo; j < hi; ++j) largest = std::max(largest, logits[j]);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = lo; j < hi; ++j) {
        logits[j] = exp_negative(logits[j] - largest);
        sum += logits[j];
    }
    if (largest > max && total > 0) {
        float factor = exp_negative(max - largest);
        total *= factor;
#pragma omp simd
        for (int64_t i = 0; i < padded; ++i) values[i] *= factor;
    }
    max = largest;
    total += sum;
}

template <class T>
void fetch_values(const Problem<T>& p, const T* const* at, int64_t count, float* values) {
    int64_t padded = p.padded();
    for (int64_t j = 0; j < count; ++j) {
        const T* v = at[j] + p.s.width;
        float* to = values + j * padded;
#pragma omp simd
        for (int64_t i = 0; i < p.s.v_width; ++i) to[i] = to_float(v[i]);
        for (int64_t i = p.s.v_width; i < padded; ++i) to[i] = 0;
    }
}

template <class T>
void fetch_keys(const Problem<T>& p, const T* const* at, int64_t count, float* keys) {
    for (int64_t j = 0; j < count; ++j)
        for (int64_t c = 0; c < p.s.width; ++c) keys[c * CHUNK + j] = to_float(at[j][c]);
    for (int64_t j = count; j < CHUNK; ++j)
        for (int64_t c = 0; c < p.s.width; ++c) keys[c * CHUNK + j] = 0;
}

template <class T>
void compute_logits(const Problem<T>& p, const T* const* at, int64_t count, int64_t rows, Scratch& scratch) {
    if (rows <= FEW_ROWS) {
        for (int64_t j = 0; j < count; ++j)
            for (int64_t r = 0; r < rows; ++r) scratch.logits[r * CHUNK + j] = dot(scratch.q + r * p.s.width, at[j], p.s.width);
        return;
    }
    fetch_keys(p, at, count, scratch.keys);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        products<4>(scratch.q + r * p.s.width, scratch.keys, p.s.width, scratch.logits + r * CHUNK);
    for (; r < rows; ++r) products<1>(scratch.q + r * p.s.width, scratch.keys, p.s.width, scratch.logits + r * CHUNK);
}

void compute_values(const float* weights, const float* chunk, int64_t count, int64_t padded, int64_t rows, float* values) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) accumulate_wide<4>(weights + r * CHUNK, chunk, count, padded, values + r * padded);
    for (; r + 3 <= rows; r += 3) accumulate_wide<3>(weights + r * CHUNK, chunk, count, padded, values + r * padded);
    for (; r < rows; ++r) accumulate_wide<1>(weights + r * CHUNK, chunk, count, padded, values + r * padded);
}

template <class T>
void fetch_queries(const Problem<T>& p, const Task& task, float* q) {
    int64_t group = p.group(), start = p.starts[task.sequence] + task.first;
    for (int64_t i = 0; i < task.count; ++i)
        for (int64_t g = 0; g < group; ++g) {
            const T* from = p.q + (start + i) * p.q_stride + (task.kv_head * group + g) * p.s.width;
            for (int64_t c = 0; c < p.s.width; ++c) *q++ = to_float(from[c]) * p.s.scale;
        }
}

// Row r of the task is query first + r / group, head kv_head * group + r % group.
template <class T>
void walk(const Problem<T>& p, const Task& task, Scratch& scratch, Running run) {
    int64_t group = p.group(), rows = task.count * group, padded = p.padded();
    int64_t queries = p.starts[task.sequence + 1] - p.starts[task.sequence];
    int64_t position = p.lengths[task.sequence] - queries + task.first;  // Of the task's first query.
    fetch_queries(p, task, scratch.q);
    std::fill(run.values, run.values + rows * padded, 0.0f);
    std::fill(run.max, run.max + rows, -INFINITY);
    std::fill(run.total, run.total + rows, 0.0f);
    const T* at[CHUNK];
    for (int64_t begin = task.begin; begin < task.end; begin += CHUNK) {
        int64_t count = std::min<int64_t>(CHUNK, task.end - begin);
        for (int64_t j = 0; j < count; ++j) at[j] = p.row(task.sequence, begin + j, task.kv_head);
        compute_logits(p, at, count, rows, scratch);
        for (int64_t r = 0; r < rows; ++r) {
            int64_t here = position + r / group;
            int64_t lo = p.s.window > 0 ? std::max<int64_t>(0, here - p.s.window + 1 - begin) : 0;
            int64_t hi = std::min(count, here + 1 - begin);
            soften(scratch.logits + r * CHUNK, std::min<int64_t>(lo, CHUNK), std::max<int64_t>(hi, 0), p.s, padded,
                   run.values + r * padded, run.max[r], run.total[r]);
        }
        fetch_values(p, at, count, scratch.values);
        compute_values(scratch.logits, scratch.values, count, padded, rows, run.values);
    }
}

template <class T>
void finish(const Problem<T>& p, int64_t token, int64_t head, const float* values, float max, float total) {
    float factor = 0;
    if (total > 0) {
        factor = 1.0f / total;
        if (p.sinks) {
            float sink = p.sinks[head], most = std::max(max, sink);
            factor = exp_negative(max - most) / (total * exp_negative(max - most) + exp_negative(sink - most));
        }
    }
    T* out = p.out + (token * p.s.heads + head) * p.s.v_width;
#pragma omp simd
    for (int64_t i = 0; i < p.s.v_width; ++i) out[i] = from_float<T>(values[i] * factor);
}

// The results of the keys' parts, of one query vector each, as if they had been walked at once.
inline void merge(const float* from, int64_t padded, float from_max, float from_total, float* values, float& max, float& total) {
    if (from_total == 0) return;
    float most = std::max(max, from_max);
    float old = total > 0 ? exp_negative(max - most) : 0.0f, add = exp_negative(from_max - most);
    for (int64_t i = 0; i < padded; ++i) values[i] = values[i] * old + from[i] * add;
    total = total * old + from_total * add;
    max = most;
}

// A split of the keys of rows with one query, such that every thread has some.
int64_t split_length(const int32_t* starts, const int32_t* lengths, int64_t batch, int64_t kv_heads) {
    int64_t work = 0;
    for (int64_t r = 0; r < batch; ++r) work += starts[r + 1] - starts[r] == 1 ? lengths[r] : 0;
    int64_t share = work * kv_heads / (int64_t(max_threads()) * 4) / CHUNK * CHUNK;
    return std::max(LEAST_SPLIT, share);
}

template <class T>
void make_tasks(const Problem<T>& p, int64_t batch, std::vector<Task>& tasks, int64_t& partials) {
    int64_t most = std::max<int64_t>(1, MOST_ROWS / p.group());
    int64_t split = split_length(p.starts, p.lengths, batch, p.s.kv_heads);
    for (int64_t r = 0; r < batch; ++r) {
        int64_t queries = p.starts[r + 1] - p.starts[r], length = p.lengths[r];
        // The last queries see the most keys: they begin first, so that no thread is left with a long one at the end.
        for (int64_t last = queries; last > 0; last -= most) {
            int64_t first = std::max<int64_t>(0, last - most), count = last - first;
            int64_t lowest = length - queries + first, end = std::max<int64_t>(0, length - queries + last);
            int64_t begin = p.s.window > 0 ? std::max<int64_t>(0, lowest - p.s.window + 1) : 0;
            int64_t parts = queries == 1 ? std::min(MOST_SPLITS, (end - begin + split - 1) / split) : 1;
            int64_t part = parts > 1 ? ((end - begin + parts - 1) / parts + CHUNK - 1) / CHUNK * CHUNK : end - begin;
            for (int64_t h = 0; h < p.s.kv_heads; ++h) {
                if (parts <= 1) {
                    tasks.push_back({r, first, count, h, begin, end, -1});
                    continue;
                }
                for (int64_t at = begin; at < end; at += part)
                    tasks.push_back({r, first, count, h, at, std::min(at + part, end), partials++});
            }
        }
    }
}

template <class T>
void merge_partials(const Problem<T>& p, const std::vector<Task>& tasks, std::vector<float>& space) {
    int64_t group = p.group(), padded = p.padded(), size = group * (padded + 2);
    for (size_t i = 0; i < tasks.size();) {
        const Task& first = tasks[i];
        if (first.partial < 0) {
            ++i;
            continue;
        }
        float* values = space.data() + first.partial * size;
        float *max = values + group * padded, *total = max + group;
        for (++i; i < tasks.size() && tasks[i].partial >= 0 && tasks[i].sequence == first.sequence &&
                  tasks[i].kv_head == first.kv_head; ++i) {
            const float* from = space.data() + tasks[i].partial * size;
            for (int64_t g = 0; g < group; ++g)
                merge(from + g * padded, padded, from[group * padded + g], from[group * (padded + 1) + g], values + g * padded,
                      max[g], total[g]);
        }
        for (int64_t g = 0; g < group; ++g)
            finish(p, p.starts[first.sequence], first.kv_head * group + g, values + g * padded, max[g], total[g]);
    }
}

template <class T>
void attention(const Problem<T>& p, int64_t batch, int64_t tokens) {
    static thread_local std::vector<Task> tasks;
    static thread_local std::vector<float> space;
    tasks.clear();
    int64_t partials = 0, group = p.group(), padded = p.padded(), size = group * (padded + 2);
    make_tasks(p, batch, tasks, partials);
    if (space.size() < size_t(partials * size)) space.resize(size_t(partials * size));
    const std::vector<Task>& work = tasks;
    float* shared = space.data();
    int64_t keys = 0;
    for (const Task& task : work) keys += (task.end - task.begin) * task.count;
    // A few keys are done sooner than another thread wakes up.
    int64_t chunk = keys < 256 ? int64_t(work.size()) : chunk_of(int64_t(work.size()), 8, 1);
    parallel(int64_t(work.size()), std::max<int64_t>(1, chunk), [&](int64_t begin, int64_t end) {
        static thread_local Scratch scratch;
        for (int64_t i = begin; i < end; ++i) {
            const Task& task = work[size_t(i)];
            int64_t rows = task.count * group;
            scratch.reserve(p, rows);
            if (task.partial >= 0) {
                float* values = shared + task.partial * size;
                walk(p, task, scratch, {values, values + group * padded, values + group * (padded + 1)});
                continue;
            }
            walk(p, task, scratch, {scratch.results, scratch.max, scratch.total});
            for (int64_t r = 0; r < rows; ++r)
                finish(p, p.starts[task.sequence] + task.first + r / group, task.kv_head * group + r % group,
                       scratch.results + r * padded, scratch.max[r], scratch.total[r]);
        }
    });
    merge_partials(p, work, space);
    int64_t used = p.starts[batch], width = p.s.heads * p.s.v_width;
    if (tokens > used) std::memset(static_cast<void*>(p.out + used * width), 0, size_t((tokens - used) * width) * sizeof(T));
}

}  // namespace

// table: the batch's block numbers. window and soft_cap: 0 for none; sinks: null for none. Tokens behind the last row's
// get zeros, and so does a query without keys.
API void headrace_attention(const void* q, int64_t q_stride, const void* rows, const int32_t* table, const int32_t* starts,
                            const int32_t* lengths, const float* sinks, void* out, int64_t batch, int64_t tokens, int64_t heads,
                            int64_t kv_heads, int64_t width, int64_t v_width, int64_t block_size, int64_t table_width,
                            float scale, float soft_cap, int64_t window, int type) {
    Shape s{heads, kv_heads, width, v_width, block_size, table_width, scale, soft_cap, window};
    if (type == FLOAT32) {
        attention(Problem<float>{static_cast<const float*>(q), q_stride, static_cast<const float*>(rows), table, starts, lengths,
                                 sinks, static_cast<float*>(out), s},
                  batch, tokens);
    } else {
        attention(Problem<bf16>{static_cast<const bf16*>(q), q_stride, static_cast<const bf16*>(rows), table, starts, lengths,
                                sinks, static_cast<bf16*>(out), s},
                  batch, tokens);
    }
}

}  // namespace headrace
