// Products in e4m3 of tiles of up to 32 tokens with their experts' weights, for Hopper GPUs (sm_90a), compiled by NVRTC.
//
// A block makes the outputs of LINES lines of an expert's weight for the rows of a tile. One warp asks the tensor memory
// accelerator for weights and rows in a ring of STAGES steps of 128 bytes of channels, four multiply them. The second product asks
// for its first weights while the first still runs (programmatic dependent launch): blocks of the first let it start when they
// know the tiles, and so it knows them too.
//
// Constants: FIRST (1: the first product, of tokens' rows with a gate and an up, and y is silu(gate) up, by place in the order; 0: the
// second, of rows by place, and y is its output times a factor, by choice), ROWS (of a tile: 8, 16 or 32), TABLED (0: each choice is
// a tile, whose expert ``order`` has), LINES (a multiple of 64; of FIRST half of them are the gate's, half the up's), STAGES, Y_KIND
// (0 bfloat16, 1 float16), TOP_K, EXPERTS.

#define PACKED_KIND Y_KIND
#include "hopper.cuh"

constexpr int THREADS = 160, HEIGHT = LINES / 64, SUMS = ROWS / 2, OUTPUTS = FIRST ? LINES / 2 : LINES;
constexpr int WEIGHT_BYTES = LINES * 128, STAGE_BYTES = WEIGHT_BYTES + ROWS * 128;

// Adds the product of 64 lines and the rows over 32 bytes of channels to the sums, or puts it in their place.
template <bool ADD>
__device__ __forceinline__ void multiply(float (&d)[SUMS], u64 weight, u64 x) {
#if ROWS == 8
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, p, 1, 1;\n}\n"
        : D4(d, 0) : "l"(weight), "l"(x), "n"(ADD ? 1 : 0));
#elif ROWS == 16
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1;\n}\n"
        : D4(d, 0), D4(d, 4) : "l"(weight), "l"(x), "n"(ADD ? 1 : 0));
#else
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, p, 1, 1;\n}\n"
        : D16(d, 0) : "l"(weight), "l"(x), "n"(ADD ? 1 : 0));
#endif
}

