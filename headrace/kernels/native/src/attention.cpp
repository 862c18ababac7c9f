// Attention over the paged cache, for rows of one query and of many, of any geometry.
//
// The work is cut into tasks: some queries of a row, one KV head with the query heads that share it, and a range of keys.
// A task walks its keys in chunks with a running softmax (Milakov and Gimelshein, 2018), in float32 throughout. Where there
// are fewer rows than would keep all threads busy, the keys of a row with one query are split among tasks whose partial
// results are merged at the end.
//
// A query and a head make a query vector. Few of them: the lanes of the CPU's vectors are channels. Many: they are query
// vectors, so that nothing is ever summed across lanes.

#include <vector>

#include "vector.h"

namespace headrace {
namespace {

constexpr int CHUNK = 64;  // Keys at a time.
constexpr int MOST_ROWS = 64;
constexpr int FEW_ROWS = 6;
constexpr int64_t LEAST_SPLIT = 256;
constexpr int64_t MOST_SPLITS = 64;

struct Shape {
    int64_t heads, kv_heads, width, v_width;
    int64_t row_width;  // Of a token and head: its values are the last v_width channels, beside the key's or among them.
    int64_t block_size, block_stride, table_width;
    float scale, soft_cap;  // No cap: 0.
    int64_t window;         // No window: 0. Negative: it does not slide, but begins at multiples of -window.

    // The first position that the query at `position` sees.
    int64_t first_seen(int64_t position) const {
        if (window < 0) return position - position % -window;
        return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
    }
};

template <class T>
struct Problem {
    const T* q;  // [tokens, heads, width], `q_stride` from token to token
    int64_t q_stride;
    const T* rows;         // [blocks, block_size, kv_heads, row_width], `block_stride` from block to block
    const int32_t* table;  // [batch, table_width]
    const int32_t* starts;
    const int32_t* lengths;
    const float* sinks;  // [heads], or null
    T* out;              // [tokens, heads * v_width]
    Shape s;

    int64_t group() const { return s.heads / s.kv_heads; }

    const T* row(int64_t sequence, int64_t position, int64_t kv_head) const {
        int64_t block = table[sequence * s.table_width + position / s.block_size];
        int64_t place = (position % s.block_size) * s.kv_heads + kv_head;
        return rows + block * s.block_stride + place * s.row_width;
    }
};

int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

struct Task {
    int64_t sequence, first, count;  // Queries [first, first + count) of the sequence's.
    int64_t kv_head, begin, end;     // Keys [begin, end).
    int64_t partial;                 // Where its results wait to be merged; -1: they are final.
};

// Query vector r of a task is query first + r / group and head kv_head * group + r % group. Of each: the sum of
// exp(logit - max) times values, that of the weights alone, and max.
struct Running {
    float *values, *total, *max;
};

// Space of one thread. `rows` is a count of query vectors, a multiple of LANES where they are the lanes.
struct Scratch {
    std::vector<float> space;
    float *q, *keys, *values, *weights;
    Running run;

