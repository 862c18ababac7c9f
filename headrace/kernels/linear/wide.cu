// Products of up to 64 rows with a weight, y^T = W x^T, for Hopper GPUs (sm_90a), compiled by NVRTC.
//
// A block makes TILE outputs. SPLIT of them, a cluster, share the channels of a tile and add up their sums in their order, by way
// of their shared memory. One warp asks the tensor memory accelerator for weights and rows in a ring of STAGES steps, four
// multiply them. The first weights are asked for before the kernel before is complete (programmatic dependent launch).
//
// An instruction takes 64 lines of weights. Where TILE is less, they are several runs of the channels of the same outputs,
// multiplied by the rows of all of these runs: a quarter or half of what it sums up is what is wanted.
//
// Constants: KIND of weight and x (0 bfloat16, 1 float16, 2 e4m3), ROWS (8, 16, 32 or 64), TILE (16, 32 or a multiple of 64), SPLIT (1 to 8),
// LINES (128 bytes of channels of each line of an instruction a step), STAGES, Y_KIND (0 bfloat16, 1 float16, 2 float32),
// BIAS (0 none, 1 bfloat16, 2 float16, 3 float32), GATED (1: the weight is a gate's, then as many outputs of an up projection,
// and y is silu(gate) up; TILE, at least 64, is lines of both, SPLIT 1 and BIAS 0), ADAPTED (1: what adapters add joins the sums;
// 0), RESIDENT (blocks that a multiprocessor is to have at a time), ORDERED (1: channels are cut into as many splits as a tile has
// runs and blocks, of `steps` steps each, which are added in their order, so that sums depend on their number alone; 0).
#define PACKED_KIND Y_KIND
#include "hopper.cuh"

#ifndef ADAPTED
#define ADAPTED 0
#define RESIDENT (TILE > 128 ? 1 : 3)
#endif
#ifndef ORDERED
#define ORDERED 0
#endif

#if TILE < 64
#define SIZE (ROWS * 64 / TILE)
#else
#define SIZE ROWS
#endif
constexpr int THREADS = ADAPTED ? 288 : 160;
constexpr int FOLD = TILE < 64 ? 64 / TILE : 1;  // runs of channels side by side in an instruction
constexpr int HEIGHT = TILE < 64 ? 1 : TILE / 64;  // instructions that cover a tile
constexpr int WIDTH = SIZE;  // of an instruction
constexpr int BLOCKS = ROWS / 8;
constexpr int SUMS = WIDTH / 2;  // of a thread and an instruction
constexpr int OUTPUTS = GATED ? TILE / 2 : TILE;  // of y
constexpr int WEIGHT_BYTES = HEIGHT * 8192;
constexpr int X_BYTES = WIDTH * 128;
constexpr int STAGE_BYTES = LINES * (WEIGHT_BYTES + X_BYTES);
constexpr int LINE_CHANNELS = KIND == 2 ? 128 : 64;
constexpr int SIXTEEN_BYTES = HEIGHT * 2048;  // 16 of B's columns
constexpr int LINE_SIXTEENS = FOLD * 4, STEP_SIXTEENS = LINES * LINE_SIXTEENS;
static_assert(WIDTH <= 64 && (!GATED || (TILE >= 64 && SPLIT == 1)), "sizes");

#if KIND == 0
#define INPUTS_16 "k16.f32.bf16.bf16"
#define MAJORS ", 0, 0"
#elif KIND == 1
#define INPUTS_16 "k16.f32.f16.f16"
#define MAJORS ", 0, 0"
#else
#define INPUTS_16 "k32.f32.e4m3.e4m3"
#define MAJORS ""
#endif
// Adds the product of 64 lines and WIDTH rows over 32 bytes of channels to the sums, or puts it in their place.
template <bool ADD>
__device__ __forceinline__ void multiply(float (&d)[SUMS], u64 weight, u64 x) {
#if SIZE == 8
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8" INPUTS_16 " {%0, %1, %2, %3}, %4, %5, p, 1, 1" MAJORS ";\n}\n"
        : D4(d, 0) : "l"(weight), "l"(x), "n"(ADD ? 1 : 0));
