// Products of up to 64 rows with a weight, y^T = W x^T, for Hopper GPUs (sm_90a), compiled by NVRTC without any include.
//
// A block makes TILE outputs. SPLIT of them, a cluster, share the channels of a tile and add up their sums in their order, by way
// of their shared memory. One warp asks the tensor memory accelerator for weights and rows in a ring of STAGES steps, four
// multiply them. The first weights are asked for before the kernel before is complete (programmatic dependent launch).
//
// An instruction takes 64 lines of weights. Where TILE is less, they are several runs of the channels of the same outputs,
// multiplied by the rows of all of these runs: a quarter or half of what it sums up is what is wanted.
//
// Constants: KIND of weight and x (0 bfloat16, 1 float16, 2 e4m3), ROWS (8, 16, 32 or 64), TILE (16 to 128), SPLIT (1 to 8),
// LINES (128 bytes of channels of each line of an instruction a step), STAGES, Y_KIND (0 bfloat16, 1 float16, 2 float32),
// BIAS (0 none, 1 bfloat16, 2 float16, 3 float32), GATED (1: the weight is a gate's, then as many outputs of an up projection,
// and y is silu(gate) up; TILE is 128 lines of both, SPLIT 1 and BIAS 0).

#ifdef DEBUG
#define SPIN_BEGINS long long spun = clock64();
#define BOUNDED_SPIN if (clock64() - spun > 4000000000ll) asm volatile("trap;");
#else
#define SPIN_BEGINS
#define BOUNDED_SPIN
#endif
#ifndef ONCE
#define ONCE "evict_first"
#endif
#ifdef TRACE
#define STAMP(i) \
    { \
        u64 now; \
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); \
        trace[blockIdx.x * 8 + i] = now; \
    }
#else
#define STAMP(i)
#endif

struct alignas(64) TensorMap {
    char bytes[128];
};

typedef unsigned long long u64;

#if TILE < 64
#define SIZE (ROWS * 64 / TILE)
#else
#define SIZE ROWS
#endif
constexpr int THREADS = 160;
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
static_assert(WIDTH <= 64 && (!GATED || TILE == 128 && SPLIT == 1), "sizes");

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

__device__ __forceinline__ float gated(float gate, float up) {
    float wide = rounded(gate), sigmoid;
    asm("{\n.reg .f32 t;\nmul.ftz.f32 t, %1, 0fBFB8AA3B;\nex2.approx.ftz.f32 t, t;\nadd.ftz.f32 t, t, 0f3F800000;\n"
        "rcp.approx.ftz.f32 %0, t;\n}\n" : "=f"(sigmoid) : "f"(wide));
    return rounded(wide * sigmoid) * rounded(up);
}

__device__ __forceinline__ float4 gated(float4 gate, float4 up) {
    return make_float4(gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w));
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


__device__ __forceinline__ void store_shared(unsigned place, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(place), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// Of the shared memory of a block of the cluster.
__device__ __forceinline__ float4 load_shared(unsigned place, unsigned block) {
    float4 v;
    asm volatile(
        "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}\n"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(place), "r"(block) : "memory");
    return v;
}

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) wide_product(
    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, void* y, const void* bias,
    const float* x_scales, const float* weight_scales, int rows, int out, int steps
#ifdef TRACE
    , u64* trace
#endif
) {
    extern __shared__ char memory[];
    unsigned base = (shared_address(memory) + 1023) & ~1023u;
    unsigned full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, first_output = blockIdx.x / SPLIT * OUTPUTS;
    int begin = steps * rank / SPLIT, count = steps * (rank + 1) / SPLIT - begin;

    if (threadIdx.x == 128) {
        STAMP(0)
        for (int s = 0; s < STAGES; ++s) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * s) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 4;" :: "r"(empty + 8 * s) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (threadIdx.x >= 128) {
        if (threadIdx.x > 128) return;
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        u64 once, often;
        asm volatile("createpolicy.fractional.L2::" ONCE ".b64 %0, 1.0;" : "=l"(once));
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
        auto load_weight = [&](int unit, unsigned to, unsigned barrier) {
#pragma unroll
            for (int l = 0; l < LINES; ++l)
#pragma unroll
                for (int f = 0; f < FOLD; ++f) {
                    int channel = (((begin + unit) * LINES + l) * FOLD + f) * LINE_CHANNELS;
                    unsigned place = to + l * WEIGHT_BYTES + f * (TILE * 128);
                    load_tile(place, weight, barrier, channel, first_output, once);
                    if (GATED) load_tile(place + 8192, weight, barrier, channel, out + first_output, once);
                }
        };
        auto load_x = [&](int unit, unsigned to, unsigned barrier) {
#pragma unroll
            for (int l = 0; l < LINES; ++l)
#pragma unroll
                for (int f = 0; f < FOLD; ++f) {
                    int channel = (((begin + unit) * LINES + l) * FOLD + f) * LINE_CHANNELS;
                    load_tile(to + LINES * WEIGHT_BYTES + (l * FOLD + f) * (ROWS * 128), x, barrier, channel, 0, often);
                }
        };
        int ahead = count < STAGES ? count : STAGES;
        for (int unit = 0; unit < ahead; ++unit) {
            unsigned to = base + unit * STAGE_BYTES, barrier = full + 8 * unit;
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(STAGE_BYTES) : "memory");
            load_weight(unit, to, barrier);
        }
        STAMP(1)
        asm volatile("griddepcontrol.wait;" ::: "memory");
        STAMP(2)
        for (int unit = 0; unit < ahead; ++unit) load_x(unit, base + unit * STAGE_BYTES, full + 8 * unit);
        int stage = 0;
        unsigned parity = 0;
        for (int unit = ahead; unit < count; ++unit) {
            unsigned to = base + stage * STAGE_BYTES, barrier = full + 8 * stage;
            wait_for(empty + 8 * stage, parity);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(STAGE_BYTES) : "memory");
            load_weight(unit, to, barrier);
            load_x(unit, to, barrier);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        STAMP(3)
        return;
    }

    // What the kernel before has written is read behind this alone.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    Result result = {y, bias, x_scales, weight_scales, rows, out};
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
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
#ifdef TRACE
        if (unit == 0 && threadIdx.x == 0) STAMP(4)
