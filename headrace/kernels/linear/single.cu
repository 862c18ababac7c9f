// The product of one row with a weight in e4m3, for Hopper GPUs (sm_90a), compiled by NVRTC.
//
// Blocks, all of them at once on the multiprocessors, take tiles of lines of the weight in turn. Each warp has channels of its own, and a
// ring of stages that the tensor memory accelerator fills: it is full before the kernel before is complete, and never runs empty. The
// matrix units add up the products of a warp, and warps' sums are added at the end.
//
// Lines lie in pieces of 128 bytes, eight pieces in a step: LINES / GROUPS lines of PARTS neighbouring pieces of channels. A thread has
// 16 bytes of a piece, whose words 0, 2, ... a matrix instruction takes as its first eight rows, and words 1, 3, ... as the other eight.
// Of its eight columns, two are x at the channels of a piece, one for each half of the rows.
//
// Constants: OUT_KIND (0 bfloat16, 1 float16, 2 float32), INPUTS (channels), LINES (of a tile; LINES / GROUPS is 2, 4 or 8), GROUPS (2:
// gate and up, of which a tile has as many lines and the block stores silu(gate) * up; else 1), WARPS, STAGES, RUN (pieces of a line in a
// stage), RESIDENT (blocks of a multiprocessor), ROUNDS (0: x has codes and a scale; else numbers of 16 bits that each block rounds, 1
// bfloat16, 2 float16), FIXED (turns of a block whose tiles are fixed), DRAWS (1: behind these, blocks draw their tiles, since
// multiprocessors are not equally fast), FLUSH (turns whose sums are kept), BIAS (kind of a bias + 1, as OUT_KIND; 0: none).

#define PACKED_KIND OUT_KIND
#include "hopper.cuh"
typedef unsigned short u16;

constexpr int PIECE = 128;  // bytes, as many channels
constexpr int OWN = LINES / GROUPS, PARTS = 8 / OWN;
constexpr int PIECES = INPUTS / PIECE, MINE = PIECES / WARPS, LOADS = MINE / RUN, STEPS = RUN / PARTS;
constexpr int GROUP_BYTES = RUN * OWN * 128, STAGE_BYTES = GROUPS * GROUP_BYTES, THREADS = 32 * WARPS;
// Where everything is, behind the rings: x, barriers, sums.
constexpr int AT_X = WARPS * STAGES * STAGE_BYTES, AT_BARRIERS = AT_X + INPUTS, AT_SUMS = AT_BARRIERS + (WARPS * STAGES + 1) * 8;
constexpr int QUEUE = 32, TILE_BITS = 20, AT_QUEUE = AT_SUMS + FLUSH * GROUPS * 8 * WARPS * 4, AT_SCALES = AT_QUEUE + QUEUE * 4;
static_assert(MINE * WARPS * PIECE == INPUTS && LOADS * RUN == MINE && STEPS * PARTS == RUN, "warps have as many whole stages");

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

__device__ __forceinline__ float rounded(float value) {
#if OUT_KIND == 2
    return value;
#else
    return wide_of<OUT_KIND>(packed(value, 0.0f) & 0xFFFF);
#endif
}