    void reserve(const Shape& s, int64_t rows) {
        int64_t width = padded(s.width), v_width = padded(s.v_width);
        int64_t sizes[] = {rows * width, CHUNK * width, CHUNK * v_width, CHUNK * rows, rows * v_width, rows, rows};
        float** places[] = {&q, &keys, &values, &weights, &run.values, &run.total, &run.max};
        size_t need = 0;
        for (int64_t size : sizes) need += size_t(padded(size));
        if (space.size() < need) space.resize(need);
        float* at = space.data();
        for (int i = 0; i < 7; at += padded(sizes[i]), ++i) *places[i] = at;
    }
};

template <class T>
void widen(const T* from, int64_t width, float* to) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(to + i, load(from + i));
    if (i == width) return;
    for (int64_t end = padded(width); i < end; ++i) to[i] = i < width ? to_float(from[i]) : 0.0f;
}

inline float cap(float x, float limit) {
    float e = exp_negative(-2.0f * std::fabs(x / limit));
    return std::copysign(limit * (1.0f - e) / (1.0f + e), x);
}

inline Vec cap(Vec x, float limit) {
    Vec e = exp_negative(-2.0f * (x > 0.0f ? x : -x) / limit);
    Vec size = limit * (1.0f - e) / (1.0f + e);
    return x > 0.0f ? size : -size;
}

template <class T>
const T* query(const Problem<T>& p, const Task& task, int64_t r) {
    int64_t token = p.starts[task.sequence] + task.first + r / p.group();
    return p.q + token * p.q_stride + (task.kv_head * p.group() + r % p.group()) * p.s.width;
}

// Position of the task's first query.
template <class T>
int64_t position(const Problem<T>& p, const Task& task) {
    return p.lengths[task.sequence] - (p.starts[task.sequence + 1] - p.starts[task.sequence]) + task.first;
}

template <class T>
int64_t locate(const Problem<T>& p, const Task& task, int64_t begin, const T** at) {
    int64_t count = std::min<int64_t>(CHUNK, task.end - begin);
    for (int64_t j = 0; j < count; ++j) at[j] = p.row(task.sequence, begin + j, task.kv_head);
    return count;
}

// ---- Few query vectors: lanes are channels. q [R, width], weights [R, CHUNK], run.values [R, v_width], padded widths.

template <int R, class T>
void dots(const float* q, const T* k, int64_t width, float* logits) {
    Vec acc[R] = {};
    int64_t c = 0, stride = padded(width);
    for (; c + LANES <= width; c += LANES) {
        Vec key = load(k + c);
        for (int r = 0; r < R; ++r) acc[r] += load(q + r * stride + c) * key;
    }
    float rest[R] = {};
    for (; c < width; ++c)
        for (int r = 0; r < R; ++r) rest[r] += q[r * stride + c] * to_float(k[c]);
    for (int r = 0; r < R; ++r) logits[r * CHUNK] = sum(acc[r]) + rest[r];
}

template <int R, int N, class T>
void add_values(const float* weights, const T* const* at, int64_t count, int64_t offset, int64_t stride, float* values) {
    Vec acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) acc[r][n] = load(values + r * stride + n * LANES);
    for (int64_t j = 0; j < count; ++j) {
        Vec v[N];
        for (int n = 0; n < N; ++n) v[n] = load(at[j] + offset + n * LANES);
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) acc[r][n] += splat(weights[r * CHUNK + j]) * v[n];
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) store(values + r * stride + n * LANES, acc[r][n]);
}

// Softens weights[0, count) of one query vector, and carries its results along.
inline void soften(float* weights, int64_t count, const Shape& s, float* values, float& total, float& max) {
    if (s.soft_cap > 0)
        for (int64_t j = 0; j < count; ++j) weights[j] = cap(weights[j], s.soft_cap);
    float largest = max;
    for (int64_t j = 0; j < count; ++j) largest = std::max(largest, weights[j]);
    std::fill(weights + count, weights + CHUNK, -INFINITY);
    Vec sums = {};
    for (int64_t j = 0; j < CHUNK; j += LANES) {
        Vec logits = load(weights + j);
        Vec weight = logits > -INFINITY ? exp_negative(logits - largest) : splat(0.0f);
        sums += weight;
        store(weights + j, weight);
    }
    if (largest > max && total > 0) {
        float factor = exp_negative(max - largest);
        total *= factor;
        for (int64_t i = 0; i < padded(s.v_width); ++i) values[i] *= factor;
    }
    max = largest;
    total += sum(sums);
}

