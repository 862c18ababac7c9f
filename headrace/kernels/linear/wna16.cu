// Products of 4-bit weights in groups of 128 (or multiples) with rows in 16 bits, for Hopper.
//
// Weights are the left operand of wgmma, from registers: ldmatrix hands each thread the words that have its part of instructions,
// since headrace packs them so. The tensor memory accelerator brings codes and x into a ring of stages in shared memory, for
// which a warp asks that multiplies nothing.
//
// The parts of a tile's inputs are a cluster of programs, which add up their sums, in order, through their shared memory.
//
// A second kernel (FEW) multiplies up to 8 rows by a gate and what it gates: warps of a program share the inputs, whose x they
// keep in registers, and go through outputs.
//
// Macros:
//   FEW      0, or runs of 128 inputs: the kernel for few rows. It takes STAGES, HALF, HALF_SCALES and
//   WARPS    of a program, four runs or less each
//   GROUP_RUNS runs that share a scale
//   ROWS     a multiple of 8: rows of x of a tile
//   TEAMS    warpgroups that multiply, of 64 outputs each
//   PARTS    programs that share a tile's inputs
//   STAGES   steps of 128 inputs in flight or in shared memory
//   DEFERRED 1: scales multiply a step's sums while the next step's products are made
//   ROUNDED  1: weights are rounded to bfloat16, as are scales that multiply them, in place of the sums of a step
//   MIDDLES  1: middle codes have values (zero points)
//   GATED    1: y is silu(gate) * up of the halves of the outputs, without a bias
//   HALF     1: x, bias and y are float16 in place of bfloat16
//   HALF_SCALES 1: scales are float16

#if FEW
#define IN_ORDER
#else
#define IN_ORDER volatile
#endif

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
__device__ __forceinline__ void copy4(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Of each of 8 outputs, thread 4 n + q gets word q of the four of each piece of 16 bytes.
__device__ __forceinline__ quad load_words(u32 at) {
    quad r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.a), "=r"(r.b), "=r"(r.c), "=r"(r.d)
                 : "r"(at)
                 : "memory");
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
// Which group a step is of, if groups have so many steps.
__device__ __forceinline__ int group_of(int step, int steps) { return steps == 1 ? step : step / steps; }
template <bool F16> __device__ __forceinline__ float wide(u32 bits) {
    if (!F16) return __uint_as_float(bits << 16);
    float r;
    asm("{ .reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t; }" : "=f"(r) : "r"(bits));
    return r;
}
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
        asm IN_ORDER("{ .reg .b32 t, u, l, h, m, n; mov.b32 l, 0x3c003c00; mov.b32 h, 0x2c002c00; mov.b32 m, 0xe408e408;\n"
                     "mov.b32 n, 0xd480d480; shr.u32 u, %4, 8;\n"
                     "lop3.b32 t, %4, 0x000f000f, 0x64006400, 0xea; fma.rn.f16x2 %0, t, l, m;\n"
                     "lop3.b32 t, %4, 0x00f000f0, 0x64006400, 0xea; fma.rn.f16x2 %1, t, h, n;\n"
                     "lop3.b32 t, u, 0x000f000f, 0x64006400, 0xea; fma.rn.f16x2 %2, t, l, m;\n"
                     "lop3.b32 t, u, 0x00f000f0, 0x64006400, 0xea; fma.rn.f16x2 %3, t, h, n; }"
                     : "=&r"(a), "=&r"(b), "=&r"(c), "=&r"(d)
                     : "r"(word));
    else
        asm IN_ORDER("{ .reg .b32 t, u, l, h, m; mov.b32 l, 0x7f007f00; mov.b32 h, 0x7d007d00; mov.b32 m, 0xbe00be00;\n"
                     "and.b32 t, %4, 0x000f000f; fma.rn.bf16x2 %0, t, l, m;\n"
                     "and.b32 t, %4, 0x00f000f0; fma.rn.bf16x2 %1, t, h, m;\n"
                     "shr.u32 u, %4, 8;\n"
                     "and.b32 t, u, 0x000f000f; fma.rn.bf16x2 %2, t, l, m;\n"
                     "and.b32 t, u, 0x00f000f0; fma.rn.bf16x2 %3, t, h, m; }"
                     : "=&r"(a), "=&r"(b), "=&r"(c), "=&r"(d)
                     : "r"(word));
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
struct alignas(64) TensorMap {
    char bytes[128];
};
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
#if FEW
template <bool F16> __device__ __forceinline__ void multiply(float (&s)[4], u32 a, u32 b, u32 c, u32 d, u32 x, u32 z) {
#define MULTIPLY(KIND)                                                                                                          \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"    \
        : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])                                                                        \
        : "r"(a), "r"(b), "r"(c), "r"(d), "r"(x), "r"(z))
    if (F16)
        MULTIPLY("f16.f16");
    else
        MULTIPLY("bf16.bf16");
}
__device__ __forceinline__ quad load_shared(u32 at) {
    quad r;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(r.a), "=r"(r.b), "=r"(r.c), "=r"(r.d) : "r"(at));
    return r;
}
__device__ __forceinline__ floats load_floats(u32 at) {
    floats r;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.a), "=f"(r.b), "=f"(r.c), "=f"(r.d) : "r"(at) : "memory");
    return r;
}
__device__ __forceinline__ quad load_x(const u16 *p, bool there) {
    quad r = {0, 0, 0, 0};
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(r.a), "+r"(r.b), "+r"(r.c), "+r"(r.d)
                 : "l"(p), "r"((int)there));
    return r;
}

