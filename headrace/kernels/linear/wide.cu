// Products of up to 64 rows with a weight, y^T = W x^T, for Hopper GPUs (sm_90a), compiled by NVRTC without any include.
//
// A unit of work is a tile of 64 TILES outputs times a step of LINES lines of 128 bytes of channels. The units of a weight are
// one line, of which each of the grid's programs takes an equal run (Osama et al., 2023, "Stream-K"). A program whose tile
// others share leaves its sums in the L2 cache, and at its end adds up a share of that tile in the programs' order, so that
// results are the same from run to run. All programs of a grid run at once: it has no more than there are multiprocessors.
//
// One warp asks the tensor memory accelerator for weights and rows in a ring of STAGES steps, four multiply them. Weights are
// asked for before the kernel before is complete (programmatic dependent launch), but not before the last kernel of this sort has
// asked for all of its own (`pace`): sooner they would only take its place in the queue of the memory, and at its end the
// memory would have nothing to do.
//
// Constants: KIND of weight and x (0 bfloat16, 1 float16, 2 e4m3), ROWS (8, 16, 32 or 64), TILES (1 or 2), LINES (1 or 2),
// STAGES, Y_KIND (0 bfloat16, 1 float16, 2 float32), BIAS (0 none, 1 bfloat16, 2 float16, 3 float32).

#ifdef DEBUG
#define SPIN_BEGINS long long spun = clock64();
#define BOUNDED_SPIN if (clock64() - spun > 4000000000ll) asm volatile("trap;");
#else
#define SPIN_BEGINS
#define BOUNDED_SPIN
#endif

struct alignas(64) TensorMap {
    char bytes[128];
};

typedef unsigned long long u64;

constexpr int THREADS = 160;
constexpr int PACED = 256;  // places of `pace` for programs that start; as many for those that have asked for all weights
constexpr int OUTPUTS = 64 * TILES;
constexpr int BLOCKS = ROWS / 8;
constexpr int SUMS = 4 * BLOCKS;  // of a thread and 64 outputs
constexpr int CHUNKS = TILES * BLOCKS;  // of four sums of a thread
constexpr int WEIGHT_BYTES = OUTPUTS * 128;
constexpr int X_BYTES = ROWS * 128;
constexpr int STAGE_BYTES = LINES * (WEIGHT_BYTES + X_BYTES);
constexpr int LINE_CHANNELS = KIND == 2 ? 128 : 64;

__device__ __forceinline__ unsigned shared_address(const void* place) {
    return (unsigned)__cvta_generic_to_shared(place);
}

__device__ __forceinline__ void wait_for(unsigned barrier, unsigned parity) {
    unsigned done;
    SPIN_BEGINS
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
        BOUNDED_SPIN
    } while (!done);
}

__device__ __forceinline__ void load_tile(unsigned to, const TensorMap& map, unsigned barrier, int channel, int line, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(to), "l"(&map), "r"(barrier), "r"(channel), "r"(line), "l"(policy) : "memory");
}

__device__ __forceinline__ void fetch_near(const TensorMap& map, int channel, int line) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" :: "l"(&map), "r"(channel), "r"(line) : "memory");
}

// Lines of 128 bytes, of which eight stand together with their pieces of 16 bytes exchanged.
__device__ __forceinline__ u64 descriptor(unsigned address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

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
#define D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(d, i) D4(d, i), D4(d, i + 4), D4(d, i + 8), D4(d, i + 12)

// Adds the product of 64 outputs and ROWS rows over 32 bytes of channels to the sums, or puts it in their place.
template <bool ADD>
__device__ __forceinline__ void multiply(float (&d)[SUMS], u64 weight, u64 x) {
#if ROWS == 8
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8" INPUTS_16 " {%0, %1, %2, %3}, %4, %5, p, 1, 1" MAJORS ";\n}\n"
        : D4(d, 0) : "l"(weight), "l"(x), "n"(ADD ? 1 : 0));
#elif ROWS == 16
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16" INPUTS_16 " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1" MAJORS ";\n}\n"
        : D4(d, 0), D4(d, 4) : "l"(weight), "l"(x), "n"(ADD ? 1 : 0));
