// The experts of up to 64 tokens a cluster for Hopper GPUs (sm_90a), compiled by NVRTC: logits, choice, and,
// with SORT, the order of the choices by their experts and the tiles that it makes; with ROUND, the tokens' rows as e4m3 too.
//
// A cluster of CLUSTER blocks shares the channels. Weights in float32 are split into three numbers of bfloat16, which add up to
// them exactly, before the kernel before is complete (programmatic dependent launch); matrix units multiply them by the tokens.
// Each block adds up the logits of some tokens, by way of the others' shared memory, and chooses their experts; in the end each
// sorts the choices of some experts.
//
// Constants: EXPERTS (a multiple of 32, at most 128), IN (a multiple of 128 CLUSTER), CLUSTER (8 or 16), ROWS (tokens of a cluster: 8, 16, 32
// or 64), TOP_K, SIGMOID, NORMALIZE, BIAS, CORRECTION, SORT (for one cluster), TILE (rows of a tile), ROUND.

#include "hopper.cuh"
typedef unsigned char u8;

constexpr int WARPS = EXPERTS / 16, THREADS = 32 * WARPS;
constexpr int SLICE = IN / CLUSTER, CHUNKS = SLICE / 128;  // channels of a block
constexpr int PIECES = SLICE / 8;  // of 16 bytes, of a row's slice
constexpr int X_PITCH = SLICE * 2 + 64, LOGIT_PITCH = (EXPERTS + 4) * 4;  // rows that are read together lie in other banks
constexpr int LOGITS = ROWS * X_PITCH, PEAKS = LOGITS + ROWS * LOGIT_PITCH, COUNTS = PEAKS + ROWS * CLUSTER * 4;
constexpr int PICKS = COUNTS + EXPERTS * 4;  // and ROWS * TOP_K bytes behind it
constexpr int OWN = EXPERTS / 32, WIDE = OWN == 4 ? 4 : 1;  // experts of a lane, and logits that it reads at once
constexpr int CHAINS = ROWS <= 16 ? 3 : 1;  // sums that matrix units add up beside each other
constexpr int TOKENS_OF_BLOCK = (ROWS + CLUSTER - 1) / CLUSTER;
constexpr float E4M3_MAX = 448.0f;

__device__ __forceinline__ void load_logits(float* values, unsigned place) {
    if constexpr (WIDE == 4)
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
            : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3]) : "r"(place) : "memory");
    else
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(values[0]) : "r"(place) : "memory");
}

__device__ __forceinline__ unsigned pair(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float low_of(unsigned both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(unsigned both) { return __uint_as_float(both & 0xFFFF0000u); }

// Splits two weights: high, middle and low parts.
__device__ __forceinline__ void split(unsigned (&parts)[3], float first, float second) {
#pragma unroll
    for (int part = 2; part >= 0; --part) {
        parts[part] = pair(first, second);
        first -= low_of(parts[part]);
        second -= high_of(parts[part]);
    }
}

__device__ __forceinline__ void multiply(float (&d)[4], const unsigned* a, unsigned b0, unsigned b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Larger for larger numbers, and never 0.
__device__ __forceinline__ unsigned key_of(float value) {
    unsigned bits = __float_as_uint(value == value ? value : __uint_as_float(0xFF800000u));
    return bits ^ ((int)bits < 0 ? 0xFFFFFFFFu : 0x80000000u);
}

__device__ __forceinline__ float power_of_e(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value * 1.4426950408889634f));
    return result;
}

__device__ __forceinline__ unsigned codes_of(float first, float second) {
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    return both;
}

// A fragment's weights: those of 16 experts and 128 channels. A thread has eight neighbouring channels of each 32, which stand
// for those that the instruction gives it; x is read likewise.
__device__ __forceinline__ void load_weights(float (&own)[64], const float* weight, int lane) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float* from = weight + (lane / 4 + i % 4 / 2 * 8) * (long long)IN + i / 4 * 32 + lane % 4 * 8 + i % 2 * 4;
        float4 four = __ldg((const float4*)from);
        own[4 * i] = four.x, own[4 * i + 1] = four.y, own[4 * i + 2] = four.z, own[4 * i + 3] = four.w;
    }
}

