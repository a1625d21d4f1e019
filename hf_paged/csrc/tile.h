// The arithmetic of one tile: `rows` query vectors against a chunk of up to kChunk tokens of one key/value head.
//
//                 chunk of tokens (gathered through the block table, read from memory once)
//               t0  t1  t2  ...                      kChunk
//             +------------------------------------------+
//     row 0   | query 0, head 0 of the group             |      scores  S[rows, kChunk]   float32
//     row 1   | query 0, head 1                     S    |  --> softmax P in place, running (max, sum) per row
//     row 2   | query 1, head 0                          |  --> acc[rows, D_v] = acc * alpha + P @ V
//     row 3   | query 1, head 1                          |
//             +------------------------------------------+
//
// All query heads of a group, all queries of a row and, for a shared prefix, the queries of several rows are stacked.
// The recurrence over chunks is the online softmax of Milakov & Gimelshein (2018), as in FlashAttention (Dao et al.,
// 2022). Exponentials are base 2; scale * log2(e) is folded into the scores.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "simd.h"

namespace hf_paged {

constexpr int kChunk = 64;  // tokens; keys and values of two chunks fit in the second-level cache
constexpr int kRowBlock = 4;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// Tokens of a chunk: where head 0 of each key and value lies. Entries up to a multiple of kLanes repeat the last one.
template <class T>
struct Chunk {
    int count = 0;
    const T* key[kChunk];
    const T* value[kChunk];
};

// Fetches a stretch of memory rows (the keys or the values of the next chunk, all heads of the item) into the cache, a
// few lines at a time and in address order, while another chunk is worked on. One head after the other would hop over
// memory in strides of a token, which costs several times as much.
template <class T>
class Prefetcher {
public:
    // rows[0 .. count): where the rows start, less `offset` elements; `width` elements each; done within `steps` steps.
    Prefetcher(const T* const* rows, int count, int64_t offset, int width, int steps)
        : row_(rows), end_(rows + count), offset_(offset), lines_(steps_of(width * static_cast<int>(sizeof(T)), kLine)),
          per_step_(steps_of(count * lines_, steps)) {
        if (row_ != end_) start_row();
    }

    void step() {
        for (int todo = per_step_; todo > 0 && row_ != end_;) {
            const int now = std::min(todo, left_);
            for (int i = 0; i < now; ++i, line_ += kLine) prefetch(line_);
            todo -= now;
            left_ -= now;
            if (left_ == 0 && ++row_ != end_) start_row();
        }
    }

private:
    static constexpr int kLine = 64;  // bytes

    void start_row() {
        line_ = reinterpret_cast<const char*>(*row_ + offset_);
        left_ = lines_;
    }

