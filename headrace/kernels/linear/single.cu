// The product of one row with a weight, for Hopper GPUs (sm_90a), compiled by NVRTC.
//
// A block makes LINES numbers. It asks for its lines of the weight at once, as soon as there is room for it on a multiprocessor and long
// before the kernel before is complete: as much as fits into shared memory is on its way while that one runs. Each warp has channels of its
// own, of which the matrix units add up the products, and warps' sums are added at the end.
//
// Lines lie in pieces of 128 bytes, eight pieces in a step: LINES / GROUPS lines of PARTS neighbouring pieces of channels. A thread has
// 16 bytes of a piece, whose words 0, 2, ... a matrix instruction takes as its first eight rows, and words 1, 3, ... as the other eight.
// Of its eight columns, two are x at the channels of a piece, one for each half of the rows.
//
// Constants: KIND (of the weight and x: 0 bfloat16, 1 float16, 2 e4m3 with scales), OUT_KIND (0 bfloat16, 1 float16, 2 float32), INPUTS
// (channels), LINES / GROUPS is 2, 4 or 8, GROUPS (2: gate and up, of which a block has as many lines and stores silu(gate) * up; else 1), WARPS, ROUNDS (with e4m3: 0, x has codes and a scale; else numbers of 16 bits that each block
// rounds, 1 bfloat16, 2 float16).

#define PACKED_KIND OUT_KIND
#include "hopper.cuh"
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int SIZE = KIND == 2 ? 1 : 2, PIECE = 128 / SIZE;  // bytes of a number, channels of a piece
constexpr int OWN = LINES / GROUPS, PARTS = 8 / OWN;
constexpr int PIECES = INPUTS / PIECE, MINE = PIECES / WARPS, STEPS = MINE / PARTS;
constexpr int GROUP_BYTES = MINE * OWN * 128, WARP_BYTES = GROUPS * GROUP_BYTES, THREADS = 32 * WARPS;
constexpr int AT_X = WARPS * WARP_BYTES, AT_SUMS = AT_X + INPUTS * SIZE, AT_BARRIERS = AT_SUMS + WARPS * GROUPS * 32;
static_assert(MINE * WARPS * PIECE == INPUTS && STEPS * PARTS == MINE, "warps have as many whole steps");

__device__ __forceinline__ uint4 load_pieces(unsigned place) {
    uint4 four;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w) : "r"(place));
    return four;
}

// Two e4m3 numbers, in a word's lower half, as float16.
__device__ __forceinline__ unsigned widened(unsigned codes) {
    unsigned both;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}\n" : "=r"(both) : "r"(codes));
    return both;
}

__device__ __forceinline__ unsigned widened_upper(unsigned codes) {
    unsigned both;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}\n" : "=r"(both) : "r"(codes));
    return both;
}

#if KIND == 0
#define INPUT_KINDS "bf16.bf16"
#else
#define INPUT_KINDS "f16.f16"
#endif

__device__ __forceinline__ void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." INPUT_KINDS ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float rounded(float value) {
#if OUT_KIND == 2
    return value;
#elif OUT_KIND == 1
    float wide;
    asm("{\n.reg .b16 t;\ncvt.rn.f16.f32 t, %1;\ncvt.f32.f16 %0, t;\n}\n" : "=f"(wide) : "f"(value));
    return wide;
#else
    return __uint_as_float(packed(value, 0.0f) << 16);
#endif
}

#if ROUNDS
// A number of 16 bits.
__device__ __forceinline__ float wide_of(unsigned bits) {
#if ROUNDS == 2
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((u16)bits));
    return wide;
#else
    return __uint_as_float(bits << 16);
#endif
}