#if ROUNDS
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

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) single(
    const __grid_constant__ TensorMap weight,  // channels of a piece, lines, pieces
    const char* x, const float* x_scale, const float* scales, const char* bias, char* y,
    int outputs, int tiles,
    unsigned* drawn  // 0 before and after
) {
    extern __shared__ __align__(1024) char memory[];
    unsigned base = shared_address(memory);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, quad = lane >> 2, place = lane & 3;
    unsigned ring = base + warp * (STAGES * STAGE_BYTES), barriers = base + AT_BARRIERS + warp * (STAGES * 8);
    unsigned x_barrier = base + AT_BARRIERS + WARPS * STAGES * 8, sums_at = base + AT_SUMS;
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    [[maybe_unused]] unsigned queue_at = base + AT_QUEUE, scales_at = base + AT_SCALES;
    // One past the end is a block's last. An entry of the queue has its turn beside the tile.
    auto tile_of = [&](int turn) {
        if (turn < FIXED) return (int)(blockIdx.x + turn * gridDim.x);
#if DRAWS
        unsigned entry;
        do {
            asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(entry) : "r"(queue_at + turn % QUEUE * 4) : "memory");
        } while (entry >> TILE_BITS != (unsigned)turn);
        return (int)(entry & ((1 << TILE_BITS) - 1));
#else
        return tiles;
#endif
    };
    int asked_turn = 0, asked_load = 0, asked_tile = blockIdx.x;
    [[maybe_unused]] unsigned pending = 0;
    auto ask = [&](int stage) {
        if (asked_tile >= tiles) return;
#if DRAWS
        // The first warp has drawn the next turn's tile meanwhile, and draws that of the one after.
        if (warp == 0 && asked_load == 0 && asked_turn >= FIXED - 1) {
            unsigned next = asked_turn + 1, tile = min(pending + FIXED * gridDim.x, (unsigned)tiles);
            asm volatile("st.volatile.shared.u32 [%0], %1;" :: "r"(queue_at + next % QUEUE * 4), "r"(next << TILE_BITS | tile) : "memory");
            if (tile < tiles) pending = atomicInc(drawn, tiles - (FIXED - 1) * gridDim.x - 1);
        }
#endif
        unsigned barrier = barriers + 8 * stage;
        expect(barrier, STAGE_BYTES);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
            asm volatile(
                "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;"
                :: "r"(ring + stage * STAGE_BYTES + group * GROUP_BYTES), "l"(&weight), "r"(barrier), "r"(0),
                "r"(asked_tile * OWN + group * outputs), "r"(warp * MINE + asked_load * RUN), "l"(once) : "memory");
        if (++asked_load < LOADS) return;
        asked_load = 0, ++asked_turn;
        asked_tile = tile_of(asked_turn);
    };
    if (lane == 0) {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) init_barrier<1>(barriers + 8 * s);
        if (warp == 0) init_barrier<1>(x_barrier);
        publish_barriers();
#pragma unroll
        for (int s = 0; s < STAGES; ++s) ask(s);
    }
    // Scales of a tile come to shared memory while it is multiplied.
    auto ask_scales = [&](int turn, int tile) {
        int group = lane / OWN, output = tile * OWN + lane % OWN;
        if (warp == 0 && lane < LINES && output < outputs)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                :: "r"(scales_at + (turn % FLUSH * LINES + lane) * 4), "l"(scales + output + group * outputs) : "memory");
    };
#if DRAWS
    if (threadIdx.x < QUEUE) asm volatile("st.volatile.shared.u32 [%0], %1;" :: "r"(queue_at + threadIdx.x * 4), "r"(0u) : "memory");
#endif
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
#if DRAWS
    if (threadIdx.x == 0) pending = atomicInc(drawn, tiles - (FIXED - 1) * gridDim.x - 1);
#endif
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
    if (lane == 0) asm volatile("st.shared.u32 [%0], %1;" :: "r"(sums_at + warp * 4), "r"(peak) : "memory");
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        unsigned one;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(one) : "r"(sums_at + w * 4) : "memory");
        peak = max(peak, one);
    }
    float x_factor = __fdiv_rn(wide_of<ROUNDS - 1>(peak), 448.0f);
    x_factor = x_factor < 1e-12f ? 1e-12f : x_factor;
    float inverse = __fdiv_rn(1.0f, x_factor);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        unsigned words[4] = {held[turn].x, held[turn].y, held[turn].z, held[turn].w}, codes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = code_of(wide_of<ROUNDS - 1>(words[i] & 0xFFFF), wide_of<ROUNDS - 1>(words[i] >> 16), x_factor, inverse);
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};"
            :: "r"(base + AT_X + (turn * THREADS + threadIdx.x) * 8), "r"(codes[0] | codes[1] << 16), "r"(codes[2] | codes[3] << 16) : "memory");
    }
    __syncthreads();
