// Batch-invariant attention of decode rows, one query each, over a paged cache of heads of 128 channels in bfloat16, for Hopper
// GPUs (sm_90a), compiled by NVRTC: bit for bit what Triton's kernel computes in tiles of 64 keys, whatever the rows' queries are there.
//
// A block serves the query heads of one KV head of a row, split after split, whose tiles it takes in in their order. Four warps have a
// page, 16 tokens, of each tile, and multiply its keys; then they share the channels, and each adds up values of all keys. Pages
// are in a ring, which the tensor memory accelerator fills. Weights are summed as values are, as if there were one more channel of ones.
//
// A row of one split is finished at once. Of more splits, the block that is done last adds up what all have left, in their order.
//
// The first pages are asked for before the kernel before is complete (EARLY), which has written no page but those of the new tokens.
//
// Constants: GROUP (query heads of a KV head, 1 to 8), STAGES (pages in flight: a multiple of 4, from 8 on).

#define PACKED_KIND 0
#include "hopper.cuh"
#include "pages.cuh"

constexpr int WARPS = 4, PITCH = 144;  // bytes from one query's weights in a tile to the next's
constexpr int AT_WEIGHTS = STAGES * PAGE_BYTES, AT_PEAKS = AT_WEIGHTS + 8 * PITCH, AT_OUT = AT_PEAKS + WARPS * 32;
constexpr int OUT_PITCH = WIDTH * 2 + 16, AT_BARRIERS = AT_OUT + 8 * OUT_PITCH;
static_assert(STAGES % WARPS == 0 && STAGES >= 2 * WARPS, "while one tile is taken in, the next one has been asked for");

constexpr unsigned ONES = 0x3F803F80u;

// As Triton divides.
__device__ __forceinline__ float quotient(float x, float y) {
    float result;
    asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return result;
}

