// Products of 4-bit weights in groups of 128 (or multiples) with up to ROWS rows in 16 bits, for Hopper.
//
// Weights are the left operand of wgmma, from registers: a thread's word of codes, as headrace packs them, is its part of two
// instructions. x goes to shared memory in the order of instructions, since which channels an instruction takes is free.
//
// The parts of a tile's inputs are a cluster of programs, which add up their sums, in order, through their shared memory.
//
// Macros:
//   ROWS     8, 16, 24, 32, 48 or 64: rows of x at most
//   TEAMS    warpgroups of a program, of 64 outputs each
//   PARTS    programs of a cluster
//   DEPTH    steps of 128 inputs whose codes are in flight or in shared memory
//   BUFFERS  steps of x in shared memory, at least 2
//   TOGETHER programs of a multiprocessor, for the compiler
//   MIDDLES  1: middle codes have values (zero points)
//   GATED    1: y is silu(gate) * up of the halves of the outputs, without a bias
//   HALVES   1: half of a step's products are complete before the codes of the other half become floats
//   HALF     1: x, bias and y are float16 in place of bfloat16
//   HALF_SCALES 1: scales are float16


typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct __align__(16) quad { u32 a, b, c, d; };
struct __align__(16) floats { float a, b, c, d; };

__device__ __forceinline__ u32 shared_address(const void *p) {
    u32 r;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(r) : "l"(p));
    return r;
}
__device__ __forceinline__ void copy16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ quad load_shared(u32 at) {
    quad r;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(r.a), "=r"(r.b), "=r"(r.c), "=r"(r.d) : "r"(at) : "memory");
    return r;
}
__device__ __forceinline__ void store_shared(u32 at, u32 value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u32 load_shared16(u32 at) {
    u16 r;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(at) : "memory");
    return r;
}
__device__ __forceinline__ float load_shared_float(u32 at) {
    float r;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(at) : "memory");
    return r;
}
__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at) {
    asm volatile("mbarrier.arrive.release.cta.shared.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(at), "r"(parity)
            : "memory");
    } while (!done);
}
__device__ __forceinline__ void load_x(quad &r, const u16 *p, bool there) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(r.a), "+r"(r.b), "+r"(r.c), "+r"(r.d)
                 : "l"(p), "r"((int)there)
                 : "memory");
}
// Which group a step is of, if groups have so many steps.
__device__ __forceinline__ int group_of(int step, int steps) { return steps == 1 ? step : step / steps; }
template <bool F16> __device__ __forceinline__ float wide(u32 bits) {
    if (!F16) return __uint_as_float(bits << 16);
    float r;
    asm("{ .reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t; }" : "=f"(r) : "r"(bits));
    return r;
}
template <bool F16> __device__ __forceinline__ float pair_sum(u32 pair) { return wide<F16>(pair & 0xffff) + wide<F16>(pair >> 16); }
// Two floats in 16 bits each, the first one low.
template <bool F16> __device__ __forceinline__ u32 narrow(float low, float high) {
    u32 r;
    if (F16)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// A word's codes less 8, as 4 pairs. In bfloat16 they are over 64: codes as subnormal numbers are multiplied by 2 ** 127, those
// that are four bits higher by 2 ** 123. In the mantissa of 1024, as float16 has it, a code is 1024 more than it is.
template <bool F16> __device__ __forceinline__ void decode(u32 word, u32 &a, u32 &b, u32 &c, u32 &d) {
    if (F16)
        asm volatile("{ .reg .b32 t, u, l, h, m, n; mov.b32 l, 0x3c003c00; mov.b32 h, 0x2c002c00; mov.b32 m, 0xe408e408;\n"
                     "mov.b32 n, 0xd480d480; shr.u32 u, %4, 8;\n"
                     "lop3.b32 t, %4, 0x000f000f, 0x64006400, 0xea; fma.rn.f16x2 %0, t, l, m;\n"
                     "lop3.b32 t, %4, 0x00f000f0, 0x64006400, 0xea; fma.rn.f16x2 %1, t, h, n;\n"
                     "lop3.b32 t, u, 0x000f000f, 0x64006400, 0xea; fma.rn.f16x2 %2, t, l, m;\n"
                     "lop3.b32 t, u, 0x00f000f0, 0x64006400, 0xea; fma.rn.f16x2 %3, t, h, n; }"
                     : "=&r"(a), "=&r"(b), "=&r"(c), "=&r"(d)
                     : "r"(word));
    else
        asm volatile("{ .reg .b32 t, u, l, h, m; mov.b32 l, 0x7f007f00; mov.b32 h, 0x7d007d00; mov.b32 m, 0xbe00be00;\n"
                     "and.b32 t, %4, 0x000f000f; fma.rn.bf16x2 %0, t, l, m;\n"
                     "and.b32 t, %4, 0x00f000f0; fma.rn.bf16x2 %1, t, h, m;\n"
                     "shr.u32 u, %4, 8;\n"
                     "and.b32 t, u, 0x000f000f; fma.rn.bf16x2 %2, t, l, m;\n"
                     "and.b32 t, u, 0x00f000f0; fma.rn.bf16x2 %3, t, h, m; }"
                     : "=&r"(a), "=&r"(b), "=&r"(c), "=&r"(d)
                     : "r"(word));
}
template <int N, bool F16> struct Product;
#define F4(n) "+f"(s[n]), "+f"(s[n + 1]), "+f"(s[n + 2]), "+f"(s[n + 3])
#define PRODUCT(N, F16, KIND, REGISTERS, A, B, C, D, X, KEEP, ...)                                                             \
    template <> struct Product<N, F16> {                                                                                       \
        static __device__ __forceinline__ void add(float *s, u32 a, u32 b, u32 c, u32 d, u64 x, int keep) {                     \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, " KEEP ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND     \
                         " {" REGISTERS "}, {" A "," B "," C "," D "}, " X ", p, 1, 1, 0; }"                                    \
                         : __VA_ARGS__                                                                                          \
                         : "r"(a), "r"(b), "r"(c), "r"(d), "l"(x), "r"(keep));                                                  \
        }                                                                                                                       \
    };
#define PRODUCTS(N, ...) PRODUCT(N, false, "bf16.bf16", __VA_ARGS__) PRODUCT(N, true, "f16.f16", __VA_ARGS__)
#define R4 "%0,%1,%2,%3"
#define R8 R4 ",%4,%5,%6,%7"
#define R12 R8 ",%8,%9,%10,%11"
#define R16 R12 ",%12,%13,%14,%15"
#define R24 R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define R32 R24 ",%24,%25,%26,%27,%28,%29,%30,%31"
PRODUCTS(8, R4, "%4", "%5", "%6", "%7", "%8", "%9", F4(0))
PRODUCTS(16, R8, "%8", "%9", "%10", "%11", "%12", "%13", F4(0), F4(4))
PRODUCTS(24, R12, "%12", "%13", "%14", "%15", "%16", "%17", F4(0), F4(4), F4(8))
PRODUCTS(32, R16, "%16", "%17", "%18", "%19", "%20", "%21", F4(0), F4(4), F4(8), F4(12))
PRODUCTS(48, R24, "%24", "%25", "%26", "%27", "%28", "%29", F4(0), F4(4), F4(8), F4(12), F4(16), F4(20))
PRODUCTS(64, R32, "%32", "%33", "%34", "%35", "%36", "%37", F4(0), F4(4), F4(8), F4(12), F4(16), F4(20), F4(24), F4(28))
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// The sum of what the programs of the cluster have at a place of their shared memory, in order.
template <int PROGRAMS> __device__ __forceinline__ floats gathered(u32 at) {
    floats parts[PROGRAMS], sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int p = 0; p < PROGRAMS; p++) {
        u32 there;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(p));
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(parts[p].a), "=f"(parts[p].b), "=f"(parts[p].c), "=f"(parts[p].d)
                     : "r"(there)
                     : "memory");
    }
