// Attention of decode rows, one query each, over a paged cache of heads of 128 channels in 16 bits, for Hopper GPUs (sm_90a),
// compiled by NVRTC. It norms and rotates q and k of the rows' tokens, and writes k and v to the cache.
//
// A block serves the query heads of one KV head of a row. Each warp has a ring of pages, 16 tokens of the KV head, which the
// tensor memory accelerator loads, and a softmax of its own. Up to SPLIT blocks share a row's pages: as many as have LEAST pages for each
// warp, and the others end at once. Warps merge what they have by way of shared memory. Blocks are a cluster and merge in the memory of the
// first; with GATHERS they are none, so that they start wherever there is room, and the last to be done merges what all have stored.
//
// The first pages are asked for before the kernel before is complete (EARLY), which no kernel since the last of these may have written:
// so this kernel lets the next one start only when it has waited itself. With GATHERS, only a step's first launch does, which reads
// nothing early.
//
// Constants: KIND (0 bfloat16, 1 float16), GROUP (query heads of a KV head, 1 to 8), WARPS, STAGES (pages of a warp in flight), SPLIT
// (blocks that may share a row's pages: 1 to 8 if they are clusters), LEAST, GATHERS, NORMS (1: q and k are normed), ROTATES.

#define PACKED_KIND KIND
#include "hopper.cuh"
#include "pages.cuh"

#define CLUSTERED (SPLIT > 1 && !GATHERS)

constexpr int THREADS = 32 * WARPS, RING = STAGES * PAGE_BYTES;
constexpr int SUMS = GROUP * WIDTH * 4 + 64;  // bytes: sums of values of each head, then maxima and masses
constexpr int PITCH = WIDTH + 8, CLUSTER = GATHERS ? 1 : SPLIT;
static_assert(SUMS <= RING, "a warp's sums take the place of its pages");

// Where everything is, behind the rings: the blocks' sums, heads, the new token's key and value, barriers.
constexpr int AT_SUMS = WARPS * RING, AT_HEADS = AT_SUMS + (CLUSTER > 1 ? SPLIT * SUMS : 0), AT_NEW = AT_HEADS + 8 * PITCH * 2, AT_BARRIERS = AT_NEW + 2 * WIDTH * 2;

// Either half of a word.
__device__ __forceinline__ float half_of(unsigned word, int which) { return wide_of<KIND>(which ? word >> 16 : word & 0xFFFF); }

__device__ __forceinline__ float rounded(float value) { return half_of(packed(value, 0.0f), 0); }

__device__ __forceinline__ float4 load_four(unsigned place) {
    float4 four;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "r"(place) : "memory");
    return four;
}

__device__ __forceinline__ float load_one(unsigned place) {
    float one;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(one) : "r"(place) : "memory");
    return one;
}

// Store to another block's memory, and count the bytes at its barrier.
__device__ __forceinline__ void send_four(unsigned place, float4 four, unsigned barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
        :: "r"(place), "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w), "r"(barrier) : "memory");
}

__device__ __forceinline__ void send_one(unsigned place, float value, unsigned barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" :: "r"(place), "f"(value), "r"(barrier) : "memory");
}

__device__ __forceinline__ void store_one(unsigned place, float value) {
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(place), "f"(value) : "memory");
}

__device__ __forceinline__ void store_two(unsigned place, unsigned low, unsigned high) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" :: "r"(place), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ unsigned load_word(unsigned place) {
    unsigned word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(place) : "memory");
    return word;
}

// What a thread has of a head: four channels, their norm's weights, cosines and sines.
struct Head {
    uint2 part;
    uint2 weight;
};

// Norms and rotates a head of which each thread of a warp has four channels. Rounds where separate kernels would.
__device__ __forceinline__ uint2 finished(Head head, float4 cos, float4 sin, float eps, int lane) {
    float x[4] = {half_of(head.part.x, 0), half_of(head.part.x, 1), half_of(head.part.y, 0), half_of(head.part.y, 1)};
#if NORMS
    float squares = x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3];
