// Products of 65 to 256 rows with a weight in 16 bits, y^T = W x^T, for Hopper GPUs (sm_90a), compiled by NVRTC.
//
// As wide.cu, whose rows are fewer, with a ring for weights and another for rows, which a warp each asks the tensor memory
// accelerator for, and GROUPS groups of four warps that multiply, each a part of a tile's outputs by all rows.
//
// Constants: KIND (0 bfloat16, 1 float16), ROWS (96 to 256, a multiple of 32), TILE (64 times GROUPS), GROUPS, SPLIT (blocks of a cluster,
// which share the channels of a tile), STAGES (of weights, in steps of 128 bytes), X_STAGES, LAG (1: an instruction's step is free when the next one's
// is multiplied), REGISTERS (of a thread that multiplies, where these are more than the launch gives to all; else 0), GATED (1: the
// weight is a gate's, then as many outputs of an up projection, and y is silu(gate) up; TILE is lines of both, and SPLIT is 1).

#define PACKED_KIND KIND
#include "hopper.cuh"

#if ROWS > 128
#define INSTRUCTION (ROWS / 2)
#else
#define INSTRUCTION ROWS
#endif
constexpr int WORKERS = 128 * GROUPS, THREADS = WORKERS + (REGISTERS ? 128 : 64);
constexpr int PARTS = ROWS / INSTRUCTION;  // instructions that cover the rows
constexpr int SUMS = INSTRUCTION / 2;  // of a thread and an instruction
constexpr int OUTPUTS = GATED ? TILE / 2 : TILE;  // of y
constexpr int WEIGHT_BYTES = TILE * 128, X_BYTES = ROWS * 128;  // of a step
constexpr int RING = STAGES * WEIGHT_BYTES + X_STAGES * X_BYTES;
static_assert(TILE == 64 * GROUPS && (!GATED || SPLIT == 1), "sizes");

#if KIND == 1
#define INPUTS "k16.f32.f16.f16"
#else
#define INPUTS "k16.f32.bf16.bf16"
#endif
// Adds the product of 64 lines and INSTRUCTION rows over 32 bytes of channels to the sums.
__device__ __forceinline__ void multiply(float (&d)[SUMS], u64 weight, u64 x) {
#if INSTRUCTION == 80
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n80" INPUTS " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
        "}, %40, %41, p, 1, 1, 0, 0;\n}\n"
        : D16(d, 0), D16(d, 16), D4(d, 32), D4(d, 36) : "l"(weight), "l"(x));
#elif INSTRUCTION == 96
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n96" INPUTS " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
        "}, %48, %49, p, 1, 1, 0, 0;\n}\n"
        : D16(d, 0), D16(d, 16), D16(d, 32) : "l"(weight), "l"(x));
#elif INSTRUCTION == 112
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n112" INPUTS " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55"
        "}, %56, %57, p, 1, 1, 0, 0;\n}\n"
        : D16(d, 0), D16(d, 16), D16(d, 32), D4(d, 48), D4(d, 52) : "l"(weight), "l"(x));
#else
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n128" INPUTS " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
        : D16(d, 0), D16(d, 16), D16(d, 32), D16(d, 48) : "l"(weight), "l"(x));
#endif
}

__device__ __forceinline__ void wait_lagging() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LAG) : "memory"); }

// The compiler moves no use of the sums past this: it does not know that they are written until the wait is over.
__device__ __forceinline__ void settle(float (&d)[PARTS][SUMS]) {
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(d[p][i]) :: "memory");
}

// The warps that multiply wait for each other.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" :: "n"(WORKERS) : "memory"); }

// Rounds to y's type.
__device__ __forceinline__ float rounded(float value) { return wide_of<KIND>(packed(value, 0.0f) & 0xFFFF); }

__device__ __forceinline__ float gated(float gate, float up) { return rounded(silu(rounded(gate))) * rounded(up); }