#elif SIZE == 16
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16" INPUTS_16 " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1" MAJORS ";\n}\n"
        : D4(d, 0), D4(d, 4) : "l"(weight), "l"(x), "n"(ADD ? 1 : 0));
#elif SIZE == 32
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32" INPUTS_16 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, p, 1, 1" MAJORS ";\n}\n"
        : D16(d, 0) : "l"(weight), "l"(x), "n"(ADD ? 1 : 0));
#else
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64" INPUTS_16 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1" MAJORS ";\n}\n"
        : D16(d, 0), D16(d, 16) : "l"(weight), "l"(x), "n"(ADD ? 1 : 0));
#endif
}

// The warps that multiply wait for each other.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

__device__ __forceinline__ float bias_of(const void* bias, int output) {
#if BIAS == 1
    return __uint_as_float((unsigned)((const unsigned short*)bias)[output] << 16);
#elif BIAS == 2
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(((const unsigned short*)bias)[output]));
    return wide;
#elif BIAS == 3
    return ((const float*)bias)[output];
#else
    return 0.0f;
#endif
}

// Rounds to y's type.
__device__ __forceinline__ float rounded(float value) {
    [[maybe_unused]] unsigned short bits;
#if Y_KIND == 0
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return __uint_as_float((unsigned)bits << 16);
#elif Y_KIND == 1
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
#endif
    return value;
}

__device__ __forceinline__ float gated(float gate, float up) { return rounded(silu(rounded(gate))) * rounded(up); }

