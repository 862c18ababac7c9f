// Products of many rows with a weight, or silu(gate) up of them, for Hopper GPUs (sm_90a), compiled by NVRTC.
//
// Pairs of blocks, a cluster each and as many as the GPU holds, go through the tiles of y. A block's tile has ROWS rows by LINES
// lines of the weight, and the pair shares the lines: each block loads half of them for both. One thread
// asks the tensor memory accelerator for rows and lines in a ring of STAGES steps of 128 bytes; two groups of four warps multiply
// half of the rows each, a step ahead of what they wait for. They are not in step, so that one finishes a tile while the other
// multiplies.
//
// Tiles are as large as registers allow: power limits such products, and what moves through the GPU takes it. Pairs take tiles of
// `band` pairs of rows by turns before they go on to the next lines, so that those under way share rows and lines in the L2 cache.
//
// Adapters: B's columns in the places that any row of the pair has are further channels, in steps behind those of the weight. The
// groups put A's products of their rows beside them, with zeros in rows that have another place.
//
// Constants: KIND of weight, x and y (0 bfloat16, 1 float16), GATED (1: the weight is a gate's lines, then as many of an up
// projection, and half of a tile's are the gate's; 0: y is the product), ADAPTED (1: what adapters add joins the sums; 0).

#define PACKED_KIND KIND
#include "hopper.cuh"

#if GATED
#define INSTRUCTION "wgmma.mma_async.sync.aligned.m64n192"
#else
#define INSTRUCTION "wgmma.mma_async.sync.aligned.m64n256"
#endif
constexpr int ROWS = GATED ? 256 : 128, LINES = GATED ? 192 : 256, STAGES = 4;
constexpr int HEIGHT = ROWS / 128;  // instructions that cover the rows of a group
constexpr int X_BYTES = ROWS * 128, WEIGHT_BYTES = LINES * 128, STAGE_BYTES = X_BYTES + WEIGHT_BYTES;
constexpr int CHANNELS = 64;  // of a step
constexpr int OUTPUTS = GATED ? LINES / 2 : LINES;  // of a tile
constexpr int SUMS = LINES / 2;  // of a thread and an instruction

__device__ __forceinline__ void load_tile(unsigned to, const TensorMap& map, unsigned barrier, int channel, int line) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(to), "l"(&map), "r"(barrier), "r"(channel), "r"(line) : "memory");
}

// Loads to the same place in both blocks.
__device__ __forceinline__ void load_for_both(unsigned to, const TensorMap& map, unsigned barrier, int channel, int line) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(to), "l"(&map), "r"(barrier), "r"(channel), "r"(line), "h"((unsigned short)3) : "memory");
}

#if KIND == 1
#define INPUTS "k16.f32.f16.f16"
#else
#define INPUTS "k16.f32.bf16.bf16"
#endif
#define TEXT_96 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
// Adds the product of 64 rows and LINES lines over 32 bytes of channels to the sums, or puts it in their place.
__device__ __forceinline__ void multiply(float (&d)[SUMS], u64 x, u64 weight, int add) {
#if GATED
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n" INSTRUCTION INPUTS " {" TEXT_96 "}, %96, %97, p, 1, 1, 0, 0;\n}\n"
        : D16(d, 0), D16(d, 16), D16(d, 32), D16(d, 48), D16(d, 64), D16(d, 80) : "l"(x), "l"(weight), "r"(add));
#else
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n" INSTRUCTION INPUTS " {" TEXT_96 ", "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, p, 1, 1, 0, 0;\n}\n"
        : D16(d, 0), D16(d, 16), D16(d, 32), D16(d, 48), D16(d, 64), D16(d, 80), D16(d, 96), D16(d, 112)
        : "l"(x), "l"(weight), "r"(add));
#endif
}

__device__ __forceinline__ void unpack(unsigned both, float& low, float& high) {
#if KIND == 1
    asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}\n" : "=f"(low), "=f"(high) : "r"(both));
#else
    low = __uint_as_float(both << 16), high = __uint_as_float(both & 0xFFFF0000);
#endif
}

