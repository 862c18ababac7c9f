// Both products of tiles of up to 32 tokens with their experts' weights in 16 bits, for Hopper GPUs (sm_90a), compiled by NVRTC.
//
// Each block sorts the tokens' choices by their experts. Blocks then take units of work from a counter: first 64 outputs of an
// expert's gate and up for a tile's tokens, of all tiles, then DOWN_LINES outputs of an expert's down for what these have made. One
// warp asks the tensor memory accelerator for weights and another for rows, in a ring of STAGES slots, which stays full from unit to
// unit. Two groups of four warps multiply in turns, so that one finishes its unit while the other goes on. A tile's counter says
// when its rows are complete; all blocks run at the same time, and units that wait come behind those that they wait for.
//
// Constants: KIND (0 bfloat16, 1 float16), ROWS (of a tile: 16 or 32), LINES (1 or 2: of 128 bytes of channels in a slot, of each
// of 128 outputs of gate and up), DOWN_LINES (64 or 128), STAGES (at least 3), TOP_K, EXPERTS (a multiple of 32, at most 256), HIDDEN
// and INNER (multiples of 128 and 64), BLOCKS (of the launch), RESIDENT (of a multiprocessor), CHOICES (at most; a multiple of 256).

#define PACKED_KIND KIND
#include "hopper.cuh"

constexpr int SORTERS = 8, ROUNDS = CHOICES / (32 * SORTERS);  // warps that sort choices, and how many times 32
constexpr int TILES = EXPERTS + CHOICES / ROWS;  // at most
constexpr int GROUPS = 2, WORKERS = 128 * GROUPS, THREADS = WORKERS + 64, QUEUE = 8;
constexpr int SUMS = ROWS / 2;  // of a thread and an instruction
constexpr int BOX = 8192;  // 64 lines of 128 bytes
constexpr int UP_OUTPUTS = 64, DOWN_TALL = DOWN_LINES / 64, DOWN_DEEP = 2 * LINES / DOWN_TALL;
constexpr int UP_SLICES = INNER / UP_OUTPUTS, DOWN_SLICES = HIDDEN / DOWN_LINES;
constexpr int UP_STEPS = (HIDDEN + 64 * LINES - 1) / (64 * LINES), DOWN_STEPS = (INNER + 64 * DOWN_DEEP - 1) / (64 * DOWN_DEEP);
constexpr int WEIGHT_BYTES = 2 * LINES * BOX, X_BYTES = (LINES > DOWN_DEEP ? LINES : DOWN_DEEP) * ROWS * 128;
constexpr int SLOT = WEIGHT_BYTES + X_BYTES;
constexpr int PITCH = 2 * (DOWN_LINES + 8);  // of rows of results
static_assert(CHOICES % (32 * SORTERS) == 0 && CHOICES < 1 << 15 && EXPERTS % 32 == 0 && EXPERTS <= 256, "sizes");
static_assert(SLOT % 1024 == 0 && INNER % 64 == 0 && HIDDEN % DOWN_LINES == 0, "sizes");

#if KIND == 1
#define INPUTS "k16.f32.f16.f16"
#else
#define INPUTS "k16.f32.bf16.bf16"
#endif
// Adds the product of 64 lines and the rows over 32 bytes of channels to the sums.
__device__ __forceinline__ void multiply(float (&d)[SUMS], u64 weight, u64 x) {
#if ROWS == 16
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16" INPUTS " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0;\n}\n"
        : D4(d, 0), D4(d, 4) : "l"(weight), "l"(x));
#else
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32" INPUTS " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, p, 1, 1, 0, 0;\n}\n"
        : D16(d, 0) : "l"(weight), "l"(x));
#endif
}

__device__ __forceinline__ float rounded(float value) { return wide_of<KIND>(packed(value, 0.0f) & 0xFFFF); }

__device__ __forceinline__ float gated(float gate, float up) { return rounded(silu(rounded(gate))) * rounded(up); }

// A place in the ring.
struct Slot {
    int at = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void next() {
        if (++at == STAGES) at = 0, parity ^= 1;
    }
    __device__ __forceinline__ void skip(int steps) {
        for (at += steps; at >= STAGES; at -= STAGES) parity ^= 1;
    }
};

constexpr int END = -1;  // no unit

// Lines of a weight by a tile's rows, of those that all blocks count.
struct Unit {
    bool up;
    int tile, slice;