extern "C" __global__ void __launch_bounds__(THREADS, 1) rows_product(
    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, unsigned short* y, int rows, int out, int steps
) {
    extern __shared__ char memory[];
    unsigned base = (shared_address(memory) + 1023) & ~1023u, x_base = base + STAGES * WEIGHT_BYTES;
    unsigned full = base + RING, empty = full + 8 * STAGES, x_full = empty + 8 * STAGES, x_empty = x_full + 8 * X_STAGES;
    int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, first_output = blockIdx.x / SPLIT * OUTPUTS;
    int begin = steps * rank / SPLIT, count = steps * (rank + 1) / SPLIT - begin;
    auto prepare = [&](unsigned filled, unsigned freed, int stages) {
        for (int s = 0; s < stages; ++s) {
            init_barrier<1>(filled + 8 * s);
            init_barrier<4 * GROUPS>(freed + 8 * s);
        }
        publish_barriers();
    };
    auto load_weight = [&](int unit, int stage, u64 policy) {
        unsigned to = base + stage * WEIGHT_BYTES, barrier = full + 8 * stage;
        int channel = (begin + unit) * 64;
        expect(barrier, WEIGHT_BYTES);
        load_tile(to, weight, barrier, channel, first_output, policy);
        if (GATED) load_tile(to + OUTPUTS * 128, weight, barrier, channel, out + first_output, policy);
    };
    u64 policy;
    int ahead = count < STAGES ? count : STAGES;
    if (threadIdx.x == WORKERS) {
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        prepare(full, empty, STAGES);
        for (int unit = 0; unit < ahead; ++unit) load_weight(unit, unit, policy);
    }
    if (threadIdx.x == WORKERS + 32) {
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
        prepare(x_full, x_empty, X_STAGES);
    }
    __syncwarp();
    __syncthreads();

    if (threadIdx.x >= WORKERS) {
#if REGISTERS
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#endif
        int stage = 0;
        unsigned parity = 0;
        if (threadIdx.x == WORKERS) {
            for (int unit = ahead; unit < count; ++unit) {
                wait_for(empty + 8 * stage, parity);
                load_weight(unit, stage, policy);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        } else if (threadIdx.x == WORKERS + 32) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int unit = 0; unit < count; ++unit) {
                // The first round finds all places free.
                wait_for(x_empty + 8 * stage, parity ^ 1);
                expect(x_full + 8 * stage, X_BYTES);
                load_tile(x_base + stage * X_BYTES, x, x_full + 8 * stage, (begin + unit) * 64, 0, policy);
                if (++stage == X_STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }

#if REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
#endif
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = warp / 4;
    // What the kernel before has written is read behind this alone, and what it reads is written.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int stage = 0, x_stage = 0;
    unsigned parity = 0, x_parity = 0;
    float sums[PARTS][SUMS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[p][i] = 0.0f;
    [[maybe_unused]] int last = -1, x_last = 0;
    settle(sums);
    for (int unit = 0; unit < count; ++unit) {
        u64 left_side = descriptor(base + stage * WEIGHT_BYTES + group * 8192), right_side = descriptor(x_base + x_stage * X_BYTES);
        wait_for(full + 8 * stage, parity);
        wait_for(x_full + 8 * x_stage, x_parity);
        if (!LAG) settle(sums);
        begin_multiplying();
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int p = 0; p < PARTS; ++p) multiply(sums[p], left_side + 2 * k, right_side + p * (INSTRUCTION * 8) + 2 * k);
        commit();
        wait_lagging();
        if (!LAG) {
            settle(sums);
            if (lane == 0) arrive(empty + 8 * stage), arrive(x_empty + 8 * x_stage);
        } else {
            if (lane == 0 && last >= 0) arrive(empty + 8 * last), arrive(x_empty + 8 * x_last);
            last = stage, x_last = x_stage;
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (++x_stage == X_STAGES) x_stage = 0, x_parity ^= 1;
    }
    wait_multiplied();
    settle(sums);
    // Sums go through the memory of the rings, which are not needed any more. With four more numbers a row, the warp's 32 sums stand
    // in as many banks.
    constexpr int PITCH = 4 * (TILE + 4);
    static_assert(ROWS * PITCH <= RING, "the rings are too small for the sums");
    meet();
    unsigned own = base + group * 256 + warp % 4 * 64 + (lane >> 2) * 4 + (lane & 3) * 2 * PITCH;
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int i = 0; i < SUMS; ++i)
            store_shared(own + (p * INSTRUCTION + i / 4 * 8 + i % 2) * PITCH + i % 4 / 2 * 32, sums[p][i]);
    if (SPLIT > 1) {
        arrive_cluster();
        wait_cluster();
    } else {
        meet();
    }
    // A thread finishes eight outputs of some rows.
    constexpr int EIGHTS = OUTPUTS / 8, AT_ONCE = WORKERS / EIGHTS, SHARE = ROWS / SPLIT, HALVES = GATED ? 4 : 2;
    int output = threadIdx.x % EIGHTS * 8, end = (rank + 1) * SHARE < rows ? (rank + 1) * SHARE : rows;
    if ((int)threadIdx.x < AT_ONCE * EIGHTS && first_output + output < out) {
#pragma unroll 2
        for (int row = rank * SHARE + threadIdx.x / EIGHTS; row < end; row += AT_ONCE) {
            float values[SPLIT][4 * HALVES];
#pragma unroll
            for (int s = 0; s < SPLIT; ++s)
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    unsigned place = base + row * PITCH + output * 4 + h % 2 * 16 + h / 2 * OUTPUTS * 4;
                    load_shared(&values[s][4 * h], SPLIT > 1 ? place_of(place, s) : place);
                }
            unsigned pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float two[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    two[i] = values[0][2 * j + i];
#pragma unroll
                    for (int s = 1; s < SPLIT; ++s) two[i] += values[s][2 * j + i];
                    if (GATED) two[i] = gated(two[i], values[0][(8 + 2 * j + i) % (4 * HALVES)]);
                }
                pairs[j] = packed(two[0], two[1]);
            }
            *(uint4*)(y + (long long)row * out + first_output + output) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
    // No block ends while others read its memory.
    if (SPLIT > 1) {
        arrive_cluster();
        wait_cluster();
    }
}