// The warps that multiply wait for each other.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// Rounds to y's type.
__device__ __forceinline__ float rounded(float value) {
    unsigned short bits;
#if Y_KIND == 0
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return __uint_as_float((unsigned)bits << 16);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

__device__ __forceinline__ float gated(float gate, float up) { return rounded(silu(rounded(gate))) * rounded(up); }

extern "C" __global__ void __launch_bounds__(THREADS) expert_product(
    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const int4* table, const int* order,
    const float* x_scales, const float* weight_scales, const float* factors, unsigned short* y, int tiles, int out, int steps
) {
    extern __shared__ char memory[];
    unsigned base = ((unsigned)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
    unsigned full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    int tile = blockIdx.x % tiles, first_output = blockIdx.x / tiles * OUTPUTS, height = FIRST ? 2 * out : out;
    if (FIRST) {
        // The tiles are known, and the next product may begin.
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    } else {
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    int expert, first = tile, used = 1;
    if (TABLED) {
        int4 own = __ldcg(table + tile);
        expert = own.x, first = own.y, used = own.z - own.y < ROWS ? own.z - own.y : ROWS;
    } else {
        expert = __ldcg(order + tile);
    }
    if (expert == EXPERTS) return;
    auto choice_at = [&](int row) { return TABLED ? __ldcg(order + first + row) : tile; };
    int ahead = steps < STAGES ? steps : STAGES, line = expert * height + first_output;

    if (threadIdx.x >= 128) {
        int lane = threadIdx.x - 128;
        u64 once, often;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
        auto load_weight = [&](int step, unsigned to, unsigned barrier) {
            expect(barrier, WEIGHT_BYTES + (FIRST ? used : ROWS) * 128);
            load_tile(to, weight, barrier, step * 128, line, once);
            if (FIRST) load_tile(to + OUTPUTS * 128, weight, barrier, step * 128, line + out, once);
        };
        if (lane == 0) {
            for (int s = 0; s < STAGES; ++s) {
                init_barrier<1>(full + 8 * s);
                init_barrier<4>(empty + 8 * s);
            }
            publish_barriers();
            for (int step = 0; step < ahead; ++step) load_weight(step, base + step * STAGE_BYTES, full + 8 * step);
        }
        __syncwarp();
        asm volatile("bar.arrive 2, 160;" ::: "memory");
        if (!FIRST) asm volatile("griddepcontrol.wait;" ::: "memory");
        int row = FIRST && lane < used ? choice_at(lane) / TOP_K : first;
        auto load_x = [&](int step, unsigned to, unsigned barrier) {
            if (FIRST ? lane < used : lane == 0)
                load_tile(to + WEIGHT_BYTES + (FIRST ? lane * 128 : 0), x, barrier, step * 128, row, often);
        };
        for (int step = 0; step < ahead; ++step) load_x(step, base + step * STAGE_BYTES, full + 8 * step);
        int stage = 0;
        unsigned parity = 0;
        for (int step = ahead; step < steps; ++step) {
            unsigned to = base + stage * STAGE_BYTES, barrier = full + 8 * stage;
            wait_for(empty + 8 * stage, parity);
            if (lane == 0) load_weight(step, to, barrier);
            __syncwarp();
            load_x(step, to, barrier);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        return;
    }

    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    // What this thread will finish: eight outputs of some rows.
    constexpr int EIGHTS = OUTPUTS / 8, AT_ONCE = 128 / EIGHTS, MINE = (ROWS + AT_ONCE - 1) / AT_ONCE, HALVES = FIRST ? 2 : 1;
    int output = threadIdx.x % EIGHTS * 8, first_row = threadIdx.x / EIGHTS;
    float factor[HALVES][8], tall[MINE];
    const float* from = weight_scales + line + output;
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            float4 four = __ldg((const float4*)(from + h * out + i));
            factor[h][i] = four.x, factor[h][i + 1] = four.y, factor[h][i + 2] = four.z, factor[h][i + 3] = four.w;
        }
    asm volatile("bar.sync 2, 160;" ::: "memory");
    // What the kernel before has written is read behind this alone.
    if (!FIRST) asm volatile("griddepcontrol.wait;" ::: "memory");
    int choice[MINE];
    float share[MINE];
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        int row = first_row + i * AT_ONCE;
        bool mine = row < used;
        choice[i] = mine ? choice_at(row) : 0;
        share[i] = FIRST || !mine ? 1.0f : __ldcg(factors + choice[i]);
        tall[i] = mine ? __ldcg(x_scales + (FIRST ? choice[i] / TOP_K : first + row)) : 1.0f;
    }
    int stage = 0;
    unsigned parity = 0;
    float sums[HEIGHT][SUMS];
#pragma unroll
    for (int t = 0; t < HEIGHT; ++t)
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[t][i] = 0.0f;
    for (int step = 0; step < steps; ++step) {
        unsigned from = base + stage * STAGE_BYTES;
        wait_for(full + 8 * stage, parity);
        // The matrix units keep about 14 bits of a sum: those of 128 channels are added outside of them.
        float part[HEIGHT][SUMS];
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int t = 0; t < HEIGHT; ++t) {
            u64 left_side = descriptor(from + t * 8192), right_side = descriptor(from + WEIGHT_BYTES);
            multiply<false>(part[t], left_side, right_side);
#pragma unroll
            for (int k = 1; k < 4; ++k) multiply<true>(part[t], left_side + 2 * k, right_side + 2 * k);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int t = 0; t < HEIGHT; ++t) {
            settle(part[t]);
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[t][i] += part[t][i];
        }
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(empty + 8 * stage) : "memory");
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    // Sums go through the memory of the ring, which is not needed any more: rows of a tile's lines. With four more numbers a
    // row, the warp's 32 sums stand in as many banks.
    constexpr int PITCH = 4 * (LINES + 4);
    static_assert(ROWS * PITCH <= STAGES * STAGE_BYTES, "the ring is too small for the sums");
    meet();
    unsigned place = base + warp * 64 + (lane >> 2) * 4 + (lane & 3) * 2 * PITCH;
#pragma unroll
    for (int t = 0; t < HEIGHT; ++t)
#pragma unroll
        for (int i = 0; i < SUMS; ++i)
            asm volatile("st.shared.f32 [%0], %1;"
                         :: "r"(place + (i / 4 * 8 + i % 2) * PITCH + t * 256 + i % 4 / 2 * 32), "f"(sums[t][i]) : "memory");
    meet();
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        int row = first_row + i * AT_ONCE;
        if (row >= used) break;
        float values[HALVES][8];
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
#pragma unroll
            for (int j = 0; j < 8; j += 4)
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                    : "=f"(values[h][j]), "=f"(values[h][j + 1]), "=f"(values[h][j + 2]), "=f"(values[h][j + 3])
                    : "r"(base + row * PITCH + (h * OUTPUTS + output + j) * 4) : "memory");
        float result[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int h = 0; h < HALVES; ++h) values[h][j] *= factor[h][j] * tall[i];
            result[j] = FIRST ? gated(values[0][j], values[HALVES - 1][j]) : rounded(values[0][j]) * share[i];
        }
        long long at = (long long)(FIRST ? first + row : choice[i]) * out + first_output + output;
        *(uint4*)(y + at) = make_uint4(
            packed(result[0], result[1]), packed(result[2], result[3]), packed(result[4], result[5]), packed(result[6], result[7]));
    }
}
