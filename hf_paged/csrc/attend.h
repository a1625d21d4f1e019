// Runs the items of a plan: gathers chunks of tokens through the block table, and merges partial results.
#pragma once

#include <memory>
#include <new>

#include "plan.h"
#include "tile.h"

namespace hf_paged {

// Strides in elements.
template <class T>
struct Attention {
    const T* q;  // [tokens, heads * group, key_dim]
    int64_t q_token, q_head;
    const T* k_pool;  // [blocks, block_size, heads, key_dim]
    int64_t k_block, k_slot, k_head;
    const T* v_pool;  // [blocks, block_size, heads, value_dim]
    int64_t v_block, v_slot, v_head;
    T* out;  // [tokens, heads * group, value_dim]
    int64_t out_token, out_head;
    const float* sinks;  // [heads * group] or null
    int key_dim, value_dim;
    ScoreTransform transform;

    int words() const { return padded<Keys<T>>(key_dim); }
    int acc_width() const { return padded<Values<T>>(value_dim); }
    // A partial result of one head: accumulator, then maximum and sum.
    int part_width() const { return acc_width() + 2; }
};

// Floats aligned to a cache line, kept from call to call by each thread.
class Scratch {
public:
    float* reserve(size_t floats) {
        if (floats > size_) {
            memory_.reset();
            memory_.reset(static_cast<float*>(::operator new[](floats * sizeof(float), std::align_val_t{64})));
            size_ = floats;
        }
        return memory_.get();
    }

private:
    struct Free {
        void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
    };
    std::unique_ptr<float[], Free> memory_;
    size_t size_ = 0;
};

// Tokens of one row of the block table, in order.
template <class T>
class TokenCursor {
public:
    TokenCursor(const Attention<T>& a, const int32_t* table, int block_size, int64_t begin, int64_t end)
        : a_(a), table_(table), block_size_(block_size), column_(begin / block_size),
          slot_(static_cast<int>(begin % block_size)), left_(end - begin) {}