// silu(gate) up of two outputs: gate, up and the activation are rounded before the product is.
__device__ __forceinline__ unsigned gated(float gate0, float gate1, float up0, float up1) {
    float first, second;
    unsigned product;
    unpack(packed(gate0, gate1), first, second);
#if KIND == 1
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(packed(silu(first), silu(second))), "r"(packed(up0, up1)));
#else
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(packed(silu(first), silu(second))), "r"(packed(up0, up1)));
#endif
    return product;
}

// Each of four threads has two neighbouring outputs of four runs of eight; then each has all of one run.
__device__ __forceinline__ uint4 exchanged(unsigned a, unsigned b, unsigned c, unsigned d, int lane) {
    bool odd = lane & 1, upper = lane & 2;
    // First between neighbours, then between pairs.
    unsigned give = odd ? a : b, give2 = odd ? c : d;
    unsigned got = __shfl_xor_sync(0xFFFFFFFF, give, 1), got2 = __shfl_xor_sync(0xFFFFFFFF, give2, 1);
    // Runs a, c of an even thread and b, d of an odd one, from this thread and its neighbour.
    unsigned own = odd ? b : a, own2 = odd ? d : c;
    unsigned low = odd ? got : own, high = odd ? own : got, low2 = odd ? got2 : own2, high2 = odd ? own2 : got2;
    unsigned far = __shfl_xor_sync(0xFFFFFFFF, upper ? low : low2, 2), far2 = __shfl_xor_sync(0xFFFFFFFF, upper ? high : high2, 2);
    return upper ? make_uint4(far, far2, low2, high2) : make_uint4(low, high, far, far2);
}

#if ADAPTED
#include "adapted.cuh"

// What adapters add to a tile, by 16 of B's columns: of each place that the pair's rows have, of its parts in this tile.
struct Columns {
    u64 rest;  // of the places, as bits
    int sixteens, within, all;  // of a part, of a place, and those left

    __device__ __forceinline__ Columns(u64 used, int rank) : rest(used), sixteens((rank + 15) / 16), within(0) {
        all = __popcll(used) * sixteens * (GATED + 1);
    }
    __device__ __forceinline__ int place() const { return __ffsll(rest) - 1; }
    __device__ __forceinline__ int part() const { return within / sixteens; }
    __device__ __forceinline__ int column() const { return within % sixteens * 16; }
    __device__ __forceinline__ void next() {
        --all;
        if (++within == sixteens * (GATED + 1)) within = 0, rest &= rest - 1;
    }
};

constexpr int SIXTEEN_BYTES = LINES * 32, SIXTEENS = 4;  // of a step

__device__ __forceinline__ void load_columns(unsigned to, const TensorMap& map, unsigned barrier, int column, int line, int place) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;"
        :: "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(line), "r"(place), "h"((unsigned short)3) : "memory");
}
#endif

extern "C" __global__ void __launch_bounds__(384, 1) tall_product(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, void* y, int rows, int out, int steps, int band
#if ADAPTED
    , const __grid_constant__ TensorMap b, const unsigned short* low, const int* places, int adapter_rank, int parts, int end_0, int end_1
#endif
) {
    extern __shared__ char memory[];
    unsigned base = (shared_address(memory) + 1023) & ~1023u;
    unsigned full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    int group = threadIdx.x >> 7;
#if ADAPTED
    // Places that a pair's rows have, of two tiles by turns, with barriers: they are known, and are not needed any more. And the
    // same by the stage of a tile's last step.
    __shared__ u64 of_pair[2], turns[4], used[STAGES];
    unsigned known = shared_address(turns), taken = known + 16;
#endif

    int tall = (rows + 2 * ROWS - 1) / (2 * ROWS), wide = (out + OUTPUTS - 1) / OUTPUTS, tiles = tall * wide, pairs = gridDim.x / 2;
    auto find = [&](int tile, int& row, int& output) {
        int first = tile / (band * wide) * band, within = tile - first * wide;
        int height = tall - first < band ? tall - first : band;
        row = (first + within % height) * (2 * ROWS) + (int)rank * ROWS;
        output = within / height * OUTPUTS;
    };

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            init_barrier<1>(full + 8 * s);
            init_barrier<4>(empty + 8 * s);
        }
