// What adapters add to the products of wide.cu, which has the constants.
//
// B's columns in the places that any row has are further channels, in steps behind those of the weight. Blocks have four
// more warps. Those of the first blocks multiply x by A in registers, each over a share of the channels, while the weight is
// multiplied. All then add up what their own block needs and put it in the ring in the place of x, with zeros in rows that have
// another place.

#include "adapted.cuh"

__device__ __forceinline__ void load_cube(unsigned to, const TensorMap& map, unsigned barrier, int column, int line, int place, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;"
        :: "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(line), "r"(place), "l"(policy) : "memory");
}

struct Adapters {
    const unsigned short* x;  // [rows, inputs], x_row numbers from row to row
    const unsigned short* a;  // [places, parts * rank, inputs], a_place numbers from place to place
    float* shares;  // [shares, rows, parts * sixteens * 16]: A's products of a share of the channels
    unsigned* cells;  // counters, 0 between launches: of what is made, and of blocks that know it
    long long x_row, a_place;
    int inputs, rank, parts, workers;
};

constexpr int RUNS = RESIDENT > 2 ? 2 : 4;  // of 32 channels, which a warp has in registers
constexpr int SPAN = 128 * RUNS, SHARE = GATED && ROWS > 32 ? 1024 : 512;  // channels at a time, and of a block in all
constexpr int FEW_PLACES = 8, MANY_SHARE = 2048;  // with more places than that, a block has so many channels
constexpr int EIGHTS = ROWS < 16 || RESIDENT > 1 ? 1 : 2;  // of rows, whose products with A are made at a time
constexpr int SHARES_AT_ONCE = RESIDENT > 2 ? 4 : 8;
constexpr int MADE = 0, KNOWN = 32;

// The places that the rows of a step have, as bits, and B's columns in them, by sixteens: of a part, and of its ranks, in the order
// of places.
struct Columns {
    u64 used;
    int present, of_place, of_part, all;

    __device__ __forceinline__ Columns(int first, int second, int rank) {
        Places places;
        places.add(first), places.add(second);
        used = places.of_warp(), present = __popcll(used);
        of_place = (rank + 15) / 16, of_part = present * of_place, all = GATED ? 2 * of_part : of_part;
    }
    __device__ __forceinline__ int share() const { return present > FEW_PLACES ? MANY_SHARE : SHARE; }
    __device__ __forceinline__ int steps() const { return (all + STEP_SIXTEENS - 1) / STEP_SIXTEENS; }
    // How many times 16 channels of a line are multiplied, in each run the next of the columns.
    __device__ __forceinline__ int instructions(int step, int line) const {
        int left = all - step * STEP_SIXTEENS - line * LINE_SIXTEENS;
        return left <= 0 ? 0 : left >= LINE_SIXTEENS ? 4 : (left + FOLD - 1) / FOLD;
    }
};

__device__ __forceinline__ uint4 load_once(const void* place) {
    uint4 four;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w) : "l"(place));
    return four;
}

__device__ __forceinline__ float4 load_made(const float* place) {
    float4 four;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
        : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "l"(place) : "memory");
    return four;
}

__device__ __forceinline__ void meet_adding() { asm volatile("bar.sync 2, 128;" ::: "memory"); }

