// Weights of 4 or 8 bits in groups of 32, weight = scale * code + minimum, and the activations that they meet.
//
// The activations are rounded to 15 bits, a scale for each row and group of 32, so that a group's dot product is one of
// integers. 8 bits alone would lose the small values of a group that holds one very large one, and language models have
// such groups. The sum over the groups is kept in float32, always in the same order: a row's result does not depend on
// the rows beside it.
//
// Weights lie in blocks of 16 outputs. A block holds its groups one after the other; a group holds the codes (for eight
// runs of four inputs, 16 outputs x 4 inputs; with 4 bits, runs 0-3 in the low nibbles and 4-7 in the high ones), then
// 16 scales and, as the format says, 16 minima or zero points.
#pragma once

#include <vector>

#include "common.h"

namespace headrace {
namespace {

constexpr int GROUP = 32;
constexpr int BLOCK = 16;  // Outputs that lie together.
constexpr int RUNS = 8;
constexpr int SHIFT = 7;  // Of the high part of an activation's code.
constexpr int LARGEST = 127 << SHIFT;
constexpr int PLACE = 2 * GROUP;  // Bytes of the codes of a row's group.

enum Tail : int {
    HALF_MINIMA = 0,   // Scales and minima in half precision.
    HALF_ZEROS = 1,    // Scales and zero points in half precision: minimum = -scale * zero.
    FLOAT_ZEROS = 2,   // The same in float32.
};

// Some blocks, and how their groups end.
struct Weights {
    const uint8_t* at;
    Tail tail;
};

template <int BITS>
constexpr int CODES = BLOCK * GROUP * BITS / 8;

template <int BITS>
constexpr int64_t group_bytes(Tail tail) {
    return CODES<BITS> + 2 * BLOCK * int64_t(tail == FLOAT_ZEROS ? sizeof(float) : sizeof(uint16_t));
}

// Block n, whose rows have so many groups.
template <int BITS>
Weights block_of(Weights w, int64_t n, int64_t groups) {
    return {w.at + n * groups * group_bytes<BITS>(w.tail), w.tail};
}

// A row's codes of a group, rounded to 15 bits. Returns their sum and the scale.
struct Rounded {
    int32_t codes[GROUP];
    int32_t sum;
    float scale;
};

template <class T>
inline Rounded round_group(const T* x) {
    Rounded out;
    float values[GROUP];
    float largest = 0;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < GROUP; ++i) {
        values[i] = to_float(x[i]);
        largest = std::max(largest, std::fabs(values[i]));
    }
    float inverse = largest > 0 ? float(LARGEST) / largest : 0.0f;
    int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < GROUP; ++i) {
        float shifted = values[i] * inverse + 12582912.0f;  // To nearest, in the low bits.
        int32_t bits;
        std::memcpy(&bits, &shifted, 4);
        out.codes[i] = bits - 0x4b400000;
        sum += out.codes[i];
    }
    out.sum = sum;
    out.scale = largest / float(LARGEST);
    return out;
}

// Two bytes for each activation: 128 * high + low, both of 8 bits. The high parts of a group come first.
inline void write_parts(const Rounded& from, int8_t* codes) {
#pragma omp simd
    for (int i = 0; i < GROUP; ++i) {
        int32_t high = (from.codes[i] + (1 << (SHIFT - 1))) >> SHIFT;  // -127 to 127, which leaves -64 to 63.
        codes[i] = int8_t(high);
        codes[GROUP + i] = int8_t(from.codes[i] - (high << SHIFT));
    }
}

// Rounded activations of some rows. The place of a row's group is row * across + group * along.
struct Activations {
    const int8_t* codes;  // PLACE bytes to a place
    const float* scales;  // One to a place
    const float* sums;    // The scale times the sum of the codes
    int64_t groups, across, along;
};

template <class T>
void store(const float* values, const float* bias, int64_t count, T* y) {
    if (bias) {
        for (int64_t i = 0; i < count; ++i) y[i] = from_float<T>(values[i] + bias[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) y[i] = from_float<T>(values[i]);
    }
}

}  // namespace
}  // namespace headrace
