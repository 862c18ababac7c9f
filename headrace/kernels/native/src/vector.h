// A register of floats at a time, in the compilers' own vector types. Of wider ones they compare and select each number alone.
#pragma once

#include "common.h"

namespace headrace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// Vectors side by side whose products with four numbers, and the numbers themselves, are in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int WIDE = 4;
#else
constexpr int WIDE = 2;
#endif

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
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#elif defined(__AVX2__)
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
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
    return _mm512_reduce_add_ps((__m512)v);
#else
    typedef float Four __attribute__((vector_size(16)));
    Four parts[LANES / 4];
    std::memcpy(parts, &v, sizeof v);
    for (int i = 1; i < LANES / 4; ++i) parts[0] += parts[i];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
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