// Four warps multiply up to 16 rows of a place by 16 lines of A over a share of the channels, and go on with whatever else is
// theirs. Which 16 channels an instruction takes does not matter, so that a thread loads eight neighbours of each line.
// Returns how much there is to make, of all blocks.
__device__ __forceinline__ int multiply_by_a(const Adapters& given, const Columns& columns, int first, int second, int rows) {
    __shared__ float exchanged[4][8][16];
    __shared__ unsigned char list[16];
    int thread = threadIdx.x - 160, warp = thread >> 5, lane = thread & 31, line = lane >> 2, quarter = lane & 3;
    int span = columns.share(), across = given.parts * columns.of_place, shares = (given.inputs + span - 1) / span, groups = 0;
    auto rows_of = [&](int place) { return (u64)__ballot_sync(~0u, second == place) << 32 | __ballot_sync(~0u, first == place); };
    for (u64 rest = columns.used; rest; rest &= rest - 1) groups += (__popcll(rows_of(__ffsll(rest) - 1)) + 8 * EIGHTS - 1) / (8 * EIGHTS);
    int units = groups * across * shares;
    if (blockIdx.x >= given.workers) return units;
    struct Unit {
        int group, column, share, place;
        u64 own;
    };
    auto find = [&](int unit) {
        Unit found{unit % groups, unit / groups % across, unit / groups / across, 0, 0};
        for (u64 rest = columns.used; rest; rest &= rest - 1) {
            found.place = __ffsll(rest) - 1, found.own = rows_of(found.place);
            int here = (__popcll(found.own) + 8 * EIGHTS - 1) / (8 * EIGHTS);
            if (found.group < here) break;
            found.group -= here;
        }
        return found;
    };
    auto line_of = [&](const Unit& found, int at) {
        return given.a + found.place * given.a_place +
               (long long)(found.column / columns.of_place * given.rank + found.column % columns.of_place * 16 + at) * given.inputs;
    };
    auto lines_of = [&](const Unit& found) { return given.rank - found.column % columns.of_place * 16; };
    for (int unit = blockIdx.x; unit < units; unit += given.workers) {
        Unit found = find(unit);
        int count = __popcll(found.own) - found.group * 8 * EIGHTS;
        int start = found.share * span + warp * (RUNS * 32) + quarter * 8;
        unsigned lines[RUNS][2][4];
        auto load_lines = [&](int channel) {
#pragma unroll
            for (int i = 0; i < RUNS; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    uint4 four = make_uint4(0, 0, 0, 0);
                    if (line + h * 8 < lines_of(found) && channel + i * 32 < given.inputs)
                        four = load_once(line_of(found, line + h * 8) + channel + i * 32);
                    lines[i][h][0] = four.x, lines[i][h][1] = four.y, lines[i][h][2] = four.z, lines[i][h][3] = four.w;
                }
        };
        load_lines(start);
        meet_adding();
        int index = __popcll(found.own & (((u64)1 << (thread & 63)) - 1)) - found.group * 8 * EIGHTS;
        if (thread < 64 && found.own >> thread & 1 && index >= 0 && index < 16) list[index] = thread;
        meet_adding();
        if (unit == blockIdx.x) {
            // What comes later is fetched into the L2 cache, 128 bytes a thread.
            for (int later = unit; later < units; later += given.workers) {
                Unit next = find(later);
#pragma unroll
                for (int from = 0; from < span; from += 512) {
                    int channel = next.share * span + from + thread % 8 * 64;
                    if (thread / 8 < lines_of(next) && channel < given.inputs)
                        asm volatile("prefetch.global.L2 [%0];" :: "l"(line_of(next, thread / 8) + channel));
                }
            }
            asm volatile("griddepcontrol.wait;" ::: "memory");
        }
        const unsigned short* row[EIGHTS];
        float sums[EIGHTS][4];
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j) {
            row[j] = given.x + list[j * 8 + line < count ? j * 8 + line : 0] * given.x_row;
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[j][i] = 0.0f;
        }
        for (int pass = 0; pass < span; pass += SPAN) {
            int channel = start + pass;
            if (pass) load_lines(channel);
            uint4 right[EIGHTS][RUNS];
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
                for (int i = 0; i < RUNS; ++i) {
                    right[j][i] = make_uint4(0, 0, 0, 0);
                    if (j * 8 + line < count && channel + i * 32 < given.inputs) right[j][i] = *(const uint4*)(row[j] + channel + i * 32);
                }
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
                for (int i = 0; i < RUNS; ++i) {
                    unsigned front[4] = {lines[i][0][0], lines[i][1][0], lines[i][0][1], lines[i][1][1]};
                    unsigned back[4] = {lines[i][0][2], lines[i][1][2], lines[i][0][3], lines[i][1][3]};
                    multiply_16<KIND>(sums[j], front[0], front[1], front[2], front[3], right[j][i].x, right[j][i].y);
                    multiply_16<KIND>(sums[j], back[0], back[1], back[2], back[3], right[j][i].z, right[j][i].w);
                }
        }
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j) {
            if (j) meet_adding();
#pragma unroll
            for (int i = 0; i < 4; ++i) exchanged[warp][quarter * 2 + i % 2][line + i / 2 * 8] = sums[j][i];
            meet_adding();
            int at = j * 8 + thread / 16;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < 4; ++w) sum += exchanged[w][thread / 16][thread % 16];
            if (at < count) given.shares[((long long)found.share * rows + list[at]) * across * 16 + found.column * 16 + thread % 16] = sum;
        }
        meet_adding();
        if (thread == 0) asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], 1;" :: "l"(given.cells + MADE) : "memory");
    }
    return units;
}