template <int R, class T>
void walk_rows(const Problem<T>& p, const Task& task, Scratch& scratch, Running run, int64_t first) {
    int64_t stride = padded(p.s.v_width), end = p.s.v_width / LANES * LANES, from = p.s.row_width - p.s.v_width;
    float *q = scratch.q, *values = run.values + first * stride;
    for (int r = 0; r < R; ++r) {
        widen(query(p, task, first + r), p.s.width, q + r * padded(p.s.width));
        for (int64_t i = 0; i < p.s.width; ++i) q[r * padded(p.s.width) + i] *= p.s.scale;
        run.total[first + r] = 0;
        run.max[first + r] = -INFINITY;
    }
    std::fill(values, values + R * stride, 0.0f);
    const T* at[CHUNK];
    for (int64_t begin = task.begin; begin < task.end; begin += CHUNK) {
        int64_t count = locate(p, task, begin, at);
        for (int64_t j = 0; j < count; ++j) dots<R>(q, at[j], p.s.width, scratch.weights + j);
        for (int r = 0; r < R; ++r)
            soften(scratch.weights + r * CHUNK, count, p.s, values + r * stride, run.total[first + r], run.max[first + r]);
        int64_t i = 0;
        for (; i + WIDE * LANES <= end; i += WIDE * LANES)
            add_values<R, WIDE>(scratch.weights, at, count, from + i, stride, values + i);
        for (; i < end; i += LANES) add_values<R, 1>(scratch.weights, at, count, from + i, stride, values + i);
        for (; i < p.s.v_width; ++i)
            for (int r = 0; r < R; ++r)
                for (int64_t j = 0; j < count; ++j)
                    values[r * stride + i] += scratch.weights[r * CHUNK + j] * to_float(at[j][from + i]);
    }
}

// One query of a row, which sees all of the task's keys.
template <class T>
void walk_few(const Problem<T>& p, const Task& task, Scratch& scratch, Running run) {
    int64_t rows = p.group(), r = 0;
    for (; r + 3 <= rows; r += 3) walk_rows<3>(p, task, scratch, run, r);
    if (r + 2 == rows) walk_rows<2>(p, task, scratch, run, r);
    if (r + 1 == rows) walk_rows<1>(p, task, scratch, run, r);
}

// ---- Many query vectors: they are the lanes. q [width, M], weights [CHUNK, M], run.values [v_width, M], total and max [M].

// logits[4 keys, N vectors] = keys [4, width] . q [width, M]
template <int N>
void products(const float* q, int64_t rows, const float* keys, int64_t width, float* logits) {
    int64_t stride = padded(width);
    Vec acc[4][N] = {};
    for (int64_t c = 0; c < width; ++c) {
        Vec x[N];
        for (int n = 0; n < N; ++n) x[n] = load(q + c * rows + n * LANES);
        for (int j = 0; j < 4; ++j) {
            Vec key = splat(keys[j * stride + c]);
            for (int n = 0; n < N; ++n) acc[j][n] += key * x[n];
        }
    }
    for (int j = 0; j < 4; ++j)
        for (int n = 0; n < N; ++n) store(logits + j * rows + n * LANES, acc[j][n]);
}

// values[4 channels, N vectors] += chunk [count, 4 of v_width], transposed, . weights [count, M]
template <int N>
void add_products(const float* weights, int64_t rows, const float* chunk, int64_t count, int64_t stride, float* values) {
    Vec acc[4][N];
    for (int i = 0; i < 4; ++i)
        for (int n = 0; n < N; ++n) acc[i][n] = load(values + i * rows + n * LANES);
    for (int64_t j = 0; j < count; ++j) {
        Vec w[N];
        for (int n = 0; n < N; ++n) w[n] = load(weights + j * rows + n * LANES);
        for (int i = 0; i < 4; ++i) {
            Vec v = splat(chunk[j * stride + i]);
            for (int n = 0; n < N; ++n) acc[i][n] += v * w[n];
        }
    }
    for (int i = 0; i < 4; ++i)
        for (int n = 0; n < N; ++n) store(values + i * rows + n * LANES, acc[i][n]);
}