#pragma unroll
    for (int far = 16; far; far /= 2) squares += __shfl_xor_sync(~0u, squares, far);
    float factor = rsqrtf(squares / WIDTH + eps);
    float weights[4] = {half_of(head.weight.x, 0), half_of(head.weight.x, 1), half_of(head.weight.y, 0), half_of(head.weight.y, 1)};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = rounded(rounded(x[i] * factor) * weights[i]);
#endif
#if ROTATES
    float cosines[4] = {cos.x, cos.y, cos.z, cos.w}, sines[4] = {sin.x, sin.y, sin.z, sin.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float turned = __shfl_xor_sync(~0u, x[i], 16) * sines[i];
        x[i] = x[i] * cosines[i] + (lane < 16 ? -turned : turned);
    }
#endif
    return make_uint2(packed(x[0], x[1]), packed(x[2], x[3]));
}

extern "C" __global__ void __launch_bounds__(THREADS) decode_attention(
    const __grid_constant__ TensorMap cache,  // channels of a line of 128 bytes, tokens of a page, lines of K and V, heads, pages
    const u16* qkv,  // [rows, qkv_row]: q, k and v of each row's token
    u16* out,  // [rows, query heads, 128]
    u16* written,  // the cache: [pages, 16, heads, 256] with strides
    const int* tables,  // [rows, table_row]: pages of each row
    const int* lengths,  // [rows]: tokens with the new one
    const long long* slots,  // [rows]: page * 16 + place of the new token; -1: it is not written
    const float* angles,  // [rows, angle_row]: 64 cosines, then 64 sines
    const u16* q_weight, const u16* k_weight, float eps, float factor, int table_row, int qkv_row, int angle_row, int heads,
    long long page_stride, long long token_stride, long long head_stride, int early,
    float* parts,  // GATHERS: [rows, heads, SPLIT, SUMS / 4]
    int* turns  // GATHERS: [rows, heads], zeros before and after
) {
    extern __shared__ char memory[];
    unsigned base = (shared_address(memory) + 1023) & ~1023u;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#if GATHERS
    // The blocks that have something to do whatever the row's length are the first to find room.
    int rank = blockIdx.x / heads, head = blockIdx.x % heads, row = blockIdx.y;
#else
    int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, head = blockIdx.x / SPLIT, row = blockIdx.y;
#endif
    int worker = rank * WARPS + warp, quad = lane >> 2, place = lane & 3;
    [[maybe_unused]] unsigned merging = base + AT_BARRIERS + WARPS * STAGES * 8;
    unsigned ring = base + warp * RING, barriers = base + AT_BARRIERS + warp * STAGES * 8;
    if (lane == 0) {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) init_barrier<1>(barriers + 8 * s);
        publish_barriers();
    }
#if CLUSTERED
    // Of the cluster's first block: the others' sums have come.
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" :: "r"(merging) : "memory");
#endif
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    uint2 q_factors = make_uint2(0, 0), k_factors = q_factors;
#if NORMS
    q_factors = ((const uint2*)q_weight)[lane];
    k_factors = ((const uint2*)k_weight)[lane];
#endif
    // With 8 rows, whose blocks are clusters, steps are slower so.
    if (early && GATHERS) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (!early) asm volatile("griddepcontrol.wait;" ::: "memory");
    // The row's pages go round the workers. The new token is behind them, and the worker's whose turn it is.
    int context = lengths[row] - 1, pages = (context + PAGE - 1) / PAGE;
    int blocks = 1;
    if (SPLIT > 1) {
        blocks = (pages + WARPS * LEAST - 1) / (WARPS * LEAST);
        blocks = blocks < 1 ? 1 : blocks > SPLIT ? SPLIT : blocks;
        if (rank >= blocks) return;
#if !GATHERS
        asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
    }
    int workers = blocks * WARPS;
    int count = context > 0 && pages > worker ? (pages - worker + workers - 1) / workers : 0;
    bool present = context >= 0;
    int owner = present ? pages % workers : 0;
    const int* table = tables + (long long)row * table_row + worker;
    auto entries = [&](int first) { return first + lane < count ? table[(first + lane) * workers] : 0; };
    int now = entries(0), next = count > 32 ? entries(32) : 0;
    auto ask = [&](int i) {
        if (i && i % 32 == 0) {
            now = next;
            next = entries(i + 32);
        }
        int block = __shfl_sync(~0u, now, i & 31), stage = i % STAGES;
        if (lane == 0) load_page(ring + stage * PAGE_BYTES, cache, barriers + 8 * stage, head, block, once);
    };
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < STAGES && i < count; ++i) ask(i);
    bool here = owner / WARPS == rank;
    long long slot = here ? slots[row] : -1;
    float4 cos, sin;