#define EACH ((FEW + WARPS - 1) / WARPS)
#define CODE_BYTES (FEW * 512)
#define GROUPS ((FEW + GROUP_RUNS - 1) / GROUP_RUNS)
#define SCALE_BYTES ((GROUPS * 16 + 127) / 128 * 128)
#define STAGE_BYTES (2 * CODE_BYTES + 2 * SCALE_BYTES)
#define SUMS_AT (STAGES * STAGE_BYTES)
#define BARRIERS_AT (SUMS_AT + 2 * WARPS * 512)
// Shared memory: BARRIERS_AT + 8 * STAGES.

// A stage has a block of 8 gates, that of what they gate, and the scales of both.
extern "C" __global__ void __launch_bounds__(32 * WARPS, WARPS > 8 ? 1 : 2) wna16_gated(
    const u16 *__restrict__ x, const u32 *__restrict__ words, const __grid_constant__ TensorMap scales, u16 *__restrict__ y, int rows,
    int outputs, int inputs, long long x_row) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 base = shared_address(memory), filled = base + BARRIERS_AT;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, n = lane >> 2, q = lane & 3;
    const int results = outputs / 2, count = (results / 8 - (int)blockIdx.x + gridDim.x - 1) / gridDim.x;
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    auto ask = [&](int turn, int stage) {
        const u32 to = base + stage * STAGE_BYTES, barrier = filled + 8 * stage;
        expect(barrier, 2 * CODE_BYTES + 2 * GROUPS * 16);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int block = blockIdx.x + turn * gridDim.x + i * (results / 8);
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
                             "r"(to + i * CODE_BYTES), "l"(words + (u64)block * (FEW * 128)), "n"(CODE_BYTES), "r"(barrier), "l"(once)
                         : "memory");
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
                             "r"(to + 2 * CODE_BYTES + i * SCALE_BYTES), "l"(&scales), "r"(barrier), "r"(block * 8), "r"(0)
                         : "memory");
        }
    };
    if (thread == 0) {
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        for (int i = 0; i < STAGES; i++) barrier_init(filled + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        for (int i = 0; i < STAGES && i < count; i++) ask(i, i);
    }
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // x of a warp's runs, row n: thread q has 8 neighbours of 32.
    quad right[EACH][4];
#pragma unroll
    for (int r = 0; r < EACH; r++)
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const int input = (warp * EACH + r) * 128 + 32 * w + 8 * q;
            right[r][w] = load_x(x + n * x_row + input, n < rows && input < inputs);
        }
    int stage = 0;
    u32 parity = 0;
    for (int turn = 0; turn < count; turn++) {
        const u32 at = base + stage * STAGE_BYTES;
        float total[4] = {0, 0, 0, 0};
        barrier_wait(filled + 8 * stage, parity);
#pragma unroll
        for (int r = 0; r < EACH; r++) {
            const int run = warp * EACH + r;
            if (FEW % WARPS && run >= FEW) break;
            const quad a = load_shared(at + run * 512 + lane * 16), b = load_shared(at + CODE_BYTES + run * 512 + lane * 16);
            const u32 a_words[4] = {a.a, a.b, a.c, a.d}, b_words[4] = {b.a, b.b, b.c, b.d};
            const u32 scale_at = at + 2 * CODE_BYTES + run / GROUP_RUNS * 16 + n * 2;
            const float gain = HALF ? 1.0f : 64.0f;
            const float by_gate = wide<HALF_SCALES>(load_shared16(scale_at)) * gain, by_up = wide<HALF_SCALES>(load_shared16(scale_at + SCALE_BYTES)) * gain;
            // Two sums of each, so that half as many products wait for each other.
            float sums[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 l[2][4], h[2][4];
#pragma unroll
                for (int p = 0; p < 2; p++) {
                    decode<HALF>(a_words[2 * half + p], l[p][0], l[p][1], l[p][2], l[p][3]);
                    decode<HALF>(b_words[2 * half + p], h[p][0], h[p][1], h[p][2], h[p][3]);
                }
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const quad v = right[r][w];
                    multiply<HALF>(sums[half], l[0][w], h[0][w], l[1][w], h[1][w], half ? v.c : v.a, half ? v.d : v.b);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) total[i] += (sums[0][i] + sums[1][i]) * (i & 2 ? by_up : by_gate);
        }
        // In turn, buffers of sums are written and read.
        const u32 sums_at = base + SUMS_AT + (turn & 1) * (WARPS * 512) + lane * 16;
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(sums_at + warp * 512), "f"(total[0]), "f"(total[1]), "f"(total[2]), "f"(total[3]) : "memory");
        __syncthreads();
        if (warp == turn % WARPS) {
            // Everybody is done with the stage.
            if (lane == 0 && turn + STAGES < count) ask(turn + STAGES, stage);
            floats sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const floats one = load_floats(sums_at + w * 512);
                sum.a += one.a, sum.b += one.b, sum.c += one.c, sum.d += one.d;
            }
            const u32 both = gated<HALF>(narrow<HALF>(sum.a, sum.b), narrow<HALF>(sum.c, sum.d));
            u16 *to = y + (u64)(2 * q) * results + (blockIdx.x + turn * gridDim.x) * 8 + n;
            if (2 * q < rows) to[0] = (u16)both;
            if (2 * q + 1 < rows) to[results] = (u16)(both >> 16);
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}
#else
// Pairs of weights by a scale: `scale[0]` is 2 ** 119 times it, `scale[1]` 2 ** 115 times, and `scale[2]` -2 ** -11 times. They are
// too small by 2 ** 14. One rounding makes them, since the product of a code is exact.
__device__ __forceinline__ void decode_scaled(u32 word, const u32 (&scale)[3], u32 (&to)[4]) {
    asm volatile("{ .reg .b32 t, u; and.b32 t, %4, 0x000f000f; fma.rn.bf16x2 %0, t, %5, %7;\n"
                 "and.b32 t, %4, 0x00f000f0; fma.rn.bf16x2 %1, t, %6, %7; shr.u32 u, %4, 8;\n"
                 "and.b32 t, u, 0x000f000f; fma.rn.bf16x2 %2, t, %5, %7;\n"
                 "and.b32 t, u, 0x00f000f0; fma.rn.bf16x2 %3, t, %6, %7; }"
                 : "=&r"(to[0]), "=&r"(to[1]), "=&r"(to[2]), "=&r"(to[3])
                 : "r"(word), "r"(scale[0]), "r"(scale[1]), "r"(scale[2]));
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
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
#define R48 R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define R64 R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define G16(n) F4(n), F4(n + 4), F4(n + 8), F4(n + 12)
PRODUCTS(8, R4, "%4", "%5", "%6", "%7", "%8", "%9", F4(0))
PRODUCTS(16, R8, "%8", "%9", "%10", "%11", "%12", "%13", F4(0), F4(4))
PRODUCTS(24, R12, "%12", "%13", "%14", "%15", "%16", "%17", F4(0), F4(4), F4(8))
PRODUCTS(32, R16, "%16", "%17", "%18", "%19", "%20", "%21", G16(0))
PRODUCTS(48, R24, "%24", "%25", "%26", "%27", "%28", "%29", G16(0), F4(16), F4(20))
PRODUCTS(64, R32, "%32", "%33", "%34", "%35", "%36", "%37", G16(0), G16(16))
PRODUCTS(96, R48, "%48", "%49", "%50", "%51", "%52", "%53", G16(0), G16(16), G16(32))
PRODUCTS(128, R64, "%64", "%65", "%66", "%67", "%68", "%69", G16(0), G16(16), G16(32), G16(48))
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
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void load_x(u32 to, const TensorMap &map, u32 barrier, int input, int row, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(&map), "r"(barrier), "r"(input), "r"(row), "l"(policy)
                 : "memory");
}
// A run's lines of 128 bytes of some blocks.
__device__ __forceinline__ void load_codes(u32 to, const TensorMap &map, u32 barrier, int run, int block, u64 policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to), "l"(&map), "r"(barrier), "r"(0), "r"(run * 4), "r"(block), "l"(policy)
                 : "memory");
}