// Puts A's products in the place of x in the steps of B, with zeros in rows of other places. A thread has half of a row's
// sixteen columns in some of the places. `turns`: a barrier for each stage, which is complete when the stage is free for the
// next step of B. `lows`: one on which these warps arrive.
__device__ __forceinline__ void put_products(
    const Adapters& given, const Columns& columns, int first, int second, int rows, int part, int count, unsigned base, unsigned turns,
    unsigned lows) {
    constexpr int SUBS = 64 / ROWS;
    int thread = threadIdx.x - 160, lane = thread & 31, row = thread / 2 % ROWS, half = thread % 2, sub = thread / (2 * ROWS);
    int span = columns.share(), shares = (given.inputs + span - 1) / span, width = given.parts * columns.of_place * 16;
    int low_place = __shfl_sync(~0u, first, row & 31), high_place = __shfl_sync(~0u, second, row & 31);
    int place = row < 32 ? low_place : high_place, slot = place < 0 ? -1 : __popcll(columns.used & (((u64)1 << place) - 1));
    constexpr int KEPT = GATED ? 2 : 1;
    int kept[KEPT];
    unsigned values[KEPT][4];
    auto load = [&](int column, int k) {
        // A row's own columns have one thread each.
        if (column * columns.present >= columns.all || slot < 0 || (column * columns.present + slot) % STEP_SIXTEENS % SUBS != sub) return;
        const float* from = given.shares + (long long)row * width + (part * columns.of_place + column) * 16 + half * 8;
        float sum[8] = {};
#pragma unroll SHARES_AT_ONCE
        for (int share = 0; share < shares; ++share) {
            float4 one = load_made(from), other = load_made(from + 4);
            sum[0] += one.x, sum[1] += one.y, sum[2] += one.z, sum[3] += one.w;
            sum[4] += other.x, sum[5] += other.y, sum[6] += other.z, sum[7] += other.w;
            from += rows * width;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) values[k][i] = packed_as<KIND>(sum[2 * i], sum[2 * i + 1]);
    };
    // The first ones, before a stage is free for them.
#pragma unroll
    for (int k = 0; k < KEPT; ++k) load(kept[k] = k * columns.of_place, k);
    for (int step = 0; step < columns.steps(); ++step) {
        int stage = (count + step) % STAGES;
        unsigned to = base + stage * STAGE_BYTES + LINES * WEIGHT_BYTES;
        // Each phase in its turn: of two phases that are to come, a barrier says that the second is complete.
        wait_for(turns + 8 * stage, step / STAGES & 1);
        for (int within = sub; within < STEP_SIXTEENS; within += SUBS) {
            int l = within / LINE_SIXTEENS, k = within % LINE_SIXTEENS / FOLD, f = within % FOLD, at = step * STEP_SIXTEENS + within;
            int column = at / columns.present;
            bool own = slot >= 0 && at < columns.all && at == column * columns.present + slot;
            unsigned value[4] = {0, 0, 0, 0};
#pragma unroll
            for (int h = 0; h < KEPT; ++h)
                if (own && h == (GATED && column >= columns.of_place)) {
                    if (kept[h] != column) load(kept[h] = column, h);
#pragma unroll
                    for (int i = 0; i < 4; ++i) value[i] = values[h][i];
                }
            unsigned target = to + l * X_BYTES + f * (ROWS * 128) + row * 128 + ((k * 2 + half ^ row & 7) << 4);
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                :: "r"(target), "r"(value[0]), "r"(value[1]), "r"(value[2]), "r"(value[3]) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) arrive(lows + 8 * stage);
    }
}