    // Fills the chunk; false when no tokens are left.
    bool next(Chunk<T>& chunk) {
        if (left_ == 0) return false;
        chunk.count = static_cast<int>(std::min<int64_t>(left_, kChunk));
        left_ -= chunk.count;
        int t = 0;
        while (t < chunk.count) {
            const int64_t frame = table_[column_];
            const T* key = a_.k_pool + frame * a_.k_block + slot_ * a_.k_slot;
            const T* value = a_.v_pool + frame * a_.v_block + slot_ * a_.v_slot;
            const int run = std::min(block_size_ - slot_, chunk.count - t);
            for (int i = 0; i < run; ++i, ++t, key += a_.k_slot, value += a_.v_slot) {
                chunk.key[t] = key;
                chunk.value[t] = value;
            }
            slot_ += run;
            if (slot_ == block_size_) {
                slot_ = 0;
                ++column_;
            }
        }
        for (; t % kLanes != 0; ++t) {
            chunk.key[t] = chunk.key[t - 1];
            chunk.value[t] = chunk.value[t - 1];
        }
        return true;
    }

private:
    const Attention<T>& a_;
    const int32_t* table_;
    int block_size_;
    int64_t column_;
    int slot_;
    int64_t left_;
};

// acc / sum, with the sink as one more logit that has no value, rounded to T.
template <class T>
void write_output(const Attention<T>& a, const Query& query, int q_head, const float* acc, RowState state) {
    using V = Values<T>;
    float shrink = 1.0f;
    if (a.sinks != nullptr && state.max != kNegInf) {
        const float sink = a.sinks[q_head] * 1.4426950408889634f;
        const float peak = std::fmax(state.max, sink);
        shrink = exp2(state.max - peak);
        state.sum = state.sum * shrink + exp2(sink - peak);
    }
    const Vec factor = splat(state.max == kNegInf ? 0.0f : shrink / state.sum);
    T* out = a.out + query.token * a.out_token + q_head * a.out_head;
    for (int d = 0; d < a.value_dim; d += V::kStep, acc += V::kVecs * kLanes) {
        Vec x[V::kVecs];
        for (int i = 0; i < V::kVecs; ++i) x[i] = load(acc + i * kLanes) * factor;
        V::store_part(out + d, std::min(V::kStep, a.value_dim - d), x);
    }
}

// Query vectors of one head, [queries * group, words], in the lane order of the keys.
template <class T>
void pack_queries(const Attention<T>& a, const Query* queries, int count, int group, int head, float* packed) {
    using K = Keys<T>;
    for (int i = 0; i < count; ++i) {
        for (int g = 0; g < group; ++g) {
            const T* q = a.q + queries[i].token * a.q_token + (head * group + g) * a.q_head;
            for (int d = 0; d < a.key_dim; d += K::kStep, packed += K::kVecs * kLanes) {
                Vec x[K::kVecs];
                K::load_part(q + d, std::min(K::kStep, a.key_dim - d), x);
                for (int v = 0; v < K::kVecs; ++v) store(packed + v * kLanes, x[v]);
            }
        }
    }
}

template <class T>
void run_item(const Attention<T>& a, const PlanInput& in, const Plan& plan, const Item& item, float* parts,
              Scratch& scratch) {
    const int group = in.group, rows = item.queries * group, words = a.words(), width = a.acc_width();
    const Query* queries = plan.queries.data() + item.query;

    const size_t all_rows = static_cast<size_t>(rows) * item.heads;
    const auto aligned = [](size_t n) { return (n + 15) / 16 * 16; };
    float* q = scratch.reserve(aligned(all_rows * words) + aligned(all_rows * width) + aligned(all_rows * 2) +
                               aligned(rows) + static_cast<size_t>(rows + words) * kChunk);
    float* acc = q + aligned(all_rows * words);
    auto* states = reinterpret_cast<RowState*>(acc + aligned(all_rows * width));
    float* alpha = reinterpret_cast<float*>(states) + aligned(all_rows * 2);
    float* scores = alpha + aligned(rows);
    float* packed = scores + static_cast<size_t>(rows) * kChunk;

    std::fill(acc, acc + all_rows * width, 0.0f);
    std::fill(states, states + all_rows, RowState{});
    for (int h = 0; h < item.heads; ++h)
        pack_queries(a, queries, item.queries, group, item.head + h, q + static_cast<size_t>(h) * rows * words);

    const bool pack = packing_pays(rows, words);
    TokenCursor<T> cursor(a, in.table + item.row * in.table_stride, in.block_size, item.begin, item.end);
    Chunk<T> chunks[2];
    int64_t start = item.begin;
    bool more = cursor.next(chunks[0]);
    // The first chunk has nobody to fetch it in time; asking for all its keys at once is better than one by one.
    Prefetcher<T>(chunks[0].key, more ? chunks[0].count : 0, item.head * a.k_head, item.heads * a.key_dim, 1).step();
    for (int now = 0; more; now ^= 1) {
        const Chunk<T>& chunk = chunks[now];
        more = cursor.next(chunks[now ^ 1]);
        const Chunk<T>& coming = chunks[now ^ 1];
        const int steps = item.heads * steps_of(chunk.count, kLanes), fetched = more ? coming.count : 0;
        Prefetcher<T> next_keys(coming.key, fetched, item.head * a.k_head, item.heads * a.key_dim, steps);
        Prefetcher<T> next_values(coming.value, fetched, item.head * a.v_head, item.heads * a.value_dim, steps);
        for (int h = 0; h < item.heads; ++h) {
            const int64_t k_offset = (item.head + h) * a.k_head, v_offset = (item.head + h) * a.v_head;
            const float* head_q = q + static_cast<size_t>(h) * rows * words;
            if (pack) {
                scores_by_packing(head_q, words, rows, chunk, k_offset, a.key_dim, next_keys, packed, scores);
            } else {
                scores_by_dot(head_q, words, rows, chunk, k_offset, a.key_dim, next_keys, scores);
            }
            RowState* state = states + static_cast<size_t>(h) * rows;
            for (int i = 0, r = 0; i < item.queries; ++i) {
                const auto first = static_cast<int>(std::clamp<int64_t>(queries[i].begin - start, 0, chunk.count));
                const auto last = static_cast<int>(std::clamp<int64_t>(queries[i].end - start, 0, chunk.count));
                for (int g = 0; g < group; ++g, ++r)
                    alpha[r] = softmax_row<T>(scores + r * kChunk, chunk.count, first, last, a.transform, state[r]);
            }
            add_values(scores, rows, chunk, v_offset, a.value_dim, alpha, next_values,
                       acc + static_cast<size_t>(h) * rows * width, width);
        }
        start += chunk.count;
    }

    for (int h = 0; h < item.heads; ++h) {
        for (int r = 0; r < rows; ++r) {
            const size_t at = static_cast<size_t>(h) * rows + r;
            const int q_head = (item.head + h) * group + r % group;
            if (item.part < 0) {
                write_output(a, queries[r / group], q_head, acc + at * width, states[at]);
                continue;
            }
            const int64_t slot = static_cast<int64_t>(item.part + r / group) * in.heads * group + q_head;
            float* part = parts + slot * a.part_width();
            std::copy(acc + at * width, acc + (at + 1) * width, part);
            part[width] = states[at].max;
            part[width + 1] = states[at].sum;
        }
    }
}

// Log-sum-exp merge of the partial results of one query head; a query without any sees no key and gets zeros.
template <class T>
void merge(const Attention<T>& a, const PlanInput& in, const Plan& plan, const Query& query, int q_head,
           const float* parts, Scratch& scratch) {
    const int width = a.acc_width();
    float* acc = scratch.reserve(width);
    std::fill(acc, acc + width, 0.0f);
    RowState state;
    for (int32_t p = query.part; p >= 0; p = plan.next_part[p]) {
        const float* part = parts + (static_cast<int64_t>(p) * in.heads * in.group + q_head) * a.part_width();
        const RowState other{part[width], part[width + 1]};
        if (other.max == kNegInf) continue;
        const float peak = std::fmax(state.max, other.max);
        const float mine = exp2(state.max - peak), theirs = exp2(other.max - peak);
        for (int d = 0; d < width; d += kLanes)
            store(acc + d, fma(load(part + d), splat(theirs), load(acc + d) * splat(mine)));
        state = {peak, state.sum * mine + other.sum * theirs};
    }
    write_output(a, query, q_head, acc, state);
}

}  // namespace hf_paged
