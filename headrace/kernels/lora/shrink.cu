// A's products of up to 64 rows with the adapters that they have, low = A x, for Hopper GPUs (sm_90a), compiled by NVRTC without
// any include. They are what wide.cu multiplies by B.
//
// A cluster of SHARES blocks makes 16 columns: of one place, one part and 16 ranks. Each block has a share of the channels, each
// of its warps a share of that, whose lines of A it loads into registers before the kernel before is complete. Only the rows
// that have the adapter are multiplied.
//
// Columns of low: parts, in them the places that any row has, in their order, and in these the ranks, padded to a multiple of
// 16 by zeros. Rows that have another adapter are zeros. So are 512 columns behind the last.
//
// Constants: KIND (0 bfloat16, 1 float16), ROWS (8, 16, 32 or 64), IN channels, RANK, PARTS, PLACES (at most 64), SHARES, WARPS,
// CHANNELS of a warp, a multiple of 32, READY (1: says when x is complete).

typedef unsigned long long u64;

constexpr int THREADS = WARPS * 32;
constexpr int SIXTEENS = (RANK + 15) / 16;  // of ranks
constexpr int WIDTH = PLACES * PARTS * SIXTEENS * 16;
constexpr int TILES = ROWS / 8;
constexpr int GROUPS = CHANNELS / 32;
constexpr int AHEAD = GROUPS < 6 ? GROUPS : 6;  // of 32 channels, which are in registers at a time
constexpr int TOGETHER = TILES < 2 ? TILES : 2;  // tiles of rows that are loaded at a time
static_assert(PLACES <= 64 && CHANNELS % 32 == 0, "sizes");

__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if KIND == 0
#define INPUTS "bf16.bf16"
#else
#define INPUTS "f16.f16"
#endif
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32." INPUTS ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned packed(float low, float high) {
    unsigned both;
#if KIND == 1
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

__device__ __forceinline__ uint4 once(const void* place) {
    uint4 four;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w) : "l"(place));
    return four;
}

// Which places the lanes of a warp have, as bits.
__device__ __forceinline__ u64 places_of(int first, int second) {
    unsigned low = 0, high = 0;
    if (first >= 0) (first < 32 ? low : high) |= 1u << (first & 31);
    if (second >= 0) (second < 32 ? low : high) |= 1u << (second & 31);
    asm volatile("redux.sync.or.b32 %0, %0, 0xffffffff;" : "+r"(low));
    asm volatile("redux.sync.or.b32 %0, %0, 0xffffffff;" : "+r"(high));
    return (u64)high << 32 | low;
}