// Stores up to eight outputs of a row from `output` on.
__device__ __forceinline__ void store_eight(void* y, const float* sums, int row, int output, int out) {
    long long at = (long long)row * out + output;
    int present = out - output < 8 ? out - output : 8;
#if Y_KIND == 2
    float* place = (float*)y + at;
    if (present == 8 && !(out & 3)) {
        ((float4*)place)[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
        ((float4*)place)[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < present) place[i] = sums[i];
#else
    unsigned short* place = (unsigned short*)y + at;
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = packed(sums[2 * i], sums[2 * i + 1]);
    if (present == 8 && !(out & 7)) {
        *(uint4*)place = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < present) place[i] = (unsigned short)(pairs[i / 2] >> i % 2 * 16);
#endif
}

#if ADAPTED
#include "wide_adapted.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) wide_product(
    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, void* y, const void* bias,
    const float* x_scales, const float* weight_scales, int rows, int out, int steps
#if ADAPTED
    , const __grid_constant__ TensorMap b, const unsigned short* adapted_x, const unsigned short* a, const int* places, float* shares,
    unsigned* cells, long long x_row, long long a_place, int inputs, int adapter_rank, int parts, int end_0, int end_1, int workers
#endif
) {
    extern __shared__ char memory[];
    unsigned base = (shared_address(memory) + 1023) & ~1023u;
    unsigned full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, first_output = blockIdx.x / SPLIT * OUTPUTS;
#if ORDERED
    int count = steps;
    auto channel_of = [&](int unit, int line, int run) { return (((rank * FOLD + run) * steps + unit) * LINES + line) * LINE_CHANNELS; };
#else
    int begin = steps * rank / SPLIT, count = steps * (rank + 1) / SPLIT - begin;
    auto channel_of = [&](int unit, int line, int run) { return (((begin + unit) * LINES + line) * FOLD + run) * LINE_CHANNELS; };
#endif

    u64 once, often;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
    auto load_weight = [&](int unit, unsigned to, unsigned barrier) {
#pragma unroll
        for (int l = 0; l < LINES; ++l)
#pragma unroll
            for (int f = 0; f < FOLD; ++f) {
                unsigned place = to + l * WEIGHT_BYTES + f * (TILE * 128);
                load_tile(place, weight, barrier, channel_of(unit, l, f), first_output, once);
                if (GATED) load_tile(place + OUTPUTS * 128, weight, barrier, channel_of(unit, l, f), out + first_output, once);
            }
    };
    auto load_x = [&](int unit, unsigned to, unsigned barrier) {
#pragma unroll
        for (int l = 0; l < LINES; ++l)
#pragma unroll
            for (int f = 0; f < FOLD; ++f)
                load_tile(
                    to + LINES * WEIGHT_BYTES + (l * FOLD + f) * (ROWS * 128), x, barrier, channel_of(unit, l, f), 0, often);
    };
    int ahead = count < STAGES ? count : STAGES;
#if ADAPTED
    __shared__ u64 barriers[2 * STAGES];
    [[maybe_unused]] unsigned turns = shared_address(barriers), lows = turns + 8 * STAGES;
    int own_row = threadIdx.x & 31;
    int first_place = own_row < rows ? places[own_row] : -1, second_place = own_row + 32 < rows ? places[own_row + 32] : -1;
#endif
    if (threadIdx.x == 128) {
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        for (int s = 0; s < STAGES; ++s) {
            init_barrier<1>(full + 8 * s);
            init_barrier<4>(empty + 8 * s);
#if ADAPTED
            init_barrier<1>(turns + 8 * s);
            init_barrier<4>(turns + 8 * (STAGES + s));
#endif
        }
        publish_barriers();
        for (int unit = 0; unit < ahead; ++unit) {
            unsigned barrier = full + 8 * unit;
            expect(barrier, STAGE_BYTES);
            load_weight(unit, base + unit * STAGE_BYTES, barrier);
        }
    }
    __syncwarp();
    int added = 0;
#if ADAPTED
    // B's columns are for the last block of those that share channels.
    Columns columns(first_place, second_place, adapter_rank);
    if (rank == SPLIT - 1) added = columns.steps();
    int part = GATED ? 0 : (first_output >= end_0) + (first_output >= end_1);
    if (threadIdx.x >= 160) {
        Adapters given{adapted_x, a, shares, cells, x_row, a_place, inputs, adapter_rank, parts, workers};
        int units = multiply_by_a(given, columns, first_place, second_place, rows);
        if (!added) return;
        asm volatile("griddepcontrol.wait;" ::: "memory");
        if (threadIdx.x == 160) {
            unsigned made;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(made) : "l"(cells + MADE) : "memory");
            } while (made < units);
        }
        // All of these warps know it, and the barriers are there.
        asm volatile("bar.sync 3, 288;" ::: "memory");
        put_products(given, columns, first_place, second_place, rows, part, count, base, turns, lows);
        if (threadIdx.x == 160) {
            // The last to know leaves the cells as they were.
            unsigned before;
            asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(cells + KNOWN) : "memory");
            if (before == gridDim.x / SPLIT - 1) cells[MADE] = cells[KNOWN] = 0;
        }
        return;
    }