#if ROTATES
    const float4* turn = (const float4*)(angles + (long long)row * angle_row);
    cos = turn[lane & 15], sin = turn[16 + (lane & 15)];
#endif
    // What the kernel before has written is read behind this alone, and what is asked for above is what no kernel behind the last
    // of these has written.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    // Warps finish the heads in turn; the new token's last.
    const u16* token = qkv + (long long)row * qkv_row;
    constexpr int TASKS = GROUP + 1, OWN = (TASKS + WARPS - 1) / WARPS;
    Head mine[OWN];
    uint2 value = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        int task = warp + i * WARPS;
        int line = task < GROUP ? head * GROUP + task : heads * GROUP + head;
        if (task < TASKS) mine[i].part = ((const uint2*)(token + line * WIDTH))[lane];
        mine[i].weight = task < GROUP ? q_factors : k_factors;
        if (task == GROUP) value = ((const uint2*)(token + (heads * (GROUP + 1) + head) * WIDTH))[lane];
    }
    unsigned heads_at = base + AT_HEADS, new_at = base + AT_NEW;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        int task = warp + i * WARPS;
        if (task >= TASKS) break;
        uint2 done = finished(mine[i], cos, sin, eps, lane);
        if (task < GROUP) {
            store_two(heads_at + task * (PITCH * 2) + lane * 8, done.x, done.y);
        } else {
            store_two(new_at + lane * 8, done.x, done.y);
            store_two(new_at + WIDTH * 2 + lane * 8, value.x, value.y);
            if (slot >= 0) {
                u16* target = written + slot / PAGE * page_stride + slot % PAGE * token_stride + head * head_stride;
                ((uint2*)target)[lane] = done;
                ((uint2*)(target + WIDTH))[lane] = value;
            }
        }
    }
    __syncthreads();

    // Of the matrix product's 16 queries there are GROUP, in its first 8 lines.
    unsigned q[8][2];