// Codes of two numbers by their scale, as headrace/kernels/kv_cache/triton_fp8.py rounds them: the quotient is the product with the
// inverse, corrected, and NaN becomes 0.
__device__ __forceinline__ unsigned code_of(float low, float high, float scale, float inverse) {
    float ratios[2] = {low, high};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float value = ratios[i], ratio = __fmul_rn(value, inverse);
        ratio = __fmaf_rn(__fmaf_rn(ratio, scale, -value), -inverse, ratio);
        ratios[i] = ratio != ratio ? 0.0f : ratio;
    }
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(ratios[1]), "f"(ratios[0]));
    return codes;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) single(
    const __grid_constant__ TensorMap weight,  // channels of a piece, lines, pieces
    const char* x, const float* x_scale, const float* scales, const u16* bias, char* y, int outputs
) {
    extern __shared__ __align__(1024) char memory[];
    unsigned base = shared_address(memory);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, quad = lane >> 2, place = lane & 3;
    int first = blockIdx.x * OWN;
    unsigned mine = base + warp * WARP_BYTES, barrier = base + AT_BARRIERS + warp * 8, x_barrier = base + AT_BARRIERS + WARPS * 8;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (lane == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
        if (warp == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(x_barrier) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        u64 once;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "n"(WARP_BYTES) : "memory");
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
            asm volatile(
                "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;"
                :: "r"(mine + group * GROUP_BYTES), "l"(&weight), "r"(barrier), "r"(0), "r"(first + group * outputs), "r"(warp * MINE), "l"(once)
                : "memory");
    }
    int line = threadIdx.x % OWN, output = first + line;
    bool storing = threadIdx.x < OWN && output < outputs;
    float factors[GROUPS], more[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        factors[group] = 1.0f, more[group] = 0.0f;
        if (!storing) continue;
#if KIND == 2
        factors[group] = scales[output + group * outputs];
#endif
    }
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
#if ROUNDS
    // Eight numbers a turn; the largest has the largest bits without its sign, and a NaN is larger.
    constexpr int TURNS = INPUTS / 8 / THREADS;
    static_assert(TURNS * 8 * THREADS == INPUTS, "threads round as many numbers");
    uint4 held[TURNS];
    unsigned peak = 0;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) held[turn] = ((const uint4*)x)[turn * THREADS + threadIdx.x];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        unsigned words[4] = {held[turn].x, held[turn].y, held[turn].z, held[turn].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) peak = max(max(peak, words[i] & 0x7FFF), words[i] >> 16 & 0x7FFF);
    }
    peak = __reduce_max_sync(~0u, peak);
    unsigned peaks_at = base + AT_SUMS;
    if (lane == 0) asm volatile("st.shared.u32 [%0], %1;" :: "r"(peaks_at + warp * 4), "r"(peak) : "memory");
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        unsigned one;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(one) : "r"(peaks_at + w * 4) : "memory");
        peak = max(peak, one);
    }
    float x_factor = __fdiv_rn(wide_of(peak), 448.0f);
    x_factor = x_factor < 1e-12f ? 1e-12f : x_factor;
    float inverse = __fdiv_rn(1.0f, x_factor);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        unsigned words[4] = {held[turn].x, held[turn].y, held[turn].z, held[turn].w}, codes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = code_of(wide_of(words[i] & 0xFFFF), wide_of(words[i] >> 16), x_factor, inverse);
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};"
            :: "r"(base + AT_X + (turn * THREADS + threadIdx.x) * 8), "r"(codes[0] | codes[1] << 16), "r"(codes[2] | codes[3] << 16) : "memory");
    }
    __syncthreads();
#else
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(x_barrier), "n"(INPUTS * SIZE) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
            :: "r"(base + AT_X), "l"(x), "n"(INPUTS * SIZE), "r"(x_barrier) : "memory");
    }
#endif
#if KIND == 2
#if !ROUNDS
    float x_factor = storing ? *x_scale : 1.0f;
#endif
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) factors[group] *= x_factor;
#endif

    // Of the eight pieces of a step, the threads of a quad have one; pieces of 16 bytes are exchanged by the number of the piece.
    int piece = quad >> 1 | (quad & 1) << 2, upper = quad & 1;
    unsigned from = mine + piece * 128, x_from = base + AT_X + (warp * MINE + (quad >> 1) % PARTS) * 128;
    float sums[GROUPS][4];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) sums[group][0] = sums[group][1] = sums[group][2] = sums[group][3] = 0.0f;
    wait_for(barrier, 0);
#if !ROUNDS
    wait_for(x_barrier, 0);
#endif
#pragma unroll 4
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int where = half * 4 + place;
            uint4 x = load_pieces(x_from + step * (PARTS * 128) + where * 16);
#if KIND == 2
            unsigned shift = upper * 16;
            unsigned b0 = widened(x.x >> shift), b1 = widened(x.y >> shift), b2 = widened(x.z >> shift), b3 = widened(x.w >> shift);
#else
            unsigned b0 = upper ? x.y : x.x, b1 = upper ? x.w : x.z;
#endif
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                uint4 w = load_pieces(from + group * GROUP_BYTES + step * 1024 + (where ^ piece) * 16);
#if KIND == 2
                multiply(sums[group], widened(w.x), widened_upper(w.x), widened(w.y), widened_upper(w.y), b0, b1);
                multiply(sums[group], widened(w.z), widened_upper(w.z), widened(w.w), widened_upper(w.w), b2, b3);
#else
                multiply(sums[group], w.x, w.y, w.z, w.w, b0, b1);
#endif
            }
        }
    }
    unsigned sums_at = base + AT_SUMS;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group)
        if (place == piece / OWN) store_shared(sums_at + ((group * 8 + piece) * WARPS + warp) * 4, sums[group][0] + sums[group][3]);
    __syncthreads();
    if (!storing) return;
    float result[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                float one;
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(one) : "r"(sums_at + ((group * 8 + part * OWN + line) * WARPS + w) * 4));
                sum += one;
            }
        result[group] = sum * factors[group] + more[group];
    }
#if GROUPS == 2
    float value = rounded(silu(rounded(result[0]))) * rounded(result[1]);
#else
    float value = result[0];
#endif
#if OUT_KIND == 2
    ((float*)y)[output] = value;
#else
    ((u16*)y)[output] = (u16)packed(value, 0.0f);
#endif
}