// parts[step][part]: the four registers of an instruction of 16 channels
__device__ __forceinline__ void split_weights(unsigned (&parts)[8][3][4], const float (&own)[64]) {
#pragma unroll
    for (int step = 0; step < 8; ++step)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            // Registers: the row, the row eight further, and both again with the other two channels.
            int at = ((step / 2 * 4 + r % 2 * 2 + step % 2) * 4) + r / 2 * 2;
            unsigned three[3];
            split(three, own[at], own[at + 1]);
#pragma unroll
            for (int p = 0; p < 3; ++p) parts[step][p][r] = three[p];
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) route_tokens(
    const u8* x, const float* weight, const float* bias, const float* correction, int* experts, float* weights, int* order,
    int* start, int4* table, u8* codes, float* scales, long long x_row, int tokens, int tiles, float least_sum, float added_sum,
    float routed_scale
) {
    extern __shared__ __align__(128) char memory[];
    unsigned base = (unsigned)__cvta_generic_to_shared(memory);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int rank = blockIdx.x % CLUSTER, first_token = blockIdx.x / CLUSTER * ROWS;
    int present = tokens - first_token < ROWS ? tokens - first_token : ROWS;
    int* counts = (int*)(memory + COUNTS);
    u8* picks = (u8*)(memory + PICKS);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (ROUND) arrive_cluster();
    const float* own_weight = weight + warp * 16 * (long long)IN + rank * SLICE;
    unsigned parts[8][3][4];
    {
        float own[64];
        load_weights(own, own_weight, lane);
        split_weights(parts, own);
    }
    if (SORT)
        for (int i = threadIdx.x; i < EXPERTS; i += THREADS) counts[i] = 0;
    // Blocks that others write to have begun.
    if (ROUND) wait_cluster();
    asm volatile("griddepcontrol.wait;" ::: "memory");

    const u8* own_x = x + first_token * x_row + rank * (SLICE * 2);
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        int row = i / PIECES, piece = i % PIECES;
        uint4 eight = row < present ? __ldcg((const uint4*)(own_x + row * x_row + piece * 16)) : make_uint4(0, 0, 0, 0);
        *(uint4*)(memory + row * X_PITCH + piece * 16) = eight;
        if (ROUND) {
            unsigned most = __vmaxu2(
                __vmaxu2(eight.x & 0x7FFF7FFF, eight.y & 0x7FFF7FFF), __vmaxu2(eight.z & 0x7FFF7FFF, eight.w & 0x7FFF7FFF));
            most = max(most & 0xFFFF, most >> 16);
#pragma unroll
            for (int step = (PIECES < 32 ? PIECES : 32) / 2; step; step /= 2)
                most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
            // Each block gets the largest of this block's channels.
            if (PIECES >= CLUSTER && piece < CLUSTER)
                asm volatile("st.shared::cluster.u32 [%0], %1;"
                             :: "r"(place_of(base + PEAKS + (row * CLUSTER + rank) * 4, piece)), "r"(most << 16) : "memory");
        }
    }
    __syncthreads();

    float sums[ROWS / 8][CHAINS][4];
#pragma unroll
    for (int tile = 0; tile < ROWS / 8; ++tile)