// Softens a chunk's logits [count, M] for the lanes at `lane`, whose queries stand at `here` and see no key before `low`.
inline void soften(float* weights, int64_t rows, int64_t count, int64_t begin, IntVec low, IntVec here, bool whole,
                   const Shape& s, float* values, float* total, float* max) {
    const Vec none = splat(-INFINITY);
    Vec old = load(max), largest = old;
    for (int64_t j = 0; j < count; ++j) {
        Vec logit = load(weights + j * rows);
        if (s.soft_cap > 0) logit = cap(logit, s.soft_cap);
        if (!whole) {
            IntVec key = splat(int32_t(begin + j));
            logit = (key <= here) & (key >= low) ? logit : none;
        }
        if (s.soft_cap > 0 || !whole) store(weights + j * rows, logit);
        largest = headrace::max(largest, logit);
    }
    Vec sums = {};
    for (int64_t j = 0; j < count; ++j) {
        Vec logit = load(weights + j * rows);
        Vec weight = logit > none ? exp_negative(logit - largest) : splat(0.0f);
        sums += weight;
        store(weights + j * rows, weight);
    }
    Vec factor = old > none ? exp_negative(old - largest) : splat(0.0f);
    store(total, load(total) * factor + sums);
    store(max, largest);
    IntVec grown = largest > old;
    bool any = false;
    for (int i = 0; i < LANES; ++i) any |= grown[i] != 0;
    if (any)
        for (int64_t i = 0; i < padded(s.v_width); ++i) store(values + i * rows, load(values + i * rows) * factor);
}

template <int N, class T>
void chunk_of_lanes(const Problem<T>& p, const Task& task, Scratch& scratch, Running run, int64_t rows, int64_t lane,
                    int64_t begin, int64_t count) {
    int64_t width = padded(p.s.width), v_width = padded(p.s.v_width), group = p.group(), first = position(p, task);
    float* weights = scratch.weights + lane;
    for (int64_t j = 0; j < count; j += 4)
        products<N>(scratch.q + lane, rows, scratch.keys + j * width, p.s.width, weights + j * rows);
    for (int n = 0; n < N; ++n) {
        int64_t from = lane + n * LANES, lowest = first + from / group, highest = first + (from + LANES - 1) / group;
        IntVec low, here;
        for (int i = 0; i < LANES; ++i) {
            int64_t at = first + (from + i) / group;
            low[i] = int32_t(p.s.first_seen(at));
            here[i] = int32_t(at);
        }
        bool whole = begin + count - 1 <= lowest && begin >= p.s.first_seen(highest);
        soften(weights + n * LANES, rows, count, begin, low, here, whole, p.s, run.values + from, run.total + from, run.max + from);
    }
    for (int64_t i = 0; i < v_width; i += 4)
        add_products<N>(weights, rows, scratch.values + i, count, v_width, run.values + i * rows + lane);
}

template <class T>
void walk_many(const Problem<T>& p, const Task& task, Scratch& scratch, Running run) {
    int64_t count = task.count * p.group(), rows = padded(count);
    int64_t width = padded(p.s.width), v_width = padded(p.s.v_width);
    for (int64_t r = 0; r < rows; ++r) {
        const T* q = r < count ? query(p, task, r) : nullptr;
        for (int64_t c = 0; c < p.s.width; ++c) scratch.q[c * rows + r] = q ? to_float(q[c]) * p.s.scale : 0.0f;
    }
    std::fill(run.values, run.values + v_width * rows, 0.0f);
    std::fill(run.total, run.total + rows, 0.0f);
    std::fill(run.max, run.max + rows, -INFINITY);
    const T* at[CHUNK];
    for (int64_t begin = task.begin; begin < task.end; begin += CHUNK) {
        int64_t keys = locate(p, task, begin, at);
        for (int64_t j = 0; j < keys; ++j) {
            widen(at[j], p.s.width, scratch.keys + j * width);
            widen(at[j] + p.s.row_width - p.s.v_width, p.s.v_width, scratch.values + j * v_width);
        }
        for (int64_t j = keys; j % 4; ++j) std::fill(scratch.keys + j * width, scratch.keys + (j + 1) * width, 0.0f);
        int64_t lane = 0;
        for (; lane + WIDE * LANES <= rows; lane += WIDE * LANES)
            chunk_of_lanes<WIDE>(p, task, scratch, run, rows, lane, begin, keys);
        for (; lane < rows; lane += LANES) chunk_of_lanes<1>(p, task, scratch, run, rows, lane, begin, keys);
    }
}