#elif ROWS == 32
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

__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_multiplied() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// The compiler moves no use of the sums past this: it does not know that they are written until the wait is over.
__device__ __forceinline__ void settle(float (&d)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// The warps that multiply wait for each other.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

__device__ __forceinline__ unsigned packed(float low, float high) {
    unsigned both;
#if Y_KIND == 1
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

__device__ __forceinline__ unsigned transposed(unsigned pair) {
    unsigned result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

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

struct Result {
    void* y;
    const void* bias;
    const float* x_scales;
    const float* weight_scales;
    int rows, out;

    __device__ __forceinline__ void store_pair(unsigned pair, int row, int output) const {
        if (row >= rows || output >= out) return;
        unsigned short* place = (unsigned short*)y + (long long)row * out + output;
        if (!(out & 1)) {
            *(unsigned*)place = pair;
        } else {
            place[0] = (unsigned short)pair;
            if (output + 1 < out) place[1] = (unsigned short)(pair >> 16);
        }
    }

    __device__ __forceinline__ void store_float(float value, int row, int output) const {
        if (row < rows && output < out) ((float*)y)[(long long)row * out + output] = value;
    }

    // Finishes and stores a warp's 16 outputs from `first` on of the 8 rows from `row` on. A thread has sums of two rows and
    // of two outputs, 8 apart.
    __device__ __forceinline__ void store(float4 sums, int first, int row) const {
        int lane = threadIdx.x & 31;
        [[maybe_unused]] int output = first + (lane >> 2), own = row + (lane & 3) * 2;
#if KIND == 2
        float low = output < out ? weight_scales[output] : 0.0f, high = output + 8 < out ? weight_scales[output + 8] : 0.0f;
        float left = own < rows ? x_scales[own] : 0.0f, right = own + 1 < rows ? x_scales[own + 1] : 0.0f;
        sums.x *= low * left;
        sums.y *= low * right;
        sums.z *= high * left;
        sums.w *= high * right;
#endif
#if BIAS
        float lower = output < out ? bias_of(bias, output) : 0.0f, upper = output + 8 < out ? bias_of(bias, output + 8) : 0.0f;
        sums.x += lower;
        sums.y += lower;
        sums.z += upper;
        sums.w += upper;
#endif
#if Y_KIND == 2
        store_float(sums.x, own, output);
        store_float(sums.y, own + 1, output);
        store_float(sums.z, own, output + 8);
        store_float(sums.w, own + 1, output + 8);
#else
        // Two outputs of one row next to each other.
        unsigned lower_pair = transposed(packed(sums.x, sums.y)), upper_pair = transposed(packed(sums.z, sums.w));
        store_pair(lower_pair, row + (lane >> 2), first + (lane & 3) * 2);
        store_pair(upper_pair, row + (lane >> 2), first + 8 + (lane & 3) * 2);
#endif
    }
};

__device__ __forceinline__ float4 load_part(const float4* place) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(place) : "memory");
    return v;
}

// Adds up this program's share of a tile that several share, once all have left their sums.
__device__ __forceinline__ void finish_shared(
    const Result& result, const float* parts, unsigned* turn, int tile, int first, int last
) {
    int count = last - first + 1, rank = (int)blockIdx.x - first;
    int begin = rank * CHUNKS / count, end = (rank + 1) * CHUNKS / count;
    if (begin == end) {
        if (threadIdx.x == 0) {
            // Its sums are left already. The last of all to go leaves a zero.
            unsigned before;
            asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(turn), "r"(0x10000u) : "memory");
            if ((before >> 16) + 1 == (unsigned)count) *(volatile unsigned*)turn = 0;
        }
        return;
    }
    if (threadIdx.x == 0) {
        unsigned arrived;
        SPIN_BEGINS
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(turn) : "memory");
            BOUNDED_SPIN
        } while ((arrived & 0xFFFF) != (unsigned)count);
    }
    meet();
    const float4* mine = (const float4*)parts + threadIdx.x;
    for (int chunk = begin; chunk < end; chunk += 4) {
        float4 sums[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) sums[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int part = first; part <= last; part += 4) {
            float4 values[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    values[i][k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    int slot = 2 * (part + i) + (part + i == first);
                    if (part + i <= last && chunk + k < end) values[i][k] = load_part(mine + (slot * CHUNKS + chunk + k) * 128);
                }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    sums[k].x += values[i][k].x;
                    sums[k].y += values[i][k].y;
                    sums[k].z += values[i][k].z;
                    sums[k].w += values[i][k].w;
                }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (chunk + k < end) {
                int of = chunk + k;
                result.store(sums[k], tile * OUTPUTS + of / BLOCKS * 64 + (threadIdx.x >> 5) * 16, of % BLOCKS * 8);
            }
    }
    meet();
    if (threadIdx.x == 0) {
        unsigned before;
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(turn), "r"(0x10000u) : "memory");
        if ((before >> 16) + 1 == (unsigned)count) *(volatile unsigned*)turn = 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) wide_product(
    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, void* y, const void* bias,
    const float* x_scales, const float* weight_scales, float* parts, unsigned* turns, unsigned* pace, int rows, int out, int steps,
    int near
) {
    extern __shared__ char memory[];
    unsigned base = (shared_address(memory) + 1023) & ~1023u;
    unsigned full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES, released = empty + 8 * STAGES;
    unsigned units = (unsigned)((out + OUTPUTS - 1) / OUTPUTS * steps), programs = gridDim.x, program = blockIdx.x;
    int begin = (int)(units * program / programs), end = (int)(units * (program + 1) / programs);

    if (threadIdx.x == 128) {
        for (int s = 0; s < STAGES; ++s) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * s) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 4;" :: "r"(empty + 8 * s) : "memory");
        }
        asm volatile("st.volatile.shared.u32 [%0], 0;" :: "r"(released) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (threadIdx.x >= 128) {
        if (threadIdx.x > 128) return;
        asm volatile("prefetch.tensormap [%0];" :: "l"(&weight) : "memory");
        asm volatile("prefetch.tensormap [%0];" :: "l"(&x) : "memory");
        u64 once, often;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
        unsigned ticket = 0;
        if (pace) asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(ticket) : "l"(pace + program) : "memory");
        // Once the ticket is drawn: a later product draws a later one. Without the announcement the next kernel starts late.
        if (ticket != ~0u) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        if (pace) {
            unsigned asked, may;
            do {
                asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(asked) : "l"(pace + PACED + program) : "memory");
                asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(may) : "r"(released) : "memory");
            } while ((int)(asked - ticket) < 0 && !may);
        }
        int count = end - begin, ahead = count < STAGES ? count : STAGES;
        int tile = begin / steps, step = begin % steps, x_step = step;
        for (int unit = 0; unit < ahead; ++unit) {
            unsigned to = base + unit * STAGE_BYTES, barrier = full + 8 * unit;
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(STAGE_BYTES) : "memory");
#pragma unroll
            for (int l = 0; l < LINES; ++l)
                load_tile(to + l * WEIGHT_BYTES, weight, barrier, (step * LINES + l) * LINE_CHANNELS, tile * OUTPUTS, once);
            if (++step == steps) step = 0, ++tile;
        }
        // Further units are fetched into the L2 cache, `near` of them ahead of the ring.
        int fetched = ahead, near_tile = tile, near_step = step;
        bool rolling = !(near >> 16), told = pace == 0;
        near &= 0xFFFF;
        auto fetch = [&]() {
#pragma unroll
            for (int l = 0; l < LINES; ++l) fetch_near(weight, (near_step * LINES + l) * LINE_CHANNELS, near_tile * OUTPUTS);
            if (++near_step == steps) near_step = 0, ++near_tile;
            ++fetched;
        };
        auto tell = [&]() {
            if (!told) asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" :: "l"(pace + PACED + program) : "memory");
            told = true;
        };
        for (int n = 0; n < near && fetched < count; ++n) fetch();
        if (fetched == count) tell();
        asm volatile("griddepcontrol.wait;" ::: "memory");
        for (int unit = 0; unit < ahead; ++unit) {
            unsigned to = base + unit * STAGE_BYTES + LINES * WEIGHT_BYTES, barrier = full + 8 * unit;
#pragma unroll
            for (int l = 0; l < LINES; ++l)
                load_tile(to + l * X_BYTES, x, barrier, (x_step * LINES + l) * LINE_CHANNELS, 0, often);
            if (++x_step == steps) x_step = 0;
        }
        int stage = 0;
        unsigned parity = 0;
        for (int unit = ahead; unit < count; ++unit) {
            unsigned to = base + stage * STAGE_BYTES, barrier = full + 8 * stage;
            wait_for(empty + 8 * stage, parity);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(STAGE_BYTES) : "memory");