#pragma unroll
    for (int p = 0; p < PROGRAMS; p++) sum.a += parts[p].a, sum.b += parts[p].b, sum.c += parts[p].c, sum.d += parts[p].d;
    return sum;
}
// silu(gate) * up of two numbers, both rounded to 16 bits.
__device__ __forceinline__ float activated(float gate) {
    float sigmoid;
    asm("{ .reg .f32 t; mul.ftz.f32 t, %1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.ftz.f32 t, t, 0f3F800000;\n"
        "rcp.approx.ftz.f32 %0, t; }"
        : "=f"(sigmoid)
        : "f"(gate));
    return gate * sigmoid;
}
template <bool F16> __device__ __forceinline__ u32 gated(u32 gate, u32 up) {
    const u32 bent = narrow<F16>(activated(wide<F16>(gate & 0xffff)), activated(wide<F16>(gate >> 16)));
    return narrow<F16>(wide<F16>(bent & 0xffff) * wide<F16>(up & 0xffff), wide<F16>(bent >> 16) * wide<F16>(up >> 16));
}
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define WIDTH (64 * TEAMS)
#define THREADS (128 * TEAMS)
#define RESULTS (GATED ? WIDTH / 2 : WIDTH)
// Threads that bring x: eight of a line of 64 channels, which is half a step of a row. Each has a line of SWEEPS rows, and of
// both halves unless LINES is 1.
#define BRINGERS (THREADS >= 16 * ROWS ? 16 * ROWS : THREADS >= 8 * ROWS ? 8 * ROWS : THREADS >= 4 * ROWS ? 4 * ROWS : 2 * ROWS)
#define LINES (BRINGERS == 16 * ROWS ? 1 : 2)
#define SWEEPS (LINES == 1 ? 1 : 8 * ROWS / BRINGERS)
#define PIECES (LINES * SWEEPS)
// Steps of x that are put into shared memory ahead.
#define AHEAD (BUFFERS - 1)
#define X_BYTES (256 * ROWS)
#define CODE_BYTES (64 * WIDTH)
#define CODES_AT (BUFFERS * X_BYTES)
#define SUMS_AT (CODES_AT + DEPTH * CODE_BYTES)
#define BARRIERS_AT (SUMS_AT + (MIDDLES ? BUFFERS * 2 * ROWS * 4 : 0))
#define SCALES_AT (BARRIERS_AT + 16 * BUFFERS)
#if SWEEPS > 1 && BRINGERS % 64
#error "threads that bring x must have rows of the same place among eight"
#endif
// Shared memory: the larger of SCALES_AT + steps of a part * WIDTH * (2 or, with MIDDLES, 6) and ROWS * (WIDTH + 4) * 4 bytes.