    __device__ __forceinline__ Unit(int index, int up_units) {
        up = index < up_units;
        int rest = up ? index : index - up_units;
        tile = up ? rest / UP_SLICES : rest / DOWN_SLICES;
        slice = rest - tile * (up ? UP_SLICES : DOWN_SLICES);
    }
    __device__ __forceinline__ int steps() const { return up ? UP_STEPS : DOWN_STEPS; }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) expert_mlp(
    const __grid_constant__ TensorMap gate_up, const __grid_constant__ TensorMap down, const __grid_constant__ TensorMap active,
    const char* x, const int* experts, const float* factors, unsigned short* middle, unsigned short* y, unsigned* cells,
    long long x_row, int choices
) {
    extern __shared__ char memory[];
    unsigned base = (shared_address(memory) + 1023) & ~1023u, results = base + STAGES * SLOT;
    unsigned full = results + GROUPS * ROWS * PITCH, x_full = full + 8 * STAGES, empty = x_full + 8 * STAGES;
    unsigned known = empty + 8 * STAGES, read = known + 8 * QUEUE, turn = read + 8 * QUEUE;
    __shared__ int queue[QUEUE], places[SORTERS][EXPERTS], sums_of_warps[EXPERTS / 32];
    __shared__ int3 table[TILES];  // of a tile: its expert, the first of its places in the order, and how many they are
    __shared__ unsigned short order[CHOICES];
    int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    unsigned* complete = cells + 64;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x == WORKERS) {
        for (int s = 0; s < STAGES; ++s) init_barrier<1>(full + 8 * s), init_barrier<1>(x_full + 8 * s), init_barrier<4>(empty + 8 * s);
        for (int q = 0; q < QUEUE; ++q) init_barrier<1>(known + 8 * q), init_barrier<WORKERS / 32 + 1>(read + 8 * q);
        for (int g = 0; g < GROUPS; ++g) init_barrier<4>(turn + 8 * g);
        publish_barriers();
        asm volatile("prefetch.tensormap [%0];\nprefetch.tensormap [%1];" :: "l"(&gate_up), "l"(&down) : "memory");
    }
    // A stable counting sort, of which each warp has some neighbouring choices.
    for (int i = threadIdx.x; i < SORTERS * EXPERTS; i += THREADS) places[i / EXPERTS][i % EXPERTS] = 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    __syncthreads();
    int own_experts[ROUNDS], rounds = (choices + 32 * SORTERS - 1) / (32 * SORTERS), first_choice = warp * rounds * 32 + lane;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        int choice = first_choice + r * 32;
        own_experts[r] = warp < SORTERS && r < rounds && choice < choices ? __ldcg(experts + choice) : EXPERTS;
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
        if (own_experts[r] < EXPERTS) atomicAdd(&places[warp][own_experts[r]], 1);
    __syncthreads();
    // Of an expert: its choices, and in the high half its tiles; then those of all experts up to it.
    int mine = 0, sum = 0;
    if (threadIdx.x < EXPERTS) {
#pragma unroll
        for (int w = 0; w < SORTERS; ++w) mine += places[w][threadIdx.x];
        sum = mine = mine | (mine + ROWS - 1) / ROWS << 16;
#pragma unroll
        for (int far = 1; far < 32; far *= 2) {
            int other = __shfl_up_sync(~0u, sum, far);
            if (lane >= far) sum += other;
        }
        if (lane == 31) sums_of_warps[warp] = sum;
    }
    __syncthreads();
    int present = 0;