#pragma unroll
            for (int l = 0; l < LINES; ++l) {
                int channel = (step * LINES + l) * LINE_CHANNELS;
                load_tile(to + l * WEIGHT_BYTES, weight, barrier, channel, tile * OUTPUTS, once);
                load_tile(to + LINES * WEIGHT_BYTES + l * X_BYTES, x, barrier, channel, 0, often);
            }
            if (++step == steps) step = 0, ++tile;
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (near && rolling && fetched < count) {
                fetch();
                if (fetched == count) tell();
            }
        }
        tell();
        return;
    }

    // What the kernel before has written is read behind this alone.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x == 0) asm volatile("st.volatile.shared.u32 [%0], 1;" :: "r"(released) : "memory");
    Result result = {y, bias, x_scales, weight_scales, rows, out};
    int warp = threadIdx.x >> 5;
    bool speaks = (threadIdx.x & 31) == 0;
    int stage = 0;
    unsigned parity = 0;
    float sums[TILES][SUMS];
    for (int unit = begin; unit < end;) {
        int tile = unit / steps, step = unit % steps;
        int most = end - unit, left = steps - step < most ? steps - step : most;
        bool whole = left == steps;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[t][i] = 0.0f;
        for (int n = 0; n < left; ++n) {
            unsigned from = base + stage * STAGE_BYTES;
            wait_for(full + 8 * stage, parity);
#if KIND == 2
            // The matrix units keep about 14 bits of a sum: those of 128 channels are added outside of them.
#pragma unroll
            for (int l = 0; l < LINES; ++l)
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
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
            for (int t = 0; t < TILES; ++t) settle(sums[t]);
            begin_multiplying();
#pragma unroll
            for (int l = 0; l < LINES; ++l)
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
                        multiply<true>(
                            sums[t], descriptor(from + l * WEIGHT_BYTES + t * 8192) + 2 * k,
                            descriptor(from + LINES * WEIGHT_BYTES + l * X_BYTES) + 2 * k);
            commit();
            // Not one step later, which arrives only then, where the memory is what the program waits for.
            wait_multiplied();
#pragma unroll
            for (int t = 0; t < TILES; ++t) settle(sums[t]);
#endif
            if (speaks) arrive(empty + 8 * stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        if (whole) {
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b) {
                    float4 four = make_float4(sums[t][4 * b], sums[t][4 * b + 1], sums[t][4 * b + 2], sums[t][4 * b + 3]);
                    result.store(four, tile * OUTPUTS + t * 64 + warp * 16, b * 8);
                }
        } else {
            // A program has two places for its sums: for the tile at its beginning that others began, and for another.
            float4* own = (float4*)parts + (2 * program + (step == 0)) * CHUNKS * 128 + threadIdx.x;
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b)
                    own[(t * BLOCKS + b) * 128] =
                        make_float4(sums[t][4 * b], sums[t][4 * b + 1], sums[t][4 * b + 2], sums[t][4 * b + 3]);
            __threadfence();
            meet();
            if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(turns + tile) : "memory");
        }
        unit += left;
    }
    // At most the first and the last tile are shared.
    int first_tile = begin / steps, last_tile = (end - 1) / steps;
    for (int tile = first_tile; begin < end && tile <= last_tile; tile += max(last_tile - tile, 1)) {
        int from = tile * steps, to = from + steps;
        if (begin <= from && to <= end) continue;
        int first = (int)(((unsigned)(from + 1) * programs - 1) / units), last = (int)(((unsigned)to * programs - 1) / units);
        finish_shared(result, parts, turns + tile, tile, first, last);
    }
}
