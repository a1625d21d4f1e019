// PagedAttention (Kwon et al., 2023) on the CPU: the C entry points that the Python library binds with ctypes.
//
// No header of torch or Python is included, so a build takes seconds and serves every version of both.

#include <atomic>
#include <cstring>
#include <exception>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "attend.h"

#define HF_PAGED_EXPORT extern "C" __attribute__((visibility("default")))

namespace hf_paged {
namespace {

enum Status { kOk = 0, kBadType = 1, kBadShape = 2, kNoMemory = 3 };
enum Type { kFloat32 = 0, kBFloat16 = 1, kHalf = 2 };
enum Flags { kNoSharing = 1, kNoSplit = 2, kSplitAlways = 4 };

constexpr int64_t kSerialWork = 1 << 19;  // multiply-adds below which waking other threads costs more than it gives
constexpr int64_t kSerialMerge = 1 << 16;  // likewise, floats of partial results

// Calls body(i, scratch) for i in [0, count) on up to `threads` threads; false when memory ran out on one of them.
template <class F>
bool for_each(int64_t count, int threads, F&& body) {
    std::atomic<bool> ok{true};
    threads = static_cast<int>(std::min<int64_t>(threads, count));
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
#endif
    for (int64_t i = 0; i < count; ++i) {
        static thread_local Scratch scratch;
        try {
            body(i, scratch);
        } catch (const std::bad_alloc&) {
            ok = false;
        }
    }
    return ok;
}

template <class T>
Status attend(const Attention<T>& a, PlanInput& in) {
    static thread_local Plan plan;  // of the calling thread; kept so that a decode step allocates nothing
    static thread_local Scratch merge_memory;
    plan.make(in);

    int64_t work = 0;
    for (const Item& item : plan.items) work += item.cost;
    const int threads = work * (a.key_dim + a.value_dim) < kSerialWork ? 1 : in.threads;

    const int64_t q_heads = static_cast<int64_t>(in.heads) * in.group;
    const Plan& shared_plan = plan;  // thread_local: name this thread's object for the others
    float* parts = merge_memory.reserve(shared_plan.next_part.size() * q_heads * a.part_width());
    bool ok = for_each(static_cast<int64_t>(shared_plan.items.size()), threads, [&](int64_t i, Scratch& scratch) {
        run_item(a, in, shared_plan, shared_plan.items[i], parts, scratch);
    });
    const int64_t merged = static_cast<int64_t>(shared_plan.next_part.size()) * q_heads * a.part_width();
    ok = ok && for_each(static_cast<int64_t>(shared_plan.queries.size()), merged < kSerialMerge ? 1 : threads,
                        [&](int64_t i, Scratch& scratch) {
                            const Query& query = shared_plan.queries[i];
                            if (query.parts == 1 && query.part < 0) return;
                            for (int h = 0; h < q_heads; ++h) merge(a, in, shared_plan, query, h, parts, scratch);
                        });
    return ok ? kOk : kNoMemory;
}

// Where new tokens lie: token i of the call is (i / per_row, i % per_row). Strides in elements.
struct NewTokens {
    const char* data;
    int64_t row, head, token;
};

struct PoolLayout {
    char* data;
    int64_t block, slot, head;
};

void write_token(const NewTokens& from, const PoolLayout& to, int64_t row, int64_t token, int64_t block, int64_t slot,
                 int heads, int64_t head_dim, int64_t size) {
    const char* in = from.data + (row * from.row + token * from.token) * size;
    char* out = to.data + (block * to.block + slot * to.slot) * size;
    if (from.head == head_dim && to.head == head_dim) {  // the heads lie side by side on both sides
        std::memcpy(out, in, static_cast<size_t>(heads * head_dim * size));
        return;
    }
    for (int h = 0; h < heads; ++h)
        std::memcpy(out + h * to.head * size, in + h * from.head * size, static_cast<size_t>(head_dim * size));
}

}  // namespace
}  // namespace hf_paged

using namespace hf_paged;

// Raised with every change of a signature below.
HF_PAGED_EXPORT int hf_paged_abi_version() { return 1; }

// The vector instructions this library was compiled for.
HF_PAGED_EXPORT const char* hf_paged_instruction_set() { return kInstructionSet; }

HF_PAGED_EXPORT int hf_paged_has_openmp() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

