// Sixteen floats at a time, in the compilers' own vector types: they make of it whatever the CPU has.
#pragma once

#include "common.h"

namespace headrace {

constexpr int LANES = 16;

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));

inline Vec splat(float x) { return x - Vec{}; }

inline IntVec splat(int32_t x) { return x - IntVec{}; }

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Vec load(const bf16* p) {
#if defined(__AVX512F__)
    __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
    Vec v;
    std::memcpy(&v, &wide, sizeof v);
    return v;
#else
    float wide[LANES];
    for (int i = 0; i < LANES; ++i) wide[i] = to_float(p[i]);
    return load(wide);
#endif
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

inline float sum(Vec v) {
#if defined(__AVX512F__)
    __m512 wide;
    std::memcpy(&wide, &v, sizeof v);
    return _mm512_reduce_add_ps(wide);
#else
    typedef float Half __attribute__((vector_size(2 * LANES)));
    typedef float Quarter __attribute__((vector_size(LANES)));
    Half half[2];
    std::memcpy(half, &v, sizeof v);
    half[0] += half[1];
    Quarter quarter[2];
    std::memcpy(quarter, half, sizeof half[0]);
    quarter[0] += quarter[1];
    return (quarter[0][0] + quarter[0][2]) + (quarter[0][1] + quarter[0][3]);
#endif
}

// As the scalar one.
inline Vec exp_negative(Vec x) {
    x = max(x, splat(-87.0f));
    Vec shifted = x * 1.44269504088896341f + 12582912.0f;
    Vec whole = shifted - 12582912.0f;
    Vec rest = x - whole * 0.693359375f;
    rest = rest - whole * -2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    IntVec exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    exponent = (exponent - (0x4b400000 - 127)) << 23;
    Vec power;
    std::memcpy(&power, &exponent, sizeof power);
    return p * power;
}

}  // namespace headrace