#pragma unroll
    for (int k = 0; k < 8; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            q[k][half] = quad < GROUP ? load_word(heads_at + quad * (PITCH * 2) + (k * 16 + half * 8 + place * 2) * 2) : 0u;

    float highest = -INFINITY_, mass = 0.0f, sums[8][4];
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[j][i] = 0.0f;
    // Takes in scores of 16 keys, of which a thread has four of query `quad`; returns the weights.
    auto soften = [&](float (&s)[2][4], unsigned (&weights)[2]) {
        float most = fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        most = fmaxf(most, highest);
        float decay = power_of_two(highest - most);
        highest = most;
        float p[4] = {power_of_two(s[0][0] - most), power_of_two(s[0][1] - most), power_of_two(s[1][0] - most), power_of_two(s[1][1] - most)};
        mass = mass * decay + (p[0] + p[1]) + (p[2] + p[3]);
        weights[0] = packed(p[0], p[1]);
        weights[1] = packed(p[2], p[3]);
        // Sums have queries along their other axis: a thread's are 2 place and 2 place + 1.
        float even = __shfl_sync(~0u, decay, place * 8), odd = __shfl_sync(~0u, decay, place * 8 + 4);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[j][0] *= even, sums[j][1] *= odd, sums[j][2] *= even, sums[j][3] *= odd;
    };

    int line = lane & 7, matrix = lane >> 3;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        int stage = i % STAGES;
        unsigned from = ring + stage * PAGE_BYTES;
        wait_for(barriers + 8 * stage, i / STAGES & 1);
        float s[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                // Pieces of 16 bytes of a line are exchanged by the number of the line.
                unsigned keys[4];
                load_matrices(keys, from + (k / 2) * PART + (n * 8 + line) * 128 + ((k % 2 * 4 + matrix) ^ line) * 16);
                multiply_16<KIND>(s[n], q[2 * k][0], 0u, q[2 * k][1], 0u, keys[0], keys[1]);
                multiply_16<KIND>(s[n], q[2 * k + 1][0], 0u, q[2 * k + 1][1], 0u, keys[2], keys[3]);
            }
        }
        int left = context - (worker + i * workers) * PAGE;
        unsigned low = ~0u, high = ~0u;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                bool seen = n * 8 + place * 2 + j < left;
                s[n][j] = seen ? s[n][j] * factor : -INFINITY_;
                unsigned kept = j ? 0x0000FFFFu : 0xFFFF0000u;
                if (!seen) n ? high &= kept : low &= kept;
            }
        unsigned weights[2];
        soften(s, weights);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            unsigned values[4];
            load_turned(values, from + (2 + j / 4) * PART + (matrix / 2 * 8 + line) * 128 + ((j % 4 * 2 + matrix % 2) ^ line) * 16);
            // What is no token of the row may be no number.
            multiply_16<KIND>(sums[j], values[0] & low, values[1] & low, values[2] & high, values[3] & high, weights[0], weights[1]);
        }
        __syncwarp();
        if (i + STAGES < count) ask(i + STAGES);
    }
    if (present && worker == owner) {
        float s[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {-INFINITY_, -INFINITY_, 0.0f, 0.0f}};
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            unsigned at = new_at + (k * 16 + place * 2) * 2;
            multiply_16<KIND>(s[0], q[k][0], 0u, q[k][1], 0u, quad ? 0u : load_word(at), quad ? 0u : load_word(at + 16));
        }
        s[0][0] = place ? -INFINITY_ : s[0][0] * factor;
        s[0][1] = -INFINITY_;
        unsigned weights[2];
        soften(s, weights);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            // Channels j * 16 + quad and 8 further; of 16 keys the first.
            unsigned at = new_at + WIDTH * 2 + (j * 16 + (quad & ~1)) * 2;
            unsigned first = load_word(at), second = load_word(at + 16);
            first = quad & 1 ? first >> 16 : first & 0xFFFF, second = quad & 1 ? second >> 16 : second & 0xFFFF;
            multiply_16<KIND>(sums[j], place ? 0u : first, place ? 0u : second, 0u, 0u, weights[0], weights[1]);
        }
    }
    mass += __shfl_xor_sync(~0u, mass, 1);
    mass += __shfl_xor_sync(~0u, mass, 2);

    // A warp's sums take the place of its pages.
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int query = place * 2 + i % 2;
            if (query < GROUP) store_one(ring + (query * WIDTH + j * 16 + i / 2 * 8 + quad) * 4, sums[j][i]);
        }
    if (place == 0 && quad < GROUP) {
        store_one(ring + GROUP * WIDTH * 4 + quad * 4, highest);
        store_one(ring + GROUP * WIDTH * 4 + 32 + quad * 4, mass);
    }
    __syncthreads();
    // Merges what `parts` sums say of four channels of a query.
    struct Merged {
        float4 sum;
        float highest, mass;
    };
    auto merge = [&](auto part, int parts, int at) {
        int query = at / WIDTH;
        Merged all = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), -INFINITY_, 0.0f};
        for (int w = 0; w < parts; ++w) all.highest = fmaxf(all.highest, load_one(part(w) + GROUP * WIDTH * 4 + query * 4));
        float pivot = all.highest == -INFINITY_ ? 0.0f : all.highest;
        for (int w = 0; w < parts; ++w) {
            float share = power_of_two(load_one(part(w) + GROUP * WIDTH * 4 + query * 4) - pivot);
            float4 four = load_four(part(w) + at * 4);
            all.mass += share * load_one(part(w) + GROUP * WIDTH * 4 + 32 + query * 4);
            all.sum.x += share * four.x, all.sum.y += share * four.y, all.sum.z += share * four.z, all.sum.w += share * four.w;
        }
        return all;
    };
    auto store = [&](const Merged& all, int at) {
        float inverse = all.mass > 0.0f ? 1.0f / all.mass : 0.0f;
        uint2 four = make_uint2(packed(all.sum.x * inverse, all.sum.y * inverse), packed(all.sum.z * inverse, all.sum.w * inverse));
        *(uint2*)(out + ((long long)row * heads + head) * (GROUP * WIDTH) + at) = four;
    };
    auto of_warp = [&](int w) { return base + w * RING; };
    [[maybe_unused]] unsigned first = 0, first_merging = 0;
