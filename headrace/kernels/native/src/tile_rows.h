// The end of a tile header: products of several rows by its tile_of, whose activations lie row after row.
#pragma once

#include "packed.h"

namespace headrace {
namespace {

constexpr int64_t ROW_BLOCK = 256;  // Rows whose activations stay in the second-level cache.

// Products of rows [first, last), at most ROW_BLOCK, with a block of weights.
template <int BITS>
void block_rows(Weights w, const Activations& a, int64_t rows, int64_t first, int64_t last, float* out) {
    for (int64_t row = first; row < last;) row += tile_of<BITS>(last - row, w, a, row, out + (row - first) * BLOCK);
}

inline void arrange(Activations& a, int64_t rows) {
    a.across = a.groups;
    a.along = 1;
}

inline void write_codes(const Rounded& from, int bits, int64_t rows, int8_t* codes) { write_parts(from, codes); }

}  // namespace
}  // namespace headrace
