// Eight float lanes in the compiler's vector extension (GCC and Clang, any target), with AVX2/F16C instructions at the
// few places where compilers do not find them. Head sizes are multiples of eight, so no partial vectors occur here.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "scalar.h"

namespace hf_paged {

constexpr int kLanes = 8;
constexpr int kAccVecs = 2;  // 4 rows x 2 vectors: AVX2 has 16 registers
constexpr int kSumRowsCost = 21;
constexpr int kTransposeCost = 5;

using Float8 = float __attribute__((vector_size(32)));
using Int8 = int32_t __attribute__((vector_size(32)));

struct Vec {
    Float8 v;
};

inline Vec zeros() { return {Float8{}}; }
inline Vec splat(float x) { return {Float8{x, x, x, x, x, x, x, x}}; }
inline Vec load(const float* p) {
    Vec a;
    std::memcpy(&a.v, p, sizeof a.v);
    return a;
}
inline void store(float* p, Vec a) { std::memcpy(p, &a.v, sizeof a.v); }
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec round_nearest(Vec a) {  // |a| < 2^22
    const Vec magic = splat(12582912.0f);
    return (a + magic) - magic;
}
inline Vec scale_by_pow2(Vec a, Vec n) {  // a * 2^n, 0 below the normal numbers
    const Int8 exponent = (__builtin_convertvector(n.v, Int8) + 127) << 23;
    Float8 power;
    std::memcpy(&power, &exponent, sizeof power);
    return {n.v < -126.0f ? Float8{} : a.v * power};
}
inline Vec select_abs_less(Vec x, float limit, Vec yes, Vec no) {
    const Float8 magnitude = x.v < 0.0f ? -x.v : x.v;
    return {magnitude < limit ? yes.v : no.v};
}
inline float reduce_max(Vec a) {
    float best = a.v[0];
    for (int i = 1; i < kLanes; ++i) best = a.v[i] > best ? a.v[i] : best;
    return best;
}
inline float reduce_add(Vec a) {
    return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}

#ifdef __AVX2__
// Lane t of the result is the sum over the lanes of a[t].
inline Vec sum_rows(const Vec (&a)[kLanes]) {
    __m256 b[4], c[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) b[i] = _mm256_hadd_ps(a[2 * i].v, a[2 * i + 1].v);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) c[i] = _mm256_hadd_ps(b[2 * i], b[2 * i + 1]);
    return {_mm256_add_ps(_mm256_permute2f128_ps(c[0], c[1], 0x20), _mm256_permute2f128_ps(c[0], c[1], 0x31))};
}

// a[i] lane j <-> a[j] lane i
inline void transpose(Vec (&a)[kLanes]) {
    __m256 t[8], u[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(a[i].v, a[i + 1].v);
        t[i + 1] = _mm256_unpackhi_ps(a[i].v, a[i + 1].v);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        a[j].v = _mm256_permute2f128_ps(u[j], u[4 + j], 0x20);
        a[4 + j].v = _mm256_permute2f128_ps(u[j], u[4 + j], 0x31);
    }
}
#else
inline Vec sum_rows(const Vec (&a)[kLanes]) {
    Vec sum;
    for (int i = 0; i < kLanes; ++i) sum.v[i] = reduce_add(a[i]);
    return sum;
}

inline void transpose(Vec (&a)[kLanes]) {
    Vec b[kLanes];
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < kLanes; ++j) b[i].v[j] = a[j].v[i];
    for (int i = 0; i < kLanes; ++i) a[i] = b[i];
}
#endif

// Lanes<T>: how kStep neighbouring elements of a row become kVecs vectors of floats ("lane order") and back.
template <class T>
struct Lanes {
    static constexpr int kStep = 8, kVecs = 1;
    static void load(const T* p, Vec* out) {
        for (int i = 0; i < kStep; ++i) out[0].v[i] = to_float(p[i]);
    }
    static void load_part(const T* p, int, Vec* out) { load(p, out); }
    static void store_part(T* p, int, const Vec* in) {
        for (int i = 0; i < kStep; ++i) from_float(in[0].v[i], p[i]);
    }
};

template <>
inline void Lanes<float>::load(const float* p, Vec* out) {
    out[0] = hf_paged::load(p);
}
#ifdef __AVX2__
template <>
inline void Lanes<BFloat16>::load(const BFloat16* p, Vec* out) {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    out[0].v = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
#ifdef __F16C__
template <>
inline void Lanes<Half>::load(const Half* p, Vec* out) {
    out[0].v = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
#endif
#endif

}  // namespace hf_paged