#if CLUSTERED
    if (blocks > 1 && rank) {
        // No block stores to one that has not begun.
        asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
        first = place_of(base + AT_SUMS + rank * SUMS, 0), first_merging = place_of(merging, 0);
    }
#endif
    for (int at = threadIdx.x * 4; at < GROUP * WIDTH; at += THREADS * 4) {
        Merged all = merge(of_warp, WARPS, at);
        int query = at / WIDTH;
        if (blocks == 1) {
            store(all, at);
#if GATHERS
        } else {
            float* part = parts + (((long long)row * heads + head) * SPLIT + rank) * (SUMS / 4);
            *(float4*)(part + at) = all.sum;
            if (at % WIDTH == 0) part[GROUP * WIDTH + query] = all.highest, part[GROUP * WIDTH + 8 + query] = all.mass;
        }
#else
        } else if (rank) {
            send_four(first + at * 4, all.sum, first_merging);
            if (at % WIDTH == 0) {
                send_one(first + GROUP * WIDTH * 4 + query * 4, all.highest, first_merging);
                send_one(first + GROUP * WIDTH * 4 + 32 + query * 4, all.mass, first_merging);
            }
        } else {
            unsigned to = base + AT_SUMS;
            store_one(to + at * 4, all.sum.x), store_one(to + at * 4 + 4, all.sum.y);
            store_one(to + at * 4 + 8, all.sum.z), store_one(to + at * 4 + 12, all.sum.w);
            if (at % WIDTH == 0) {
                store_one(to + GROUP * WIDTH * 4 + query * 4, all.highest);
                store_one(to + GROUP * WIDTH * 4 + 32 + query * 4, all.mass);
            }
        }
#endif
    }
#if GATHERS
    if (blocks == 1) return;
    // All of a block's threads have stored before one of them says so.
    __syncthreads();
    bool& last = *(bool*)memory;
    int* count_at = turns + row * heads + head;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(count_at, 1) == blocks - 1;
        __threadfence();
        if (last) *count_at = 0;
    }
    __syncthreads();
    if (!last) return;
    const float* stored = parts + ((long long)row * heads + head) * (SPLIT * (SUMS / 4));
    for (int at = threadIdx.x * 4; at < GROUP * WIDTH; at += THREADS * 4) {
        int query = at / WIDTH;
        Merged all = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), -INFINITY_, 0.0f};
        for (int w = 0; w < blocks; ++w) all.highest = fmaxf(all.highest, __ldcg(stored + w * (SUMS / 4) + GROUP * WIDTH + query));
        float pivot = all.highest == -INFINITY_ ? 0.0f : all.highest;
        for (int w = 0; w < blocks; ++w) {
            const float* part = stored + w * (SUMS / 4);
            float share = power_of_two(__ldcg(part + GROUP * WIDTH + query) - pivot);
            float4 four = __ldcg((const float4*)(part + at));
            all.mass += share * __ldcg(part + GROUP * WIDTH + 8 + query);
            all.sum.x += share * four.x, all.sum.y += share * four.y, all.sum.z += share * four.z, all.sum.w += share * four.w;
        }
        store(all, at);
    }
#elif CLUSTERED
    if (blocks == 1 || rank) return;
    if (threadIdx.x == 0)
        expect(merging, (blocks - 1) * GROUP * (WIDTH * 4 + 8));
    __syncthreads();
    wait_for(merging, 0);
    auto of_block = [&](int w) { return base + AT_SUMS + w * SUMS; };
    for (int at = threadIdx.x * 4; at < GROUP * WIDTH; at += THREADS * 4) store(merge(of_block, blocks, at), at);
#endif
}