#define WIDTH (64 * TEAMS)
#define MULTIPLIERS (128 * TEAMS)
#define MEET asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory")
// Where many registers are needed, a whole warpgroup gives up its own; else a warp asks for what is needed.
#define GIVES_UP DEFERRED
#define THREADS (MULTIPLIERS + (GIVES_UP ? 128 : 32))
#define RESULTS (GATED ? WIDTH / 2 : WIDTH)
// Whether sums of x have registers of their own.
#define APART (MIDDLES && ROWS <= 32)
#define X_BYTES (256 * ROWS)
#define CODE_BYTES (64 * WIDTH)
#define STAGE_BYTES (X_BYTES + CODE_BYTES)
#define BARRIERS_AT (STAGES * STAGE_BYTES)
#define SCALES_AT (BARRIERS_AT + 16 * STAGES)
// Shared memory: 1024 and the larger of SCALES_AT + steps of a part * WIDTH * (2 or, with MIDDLES, 6) and ROWS * (WIDTH + 4) * 4 bytes.

extern "C" __global__ void __launch_bounds__(THREADS, 1) wna16_product(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap words, const u16 *__restrict__ scales,
    const float *__restrict__ middles, const u16 *__restrict__ bias, u16 *__restrict__ y, int rows, int outputs, int inputs,
    int group) {
    extern __shared__ unsigned char memory[];
    const u32 base = (shared_address(memory) + 1023) & ~1023u;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int part = blockIdx.x, tile = blockIdx.y, top = blockIdx.z * ROWS;
    const int all = (inputs + 127) / 128;
    const int begin = part * all / PARTS, steps = (part + 1) * all / PARTS - begin;
    const int ahead = steps < STAGES ? steps : STAGES;
    const u32 filled = base + BARRIERS_AT, emptied = filled + 8 * STAGES;
    const u32 scales_at = base + SCALES_AT;
    [[maybe_unused]] const u32 middles_at = scales_at + steps * (WIDTH * 2);

    u64 once, often;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
    auto codes_of = [&](int step, int stage) {
        const u32 to = base + stage * STAGE_BYTES + X_BYTES, barrier = filled + 8 * stage;
        expect(barrier, STAGE_BYTES);
#if GATED
        // The first half of the warps has gates, the second what they gate.
        load_codes(to, words, barrier, begin + step, tile * (WIDTH / 16), once);
        load_codes(to + CODE_BYTES / 2, words, barrier, begin + step, outputs / 16 + tile * (WIDTH / 16), once);
#else
        load_codes(to, words, barrier, begin + step, tile * (WIDTH / 8), once);
#endif
    };
    auto x_of = [&](int step, int stage) {
        const u32 to = base + stage * STAGE_BYTES, barrier = filled + 8 * stage;
load_x(to, x, barrier, (begin + step) * 128, top, often);
        load_x(to + ROWS * 128, x, barrier, (begin + step) * 128 + 64, top, often);
    };
    if (thread == MULTIPLIERS) {
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        for (int i = 0; i < STAGES; i++) {
            barrier_init(filled + 8 * i, 1);
            barrier_init(emptied + 8 * i, 4 * TEAMS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        for (int step = 0; step < ahead; step++) codes_of(step, step);
    }
#if GATED
    const int first = tile * (WIDTH / 2) + warp * 16 + (warp >= 2 * TEAMS ? outputs / 2 - WIDTH / 2 : 0);
#else
    const int first = tile * WIDTH + warp * 16;
#endif
    // Scales of all steps: [step, output], a warp's by itself.
    if (thread < MULTIPLIERS) {
        const int groups = group >> 7;
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
    }
    __syncthreads();

    if (thread >= MULTIPLIERS) {
#if GIVES_UP
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
        if (thread > MULTIPLIERS) return;
        asm volatile("griddepcontrol.wait;" ::: "memory");
        for (int step = 0; step < ahead; step++) x_of(step, step);
        int stage = 0;
        u32 parity = 0;
        for (int step = ahead; step < steps; step++) {
            barrier_wait(emptied + 8 * stage, parity);
            codes_of(step, stage);
            x_of(step, stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        return;
    }
#if GIVES_UP
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(TEAMS == 2 ? 240 : 160));
#endif
    copies_wait();
    __syncwarp();

    float total[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) total[i] = 0.0f;
    // A warp's codes are those of 16 outputs, of two blocks. The accelerator has exchanged the pieces of 16 bytes of a line, which
    // are of two outputs: this thread's address is that of output `lane % 8` and piece `lane / 8`.
    const int output = lane & 7;
    const u32 low_at = X_BYTES + warp * 1024 + (output >> 1) * 128 + ((((output & 1) << 2 | lane >> 3) ^ (output >> 1)) << 4);
    const u32 high_at = (low_at ^ 64) + 512;
    u32 from = base, barrier = filled, parity = 0, scale_at = scales_at + (warp * 16 + lane / 4) * 2;
#if MIDDLES
    u32 middle_at = middles_at + (warp * 16 + lane / 4) * 4;
#endif
    // The descriptor of x: lines of 128 bytes whose pieces are exchanged, 8 lines after 1024 bytes.
    auto inputs_at = [&](int sixteen) {
        return 0x40000040ull << 32 | ((from >> 4 | 1 << 16) + ((sixteen >> 2) * (ROWS * 128) + (sixteen & 3) * 32) / 16);
    };
    // Sums of x, as products by ones, stand where the middles' products are needed.
    [[maybe_unused]] const u32 ones = HALF ? 0x3c003c00 : 0x3f803f80;
    [[maybe_unused]] float rows_of_ones[ROWS / 2];
    auto multiply = [&](float(&sums)[ROWS / 2]) {
        barrier_wait(barrier, parity);
        const quad a = load_words(from + low_at), b = load_words(from + high_at);
        const u32 a_words[4] = {a.a, a.b, a.c, a.d}, b_words[4] = {b.a, b.b, b.c, b.d};
#if ROUNDED
        const u32 low = load_shared16(scale_at) * 0x10001, high = load_shared16(scale_at + 16) * 0x10001;
        scale_at += WIDTH * 2;
        const u32 by_low[3] = {times(low, 0x7b007b00), times(low, 0x79007900), times(low, 0xba00ba00)};
        const u32 by_high[3] = {times(high, 0x7b007b00), times(high, 0x79007900), times(high, 0xba00ba00)};
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 l[2][4], h[2][4];
#pragma unroll
            for (int p = 0; p < 2; p++) {
#if ROUNDED
                decode_scaled(a_words[2 * half + p], by_low, l[p]);
                decode_scaled(b_words[2 * half + p], by_high, h[p]);
#else
                decode<HALF>(a_words[2 * half + p], l[p][0], l[p][1], l[p][2], l[p][3]);
                decode<HALF>(b_words[2 * half + p], h[p][0], h[p][1], h[p][2], h[p][3]);
#endif
            }
            products_fence();
#pragma unroll
            for (int w = 0; w < 4; w++)
                Product<ROWS, HALF>::add(
                    sums, l[0][w], h[0][w], l[1][w], h[1][w], inputs_at(2 * w + half), ROUNDED || half + w > 0);
#if APART
#pragma unroll
            for (int w = 0; w < 4; w++)
                Product<ROWS, HALF>::add(rows_of_ones, ones, ones, ones, ones, inputs_at(2 * w + half), half + w > 0);
#endif
            products_commit();
        }
    };
    auto release = [&](u32 empty) {
        if (lane == 0) barrier_arrive(empty);
    };
    // The compiler moves no use of the sums past this.
    auto settle = [&](float(&sums)[ROWS / 2]) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
    };
    [[maybe_unused]] auto scale = [&](const float(&sums)[ROWS / 2]) {
        const float gain = HALF ? 1.0f : 64.0f;
        const float by_low = wide<HALF_SCALES>(load_shared16(scale_at)) * gain, by_high = wide<HALF_SCALES>(load_shared16(scale_at + 16)) * gain;
        scale_at += WIDTH * 2;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) total[i] += sums[i] * (i & 2 ? by_high : by_low);
    };
    auto forward = [&]() {
        from += STAGE_BYTES, barrier += 8;
        if (barrier == emptied) from = base, barrier = filled, parity ^= 1;
    };
#if ROUNDED
    for (int step = 0; step < steps; step++) {
        multiply(total);
        products_wait<0>();
        settle(total);
        release(barrier + 8 * STAGES);
        forward();
    }
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) total[i] *= 0x1p14f;
#elif DEFERRED
    float even[ROWS / 2], odd[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) even[i] = odd[i] = 0.0f;
    auto finish = [&](float(&sums)[ROWS / 2], u32 empty) {
        settle(sums);
        release(empty);
        scale(sums);
    };
    multiply(even);
    u32 before = barrier + 8 * STAGES;
    forward();
    int step = 1;
    auto turn = [&](float(&sums)[ROWS / 2], float(&earlier)[ROWS / 2]) {
        multiply(sums);
        products_wait<2>();
        finish(earlier, before);
        before = barrier + 8 * STAGES;
        forward();
    };
    for (; step + 1 < steps; step += 2) {
        turn(odd, even);
        turn(even, odd);
    }
    if (step < steps) {
        turn(odd, even);
        products_wait<0>();
        finish(odd, before);
    } else {
        products_wait<0>();
        finish(even, before);
    }