#if ADAPTED
        for (int i = 0; i < 4; ++i) init_barrier<1>(known + 8 * i);
#endif
        publish_barriers();
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");

    if (group == 0) {
        // 64512 registers in all.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(ADAPTED ? 40 : 24));
        if (threadIdx.x == 0) {
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            asm volatile("griddepcontrol.wait;" ::: "memory");
            int stage = 0, row, output;
            [[maybe_unused]] int count = 0;
            unsigned parity = 1;
            for (int tile = blockIdx.x / 2; tile < tiles; tile += pairs) {
                find(tile, row, output);
                int line = output + (int)rank * (GATED ? out : LINES / 2);
                for (int step = 0; step < steps; ++step) {
                    unsigned to = base + stage * STAGE_BYTES, barrier = full + 8 * stage;
                    wait_for(empty + 8 * stage, parity);
#if ADAPTED
                    if (step == steps - 1) {
                        wait_for(known + count % 2 * 8, count >> 1 & 1);
                        used[stage] = of_pair[count % 2];
                    }
#endif
                    expect(barrier, STAGE_BYTES);
                    load_for_both(to + X_BYTES + rank * (WEIGHT_BYTES / 2), weight, barrier, step * CHANNELS, line);
                    load_tile(to, x, barrier, step * CHANNELS, row);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
#if ADAPTED
                for (Columns columns(of_pair[count % 2], adapter_rank); columns.all;) {
                    unsigned to = base + stage * STAGE_BYTES + X_BYTES + rank * (SIXTEEN_BYTES / 2), barrier = full + 8 * stage;
                    int here = columns.all < SIXTEENS ? columns.all : SIXTEENS;
                    wait_for(empty + 8 * stage, parity);
                    expect(barrier, here * SIXTEEN_BYTES);
                    // Columns behind the last are outside of B: zeros. So is the half of a tile that is not the part's.
                    for (int k = 0; k < here; ++k, columns.next())
                        load_columns(
                            to + k * SIXTEEN_BYTES, b, barrier, GATED && columns.part() != rank ? 1 << 20 : columns.column(), line,
                            columns.place());
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
                arrive(taken + count++ % 2 * 8);
#endif
            }
        }
#if ADAPTED
        if (threadIdx.x >> 5 == 1) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            int count = 0, row, output;
            for (int tile = blockIdx.x / 2; tile < tiles; tile += pairs, ++count) {
                find(tile, row, output);
                Places found;
#pragma unroll 4
                for (int i = threadIdx.x & 31; i < 2 * ROWS; i += 32) {
                    int at = row - (int)rank * ROWS + i;
                    found.add(at < rows ? places[at] : -1);
                }
                u64 bits = found.of_warp();
                if (threadIdx.x == 32) {
                    wait_for(taken + count % 2 * 8, count >> 1 & 1 ^ 1);
                    of_pair[count % 2] = bits;
                    arrive(known + count % 2 * 8);
                }
            }
        }
#endif
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(ADAPTED ? 232 : 240));
        int own = group - 1, thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
        // The first threads of two warps tell a block each that a step's memory is free. What was read there needs no fence,
        // which would hold the group up: the products are complete.
        bool tells = lane == 0 && warp < 2;
        unsigned told;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(told) : "r"(empty), "r"(warp & 1));
        auto release = [&](int stage) {
            if (tells) asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(told + 8 * stage) : "memory");
        };
#if ADAPTED
        asm volatile("griddepcontrol.wait;" ::: "memory");
        constexpr int HALVES = HEIGHT;  // of 16 columns that a thread has of its row
        int own_row = thread % (ROWS / 2), first_half = thread / (ROWS / 2);