// ---- Tasks and results.

template <class T>
void finish(const Problem<T>& p, int64_t token, int64_t head, const float* values, int64_t stride, float total, float max) {
    float factor = 0;
    if (total > 0) {
        factor = 1.0f / total;
        if (p.sinks) {
            float sink = p.sinks[head], most = std::max(max, sink);
            factor = exp_negative(max - most) / (total * exp_negative(max - most) + exp_negative(sink - most));
        }
    }
    T* out = p.out + (token * p.s.heads + head) * p.s.v_width;
    for (int64_t i = 0; i < p.s.v_width; ++i) out[i] = from_float<T>(values[i * stride] * factor);
}

template <class T>
bool is_few(const Problem<T>& p, const Task& task) {
    return task.count == 1 && p.group() <= FEW_ROWS;
}

template <class T>
void walk(const Problem<T>& p, const Task& task, Scratch& scratch, Running run) {
    is_few(p, task) ? walk_few(p, task, scratch, run) : walk_many(p, task, scratch, run);
}

// Floats of the results of a task of one query.
template <class T>
int64_t partial_size(const Problem<T>& p) {
    return padded(p.group()) * (padded(p.s.v_width) + 2);
}

template <class T>
Running partial(const Problem<T>& p, const Task& task, float* space) {
    int64_t rows = padded(p.group()), v_width = padded(p.s.v_width);
    float* values = space + task.partial * partial_size(p);
    return {values, values + rows * v_width, values + rows * (v_width + 1)};
}

// Where channel i of query vector r is: values[r * vector + i * channel].
struct Strides {
    int64_t vector, channel;
};

template <class T>
Strides strides(const Problem<T>& p, const Task& task) {
    if (is_few(p, task)) return {padded(p.s.v_width), 1};
    return {1, padded(task.count * p.group())};
}

// Adds other keys' results, of one query vector, as if all had been walked at once.
inline void merge(const Running& from, const Running& to, int64_t r, Strides at, int64_t v_width) {
    if (from.total[r] == 0) return;
    float most = std::max(to.max[r], from.max[r]);
    float old = to.total[r] > 0 ? exp_negative(to.max[r] - most) : 0.0f, add = exp_negative(from.max[r] - most);
    for (int64_t i = 0; i < v_width; ++i) {
        int64_t place = r * at.vector + i * at.channel;
        to.values[place] = to.values[place] * old + from.values[place] * add;
    }
    to.total[r] = to.total[r] * old + from.total[r] * add;
    to.max[r] = most;
}

template <class T>
void finish_task(const Problem<T>& p, const Task& task, const Running& run) {
    Strides at = strides(p, task);
    for (int64_t r = 0; r < task.count * p.group(); ++r)
        finish(p, p.starts[task.sequence] + task.first + r / p.group(), task.kv_head * p.group() + r % p.group(),
               run.values + r * at.vector, at.channel, run.total[r], run.max[r]);
}

template <class T>
void merge_partials(const Problem<T>& p, const std::vector<Task>& tasks, float* space) {
    for (size_t i = 0; i < tasks.size();) {
        const Task& first = tasks[i++];
        if (first.partial < 0) continue;
        Running to = partial(p, first, space);
        // The parts of one row and head stand one after the other.
        for (; i < tasks.size() && tasks[i].partial >= 0 && tasks[i].sequence == first.sequence &&
               tasks[i].kv_head == first.kv_head; ++i)
            for (int64_t r = 0; r < p.group(); ++r)
                merge(partial(p, tasks[i], space), to, r, strides(p, first), p.s.v_width);
        finish_task(p, first, to);
    }
}

// Keys of a part, for rows with one query, such that every thread has some.
template <class T>
int64_t split_length(const Problem<T>& p, int64_t batch) {
    int64_t work = 0;
    for (int64_t r = 0; r < batch; ++r) work += p.starts[r + 1] - p.starts[r] == 1 ? p.lengths[r] : 0;
    return std::max(LEAST_SPLIT, work * p.s.kv_heads / (int64_t(max_threads()) * 4));
}