#endif
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
#ifdef TRACE
    if (threadIdx.x == 0) STAMP(5)
#endif
    auto four = [&](int t, int b) {
        return make_float4(sums[t][4 * b], sums[t][4 * b + 1], sums[t][4 * b + 2], sums[t][4 * b + 3]);
    };
    if (SPLIT == 1 && FOLD == 1) {
#pragma unroll
        for (int t = 0; t < HEIGHT; t += GATED + 1)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                if (GATED) result.store(gated(four(t, b), four(t + GATED, b)), first_output + warp * 16, b * 8);
                else result.store(four(t, b), first_output + t * 64 + warp * 16, b * 8);
            }
    } else {
        // Sums of 16 outputs and 8 rows stand together, of each run of channels. The ring is not needed any more.
        constexpr int GROUPS = TILE / 16, PIECES = GROUPS * BLOCKS;
        meet();
        int run = FOLD == 1 ? 0 : warp / GROUPS;
#pragma unroll
        for (int t = 0; t < HEIGHT; ++t)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                float4 own = four(t, b);
#pragma unroll
                for (int f = 1; f < FOLD; ++f) {
                    float4 other = four(t, f * BLOCKS + b);
                    own.x = run == f ? other.x : own.x;
                    own.y = run == f ? other.y : own.y;
                    own.z = run == f ? other.z : own.z;
                    own.w = run == f ? other.w : own.w;
                }
                int group = FOLD == 1 ? t * 4 + warp : warp % GROUPS;
                store_shared(base + (((run * GROUPS + group) * BLOCKS + b) * 32 + lane) * 16, own);
            }
        if (SPLIT > 1) meet_cluster();
        else meet();
        for (int piece = rank * 4 + warp; piece < PIECES; piece += 4 * SPLIT) {
            float4 values[SPLIT][FOLD];
#pragma unroll
            for (int s = 0; s < SPLIT; ++s)
#pragma unroll
                for (int f = 0; f < FOLD; ++f)
                    values[s][f] = load_shared(base + ((f * PIECES + piece) * 32 + lane) * 16, s);
            float4 sum = values[0][0];
#pragma unroll
            for (int s = 0; s < SPLIT; ++s)
#pragma unroll
                for (int f = 0; f < FOLD; ++f)
                    if (s + f > 0) {
                        sum.x += values[s][f].x;
                        sum.y += values[s][f].y;
                        sum.z += values[s][f].z;
                        sum.w += values[s][f].w;
                    }
            result.store(sum, first_output + piece / BLOCKS * 16, piece % BLOCKS * 8);
        }
        // No block ends while others read its memory.
        if (SPLIT > 1) meet_cluster();
    }
#ifdef TRACE
    if (threadIdx.x == 0) {
        STAMP(6)
        unsigned sm;
        asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
        trace[blockIdx.x * 8 + 7] = sm;
    }
#endif
}