__device__ __forceinline__ float2 load_two(unsigned place) {
    float2 two;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(place) : "memory");
    return two;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) ordered_attention(
    const __grid_constant__ TensorMap cache,  // channels of a line of 128 bytes, tokens of a page, lines of K and V, heads, pages
    const u16* queries,  // [rows, query heads, 128], q_row numbers from row to row
    u16* out,  // [rows, query heads, 128]
    float* partial,  // [rows, KV heads, splits, GROUP, 128 + 1]: of rows of more splits than one, outputs and masses in base 2
    unsigned* turns,  // [rows, KV heads]: splits that are done; 0 between launches
    const int* tables,  // [rows, table_row]: pages of each row
    const int* lengths,  // [rows]: tokens with the new one
    float factor, int table_row, int q_row, int splits, int split_pages, int early
) {
    extern __shared__ char memory[];
    unsigned base = (shared_address(memory) + 1023) & ~1023u, barriers = base + AT_BARRIERS;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, quad = lane >> 2, place = lane & 3;
    int head = blockIdx.x, heads = gridDim.x, row = blockIdx.y;
    if (lane == 0) {
#pragma unroll
        for (int s = warp; s < STAGES; s += WARPS) init_barrier<1>(barriers + 8 * s);
        publish_barriers();
    }
    __syncwarp();
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    if (!early) asm volatile("griddepcontrol.wait;" ::: "memory");
    int length = lengths[row], pages = (length + PAGE - 1) / PAGE, own_splits = (pages + split_pages - 1) / split_pages;
    // Empty splits have nothing to say.
    if (blockIdx.z && blockIdx.z >= own_splits) return;
    const int* table = tables + (long long)row * table_row;
    unsigned q[8][2];
    bool waited = false;
    int asked = 0;  // pages of the splits before
    for (int split = blockIdx.z; split < own_splits || !waited; split += gridDim.z) {
        int first = split * split_pages, count = pages - first < split_pages ? pages - first : split_pages;
        // Threads of a warp ask for its pages.
        auto ask = [&](int page, int block) {
            int stage = (asked + page) % STAGES;
            load_page(base + stage * PAGE_BYTES, cache, barriers + 8 * stage, head, block, once);
        };
        int mine = warp + lane * WARPS, entry = 0;
        bool wanted = lane < STAGES / WARPS && mine < count, late = false;
        if (wanted) {
            entry = table[first + mine];
            // The new token is in the last page.
            late = early && !waited && first + mine == pages - 1;
            if (!late) ask(mine, entry);
        }
        if (!waited) {
            // What the kernel before has written is read behind this alone.
            if (early) asm volatile("griddepcontrol.wait;" ::: "memory");
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            if (late) ask(mine, entry);
            const u16* from = queries + (long long)row * q_row + (head * GROUP + quad) * WIDTH + place * 2;
#pragma unroll
            for (int k = 0; k < 8; ++k)
#pragma unroll
                for (int half = 0; half < 2; ++half) q[k][half] = quad < GROUP ? *(const unsigned*)(from + k * 16 + half * 8) : 0u;
            waited = true;
        }
        mine = STAGES + warp;
        entry = lane == 0 && mine < count ? table[first + mine] : 0;
        // All barriers are there.
        __syncthreads();

        float highest[2] = {-INFINITY_, -INFINITY_}, total[4] = {0.0f, 0.0f, 0.0f, 0.0f}, sums[2][4] = {};
        int line = lane & 7, matrix = lane >> 3;
        // A tile has a page of each warp.
#pragma unroll 1
        for (int begin = 0; begin < count; begin += WARPS) {
            float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            int page = begin + warp;
            if (page < count) {
                int stage = (asked + page) % STAGES;
                unsigned from = base + stage * PAGE_BYTES;
                wait_for(barriers + 8 * stage, (asked + page) / STAGES & 1);
                unsigned keys[8][4];
                // Pieces of 16 bytes of a line are exchanged by the number of the line.
#pragma unroll
                for (int k = 0; k < 8; ++k)
                    load_matrices(keys[k], from + k / 4 * PART + (matrix % 2 * 8 + line) * 128 + ((k % 4 * 2 + matrix / 2) ^ line) * 16);
#pragma unroll
                for (int k = 0; k < 8; ++k) multiply_16<0>(s, keys[k][0], keys[k][1], keys[k][2], keys[k][3], q[k][0], q[k][1]);
            }
            // A thread has two keys of two queries.
            int left = length - (first + page) * PAGE;
            float peaks[2];
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] = quad + i / 2 * 8 < left ? __fmul_rn(s[i], factor) : -INFINITY_;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                peaks[i] = fmaxf(s[i], s[i + 2]);
#pragma unroll
                for (int far = 4; far < 32; far *= 2) peaks[i] = fmaxf(peaks[i], __shfl_xor_sync(~0u, peaks[i], far));
            }
            if (quad == 0) {
                unsigned to = base + AT_PEAKS + warp * 32 + place * 8;
                store_shared(to, peaks[0]), store_shared(to + 4, peaks[1]);
            }
            __syncthreads();
            // All warps are done with the pages of the tile before.
            if (begin) {
                mine = page - WARPS + STAGES;
                if (lane == 0 && mine < count) ask(mine, entry);
                mine += WARPS;
                entry = lane == 0 && mine < count ? table[first + mine] : 0;
            }
            // The tile's pages have come, each for the warp that has multiplied its keys.
            unsigned values[WARPS][2][4];
#pragma unroll
            for (int k = 0; k < WARPS; ++k) {
                unsigned from = base + (asked + begin + k) % STAGES * PAGE_BYTES;
                if (begin + k < count)
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        int sixteen = warp * 2 + m;
                        load_turned(values[k][m], from + (2 + sixteen / 4) * PART + (matrix / 2 * 8 + line) * 128 + ((sixteen % 4 * 2 + matrix % 2) ^ line) * 16);
                    }
            }
            float now[2] = {highest[0], highest[1]}, decay[2], weights[4];
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                float2 two = load_two(base + AT_PEAKS + w * 32 + place * 8);
                now[0] = fmaxf(now[0], two.x), now[1] = fmaxf(now[1], two.y);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float pivot = now[i] == -INFINITY_ ? 0.0f : now[i];
                decay[i] = power_of_two(highest[i] - pivot);
                weights[i] = power_of_two(s[i] - pivot), weights[i + 2] = power_of_two(s[i + 2] - pivot);
                highest[i] = now[i];
            }
            unsigned to = base + AT_WEIGHTS + line * PITCH + warp * 32 + matrix % 2 * 16;
            asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                :: "r"(to), "r"(packed(weights[0], weights[1])), "r"(packed(weights[2], weights[3])) : "memory");
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 4; ++i) total[i] *= decay[i % 2], sums[0][i] *= decay[i % 2], sums[1][i] *= decay[i % 2];
            unsigned rounded[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half) load_matrices(rounded[half], base + AT_WEIGHTS + line * PITCH + half * 64 + matrix * 16);