extern "C" __global__ void __launch_bounds__(THREADS, TOGETHER) wna16_product(
    const u16 *__restrict__ x, const u32 *__restrict__ words, const u16 *__restrict__ scales, const float *__restrict__ middles,
    const u16 *__restrict__ bias, u16 *__restrict__ y, int rows, int outputs, int inputs, long long x_row, int group) {
    extern __shared__ __align__(1024) unsigned char memory[];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const u32 base = shared_address(memory);
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int part = blockIdx.x, tile = blockIdx.y;
    const int all = (inputs + 127) / 128;
    const int begin = part * all / PARTS, steps = (part + 1) * all / PARTS - begin;

    // A warp's codes are those of 16 outputs, of two blocks. A thread reads what it has copied.
#if GATED
    // The first half of the warps has gates, the second what they gate.
    const int first = tile * (WIDTH / 2) + warp * 16 + (warp >= 2 * TEAMS ? outputs / 2 - WIDTH / 2 : 0);
#else
    const int first = tile * WIDTH + warp * 16;
#endif
    const int last = (outputs + 7) / 8 - 1, block = first / 8;
    const u32 *low = words + ((u64)(block < last ? block : last) * all + begin) * 128 + lane * 4;
    const int apart = block < last ? all * 128 : 0;
    const u32 ring = base + CODES_AT + warp * 1024 + lane * 16;
    const u32 scales_at = base + SCALES_AT, middles_at = scales_at + steps * (WIDTH * 2);
    const int groups = group >> 7;
    copy16(ring, low);
    copy16(ring + 512, low + apart);
    // Scales of all steps: [step, output], a warp's by itself.
    if (outputs & 1) {
        for (int i = lane; i < steps * 16; i += 32) {
            const int output = first + (i & 15) < outputs ? first + (i & 15) : outputs - 1;
            const u16 value = scales[(u64)(group_of(begin + (i >> 4), groups)) * outputs + output];
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(scales_at + ((i >> 4) * WIDTH + warp * 16 + (i & 15)) * 2), "h"(value) : "memory");
        }
    } else {
        for (int i = lane; i < steps * 8; i += 32) {
            const int output = first + (i & 7) * 2 < outputs ? first + (i & 7) * 2 : outputs - 2;
            copy4(scales_at + ((i >> 3) * WIDTH + warp * 16 + (i & 7) * 2) * 2,
                  scales + (u64)(group_of(begin + (i >> 3), groups)) * outputs + output);
        }
    }