#endif
    asm volatile("bar.sync 0, 160;" ::: "memory");
    if (ADAPTED) asm volatile("bar.arrive 3, 288;" ::: "memory");

    if (threadIdx.x >= 128) {
        if (threadIdx.x > 128) return;
        asm volatile("griddepcontrol.wait;" ::: "memory");
        for (int unit = 0; unit < ahead; ++unit) load_x(unit, base + unit * STAGE_BYTES, full + 8 * unit);
        int stage = 0;
        unsigned parity = 0;
        for (int unit = ahead; unit < count; ++unit) {
            unsigned to = base + stage * STAGE_BYTES, barrier = full + 8 * stage;
            wait_for(empty + 8 * stage, parity);
            expect(barrier, STAGE_BYTES);
            load_weight(unit, to, barrier);
            load_x(unit, to, barrier);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
#if ADAPTED
        u64 rest = columns.used;
        int at = 0;
        for (int unit = count; unit < count + added; ++unit) {
            stage = unit % STAGES;
            unsigned to = base + stage * STAGE_BYTES, barrier = full + 8 * stage, bytes = 0;
            for (int l = 0; l < LINES; ++l) bytes += columns.instructions(unit - count, l) * SIXTEEN_BYTES;
            if (unit >= STAGES) wait_for(empty + 8 * stage, unit / STAGES - 1 & 1);
            arrive(turns + 8 * stage);
            expect(barrier, bytes);
            for (int l = 0; l < LINES; ++l)
                for (int k = 0; k < columns.instructions(unit - count, l); ++k)
                    for (int f = 0; f < FOLD; ++f, ++at) {
                        // Columns behind the last are outside of B: zeros. So is each part's half of the other part's columns.
                        int column = at < columns.all ? at / columns.present % columns.of_place * 16 : 1 << 20, place = __ffsll(rest) - 1;
                        unsigned tile = to + l * WEIGHT_BYTES + k * SIXTEEN_BYTES + f * (TILE * 32);
                        bool second = at >= columns.of_part;
                        load_cube(tile, b, barrier, GATED && second ? 1 << 20 : column, first_output, place, once);
                        if (GATED)
                            load_cube(tile + OUTPUTS * 32, b, barrier, second ? column : 1 << 20, out + first_output, place, once);
                        rest &= rest - 1;
                        if (!rest) rest = columns.used;
                    }
        }
#endif
        return;
    }

    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    // What this thread will finish: eight outputs of some rows.
    constexpr int EIGHTS = OUTPUTS / 8, AT_ONCE = 128 / EIGHTS, SHARE = (ROWS + SPLIT - 1) / SPLIT, MINE = (SHARE + AT_ONCE - 1) / AT_ONCE;
    int output = threadIdx.x % EIGHTS * 8, first_row = rank * SHARE + threadIdx.x / EIGHTS;
    int last_row = (rank + 1) * SHARE < ROWS ? (rank + 1) * SHARE : ROWS;
    auto mine = [&](int row) { return row < last_row && threadIdx.x < AT_ONCE * EIGHTS; };
    [[maybe_unused]] float factor[8], more[8], tall[MINE];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        int at = first_output + output + i;
        factor[i] = KIND == 2 && at < out ? weight_scales[at] : 0.0f;
        more[i] = BIAS && at < out ? bias_of(bias, at) : 0.0f;
    }
    // What the kernel before has written is read behind this alone.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        int row = first_row + i * AT_ONCE;
        tall[i] = KIND == 2 && row < rows ? x_scales[row] : 0.0f;
    }
    int stage = 0;
    unsigned parity = 0;
    float sums[HEIGHT][SUMS];
#pragma unroll
    for (int t = 0; t < HEIGHT; ++t)
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[t][i] = 0.0f;
    for (int unit = 0; unit < count; ++unit) {
        unsigned from = base + stage * STAGE_BYTES;
        wait_for(full + 8 * stage, parity);
#if KIND == 2
        // The matrix units keep about 14 bits of a sum: those of 128 channels are added outside of them.
#pragma unroll
        for (int l = 0; l < LINES; ++l)
#pragma unroll
            for (int t = 0; t < HEIGHT; ++t) {
                float part[SUMS];
                u64 left_side = descriptor(from + l * WEIGHT_BYTES + t * 8192);
                u64 right_side = descriptor(from + LINES * WEIGHT_BYTES + l * X_BYTES);
                begin_multiplying();
                multiply<false>(part, left_side, right_side);
#pragma unroll
                for (int k = 1; k < 4; ++k) multiply<true>(part, left_side + 2 * k, right_side + 2 * k);
                commit();
                wait_multiplied();
                settle(part);
#pragma unroll
                for (int i = 0; i < SUMS; ++i) sums[t][i] += part[i];
            }
#else
#pragma unroll
        for (int t = 0; t < HEIGHT; ++t) settle(sums[t]);
        begin_multiplying();
#pragma unroll
        for (int l = 0; l < LINES; ++l)
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int t = 0; t < HEIGHT; ++t)
                    multiply<true>(
                        sums[t], descriptor(from + l * WEIGHT_BYTES + t * 8192) + 2 * k,
                        descriptor(from + LINES * WEIGHT_BYTES + l * X_BYTES) + 2 * k);
        commit();
        // Not one step later, which arrives only then, where the memory is what the block waits for.
        wait_multiplied();