#pragma unroll
            for (int k = 0; k < WARPS; ++k) {
                if (begin + k >= count) break;
                // What is no token of the row may be no number.
                int more = length - (first + begin + k) * PAGE - place * 2;
                unsigned low = more > 1 ? ~0u : more > 0 ? 0xFFFFu : 0u, high = more > 9 ? ~0u : more > 8 ? 0xFFFFu : 0u;
                unsigned b0 = rounded[k / 2][k % 2 * 2], b1 = rounded[k / 2][k % 2 * 2 + 1];
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    multiply_16<0>(sums[m], values[k][m][0] & low, values[k][m][1] & low, values[k][m][2] & high, values[k][m][3] & high, b0, b1);
                multiply_16<0>(total, ONES, ONES, ONES, ONES, b0, b1);
            }
        }
        asked += count;

        float inverse[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) inverse[i] = quotient(1.0f, total[i] == 0.0f ? 1.0f : total[i]);
        if (own_splits <= 1) {
            // Each warp has 32 channels of all queries.
            unsigned at = base + AT_OUT;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                unsigned low = packed(sums[m][0] * inverse[0], sums[m][1] * inverse[1]), high = packed(sums[m][2] * inverse[0], sums[m][3] * inverse[1]);
                unsigned to = at + (lane & 7) * OUT_PITCH + (warp * 32 + m * 16 + (lane >> 3 & 1) * 8) * 2;
                asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" :: "r"(to), "r"(low), "r"(high) : "memory");
            }
            __syncwarp();
            if (quad < GROUP) {
                uint4 eight;
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                    : "r"(at + quad * OUT_PITCH + warp * 64 + place * 16) : "memory");
                *(uint4*)(out + ((long long)row * heads + head) * (GROUP * WIDTH) + quad * WIDTH + warp * 32 + place * 8) = eight;
            }
            return;
        }
        float* pieces = partial + ((long long)row * heads + head) * splits * (GROUP * (WIDTH + 1));
        float* piece = pieces + (long long)split * (GROUP * (WIDTH + 1));
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int query = place * 2 + i % 2;
                if (query < GROUP) piece[query * WIDTH + warp * 32 + m * 16 + i / 2 * 8 + quad] = sums[m][i] * inverse[i % 2];
            }
        if (warp == 0 && quad == 0)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (place * 2 + i < GROUP) piece[GROUP * WIDTH + place * 2 + i] = highest[i] + log2f(total[i] == 0.0f ? 1.0f : total[i]);
        __syncthreads();
        __shared__ unsigned turn;
        unsigned* counter = turns + row * heads + head;
        if (threadIdx.x == 0) {
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(turn) : "l"(counter) : "memory");
            if (turn == own_splits - 1) *counter = 0;
        }
        __syncthreads();
        if (turn < own_splits - 1) continue;
        for (int at = threadIdx.x; at < GROUP * WIDTH; at += 32 * WARPS) {
            auto mass_of = [&](int each) { return __ldcg(pieces + (long long)each * (GROUP * (WIDTH + 1)) + GROUP * WIDTH + at / WIDTH); };
            float pivot = -INFINITY_, merged = 0.0f, masses = 0.0f;
            for (int each = 0; each < own_splits; ++each) pivot = fmaxf(pivot, mass_of(each));
            pivot = pivot == -INFINITY_ ? 0.0f : pivot;
            for (int each = 0; each < own_splits; ++each) {
                float weight = power_of_two(mass_of(each) - pivot);
                if (weight > 0.0f) merged = fmaf(weight, __ldcg(pieces + (long long)each * (GROUP * (WIDTH + 1)) + at), merged);
                masses += weight;
            }
            merged = quotient(merged, masses == 0.0f ? 1.0f : masses);
            out[((long long)row * heads + head) * (GROUP * WIDTH) + at] = (u16)packed(merged, 0.0f);
        }
    }
}
