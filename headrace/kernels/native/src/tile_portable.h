// Products on any CPU, in plain C++.
#pragma once

#include "packed.h"

#define HEADRACE_TILE "portable"

namespace headrace {
namespace {

inline float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent == 0) {
        float tiny = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -tiny : tiny;
    }
    uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13);
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline void read_tail(const uint8_t* at, Tail tail, float* scale, float* minimum) {
    if (tail == FLOAT_ZEROS) {
        std::memcpy(scale, at, 4 * BLOCK);
        std::memcpy(minimum, at + 4 * BLOCK, 4 * BLOCK);
    } else {
        uint16_t halves[2 * BLOCK];
        std::memcpy(halves, at, sizeof halves);
        for (int n = 0; n < BLOCK; ++n) scale[n] = half_to_float(halves[n]), minimum[n] = half_to_float(halves[BLOCK + n]);
    }
    if (tail == HALF_MINIMA) return;
    for (int n = 0; n < BLOCK; ++n) minimum[n] *= -scale[n];
}

template <int ROWS, int BITS>
void tile(Weights weights, const Activations& a, int64_t row, float* out) {
    float total[ROWS][BLOCK] = {};
    const int8_t* codes = a.codes + row * a.groups * PLACE;
    const float* scales = a.scales + row * a.groups;
    const float* sums = a.sums + row * a.groups;
    const uint8_t* w = weights.at;
    for (int64_t g = 0; g < a.groups; ++g, w += group_bytes<BITS>(weights.tail)) {
        fetch_ahead(w, group_bytes<BITS>(weights.tail));
        float scale[BLOCK], minimum[BLOCK];
        read_tail(w + CODES<BITS>, weights.tail, scale, minimum);
        uint8_t c[RUNS][BLOCK * 4];
        for (int p = 0; p < RUNS; ++p) {
            int shift = BITS == 4 && p >= RUNS / 2 ? 4 : 0;
            const uint8_t* from = w + 64 * (BITS == 4 ? p % (RUNS / 2) : p);
            for (int i = 0; i < BLOCK * 4; ++i) c[p][i] = uint8_t(from[i] >> shift) & (BITS == 4 ? 15 : 255);
        }
        for (int m = 0; m < ROWS; ++m) {
            const int8_t* x = codes + (m * a.groups + g) * PLACE;
            int32_t dot[BLOCK] = {};
            for (int p = 0; p < RUNS; ++p)
                for (int n = 0; n < BLOCK; ++n)
                    for (int t = 0; t < 4; ++t) {
                        int i = 4 * p + t;
                        dot[n] += int32_t(c[p][4 * n + t]) * ((int32_t(x[i]) << SHIFT) + int32_t(x[GROUP + i]));
                    }
            float xs = scales[m * a.groups + g], xc = sums[m * a.groups + g];
            for (int n = 0; n < BLOCK; ++n) {
                total[m][n] += scale[n] * xs * float(dot[n]);
                total[m][n] += minimum[n] * xc;
            }
        }
    }
    std::memcpy(out, total, sizeof total);
}

template <int BITS>
int64_t tile_of(int64_t left, Weights w, const Activations& a, int64_t row, float* out) {
    if (left >= 8) return tile<8, BITS>(w, a, row, out), 8;
    return tile<1, BITS>(w, a, row, out), 1;
}

}  // namespace
}  // namespace headrace

#include "tile_rows.h"