#pragma unroll
        for (int t = 0; t < HEIGHT; ++t) settle(sums[t]);
#endif
        if (lane == 0) arrive(empty + 8 * stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
#if ADAPTED
    for (int step = 0; step < added; ++step) {
        unsigned from = base + stage * STAGE_BYTES;
        wait_for(full + 8 * stage, parity);
        wait_for(lows + 8 * stage, step / STAGES & 1);
#pragma unroll
        for (int t = 0; t < HEIGHT; ++t) settle(sums[t]);
        begin_multiplying();
#pragma unroll
        for (int l = 0; l < LINES; ++l)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                // Columns that there are not are the first ones, multiplied by zeros.
                unsigned left_side = from + (k < columns.instructions(step, l) ? l * WEIGHT_BYTES + k * SIXTEEN_BYTES : 0);
#pragma unroll
                for (int t = 0; t < HEIGHT; ++t)
                    multiply<true>(
                        sums[t], narrow_descriptor(left_side + t * 2048), descriptor(from + LINES * WEIGHT_BYTES + l * X_BYTES) + 2 * k);
            }
        commit();
        wait_multiplied();
#pragma unroll
        for (int t = 0; t < HEIGHT; ++t) settle(sums[t]);
        if (lane == 0) arrive(empty + 8 * stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
#endif
    // Sums go through the memory of the ring, which is not needed any more: rows of a tile's outputs, for each run of channels.
    // With four more numbers a row, the warp's 32 sums stand in as many banks.
    constexpr int PITCH = 4 * (TILE + 4), RUN = ROWS * PITCH, GROUPS = TILE / 16;
    static_assert(FOLD * RUN <= STAGES * STAGE_BYTES, "the ring is too small for the sums");
    meet();
    int run = FOLD == 1 ? 0 : warp / GROUPS;
    unsigned own = base + run * RUN + (FOLD == 1 ? warp : warp % GROUPS) * 64 + (lane >> 2) * 4 + (lane & 3) * 2 * PITCH;
#pragma unroll
    for (int t = 0; t < HEIGHT; ++t)
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float sum = sums[t][4 * b + i];
#pragma unroll
                for (int f = 1; f < FOLD; ++f) sum = run == f ? sums[t][4 * (f * BLOCKS + b) + i] : sum;
                store_shared(own + (b * 8 + i % 2) * PITCH + t * 256 + i / 2 * 32, sum);
            }
    if (SPLIT > 1) {
        arrive_cluster();
        wait_cluster();
    } else {
        meet();
    }
    constexpr int HALVES = GATED ? 4 : 2;
    float values[MINE][SPLIT * FOLD][4 * HALVES];
#pragma unroll
    for (int i = 0; i < MINE; ++i)
#pragma unroll
        for (int s = 0; s < SPLIT * FOLD; ++s)
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                int row = first_row + i * AT_ONCE;
                unsigned place = base + s % FOLD * RUN + row * PITCH + output * 4 + h % 2 * 16 + h / 2 * OUTPUTS * 4;
                if (mine(row)) load_shared(&values[i][s][4 * h], place_of(place, s / FOLD));
            }
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
#pragma unroll
        for (int s = 1; s < SPLIT * FOLD; ++s)
#pragma unroll
            for (int j = 0; j < 4 * HALVES; ++j) values[i][0][j] += values[i][s][j];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float& sum = values[i][0][j];
            if (KIND == 2) sum *= factor[j] * tall[i];
            if (BIAS) sum += more[j];
            if (GATED) sum = gated(sum, values[i][0][(8 + j) % (4 * HALVES)]);
            // What was loaded has come before the block says so.
            asm volatile("" : "+f"(sum) :: "memory");
        }
    }
    // No block ends while others read its memory.
    if (SPLIT > 1) arrive_cluster();
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        int row = first_row + i * AT_ONCE;
        if (mine(row) && row < rows && first_output + output < out)
            store_eight(y, values[i][0], row, first_output + output, out);
    }
    if (SPLIT > 1) wait_cluster();
}
