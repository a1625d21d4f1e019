// Products of bfloat16 by vdpbf16ps: 32 exact products a time, added in float32. Included by simd.h.
#pragma once

namespace hf_paged {

// A lane holds a pair of bfloat16; vdpbf16ps multiplies exactly and adds both products to the float lane.
template <>
struct Keys<BFloat16> {
    static constexpr int kStep = 32, kVecs = 1;
    static void load(const BFloat16* p, Vec* out) { out[0].v = _mm512_loadu_ps(p); }
    static void load_part(const BFloat16* p, int n, Vec* out) {
        out[0].v = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(Lanes<BFloat16>::first(n), p));
    }
    static Vec mac(Vec a, Vec b, Vec sum) {
        return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
    }
};

// Two tokens at a time, their elements side by side in a lane. The weights are rounded to bfloat16 for it (torch's own
// attention does the same); they are summed as rounded, so they still add up to one.
template <>
struct Values<BFloat16> {
    static constexpr int kStep = 32, kVecs = 2, kTokens = 2;
    static void pair(__m512i a, __m512i b, Vec* out) {  // elements 0-3, 8-11, ... and 4-7, 12-15, ...
        out[0].v = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
        out[1].v = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
    }
    static void load(const BFloat16* const* rows, int64_t at, Vec* out) {
        pair(_mm512_loadu_si512(rows[0] + at), _mm512_loadu_si512(rows[1] + at), out);
    }
    static void load_part(const BFloat16* const* rows, int64_t at, int n, Vec* out) {
        const __mmask32 some = Lanes<BFloat16>::first(n);
        pair(_mm512_maskz_loadu_epi16(some, rows[0] + at), _mm512_maskz_loadu_epi16(some, rows[1] + at), out);
    }
    static void store_part(BFloat16* p, int n, const Vec* in) {
        using L = Lanes<BFloat16>;
        const __m512i lower = _mm512_srli_epi32(L::round(in[0]), 16), upper = _mm512_srli_epi32(L::round(in[1]), 16);
        _mm512_mask_storeu_epi16(p, L::first(n), _mm512_packus_epi32(lower, upper));
    }
    static Vec weigh(float* row, int t, Vec weights) {
        const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weights.v));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(row) + t), rounded);
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16))};
    }
    static Vec weights(const float* row, int t) { return splat(row[t / 2]); }
    static Vec mac(Vec weight, Vec value, Vec sum) { return Keys<BFloat16>::mac(weight, value, sum); }
};

}  // namespace hf_paged