// Returns how many of the tasks have partial results.
template <class T>
int64_t make_tasks(const Problem<T>& p, int64_t batch, std::vector<Task>& tasks) {
    int64_t most = std::max<int64_t>(1, MOST_ROWS / p.group()), split = split_length(p, batch), partials = 0;
    tasks.clear();
    for (int64_t r = 0; r < batch; ++r) {
        int64_t queries = p.starts[r + 1] - p.starts[r], length = p.lengths[r];
        // The last queries see the most keys: they begin first, so that no thread is left with a long one at the end.
        for (int64_t last = queries; last > 0; last -= most) {
            int64_t first = std::max<int64_t>(0, last - most), lowest = length - queries + first;
            int64_t end = std::max<int64_t>(0, length - queries + last);
            // Blocks behind the window may be gone: nothing of them is read.
            int64_t begin = p.s.first_seen(lowest);
            int64_t parts = queries == 1 ? std::min(MOST_SPLITS, (end - begin + split - 1) / split) : 1;
            int64_t part = parts > 1 ? ((end - begin + parts - 1) / parts + CHUNK - 1) / CHUNK * CHUNK : end - begin;
            for (int64_t h = 0; h < p.s.kv_heads; ++h) {
                if (parts <= 1) {
                    tasks.push_back({r, first, last - first, h, begin, end, -1});
                    continue;
                }
                for (int64_t at = begin; at < end; at += part)
                    tasks.push_back({r, first, 1, h, at, std::min(at + part, end), partials++});
            }
        }
    }
    return partials;
}

template <class T>
void attention(const Problem<T>& p, int64_t batch, int64_t tokens) {
    // Kept from call to call; other threads use this thread's only while it waits for them.
    static thread_local std::vector<Task> own_tasks;
    static thread_local std::vector<float> own_space;
    size_t need = size_t(make_tasks(p, batch, own_tasks) * partial_size(p));
    if (own_space.size() < need) own_space.resize(need);
    const std::vector<Task>& tasks = own_tasks;
    float* space = own_space.data();
    int64_t keys = 0;
    for (const Task& task : tasks) keys += (task.end - task.begin) * task.count;
    // A few keys are done sooner than another thread wakes up.
    int64_t chunk = keys < 256 ? int64_t(tasks.size()) : chunk_of(int64_t(tasks.size()), 8, 1);
    parallel(int64_t(tasks.size()), std::max<int64_t>(1, chunk), [&](int64_t begin, int64_t end) {
        static thread_local Scratch scratch;
        for (int64_t i = begin; i < end; ++i) {
            const Task& task = tasks[size_t(i)];
            scratch.reserve(p.s, padded(std::max<int64_t>(task.count * p.group(), FEW_ROWS)));
            if (task.partial >= 0) {
                walk(p, task, scratch, partial(p, task, space));
            } else {
                walk(p, task, scratch, scratch.run);
                finish_task(p, task, scratch.run);
            }
        }
    });
    merge_partials(p, tasks, space);
    int64_t used = p.starts[batch], width = p.s.heads * p.s.v_width;
    if (tokens > used) std::memset(static_cast<void*>(p.out + used * width), 0, size_t((tokens - used) * width) * sizeof(T));
}

}  // namespace

// rows: `block_stride` elements from block to block. table: the batch's block numbers. window and soft_cap: 0 for none (and a window below 0: it begins at multiples of its length); sinks: null for none. Tokens behind the last row's
// get zeros, and so does a query without keys.
API void headrace_attention(const void* q, int64_t q_stride, const void* rows, const int32_t* table, const int32_t* starts,
                            const int32_t* lengths, const float* sinks, void* out, int64_t batch, int64_t tokens, int64_t heads,
                            int64_t kv_heads, int64_t width, int64_t v_width, int64_t row_width, int64_t block_size,
                            int64_t block_stride, int64_t table_width, float scale, float soft_cap, int64_t window, int type) {
    Shape s{heads, kv_heads, width, v_width, row_width, block_size, block_stride, table_width, scale, soft_cap, window};
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