    const T* const* row_;
    const T* const* end_;
    int64_t offset_;
    int lines_, per_step_;
    const char* line_ = nullptr;
    int left_ = 0;
};

// ---- scores -----------------------------------------------------------------------------------------------------

// acc[r * kTokens + t] += query r . key t, over the kStep elements at d.
template <class T, int kRows, bool kPart>
inline void dot_step(const float* queries, int words, const T* const* key, int64_t at, int part, Vec (&acc)[kLanes]) {
    using K = Keys<T>;
    constexpr int tokens = kLanes / kRows;
    Vec q[kRows][K::kVecs];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < K::kVecs; ++i) q[r][i] = load(queries + r * words + i * kLanes);
#pragma GCC unroll 16
    for (int t = 0; t < tokens; ++t) {
        Vec k[K::kVecs];
        if constexpr (kPart) {
            K::load_part(key[t] + at, part, k);
        } else {
            K::load(key[t] + at, k);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
            for (int i = 0; i < K::kVecs; ++i) acc[r * tokens + t] = K::mac(q[r][i], k[i], acc[r * tokens + t]);
    }
}

// Scores of kRows queries against kLanes tokens: an accumulator for each pair of kRows x (kLanes / kRows), then a sum
// over the lanes of all of them at once.
template <class T, int kRows>
inline void dot_block(const float* queries, int words, const T* const* key, int64_t offset, int dim, float* scores) {
    using K = Keys<T>;
    constexpr int tokens = kLanes / kRows;
    for (int first = 0; first < kLanes; first += tokens) {
        Vec acc[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) acc[i] = zeros();
        const float* q = queries;
        int d = 0;
        for (; d + K::kStep <= dim; d += K::kStep, q += K::kVecs * kLanes)
            dot_step<T, kRows, false>(q, words, key + first, offset + d, 0, acc);
        if (d < dim) dot_step<T, kRows, true>(q, words, key + first, offset + d, dim - d, acc);
        float sums[kLanes];
        store(sums, sum_rows(acc));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
            std::memcpy(scores + r * kChunk + first, sums + r * tokens, tokens * sizeof(float));
    }
}

// queries [rows, words] in the lane order of Keys<T>  ->  scores [rows, kChunk]
template <class T>
void scores_by_dot(const float* queries, int words, int rows, const Chunk<T>& chunk, int64_t offset, int dim,
                   Prefetcher<T>& next, float* scores) {
    for (int t = 0; t < chunk.count; t += kLanes) {
        next.step();
        const T* const* key = chunk.key + t;
        float* out = scores + t;
        int r = 0;
        for (; r + 4 <= rows; r += 4) dot_block<T, 4>(queries + r * words, words, key, offset, dim, out + r * kChunk);
        for (; r + 2 <= rows; r += 2) dot_block<T, 2>(queries + r * words, words, key, offset, dim, out + r * kChunk);
        for (; r < rows; ++r) dot_block<T, 1>(queries + r * words, words, key, offset, dim, out + r * kChunk);
    }
}

// Keys of the chunk, one token per lane: packed [words, kChunk]. A word is a lane of Keys<T> (a pair for bfloat16).
template <class T>
void pack_keys(const Chunk<T>& chunk, int64_t offset, int dim, Prefetcher<T>& next, float* packed) {
    using K = Keys<T>;
    for (int t = 0; t < chunk.count; t += kLanes) {
        next.step();
        float* out = packed + t;
        for (int d = 0; d < dim; d += K::kStep) {
            Vec k[K::kVecs][kLanes];
#pragma GCC unroll 16
            for (int j = 0; j < kLanes; ++j) {
                Vec one[K::kVecs];
                const T* key = chunk.key[t + j] + offset + d;
                if (d + K::kStep <= dim) {
                    K::load(key, one);
                } else {
                    K::load_part(key, dim - d, one);
                }
#pragma GCC unroll 2
                for (int i = 0; i < K::kVecs; ++i) k[i][j] = one[i];
            }
#pragma GCC unroll 2
            for (int i = 0; i < K::kVecs; ++i) {
                transpose(k[i]);
#pragma GCC unroll 16
                for (int j = 0; j < kLanes; ++j) store(out + j * kChunk, k[i][j]);
                out += kLanes * kChunk;
            }
        }
    }
}

template <class T, int kRows>
inline void score_block(const float* queries, int words, const float* packed, int tokens, float* scores) {
    for (int t = 0; t < tokens; t += kAccVecs * kLanes) {
        Vec acc[kRows][kAccVecs];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < kAccVecs; ++c) acc[r][c] = zeros();
        for (int w = 0; w < words; ++w) {
            Vec k[kAccVecs];
#pragma GCC unroll 4
            for (int c = 0; c < kAccVecs; ++c) k[c] = load(packed + w * kChunk + t + c * kLanes);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const Vec q = splat(queries[r * words + w]);
#pragma GCC unroll 4
                for (int c = 0; c < kAccVecs; ++c) acc[r][c] = Keys<T>::mac(q, k[c], acc[r][c]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < kAccVecs; ++c) store(scores + r * kChunk + t + c * kLanes, acc[r][c]);
    }
}

// Calls f.template operator()<n>(first) for blocks of n <= kRowBlock rows.
template <class F>
inline void for_row_blocks(int rows, F&& f) {
    int r = 0;
    for (; r + kRowBlock <= rows; r += kRowBlock) f(std::integral_constant<int, kRowBlock>{}, r);
    switch (rows - r) {
        case 3: f(std::integral_constant<int, 3>{}, r); break;
        case 2: f(std::integral_constant<int, 2>{}, r); break;
        case 1: f(std::integral_constant<int, 1>{}, r); break;
        default: break;
    }
}

template <class T>
void scores_by_packing(const float* queries, int words, int rows, const Chunk<T>& chunk, int64_t offset, int dim,
                       Prefetcher<T>& next, float* packed, float* scores) {
    pack_keys(chunk, offset, dim, next, packed);
    for_row_blocks(rows, [&](auto n, int r) {
        score_block<T, n.value>(queries + r * words, words, packed, chunk.count, scores + r * kChunk);
    });
}

// Transposing the keys costs kTransposeCost per word and token vector, once; the dot products kSumRowsCost per row.
inline bool packing_pays(int rows, int words) { return rows * kSumRowsCost > kTransposeCost * words; }

// ---- softmax ----------------------------------------------------------------------------------------------------

struct ScoreTransform {
    float scale;    // multiplies the raw scores
    float softcap;  // 0: none; else softcap * tanh(scaled score / softcap)
};

// Running state of one row: the exponentials so far are relative to 2^max and add up to sum.
struct RowState {
    float max = kNegInf;
    float sum = 0.0f;
};

// One row: raw scores [kChunk] -> weights of Values<T> in place; only tokens [begin, end) are visible. Returns the
// factor by which what was accumulated before shrinks.
template <class T>
inline float softmax_row(float* s, int count, int begin, int end, ScoreTransform transform, RowState& state) {
    constexpr float log2e = 1.4426950408889634f;
    const int width = steps_of(count, kLanes) * kLanes;
    if (begin >= end) {
        for (int t = 0; t < width; ++t) s[t] = 0.0f;
        return 1.0f;
    }
    if (transform.softcap != 0.0f) {
        const Vec inner = splat(transform.scale / transform.softcap), outer = splat(transform.softcap * log2e);
        for (int t = 0; t < width; t += kLanes) store(s + t, tanh(load(s + t) * inner) * outer);
    } else {
        const Vec factor = splat(transform.scale * log2e);
        for (int t = 0; t < width; t += kLanes) store(s + t, load(s + t) * factor);
    }
    for (int t = 0; t < begin; ++t) s[t] = kNegInf;
    for (int t = end; t < width; ++t) s[t] = kNegInf;
    Vec top = splat(kNegInf);
    for (int t = 0; t < width; t += kLanes) top = max(top, load(s + t));
    const float peak = std::fmax(state.max, reduce_max(top));
    const Vec shift = splat(peak);
    Vec sum = zeros();
    for (int t = 0; t < width; t += kLanes)
        sum = sum + Values<T>::weigh(s, t, exp2(load(s + t) - shift));
    const float alpha = peak == state.max ? 1.0f : exp2(state.max - peak);
    state.sum = state.sum * alpha + reduce_add(sum);
    state.max = peak;
    return alpha;
}

// ---- values -----------------------------------------------------------------------------------------------------

// acc [kRows, width] = acc * alpha + p [kRows, kChunk] @ values, for kSteps steps of columns.
template <class T, int kRows, int kSteps, bool kPart>
inline void value_block(const float* p, const T* const* value, int64_t offset, int part, int count,
                        const float* alpha, Prefetcher<T>& next, float* acc, int width) {
    using V = Values<T>;
    constexpr int vecs = kSteps * V::kVecs;
    Vec sum[kRows][vecs];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < vecs; ++c) sum[r][c] = load(acc + r * width + c * kLanes) * splat(alpha[r]);
    for (int t = 0; t < count; t += V::kTokens) {
        if (t % kLanes == 0) next.step();
        Vec v[vecs];
#pragma GCC unroll 4
        for (int s = 0; s < kSteps; ++s) {
            if constexpr (kPart) {
                V::load_part(value + t, offset + s * V::kStep, part, v + s * V::kVecs);
            } else {
                V::load(value + t, offset + s * V::kStep, v + s * V::kVecs);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const Vec weight = V::weights(p + r * kChunk, t);
#pragma GCC unroll 4
            for (int c = 0; c < vecs; ++c) sum[r][c] = V::mac(weight, v[c], sum[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < vecs; ++c) store(acc + r * width + c * kLanes, sum[r][c]);
}

template <class T>
void add_values(const float* p, int rows, const Chunk<T>& chunk, int64_t offset, int dim, const float* alpha,
                Prefetcher<T>& next, float* acc, int width) {
    using V = Values<T>;
    constexpr int wide = kAccVecs / V::kVecs;  // steps per pass over the tokens
    for_row_blocks(rows, [&](auto n, int r) {
        const float* weights = p + r * kChunk;
        float* out = acc + r * width;
        int d = 0;
        const auto columns = [&](auto steps, auto part) {
            value_block<T, n.value, steps.value, part.value>(weights, chunk.value, offset + d, dim - d, chunk.count,
                                                             alpha + r, next, out, width);
            d += steps.value * V::kStep;
            out += steps.value * V::kVecs * kLanes;
        };
        while (d + wide * V::kStep <= dim) columns(std::integral_constant<int, wide>{}, std::false_type{});
        while (d + V::kStep <= dim) columns(std::integral_constant<int, 1>{}, std::false_type{});
        if (d < dim) columns(std::integral_constant<int, 1>{}, std::true_type{});
    });
}

}  // namespace hf_paged