#if MIDDLES
    for (int i = lane; i < steps * 16; i += 32) {
        const int output = first + (i & 15) < outputs ? first + (i & 15) : outputs - 1;
        copy4(middles_at + ((i >> 4) * WIDTH + warp * 16 + (i & 15)) * 4,
              middles + (u64)(group_of(begin + (i >> 4), groups)) * outputs + output);
    }
#endif
    copies_commit();
#pragma unroll
    for (int i = 1; i < DEPTH; i++) {
        if (i < steps) {
            copy16(ring + i * CODE_BYTES, low + i * 128);
            copy16(ring + i * CODE_BYTES + 512, low + apart + i * 128);
        }
        copies_commit();
    }
    const u32 filled = base + BARRIERS_AT, emptied = filled + 8 * BUFFERS;
    if (thread == 0) {
        for (int i = 0; i < BUFFERS; i++) {
            barrier_init(filled + 8 * i, BRINGERS / 32);
            barrier_init(emptied + 8 * i, 4 * TEAMS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    // Rows past the end stay what they are: columns of products that nobody writes. Inputs past the end are zeros.
    const bool brings = thread < BRINGERS;
    const int half = LINES == 1 ? thread / (8 * ROWS) : 0, x_of = thread / 8 % ROWS, piece = thread & 7;
    const int whole = (inputs - begin * 128) / 128 < steps ? (inputs - begin * 128) / 128 : steps;
    const u16 *x_from = x + x_of * x_row + begin * 128 + half * 64 + piece * 8;
    const u32 x_to = base + half * (ROWS * 128) + x_of * 128 + ((((piece >> 2) * 4) ^ (x_of & 7)) << 4) + (piece & 3) * 4;
    const long long sweep = x_row * (BRINGERS / 8);

#define TAKE(taken, step, at)                                                                                                   \
    do {                                                                                                                        \
        if ((step) < whole) {                                                                                                   \
            _Pragma("unroll") for (int i = 0; i < PIECES; i++)                                                                  \
                load_x(taken[i], (at) + i / LINES * sweep + i % LINES * 64, x_of + i / LINES * (BRINGERS / 8) < rows);          \
        } else if ((step) < steps) {                                                                                            \
            const int left = inputs - (begin + (step)) * 128 - half * 64 - piece * 8;                                           \
            _Pragma("unroll") for (int i = 0; i < PIECES; i++) {                                                                \
                taken[i] = quad{0, 0, 0, 0};                                                                                    \
                load_x(taken[i], (at) + i / LINES * sweep + i % LINES * 64,                                                     \
                       x_of + i / LINES * (BRINGERS / 8) < rows && i % LINES * 64 < left);                                      \
            }                                                                                                                   \
        }                                                                                                                       \
    } while (0)
    // Pair p of 8 channels goes to piece p of a line, whose places the row's number exchanges.
#define PUT(taken, buffer)                                                                                                      \
    do {                                                                                                                        \
        _Pragma("unroll") for (int i = 0; i < PIECES; i++) {                                                                    \
            const u32 after = i % LINES * (ROWS * 128) + i / LINES * (BRINGERS * 16) + (buffer) * X_BYTES;                      \
            store_shared(x_to + after, taken[i].a);                                                                             \
            store_shared((x_to ^ 16) + after, taken[i].b);                                                                      \
            store_shared((x_to ^ 32) + after, taken[i].c);                                                                      \
            store_shared((x_to ^ 48) + after, taken[i].d);                                                                      \
        }                                                                                                                       \
        if (MIDDLES) {                                                                                                          \
            _Pragma("unroll") for (int i = 0; i < PIECES; i++) {                                                                \
                float sum = (pair_sum<HALF>(taken[i].a) + pair_sum<HALF>(taken[i].b)) + (pair_sum<HALF>(taken[i].c) + pair_sum<HALF>(taken[i].d));      \
                sum += __shfl_xor_sync(~0u, sum, 1);                                                                            \
                sum += __shfl_xor_sync(~0u, sum, 2);                                                                            \
                sum += __shfl_xor_sync(~0u, sum, 4);                                                                            \
                if (piece == 0)                                                                                                 \
                    store_shared(base + SUMS_AT + (((buffer) * 2 + half + i % LINES) * ROWS + x_of) * 4 + i / LINES * (BRINGERS / 2), \
                                 __float_as_uint(sum));                                                                         \
            }                                                                                                                   \
        }                                                                                                                       \
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");                                                            \
        __syncwarp();                                                                                                           \
        if (lane == 0) barrier_arrive(filled + 8 * (buffer));                                                                   \
    } while (0)

    asm volatile("griddepcontrol.wait;" ::: "memory");
    quad taken[PIECES];
    if (brings) {
        quad early[AHEAD][PIECES];
#pragma unroll
        for (int step = 0; step < AHEAD; step++) TAKE(early[step], step, x_from + step * 128);
        TAKE(taken, AHEAD, x_from + AHEAD * 128);
#pragma unroll
        for (int step = 0; step < AHEAD; step++)
            if (step < steps) PUT(early[step], step);
    }

    float total[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) total[i] = 0.0f;
    // The descriptor of x: lines of 128 bytes whose 16-byte pieces are exchanged, 8 lines after 1024 bytes.
    u32 described = base >> 4 | 1 << 16;
    u32 scale_at = scales_at + (warp * 16 + lane / 4) * 2, mine = ring, turn = 0;
#if MIDDLES
    u32 middle_at = middles_at + (warp * 16 + lane / 4) * 4;
#endif
    copies_wait<DEPTH - 1>();
    __syncwarp();

    for (int step = 0;; turn ^= 1) {
        // A turn of the buffers.
#pragma unroll
        for (int buffer = 0; buffer < BUFFERS; buffer++) {
            const int next = (buffer + AHEAD) % BUFFERS;
            const quad a = load_shared(mine), b = load_shared(mine + 512);
            const u32 a_words[4] = {a.a, a.b, a.c, a.d}, b_words[4] = {b.a, b.b, b.c, b.d};
            barrier_wait(filled + 8 * buffer, turn);
            // Keeps the compiler from having all descriptors in registers.
            asm volatile("" : "+r"(described));
            float sums[ROWS / 2];
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) sums[i] = 0.0f;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                u32 l[4], h[4];
                decode<HALF>(a_words[w], l[0], l[1], l[2], l[3]);
                decode<HALF>(b_words[w], h[0], h[1], h[2], h[3]);
                const u64 from = 0x40000040ull << 32 | (described + (buffer * X_BYTES + (w >> 1) * (ROWS * 128) + (w & 1) * 64) / 16);
                products_fence();
                Product<ROWS, HALF>::add(sums, l[0], h[0], l[1], h[1], from, w > 0);
                Product<ROWS, HALF>::add(sums, l[2], h[2], l[3], h[3], from + 2, 1);
                products_commit();
                if (HALVES && w == 1) products_wait<0>();
            }
            // The buffer of the step before is free once all warps are done with it.
            if (step + AHEAD < steps && brings) {
                if (step > 0) barrier_wait(emptied + 8 * next, buffer == 0 ? turn ^ 1 : turn);
                PUT(taken, next);
                TAKE(taken, step + AHEAD + 1, x_from + (AHEAD + 1) * 128);
            }
            // Behind the fence for x, which would wait for them.
            if (step + DEPTH < steps) {
                copy16(mine, low + DEPTH * 128);
                copy16(mine + 512, low + apart + DEPTH * 128);
            }
            copies_commit();
            low += 128;
            x_from += 128;
            const float gain = HALF ? 1.0f : 64.0f;
            const float by_low = wide<HALF_SCALES>(load_shared16(scale_at)) * gain, by_high = wide<HALF_SCALES>(load_shared16(scale_at + 16)) * gain;
            scale_at += WIDTH * 2;
            products_wait<0>();
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
            if (!MIDDLES && lane == 0) barrier_arrive(emptied + 8 * buffer);
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) total[i] += sums[i] * (i & 2 ? by_high : by_low);
#if MIDDLES
            const float middle_low = load_shared_float(middle_at), middle_high = load_shared_float(middle_at + 32);
            middle_at += WIDTH * 4;
#pragma unroll
            for (int i = 0; i < ROWS / 2; i += 4) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const u32 sums_at = base + SUMS_AT + (buffer * 2 * ROWS + i * 2 + (lane & 3) * 2 + e) * 4;
                    const float sum = load_shared_float(sums_at) + load_shared_float(sums_at + ROWS * 4);
                    total[i + e] += middle_low * sum;
                    total[i + 2 + e] += middle_high * sum;
                }
            }
#endif
            if (++step == steps) goto done;
            if (MIDDLES) {
                __syncwarp();
                if (lane == 0) barrier_arrive(emptied + 8 * buffer);
            }
            mine += CODE_BYTES;
            if (mine == ring + DEPTH * CODE_BYTES) mine = ring;
            copies_wait<DEPTH - 1>();
        }
    }