#endif
        float sums[HEIGHT][SUMS];
        int stage = 0, row, output;
        unsigned parity = 0;
        for (int tile = blockIdx.x / 2; tile < tiles; tile += pairs) {
            find(tile, row, output);
            int before = 0;
#if ADAPTED
            int at = row + own * (ROWS / 2) + own_row, place = at < rows ? places[at] : -1;
            u64 present = 0;
#endif
            for (int step = 0; step < steps; ++step) {
                unsigned from = base + stage * STAGE_BYTES;
                wait_for(full + 8 * stage, parity);
#if ADAPTED
                if (step == steps - 1) present = used[stage];
#endif
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                u64 mine = descriptor(from + own * (X_BYTES / 2)), lines = descriptor(from + X_BYTES);
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int t = 0; t < HEIGHT; ++t) multiply(sums[t], mine + t * 512 + 2 * k, lines + 2 * k, step | k);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (step) release(before);
                before = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
#if ADAPTED
            // A's products in two sixteens at a time, which are on their way while a step is multiplied.
            int part = GATED ? 0 : (output >= end_0) + (output >= end_1);
            Columns columns(present, adapter_rank);
            uint4 products[2][HALVES];
            int left = columns.all;
            auto load = [&] {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const unsigned short* numbers = low + ((long long)at * parts + part + columns.part()) * adapter_rank;
#pragma unroll
                    for (int h = 0; h < HALVES; ++h) {
                        int column = columns.column() + (first_half + h) * 8;
                        products[i][h] = make_uint4(0, 0, 0, 0);
                        if (columns.all && place == columns.place() && column < adapter_rank)
                            products[i][h] = *(const uint4*)(numbers + column);
                    }
                    if (columns.all) columns.next();
                }
            };
            load();
#endif
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            release(before);
#if ADAPTED
            while (left) {
                unsigned from = base + stage * STAGE_BYTES, mine = from + own * (X_BYTES / 2);
                int count = left < SIXTEENS ? left : SIXTEENS;
                wait_for(full + 8 * stage, parity);
#pragma unroll
                for (int k = 0; k < SIXTEENS; k += 2) {
                    if (k >= count) break;
                    if (k) load();
#pragma unroll
                    for (int i = 0; i < 2; ++i)
#pragma unroll
                        for (int h = 0; h < HALVES; ++h) {
                            const uint4& eight = products[i][h];
                            int piece = (k + i) * 2 + first_half + h;
                            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                                :: "r"(mine + own_row * 128 + ((piece ^ own_row & 7) << 4)), "r"(eight.x), "r"(eight.y), "r"(eight.z),
                                "r"(eight.w) : "memory");
                        }
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                asm volatile("bar.sync %0, 128;" :: "r"(group) : "memory");
#pragma unroll
                for (int t = 0; t < HEIGHT; ++t) settle(sums[t]);
                begin_multiplying();
#pragma unroll
                for (int k = 0; k < SIXTEENS; ++k)
                    if (k < count)
#pragma unroll
                        for (int t = 0; t < HEIGHT; ++t)
                            multiply(
                                sums[t], descriptor(mine) + t * 512 + 2 * k, narrow_descriptor(from + X_BYTES + k * SIXTEEN_BYTES), 1);
                commit();
                left -= count;
                if (left) load();
                wait_multiplied();
#pragma unroll
                for (int t = 0; t < HEIGHT; ++t) settle(sums[t]);
                release(stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
#endif
#pragma unroll
            for (int t = 0; t < HEIGHT; ++t) {
                settle(sums[t]);
                int upper = row + (own * HEIGHT + t) * 64 + warp * 16 + lane / 4;
#pragma unroll
                for (int j = 0; j < OUTPUTS / 8; j += 4)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        unsigned two[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            int at = 4 * (j + i) + 2 * half;
#if GATED
                            int up = at + SUMS / 2;
                            two[i] = gated(sums[t][at], sums[t][at + 1], sums[t][up], sums[t][up + 1]);
#else
                            two[i] = packed(sums[t][at], sums[t][at + 1]);
#endif
                        }
                        uint4 eight = exchanged(two[0], two[1], two[2], two[3], lane);
                        int place = output + (j + lane % 4) * 8;
                        if (upper + 8 * half < rows && place < out)
                            *(uint4*)((unsigned short*)y + (long long)(upper + 8 * half) * out + place) = eight;
                    }
            }
        }
        __syncwarp();
    }
    // No block ends while the other one loads to its memory, or arrives there.
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
