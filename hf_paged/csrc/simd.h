// The vector type of this build, and the functions of it that need no instruction of their own.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HF_PAGED_AVX512
#include "simd_avx512.h"
#else
#include "simd_generic.h"
#endif

namespace hf_paged {

// Keys<T>: as Lanes<T>, for the factors of a score. `mac` adds the lane-wise products of two such vectors.
template <class T>
struct Keys : Lanes<T> {
    static Vec mac(Vec a, Vec b, Vec sum) { return fma(a, b, sum); }
};

// Values<T>: kTokens rows are weighted and added at a time. `weigh` stores kLanes weights of neighbouring tokens, and
// returns them as stored; `weights` reads those of token t and the kTokens - 1 after it.
template <class T>
struct Values : Lanes<T> {
    static constexpr int kTokens = 1;
    static void load(const T* const* rows, int64_t at, Vec* out) { Lanes<T>::load(rows[0] + at, out); }
    static void load_part(const T* const* rows, int64_t at, int n, Vec* out) {
        Lanes<T>::load_part(rows[0] + at, n, out);
    }
    static Vec weigh(float* row, int t, Vec weights) {
        store(row + t, weights);
        return weights;
    }
    static Vec weights(const float* row, int t) { return splat(row[t]); }
    static Vec mac(Vec weight, Vec value, Vec sum) { return fma(weight, value, sum); }
};

}  // namespace hf_paged

#if defined(__AVX512BF16__) && defined(HF_PAGED_AVX512)
#include "simd_avx512_bf16.h"
#endif

namespace hf_paged {

// The instructions this build uses.
#if defined(HF_PAGED_AVX512) && defined(__AVX512BF16__)
constexpr const char* kInstructionSet = "avx512-bf16";
#elif defined(HF_PAGED_AVX512)
constexpr const char* kInstructionSet = "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
constexpr const char* kInstructionSet = "avx2";
#else
constexpr const char* kInstructionSet = "portable";
#endif

// 2^x to about one unit in the last place, exactly 0 for x <= -150 (also -inf). Minimax polynomial on [-1/2, 1/2].
inline Vec exp2(Vec x) {
    x = max(x, splat(-200.0f));
    const Vec n = round_nearest(x);
    const Vec f = x - n;
    Vec p = splat(0.00015345809515565634f);
    p = fma(p, f, splat(0.0013399930903688073f));
    p = fma(p, f, splat(0.009618489071726799f));
    p = fma(p, f, splat(0.05550328642129898f));
    p = fma(p, f, splat(0.24022646248340607f));
    p = fma(p, f, splat(0.6931471824645996f));
    p = fma(p, f, splat(1.0f));
    return scale_by_pow2(p, n);
}

inline float exp2(float x) {
    float lanes[kLanes];
    store(lanes, exp2(splat(x)));
    return lanes[0];
}

// tanh by its series near 0, where 1 - 2 / (1 + e^2x) would cancel. Relative error below 3e-7.
inline Vec tanh(Vec x) {
    const Vec limited = max(splat(-20.0f), splat(0.0f) - max(splat(-20.0f), splat(0.0f) - x));
    const Vec one = splat(1.0f);
    const Vec far = one - splat(2.0f) / (one + exp2(limited * splat(2.8853900817779268f)));
    const Vec square = x * x;
    Vec s = splat(62.0f / 2835.0f);
    s = fma(s, square, splat(-17.0f / 315.0f));
    s = fma(s, square, splat(2.0f / 15.0f));
    s = fma(s, square, splat(-1.0f / 3.0f));
    const Vec near = fma(x * square, s, x);
    return select_abs_less(x, 0.3f, near, far);
}

// Into the second-level cache: the tokens of one head often lie a power of two apart, and would evict each other from
// the first.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

inline constexpr int steps_of(int elements, int step) { return (elements + step - 1) / step; }

// Floats that `elements` elements occupy in the order of a Keys<T> or Values<T>, padded to whole vectors.
template <class Order>
inline constexpr int padded(int elements) {
    return steps_of(elements, Order::kStep) * Order::kVecs * kLanes;
}

}  // namespace hf_paged