done:

    // Each program of the cluster adds a share of the tile.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const int row = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), column = warp * 16 + lane / 4 + (i & 2) * 4;
        store_shared(base + (row * (WIDTH + 4) + column) * 4, __float_as_uint(total[i]));
    }
    cluster_barrier();
    const int results = GATED ? outputs / 2 : outputs;
    for (int i = part * (ROWS * RESULTS / 4) / PARTS + thread; i < (part + 1) * (ROWS * RESULTS / 4) / PARTS; i += THREADS) {
        const int row = i / (RESULTS / 4), column = i % (RESULTS / 4) * 4, at = tile * RESULTS + column;
        if (row >= rows || at >= results) continue;
        floats v = gathered<PARTS>(base + (row * (WIDTH + 4) + column) * 4);
        if (bias) {
            v.a += wide<HALF>(bias[at]);
            if (at + 1 < results) v.b += wide<HALF>(bias[at + 1]);
            if (at + 2 < results) v.c += wide<HALF>(bias[at + 2]);
            if (at + 3 < results) v.d += wide<HALF>(bias[at + 3]);
        }
        u32 front = narrow<HALF>(v.a, v.b), back = narrow<HALF>(v.c, v.d);
        if (GATED) {
            const floats up = gathered<PARTS>(base + (row * (WIDTH + 4) + column + RESULTS) * 4);
            front = gated<HALF>(front, narrow<HALF>(up.a, up.b)), back = gated<HALF>(back, narrow<HALF>(up.c, up.d));
        }
        u16 *to = y + (u64)row * results + at;
        if (results % 4 == 0) {
            asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(front), "r"(back) : "memory");
        } else {
            to[0] = (u16)front;
            if (at + 1 < results) to[1] = (u16)(front >> 16);
            if (at + 2 < results) to[2] = (u16)back;
            if (at + 3 < results) to[3] = (u16)(back >> 16);
        }
    }
    // Nobody leaves while others read its memory.
    if (PARTS > 1) cluster_barrier();
}