#else
    for (int step = 0; step < steps; step++) {
        float sums[ROWS / 2];
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) sums[i] = 0.0f;
#if APART
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) rows_of_ones[i] = 0.0f;
#endif
        multiply(sums);
        products_wait<0>();
        settle(sums);
#if MIDDLES
        scale(sums);
#if APART
        float(&totals)[ROWS / 2] = rows_of_ones;
#else
        float(&totals)[ROWS / 2] = sums;
        products_fence();
#pragma unroll
        for (int w = 0; w < 8; w++) Product<ROWS, HALF>::add(sums, ones, ones, ones, ones, inputs_at(w), w > 0);
        products_commit();
        products_wait<0>();
#endif
        settle(totals);
        release(barrier + 8 * STAGES);
        const float middle_low = load_shared_float(middle_at), middle_high = load_shared_float(middle_at + 32);
        middle_at += WIDTH * 4;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) total[i] += totals[i] * (i & 2 ? middle_high : middle_low);
#else
        release(barrier + 8 * STAGES);
        scale(sums);
#endif
        forward();
    }
#endif

    // Each program of a tile adds a share of it, in the memory of the ring.
    MEET;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const int row = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), column = warp * 16 + lane / 4 + (i & 2) * 4;
        store_shared(base + (row * (WIDTH + 4) + column) * 4, __float_as_uint(total[i]));
    }
    if (PARTS > 1)
        cluster_barrier();
    else
        MEET;
    // What the kernel before reads may be what is written here.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int results = GATED ? outputs / 2 : outputs;
    for (int i = part * (ROWS * RESULTS / 4) / PARTS + thread; i < (part + 1) * (ROWS * RESULTS / 4) / PARTS; i += MULTIPLIERS) {
        const int row = i / (RESULTS / 4), column = i % (RESULTS / 4) * 4, at = tile * RESULTS + column;
        if (top + row >= rows || at >= results) continue;
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
        u16 *to = y + (u64)(top + row) * results + at;
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
#endif