#pragma unroll
        for (int i = 0; i < 4 * CHAINS; ++i) sums[tile][i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        if (chunk) {
            float own[64];
            load_weights(own, own_weight + chunk * 128, lane);
            split_weights(parts, own);
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            uint4 eight[ROWS / 8];
#pragma unroll
            for (int tile = 0; tile < ROWS / 8; ++tile)
                eight[tile] = *(uint4*)(memory + (tile * 8 + lane / 4) * X_PITCH + chunk * 256 + step * 64 + lane % 4 * 16);
            // Neighbouring instructions add to other sums: one that adds to the same waits for the other.
#pragma unroll
            for (int p = 0; p < 3; ++p)
#pragma unroll
                for (int tile = 0; tile < ROWS / 8; ++tile)
                    multiply(sums[tile][p % CHAINS], parts[2 * step][p], eight[tile].x, eight[tile].y);
#pragma unroll
            for (int p = 0; p < 3; ++p)
#pragma unroll
                for (int tile = 0; tile < ROWS / 8; ++tile)
                    multiply(sums[tile][p % CHAINS], parts[2 * step + 1][p], eight[tile].z, eight[tile].w);
        }
    }
#pragma unroll
    for (int tile = 0; tile < ROWS / 8; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float sum = sums[tile][0][i];
#pragma unroll
            for (int chain = 1; chain < CHAINS; ++chain) sum += sums[tile][chain][i];
            int token = tile * 8 + lane % 4 * 2 + i % 2, expert = warp * 16 + lane / 4 + i / 2 * 8;
            *(float*)(memory + LOGITS + token * LOGIT_PITCH + expert * 4) = sum;
        }
    arrive_cluster();
    wait_cluster();

    for (int mine = warp; mine < TOKENS_OF_BLOCK; mine += WARPS) {
        int token = mine * CLUSTER + rank;
        if (token >= present) break;
        float scores[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) scores[i] = BIAS ? bias[lane * OWN + i] : 0.0f;
        float other[CLUSTER][OWN];
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) {
            unsigned from = place_of(base + LOGITS + token * LOGIT_PITCH + lane * OWN * 4, block);
#pragma unroll
            for (int i = 0; i < OWN; i += WIDE) load_logits(&other[block][i], from + 4 * i);
        }
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block)
#pragma unroll
            for (int i = 0; i < OWN; ++i) scores[i] += other[block][i];
        if (SIGMOID) {
#pragma unroll
            for (int i = 0; i < OWN; ++i) scores[i] = 1.0f / (1.0f + power_of_e(-scores[i]));
        } else {
            float most = scores[0], total = 0.0f;
#pragma unroll
            for (int i = 1; i < OWN; ++i) most = fmaxf(most, scores[i]);
#pragma unroll
            for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
#pragma unroll
            for (int i = 0; i < OWN; ++i) scores[i] = power_of_e(scores[i] - most), total += scores[i];
#pragma unroll
            for (int step = 16; step; step /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, step);
#pragma unroll
            for (int i = 0; i < OWN; ++i) scores[i] /= total;
        }
        unsigned keys[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) keys[i] = key_of(CORRECTION ? scores[i] + correction[lane * OWN + i] : scores[i]);
        int chosen = 0;
        float factor = 0.0f;
