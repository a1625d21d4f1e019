// Sixteen float lanes: AVX-512 F/BW/DQ/VL.
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace hf_paged {

constexpr int kLanes = 16;
constexpr int kAccVecs = 4;  // vectors per accumulator row: 4 rows x 4 vectors leave half of the 32 registers free
constexpr int kSumRowsCost = 45;    // instructions of sum_rows and of transpose (plus store and reload), per vector:
constexpr int kTransposeCost = 6;   // these decide when transposing the keys pays

struct Vec {
    __m512 v;
};

inline Vec zeros() { return {_mm512_setzero_ps()}; }
inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec round_nearest(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec scale_by_pow2(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }  // a * 2^n, 0 on underflow
inline Vec select_abs_less(Vec x, float limit, Vec yes, Vec no) {
    const __mmask16 less = _mm512_cmp_ps_mask(_mm512_abs_ps(x.v), _mm512_set1_ps(limit), _CMP_LT_OQ);
    return {_mm512_mask_blend_ps(less, no.v, yes.v)};
}
inline float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline float reduce_add(Vec a) { return _mm512_reduce_add_ps(a.v); }

// Lane t of the result is the sum over the lanes of a[t].
inline Vec sum_rows(const Vec (&a)[kLanes]) {
    __m512 b[8], c[4], d[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const __m512 x = a[2 * i].v, y = a[2 * i + 1].v;
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
        d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xdd));
    return {_mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xdd))};
}

// a[i] lane j <-> a[j] lane i
inline void transpose(Vec (&a)[kLanes]) {
    __m512 t[16], u[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(a[i].v, a[i + 1].v);
        t[i + 1] = _mm512_unpackhi_ps(a[i].v, a[i + 1].v);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        const __m512d t0 = _mm512_castps_pd(t[i]), t1 = _mm512_castps_pd(t[i + 1]);
        const __m512d t2 = _mm512_castps_pd(t[i + 2]), t3 = _mm512_castps_pd(t[i + 3]);
        u[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(t0, t2));
        u[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(t0, t2));
        u[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(t1, t3));
        u[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(t1, t3));
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512 v0 = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88), v1 = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xdd);
        const __m512 w0 = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88);
        const __m512 w1 = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xdd);
        a[j].v = _mm512_shuffle_f32x4(v0, w0, 0x88);
        a[4 + j].v = _mm512_shuffle_f32x4(v1, w1, 0x88);
        a[8 + j].v = _mm512_shuffle_f32x4(v0, w0, 0xdd);
        a[12 + j].v = _mm512_shuffle_f32x4(v1, w1, 0xdd);
    }
}

// Lanes<T>: how kStep neighbouring elements of a row become kVecs vectors of floats ("lane order") and back.
template <class T>
struct Lanes;

template <>
struct Lanes<float> {
    static constexpr int kStep = 16, kVecs = 1;
    static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
    static void load(const float* p, Vec* out) { out[0].v = _mm512_loadu_ps(p); }
    static void load_part(const float* p, int n, Vec* out) { out[0].v = _mm512_maskz_loadu_ps(first(n), p); }
    static void store_part(float* p, int n, const Vec* in) { _mm512_mask_storeu_ps(p, first(n), in[0].v); }
};

template <>
struct Lanes<Half> {
    static constexpr int kStep = 16, kVecs = 1;
    static void load(const Half* p, Vec* out) {
        out[0].v = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static void load_part(const Half* p, int n, Vec* out) {
        out[0].v = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(Lanes<float>::first(n), p));
    }
    static void store_part(Half* p, int n, const Vec* in) {
        const __m256i h = _mm512_cvtps_ph(in[0].v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_mask_storeu_epi16(p, Lanes<float>::first(n), h);
    }
};

// Even elements in the first vector, odd ones in the second: a shift and a mask widen 32 bfloat16, no shuffle.
template <>
struct Lanes<BFloat16> {
    static constexpr int kStep = 32, kVecs = 2;
    static __mmask32 first(int n) { return static_cast<__mmask32>((uint64_t{1} << n) - 1u); }
    static void widen(__m512i x, Vec* out) {
        out[0].v = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
        out[1].v = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    static void load(const BFloat16* p, Vec* out) { widen(_mm512_loadu_si512(p), out); }
    static void load_part(const BFloat16* p, int n, Vec* out) { widen(_mm512_maskz_loadu_epi16(first(n), p), out); }
    static __m512i round(Vec a) {  // to nearest even, in the upper half of each lane; NaN stays NaN
        const __m512i x = _mm512_castps_si512(a.v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
        const __m512i y = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
        return _mm512_mask_mov_epi32(y, nan, _mm512_set1_epi32(0x7fc00000));
    }
    static void store_part(BFloat16* p, int n, const Vec* in) {
        const __m512i odd = _mm512_and_si512(round(in[1]), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
        _mm512_mask_storeu_epi16(p, first(n), _mm512_or_si512(odd, _mm512_srli_epi32(round(in[0]), 16)));
    }
};

}  // namespace hf_paged