#pragma unroll
    for (int w = 0; w < EXPERTS / 32; ++w) {
        present += sums_of_warps[w] >> 16;
        if (w < warp) sum += sums_of_warps[w];
    }
    if (threadIdx.x < EXPERTS) {
        int at = (sum & 0xFFFF) - (mine & 0xFFFF), tile = (sum >> 16) - (mine >> 16), end = sum & 0xFFFF;
        for (int i = 0, first = at; first < end; ++i, first += ROWS)
            table[tile + i] = make_int3(threadIdx.x, first, end - first < ROWS ? end - first : ROWS);
#pragma unroll
        for (int w = 0; w < SORTERS; ++w) {
            int count = places[w][threadIdx.x];
            places[w][threadIdx.x] = at;
            at += count;
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        if (warp >= SORTERS || r >= rounds) break;
        int expert = own_experts[r];
        unsigned peers = __match_any_sync(~0u, expert);
        int earlier = __popc(peers & ((1u << lane) - 1)), at = expert < EXPERTS ? places[warp][expert] + earlier : 0;
        __syncwarp();
        if (expert < EXPERTS) {
            order[at] = first_choice + r * 32;
            if (!earlier) places[warp][expert] = at + __popc(peers);
        }
        __syncwarp();
    }
    __syncthreads();
    int up_units = present * UP_SLICES, units = up_units + present * DOWN_SLICES;

    u64 policy;
    if (threadIdx.x == WORKERS) {
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        Slot slot;
        unsigned parity = 0;
        // Each unit is followed by a look at the counter, the last of which sets it back.
        for (int number = 0, index = blockIdx.x;; ++number) {
            int place = number % QUEUE;
            wait_for(read + 8 * place, parity ^ 1);
            ((volatile int*)queue)[place] = index < units ? index : END;
            arrive(known + 8 * place);
            if (place == QUEUE - 1) parity ^= 1;
            if (index >= units) break;
            int following = BLOCKS + (int)atomicInc(cells, units - 1);
            Unit unit(index, up_units);
            int expert = table[unit.tile].x;
            int line = unit.up ? expert * (2 * INNER) + unit.slice * UP_OUTPUTS : expert * HIDDEN + unit.slice * DOWN_LINES;
            for (int step = 0; step < unit.steps(); ++step, slot.next()) {
                // The first round finds all slots free.
                wait_for(empty + 8 * slot.at, slot.parity ^ 1);
                unsigned to = base + slot.at * SLOT, barrier = full + 8 * slot.at;
                expect(barrier, WEIGHT_BYTES);
                if (unit.up) {
#pragma unroll
                    for (int t = 0; t < 2; ++t)
#pragma unroll
                        for (int l = 0; l < LINES; ++l)
                            load_tile(to + (l * 2 + t) * BOX, gate_up, barrier, (step * LINES + l) * 64, line + t * INNER, policy);
                } else {
#pragma unroll
                    for (int t = 0; t < DOWN_TALL; ++t)
#pragma unroll
                        for (int l = 0; l < DOWN_DEEP; ++l)
                            load_tile(
                                to + (l * DOWN_TALL + t) * BOX, down, barrier, (step * DOWN_DEEP + l) * 64, line + t * 64, policy);
                }
            }
            index = following;
        }
        return;
    }

    // What is to be done next.
    Slot slot;
    unsigned queue_parity = 0;
    auto take = [&](int number) {
        int place = number % QUEUE;
        wait_for(known + 8 * place, queue_parity);
        int unit = __shfl_sync(~0u, ((volatile int*)queue)[place], 0);
        if (lane == 0) arrive(read + 8 * place);
        if (place == QUEUE - 1) queue_parity ^= 1;
        return unit;
    };
    if (warp > WORKERS / 32) {
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
        for (int number = 0;; ++number) {
            int index = take(number);
            if (index == END) break;
            Unit unit(index, up_units);
            int first_place = table[unit.tile].y, used = table[unit.tile].z;
            if (unit.up) {
                // Rows of tokens come in pieces of 16 bytes. A step is told LATE steps later, when they are there.
                constexpr int PIECES = 8 * LINES, LATE = STAGES > 8 ? 5 : STAGES > 4 ? 3 : STAGES - 2;
                Slot made = slot;
                auto announce = [&] {
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    __syncwarp();
                    if (lane == 0) arrive(x_full + 8 * made.at);
                    made.next();
                };
                int pending = 0, copies = used * PIECES, piece = lane % 8;
                const char* from = x + lane % PIECES * 16;
                unsigned line_at = lane % PIECES / 8 * (ROWS * 128);
                for (int step = 0; step < UP_STEPS; ++step, slot.next()) {
                    wait_for(empty + 8 * slot.at, slot.parity ^ 1);
                    unsigned to = base + slot.at * SLOT + WEIGHT_BYTES + line_at;
#pragma unroll 4
                    for (int copy = lane; copy < copies; copy += 32) {
                        int row = copy / PIECES;
                        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                            :: "r"(to + row * 128 + ((piece ^ (row & 7)) << 4)),
                            "l"(from + step * (128 * LINES) + order[first_place + row] / TOP_K * x_row) : "memory");
                    }
                    asm volatile("cp.async.commit_group;" ::: "memory");
                    if (++pending > LATE) {
                        asm volatile("cp.async.wait_group %0;" :: "n"(LATE) : "memory");
                        announce(), --pending;
                    }
                }
                asm volatile("cp.async.wait_group 0;" ::: "memory");
                for (; pending; --pending) announce();
            } else {
                unsigned made;
                do {
                    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(made) : "l"(complete + unit.tile) : "memory");
                } while (made < UP_SLICES);
                asm volatile("fence.proxy.async;" ::: "memory");
                __syncwarp();
                int loads = (used + 7) / 8 * DOWN_DEEP, first = lane / DOWN_DEEP * 8, l = lane % DOWN_DEEP;
                for (int step = 0; step < DOWN_STEPS; ++step, slot.next()) {
                    wait_for(empty + 8 * slot.at, slot.parity ^ 1);
                    unsigned to = base + slot.at * SLOT + WEIGHT_BYTES, barrier = x_full + 8 * slot.at;
                    if (lane == 0) expect(barrier, loads * 1024);
                    __syncwarp();
                    if (lane < loads)
                        load_tile(to + (l * ROWS + first) * 128, active, barrier, (step * DOWN_DEEP + l) * 64, first_place + first, policy);
                }
            }
        }
        return;
    }
    if (warp == WORKERS / 32) return;

    int group = warp / 4;
    // Results go through shared memory, so that a thread stores eight neighbours of a row.
    unsigned own_results = results + group * ROWS * PITCH;
    auto meet = [&] { asm volatile("bar.sync %0, 128;" :: "r"(1 + group) : "memory"); };
    for (int number = 0;; ++number) {
        int index = take(number);
        if (index == END) break;
        int steps = index < up_units ? UP_STEPS : DOWN_STEPS;
        if (number % GROUPS != group) {
            slot.skip(steps);
            continue;
        }
        Unit unit(index, up_units);
        int first_place = table[unit.tile].y, used = table[unit.tile].z;
        // Two instructions take the same rows and other lines, or the same lines and other channels.
        bool deep = DOWN_TALL == 1 && !unit.up;
        int second = deep ? ROWS * 8 : 0, further = deep ? ROWS * 16 : ROWS * 8;
        float sums[2][SUMS];
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[t][i] = 0.0f;
        int before = 0;
        settle(sums[0]);
        settle(sums[1]);
        // The ring's slots are told apart within one round: the unit before has been multiplied.
        if (number > 0) wait_for(turn + 8 * group, (number - 1) / 2 & 1);
        for (int step = 0; step < steps; ++step, slot.next()) {
            wait_for(full + 8 * slot.at, slot.parity);
            wait_for(x_full + 8 * slot.at, slot.parity);
            u64 left = descriptor(base + slot.at * SLOT), right = descriptor(base + slot.at * SLOT + WEIGHT_BYTES);
            begin_multiplying();
#pragma unroll
            for (int l = 0; l < LINES; ++l)
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int t = 0; t < 2; ++t)
                        multiply(sums[t], left + (l * 2 + t) * (BOX / 16) + 2 * k, right + l * further + t * second + 2 * k);
            commit();
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (lane == 0 && step > 0) arrive(empty + 8 * before);
            before = slot.at;
        }
        wait_multiplied();
        if (lane == 0) arrive(empty + 8 * before);
        settle(sums[0]);
        settle(sums[1]);
        if (lane == 0) arrive(turn + 8 * (1 - group));

        int m = warp % 4 * 16 + (lane >> 2), n = (lane & 3) * 2;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            unsigned to = own_results + (i / 4 * 8 + n + i % 2) * PITCH + (m + i % 4 / 2 * 8) * 2;
            float low = unit.up ? gated(sums[0][i], sums[1][i]) : DOWN_TALL == 1 ? sums[0][i] + sums[1][i] : sums[0][i];
            unsigned both = packed(low, sums[1][i]);
            asm volatile("st.shared.u16 [%0], %1;" :: "r"(to), "h"((unsigned short)both) : "memory");
            if (DOWN_TALL == 2) asm volatile("st.shared.u16 [%0], %1;" :: "r"(to + 128), "h"((unsigned short)(both >> 16)) : "memory");
        }
        meet();
        int across = unit.up ? UP_OUTPUTS / 8 : DOWN_LINES / 8;
        for (int piece = threadIdx.x % 128; piece < used * across; piece += 128) {
            int row = piece / across, eight = piece % across;
            uint4 words;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "r"(own_results + row * PITCH + eight * 16) : "memory");
            if (unit.up) {
                *(uint4*)(middle + (long long)(first_place + row) * INNER + unit.slice * UP_OUTPUTS + eight * 8) = words;
            } else {
                int choice = order[first_place + row];
                float factor = __ldcg(factors + choice);
                auto scaled = [&](unsigned pair) { return packed(wide_of<KIND>(pair & 0xFFFF) * factor, wide_of<KIND>(pair >> 16) * factor); };
                words = make_uint4(scaled(words.x), scaled(words.y), scaled(words.z), scaled(words.w));
                *(uint4*)(y + (long long)choice * HIDDEN + unit.slice * DOWN_LINES + eight * 8) = words;
            }
        }
        if (unit.up) {
            asm volatile("fence.proxy.async;" ::: "memory");
            __threadfence();
        }
        meet();
        if (threadIdx.x % 128 == 0) {
            if (unit.up) __threadfence();
            // The tile's last unit sets its counter back.
            atomicInc(complete + unit.tile, UP_SLICES + DOWN_SLICES - 1);
        }
    }
}