// Attention of ragged queries over paged keys and values; shapes and rules in kernels/cpu.py. Strides in elements.
HF_PAGED_EXPORT int hf_paged_attention(
    int type, const void* q, int64_t q_token, int64_t q_head,                       //
    const void* k_pool, int64_t k_block, int64_t k_slot, int64_t k_head,            //
    const void* v_pool, int64_t v_block, int64_t v_slot, int64_t v_head,            //
    void* out, int64_t out_token, int64_t out_head,                                 //
    const int32_t* table, int64_t table_stride, const int32_t* lengths, const int32_t* query_starts, const float* sinks,
    int rows, int q_heads, int kv_heads, int key_dim, int value_dim, int block_size,  //
    float scale, int64_t window, float softcap, int flags, int threads) {
    if (kv_heads <= 0 || q_heads % kv_heads != 0 || key_dim <= 0 || key_dim % 8 != 0 || value_dim <= 0 ||
        value_dim % 8 != 0 || block_size <= 0 || rows < 0)
        return kBadShape;
    PlanInput in{table, table_stride, lengths, query_starts, rows, kv_heads, q_heads / kv_heads, block_size,
                 window, !(flags & kNoSharing), !(flags & kNoSplit), (flags & kSplitAlways) != 0, std::max(threads, 1)};
    const auto run = [&](auto zero) {
        using T = decltype(zero);
        const Attention<T> a{static_cast<const T*>(q), q_token, q_head,
                             static_cast<const T*>(k_pool), k_block, k_slot, k_head,
                             static_cast<const T*>(v_pool), v_block, v_slot, v_head,
                             static_cast<T*>(out), out_token, out_head,
                             sinks, key_dim, value_dim, {scale, softcap}};
        return attend(a, in);
    };
    try {
        switch (type) {
            case kFloat32: return run(float{});
            case kBFloat16: return run(BFloat16{});
            case kHalf: return run(Half{});
            default: return kBadType;
        }
    } catch (const std::exception&) {
        return kNoMemory;
    }
}

// Copies new keys and values into flat slots (block * block_size + offset); a negative slot is skipped. Slot i takes
// token source[i] of the inputs, or i when source is null. `size` is the bytes of an element; strides in elements.
HF_PAGED_EXPORT int hf_paged_write(
    const void* k, int64_t k_row, int64_t k_head, int64_t k_token,                            //
    const void* v, int64_t v_row, int64_t v_head, int64_t v_token,                            //
    void* k_pool, int64_t kp_block, int64_t kp_slot, int64_t kp_head,                         //
    void* v_pool, int64_t vp_block, int64_t vp_slot, int64_t vp_head,                         //
    const int64_t* slots, const int64_t* source, int64_t count, int64_t per_row,              //
    int kv_heads, int key_dim, int value_dim, int block_size, int size, int threads) {
    if (kv_heads <= 0 || block_size <= 0 || per_row <= 0) return count == 0 ? kOk : kBadShape;
    const NewTokens keys{static_cast<const char*>(k), k_row, k_head, k_token};
    const NewTokens values{static_cast<const char*>(v), v_row, v_head, v_token};
    const PoolLayout key_pool{static_cast<char*>(k_pool), kp_block, kp_slot, kp_head};
    const PoolLayout value_pool{static_cast<char*>(v_pool), vp_block, vp_slot, vp_head};
    const int64_t bytes = count * kv_heads * (key_dim + value_dim) * size;
    [[maybe_unused]] const bool parallel = threads > 1 && bytes > (int64_t{1} << 20);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (parallel)
#endif
    for (int64_t i = 0; i < count; ++i) {
        if (slots[i] < 0) continue;
        const int64_t from = source == nullptr ? i : source[i];
        const int64_t block = slots[i] / block_size, slot = slots[i] % block_size;
        write_token(keys, key_pool, from / per_row, from % per_row, block, slot, kv_heads, key_dim, size);
        write_token(values, value_pool, from / per_row, from % per_row, block, slot, kv_heads, value_dim, size);
    }
    return kOk;
}

// Reads `bytes` of memory and returns a digest: what a decode step could not be faster than. For benchmarks.
HF_PAGED_EXPORT uint64_t hf_paged_read(const void* data, int64_t bytes, int threads) {
    constexpr int64_t kPage = 512;  // words
    const auto* words = static_cast<const uint64_t*>(data);
    uint64_t digest = 0;
    [[maybe_unused]] const bool parallel = threads > 1;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) reduction(^ : digest) if (parallel)
#endif
    for (int64_t page = 0; page < bytes / (kPage * 8); ++page) {
        uint64_t lanes[8] = {};  // independent chains, so that the loop waits for memory alone
        for (int64_t i = 0; i < kPage; i += 8)
            for (int lane = 0; lane < 8; ++lane) lanes[lane] ^= words[page * kPage + i + lane];
        for (const uint64_t lane : lanes) digest ^= lane;
    }
    return digest;
}