#pragma unroll
        for (int choice = 0; choice < TOP_K; ++choice) {
            unsigned best = keys[0], place = 0;
            float own = scores[0];
#pragma unroll
            for (int i = 1; i < OWN; ++i)
                if (keys[i] > best) best = keys[i], place = i, own = scores[i];
            unsigned top = __reduce_max_sync(0xFFFFFFFFu, best);
            // The first of equals.
            int source = __ffs(__ballot_sync(0xFFFFFFFFu, best == top)) - 1;
            int expert = source * OWN + __shfl_sync(0xFFFFFFFFu, place, source);
            own = __shfl_sync(0xFFFFFFFFu, own, source);
            if (lane == choice) chosen = expert, factor = own;
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                if (lane * OWN + i == expert) keys[i] = 0;
            if (SORT && lane < CLUSTER)
                asm volatile("st.shared::cluster.u8 [%0], %1;"
                             :: "r"(place_of(base + PICKS + token * TOP_K + choice, lane)), "r"(expert) : "memory");
        }
        if (NORMALIZE) {
            float total = factor;
#pragma unroll
            for (int step = 16; step; step /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, step);
            factor /= fmaxf(total + added_sum, least_sum);
        }
        if (lane < TOP_K) {
            long long at = (long long)(first_token + token) * TOP_K + lane;
            experts[at] = chosen;
            weights[at] = factor * routed_scale;
        }
    }
    __syncwarp();
    arrive_cluster();
    if (ROUND) {
#pragma unroll
        for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
            int row = i / PIECES, piece = i % PIECES;
            unsigned most = *(unsigned*)(memory + PEAKS + (row * CLUSTER + piece % CLUSTER) * 4);
#pragma unroll
            for (int step = CLUSTER / 2; step; step /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
            float scale = __fdiv_rn(__uint_as_float(most), E4M3_MAX);
            scale = scale < 1e-12f ? 1e-12f : scale;
            uint4 eight = *(uint4*)(memory + row * X_PITCH + piece * 16);
            unsigned words[4] = {eight.x, eight.y, eight.z, eight.w}, made[4];
            float inverse = __fdiv_rn(1.0f, scale);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float both[2] = {low_of(words[i]), high_of(words[i])};
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float ratio = both[j] * inverse;
                    ratio = fmaf(fmaf(ratio, scale, -both[j]), -inverse, ratio);
                    both[j] = ratio == ratio ? ratio : 0.0f;
                }
                made[i] = codes_of(both[0], both[1]);
            }
            long long at = (long long)(first_token + row) * IN + rank * SLICE + piece * 8;
            if (row < present) *(uint2*)(codes + at) = make_uint2(made[0] | made[1] << 16, made[2] | made[3] << 16);
            if (row < present && rank == 0 && piece == 0) scales[first_token + row] = scale;
        }
    }
    // No block ends while others read its memory.
    wait_cluster();
    if (!SORT) return;

    int choices = present * TOP_K;
    for (int i = threadIdx.x; i < choices; i += THREADS) atomicAdd(counts + picks[i], 1);
    __syncthreads();
    int all_tiles = 0;
    for (int expert = rank * WARPS + warp; expert < EXPERTS; expert += CLUSTER * WARPS) {
        int before = 0, tiles_before = 0;
        all_tiles = 0;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            int count = counts[lane * OWN + i], tall = (count + TILE - 1) / TILE;
            bool earlier = lane * OWN + i < expert;
            before += earlier ? count : 0;
            tiles_before += earlier ? tall : 0;
            all_tiles += tall;
        }
        before = __reduce_add_sync(0xFFFFFFFFu, before);
        tiles_before = __reduce_add_sync(0xFFFFFFFFu, tiles_before);
        int end = before + counts[expert];
        if (lane == 0) start[expert] = before;
        if (lane == 0 && expert == EXPERTS - 1) start[EXPERTS] = end;
        for (int at = before + lane * TILE, i = tiles_before + lane; at < end; at += 32 * TILE, i += 32)
            table[i] = make_int4(expert, at, end, 0);
        int done = before;
#pragma unroll
        for (int first = 0; first < ROWS * TOP_K; first += 128) {
            // Four neighbouring choices of each thread.
            int mine = first + lane * 4, earlier = done;
            unsigned four = mine < ROWS * TOP_K ? *(unsigned*)(picks + mine) : 0;
            bool hit[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                hit[i] = mine + i < choices && (four >> 8 * i & 0xFF) == expert;
                unsigned hits = __ballot_sync(0xFFFFFFFFu, hit[i]);
                earlier += __popc(hits & ((1u << lane) - 1));
                done += __popc(hits);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (hit[i]) order[earlier++] = mine + i;
        }
    }
    // Tiles that there could be are no expert's.
    all_tiles = __reduce_add_sync(0xFFFFFFFFu, all_tiles);
    if (rank * WARPS + warp < EXPERTS)
        for (int i = all_tiles + (rank * WARPS + warp) * 32 + lane; i < tiles; i += CLUSTER * THREADS)
            table[i] = make_int4(EXPERTS, 0, 0, 0);
}