#else
    if (threadIdx.x == 0) {
        expect(x_barrier, INPUTS);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
            :: "r"(base + AT_X), "l"(x), "n"(INPUTS), "r"(x_barrier) : "memory");
    }
#endif
#if !ROUNDS
    float x_factor = *x_scale;
#endif

    // Of the eight pieces of a step, the threads of a quad have one; pieces of 16 bytes are exchanged by the number of the piece.
    int piece = quad >> 1 | (quad & 1) << 2, upper = quad & 1;
    unsigned x_from = base + AT_X + (warp * MINE + (quad >> 1) % PARTS) * 128;
    unsigned factor[LOADS * STEPS * 2][4];
#if !ROUNDS
    wait_for(x_barrier, 0);
#endif
#pragma unroll
    for (int i = 0; i < LOADS * STEPS * 2; ++i) {
        uint4 four = load_pieces(x_from + i / 2 * (PARTS * 128) + (i % 2 * 4 + place) * 16);
        unsigned shift = upper * 16;
        factor[i][0] = widened(four.x >> shift), factor[i][1] = widened(four.y >> shift);
        factor[i][2] = widened(four.z >> shift), factor[i][3] = widened(four.w >> shift);
    }
    unsigned from = ring + piece * 128;
    // Stores what up to FLUSH turns have summed up, a thread an output.
    auto flush = [&](int turns) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        int turn = threadIdx.x / OWN, line = threadIdx.x % OWN;
        if (turn >= turns % FLUSH + (turns % FLUSH ? 0 : FLUSH)) return;
        turn += (turns - 1) / FLUSH * FLUSH;
        int output = tile_of(turn) * OWN + line;
        if (output >= outputs) return;
        float result[GROUPS];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            float sum = 0.0f, one;
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    int column = (turn % FLUSH * GROUPS + group) * 8 + part * OWN + line;
                    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(one) : "r"(sums_at + (column * WARPS + w) * 4) : "memory");
                    sum += one;
                }
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(one) : "r"(scales_at + (turn % FLUSH * LINES + group * OWN + line) * 4) : "memory");
            sum *= one * x_factor;
#if BIAS == 3
            sum += ((const float*)bias)[output];
#elif BIAS
            sum += wide_of<BIAS - 1>(((const u16*)bias)[output]);
#endif
            result[group] = sum;
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
    };
    int stage = 0, parity = 0, turn = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile = tile_of(++turn)) {
        if (turn && turn % FLUSH == 0) {
            flush(turn);
            __syncthreads();
        }
        ask_scales(turn, tile);
        float sums[GROUPS][2][4];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[group][i / 4][i % 4] = 0.0f;
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
            wait_for(barriers + 8 * stage, parity);
#pragma unroll
            for (int i = 0; i < STEPS * 2; ++i) {
                const unsigned* b = factor[load * STEPS * 2 + i];
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    unsigned at = from + stage * STAGE_BYTES + group * GROUP_BYTES + i / 2 * 1024;
                    uint4 w = load_pieces(at + ((i % 2 * 4 + place) ^ piece) * 16);
                    multiply_16<1>(sums[group][0], widened(w.x), widened_upper(w.x), widened(w.y), widened_upper(w.y), b[0], b[1]);
                    multiply_16<1>(sums[group][1], widened(w.z), widened_upper(w.z), widened(w.w), widened_upper(w.w), b[2], b[3]);
                }
            }
            __syncwarp();
            if (lane == 0) ask(stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            float sum = (sums[group][0][0] + sums[group][1][0]) + (sums[group][0][3] + sums[group][1][3]);
            if (place == piece / OWN) store_shared(sums_at + (((turn % FLUSH * GROUPS + group) * 8 + piece) * WARPS + warp) * 4, sum);
        }
    }
    flush(turn);
}
