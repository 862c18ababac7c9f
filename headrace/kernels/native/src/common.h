// What every kernel needs: number types, conversions, and loops spread over the threads that torch uses.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#define API extern "C" __attribute__((visibility("default")))

namespace headrace {

struct bf16 {
    uint16_t bits;
};

enum DType : int { FLOAT32 = 0, BFLOAT16 = 1 };

// Fetches what lies a page after `at`. Weights are read once a step and in order, and CPUs look ahead by themselves no further
// than to the end of a page. Nothing faults: past the weights there is nothing to fetch.
inline void fetch_ahead(const uint8_t* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + 4096 + i);
}

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
    return x;
}

// To nearest, ties to even; NaN stays NaN.
template <>
inline bf16 from_float<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40;
    return bf16{uint16_t((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
}

// e^x within 2 ulp for x <= 0 and down to where it vanishes: a form that compilers turn into vector code.
inline float exp_negative(float x) {
    x = std::max(x, -87.0f);
    float scaled = x * 1.44269504088896341f;
    float shifted = scaled + 12582912.0f;  // Rounds to an integer, which the low bits of the sum then hold.
    float whole = shifted - 12582912.0f;
    float rest = x - whole * 0.693359375f;
    rest -= whole * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    int32_t exponent;
    std::memcpy(&exponent, &shifted, 4);
    exponent = (exponent - 0x4b400000 + 127) << 23;
    float power;
    std::memcpy(&power, &exponent, 4);
    return p * power;
}

// 1 / (1 + e^-g), through e^-|g| so that nothing overflows.
inline float sigmoid(float g) {
    float size = std::fabs(g);
    float e = size > 87.0f ? 0.0f : exp_negative(-size);
    return (g >= 0 ? 1.0f : e) / (1.0f + e);
}

inline float silu(float g) {
    float size = std::fabs(g);
    float e = size > 87.0f ? 0.0f : exp_negative(-size);
    return g * (g >= 0 ? 1.0f : e) / (1.0f + e);
}

// Threads: those of the OpenMP runtime that torch has loaded, so that there is one pool. Set once, by headrace_init.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using MaxThreads = int (*)();
extern Parallel gomp_parallel;
extern MaxThreads omp_max_threads;

inline int max_threads() { return omp_max_threads && gomp_parallel ? omp_max_threads() : 1; }

// The threads of one parallel region, which take pieces of work from their leader one job after another, and spin for the
// next: a fork for each of a few microseconds of work would cost as much as the work. `with_team` makes one.
class Team {
public:
    using Piece = void (*)(const void* f, int64_t begin, int64_t end);

    // By the leader: as `parallel` below. Waits for the pieces, not for the threads: one that the system holds up before
    // it took a piece delays none of the others.
    void run(Piece piece, const void* f, int64_t tasks, int64_t chunk) {
        uint32_t pieces = uint32_t((tasks + chunk - 1) / chunk);
        job.piece.store(piece, std::memory_order_relaxed);
        job.f.store(f, std::memory_order_relaxed);
        job.tasks.store(tasks, std::memory_order_relaxed);
        job.chunk.store(chunk, std::memory_order_relaxed);
        job.pieces.store(pieces, std::memory_order_relaxed);
        finished.store(0, std::memory_order_relaxed);
        state.store(((state.load(std::memory_order_relaxed) >> 32) + 1) << 32 | pieces, std::memory_order_release);
        while (take()) {
        }
        for (int spins = 0; finished.load(std::memory_order_acquire) != pieces;) rest(spins);
    }

    // By the others, until `stop`.
    void serve() {
        for (int spins = 0; !over.load(std::memory_order_relaxed);) {
            if (take()) {
                spins = 0;
            } else {
                rest(spins);
            }
        }
    }

    void stop() { over.store(true, std::memory_order_relaxed); }

private:
    // Does a piece of the job, if one is left. What is read of the job belongs to the state that is exchanged: a job's
    // fields change only while no piece is left, and no state comes twice.
    bool take() {
        uint64_t seen = state.load(std::memory_order_acquire);
        uint32_t left = uint32_t(seen);
        if (left == 0) return false;
        Piece piece = job.piece.load(std::memory_order_relaxed);
        const void* f = job.f.load(std::memory_order_relaxed);
        int64_t tasks = job.tasks.load(std::memory_order_relaxed), chunk = job.chunk.load(std::memory_order_relaxed);
        int64_t begin = int64_t(job.pieces.load(std::memory_order_relaxed) - left) * chunk;
        if (!state.compare_exchange_strong(seen, seen - 1, std::memory_order_acq_rel)) return true;  // Perhaps the next.
        piece(f, begin, std::min(begin + chunk, tasks));
        finished.fetch_add(1, std::memory_order_release);
        return true;
    }

    // Leaves the core to others, the one waited for perhaps among them, after some microseconds.
    static void rest(int& spins) {
        if (++spins % 256 == 0) {
            std::this_thread::yield();
            return;
        }
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    struct {
        std::atomic<Piece> piece{nullptr};
        std::atomic<const void*> f{nullptr};
        std::atomic<int64_t> tasks{0}, chunk{0};
        std::atomic<uint32_t> pieces{0};
    } job;
    alignas(64) std::atomic<uint64_t> state{0};  // The job's number, and how many of its pieces are left to take.
    alignas(64) std::atomic<uint32_t> finished{0};
    std::atomic<bool> over{false};
};

// The team that this thread leads.
extern thread_local Team* own_team;

// Calls f(begin, end) for pieces of [0, tasks) of at most `chunk`, in parallel if there is more than one piece.
// Which thread runs a piece is left to chance, so that a thread that the system suspends does not delay the others.
template <class F>
void parallel(int64_t tasks, int64_t chunk, const F& f) {
    int64_t pieces = (tasks + chunk - 1) / chunk;
    int threads = int(std::min<int64_t>(max_threads(), pieces));
    if (threads <= 1) {
        if (tasks > 0) f(int64_t(0), tasks);
        return;
    }
    if (own_team) {
        own_team->run([](const void* f, int64_t begin, int64_t end) { (*static_cast<const F*>(f))(begin, end); }, &f, tasks,
                      chunk);
        return;
    }
    struct Job {
        const F* f;
        int64_t tasks, chunk;
        std::atomic<int64_t> next;
    } job{&f, tasks, chunk, {0}};
    gomp_parallel(
        [](void* data) {
            Job& job = *static_cast<Job*>(data);
            for (;;) {
                int64_t begin = job.next.fetch_add(job.chunk, std::memory_order_relaxed);
                if (begin >= job.tasks) return;
                (*job.f)(begin, std::min(begin + job.chunk, job.tasks));
            }
        },
        &job, unsigned(threads), 0);
}

// Calls f() once, with a team for all that it does in parallel.
template <class F>
void with_team(const F& f) {
    if (max_threads() <= 1) return f();
    struct Region {
        const F* f;
        Team team;
        std::atomic<int> came{0};
    } region{&f};
    gomp_parallel(
        [](void* data) {
            Region& region = *static_cast<Region*>(data);
            // Whoever comes first leads: the others may still be asleep.
            if (region.came.fetch_add(1, std::memory_order_relaxed)) return region.team.serve();
            own_team = &region.team;
            (*region.f)();
            own_team = nullptr;
            region.team.stop();
        },
        &region, unsigned(max_threads()), 0);
}

// A chunk such that each thread gets about `share` pieces, none of less work than `least` tasks.
inline int64_t chunk_of(int64_t tasks, int64_t share, int64_t least) {
    return std::max<int64_t>({1, least, tasks / (int64_t(max_threads()) * share)});
}

}  // namespace headrace