extern "C" __global__ void __launch_bounds__(THREADS) shrink(
    const unsigned short* x, const unsigned short* a, const int* places, unsigned short* low, unsigned* ready, int rows,
    long long x_row, long long a_place
) {
    __shared__ alignas(16) float partial[WARPS][ROWS][16];
    __shared__ unsigned char list[64];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, line = lane >> 2, quarter = lane & 3;
    int share = blockIdx.x % SHARES, group = blockIdx.x / SHARES % (PARTS * SIXTEENS), place = blockIdx.x / SHARES / (PARTS * SIXTEENS);
    int part = group / SIXTEENS, sixteen = group % SIXTEENS;
    if (threadIdx.x == 0) {
        // The product polls this one: it starts when all blocks here have let it.
        if (READY && blockIdx.x == 0) asm volatile("st.relaxed.gpu.global.u32 [%0], 0;\nfence.acq_rel.gpu;" :: "l"(ready) : "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    int first = lane < rows ? places[lane] : -1, second = lane + 32 < rows ? places[lane + 32] : -1;
    u64 used = places_of(first, second);
    u64 own = (u64)__ballot_sync(~0u, second == place) << 32 | __ballot_sync(~0u, first == place);
    int count = __popcll(own), present = __popcll(used), before = __popcll(used & (((u64)1 << place) - 1));
    if (threadIdx.x < 64 && own >> threadIdx.x & 1) list[__popcll(own & (((u64)1 << threadIdx.x) - 1))] = threadIdx.x;

    // Whatever place has no rows has a run of columns behind those of the others.
    int slot = count ? (part * present + before) * SIXTEENS + sixteen
                     : (PARTS * present + (place - before) * PARTS + part) * SIXTEENS + sixteen;
    bool zeros = count || (slot - PARTS * present * SIXTEENS) * 16 < 512;
    auto load_a = [&](unsigned (&lines)[2][4], int channel) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int rank = sixteen * 16 + line + h * 8;
            uint4 four = make_uint4(0, 0, 0, 0);
            if (count && rank < RANK && channel < IN) four = once(a + place * a_place + (long long)(part * RANK + rank) * IN + channel);
            lines[h][0] = four.x, lines[h][1] = four.y, lines[h][2] = four.z, lines[h][3] = four.w;
        }
    };
    int start = (share * WARPS + warp) * CHANNELS + quarter * 8;
    unsigned lines[AHEAD][2][4];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load_a(lines[i], start + i * 32);
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (READY && blockIdx.x == 0 && threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(ready) : "memory");

    unsigned short* columns = low + slot * 16;
    if (zeros && threadIdx.x < rows && threadIdx.x % SHARES == share && !(own >> threadIdx.x & 1)) {
        uint4* target = (uint4*)(columns + (long long)threadIdx.x * WIDTH);
        target[0] = target[1] = make_uint4(0, 0, 0, 0);
    }
    if (!count) return;  // With all of its cluster.
    float sums[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][i] = 0.0f;
#pragma unroll
    for (int pass = 0; pass < GROUPS; pass += AHEAD) {
        if (pass) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) load_a(lines[i], pass + i < GROUPS ? start + (pass + i) * 32 : IN);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile += TOGETHER) {
            if (tile * 8 >= count) break;
            uint4 right[TOGETHER][AHEAD];
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j) {
                int at = (tile + j) * 8 + line;
                const unsigned short* row = x + list[at < count ? at : 0] * x_row;
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    int channel = start + (pass + i) * 32;
                    right[j][i] = make_uint4(0, 0, 0, 0);
                    if (at < count && pass + i < GROUPS && channel < IN) right[j][i] = *(const uint4*)(row + channel);
                }
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    unsigned front[4] = {lines[i][0][0], lines[i][1][0], lines[i][0][1], lines[i][1][1]};
                    unsigned back[4] = {lines[i][0][2], lines[i][1][2], lines[i][0][3], lines[i][1][3]};
                    multiply(sums[tile + j], front, right[j][i].x, right[j][i].y);
                    multiply(sums[tile + j], back, right[j][i].z, right[j][i].w);
                }
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) partial[warp][tile * 8 + quarter * 2 + i % 2][line + i / 2 * 8] = sums[tile][i];
    __syncthreads();
    for (int at = threadIdx.x; at < count * 16; at += THREADS) {
        float sum = (&partial[0][0][0])[at];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) sum += (&partial[w][0][0])[at];
        (&partial[0][0][0])[at] = sum;
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    // Four columns of a row are a thread's.
    for (int at = threadIdx.x * SHARES + share; at < count * 4; at += SHARES * THREADS) {
        unsigned from = (unsigned)__cvta_generic_to_shared(&partial[0][0][0] + at * 4), there;
        float total[4] = {0.0f, 0.0f, 0.0f, 0.0f}, four[SHARES][4];
#pragma unroll
        for (int s = 0; s < SHARES; ++s) {
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(from), "r"(s));
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                : "=f"(four[s][0]), "=f"(four[s][1]), "=f"(four[s][2]), "=f"(four[s][3]) : "r"(there) : "memory");
        }
#pragma unroll
        for (int s = 0; s < SHARES; ++s)
#pragma unroll
            for (int i = 0; i < 4; ++i) total[i] += four[s][i];
        *(uint2*)(columns + (long long)list[at / 4] * WIDTH + at % 4 * 4) = make_uint2(packed(total[0], total[1]), packed(total[2], total[3]));
    }
    // No block ends while others read its memory.
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
