// Which tiles there are, cut into work items of similar cost. Integers only; depends on the tables, not on the values.
//
// A row that is cut over its tokens (Flash-Decoding, Dao et al. 2023), or whose leading blocks are read together with
// other rows (as in Hydragen, Juravsky et al. 2024, and cascade inference), is answered by several items. Each leaves a
// partial result, and the partial results of a query are merged by log-sum-exp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hf_paged {

struct Query {
    int64_t begin, end;  // visible tokens of its row
    int32_t token;       // index in q and out
    int32_t part;        // newest partial result, -1: none
    int32_t parts;       // tiles and pieces of tiles that answer it
};

struct Item {
    int64_t begin, end;  // tokens
    int64_t cost;
    int32_t query, queries;  // range in Plan::queries
    int32_t row;             // block table row through which the tokens are found
    int32_t head, heads;     // key/value heads
    int32_t part;            // first partial result (one per query), -1: writes the output itself
};

struct PlanInput {
    const int32_t* table;  // [rows, >= ceil(length / block_size)]
    int64_t table_stride;
    const int32_t* lengths;       // [rows]
    const int32_t* query_starts;  // [rows + 1]
    int rows, heads, group, block_size;
    int64_t window;  // 0: none
    bool share, split;
    bool split_always;  // tests: cut at the smallest size whatever the cost
    int threads;
};

class Plan {
public:
    std::vector<Query> queries;
    std::vector<Item> items;
    std::vector<int32_t> next_part;  // chain of the partial results of one query

    void make(const PlanInput& in) {
        in_ = &in;
        queries.clear();
        tiles_.clear();
        items.clear();
        next_part.clear();
        rows_.clear();
        for (int b = 0; b < in.rows; ++b) add_row(b);
        const bool decode_like = static_cast<int64_t>(queries.size()) <= 8 * static_cast<int64_t>(rows_.size());
        if (in.share && decode_like && rows_.size() > 1) {
            order_by_table();
            add_shared(0, rows_.size(), 0);
        } else {
            for (const Row& row : rows_) add_private(row, 0);
        }
        cut_tiles();
    }

private:
    static constexpr int kTileRows = 64;         // query vectors per tile that fill it well
    static constexpr int kOneHead = 16;          // from so many query vectors on, an item is a single key/value head
    static constexpr int64_t kMinShared = 32;    // tokens
    static constexpr int64_t kMinSplit = 128;    // tokens
    static constexpr int64_t kItemOverhead = 8;  // a token costs as much as this many query vectors to read

    struct Row {
        int32_t row, query, queries;
        int64_t length, begin;
        int64_t shared;  // tokens in common with the row after it in rows_
    };
    struct Tile {
        int64_t begin, end;
        int32_t query, queries, row;
        int32_t heads = 0;   // per item
        int64_t pieces = 1;  // over the tokens
    };

    const PlanInput* in_ = nullptr;
    std::vector<Row> rows_, sorted_;
    std::vector<Query> moved_;
    std::vector<Tile> tiles_;

    const int32_t* table_row(int32_t row) const { return in_->table + row * in_->table_stride; }
    int64_t columns(const Row& row) const { return (row.length + in_->block_size - 1) / in_->block_size; }

    void add_row(int b) {
        const int32_t first = in_->query_starts[b], count = in_->query_starts[b + 1] - first;
        if (count <= 0) return;
        const int64_t length = std::max<int64_t>(in_->lengths[b], 0);
        const auto start = static_cast<int32_t>(queries.size());
        for (int32_t j = 0; j < count; ++j) {
            const int64_t end = std::max<int64_t>(length - count + j + 1, 0);
            const int64_t begin = in_->window > 0 ? std::max<int64_t>(end - in_->window, 0) : 0;
            queries.push_back({begin, end, first + j, -1, 0});
        }
        rows_.push_back({b, start, count, length, queries[start].begin, 0});
    }

    int32_t queries_per_tile() const { return std::max(1, kTileRows / in_->group); }

    void add_tiles(int32_t first, int32_t count, int32_t row, int64_t from, int64_t to) {
        const int32_t most = queries_per_tile();
        // Equal tiles: 65 queries are better done as 33 + 32 than as 64 + 1.
        const int32_t tiles = (count + most - 1) / most;
        for (int32_t i = 0; i < tiles; ++i) {
            const auto q0 = static_cast<int32_t>(static_cast<int64_t>(count) * i / tiles);
            const auto q1 = static_cast<int32_t>(static_cast<int64_t>(count) * (i + 1) / tiles);
            int64_t begin = to, end = from;
            for (int32_t q = first + q0; q < first + q1; ++q) {
                begin = std::min(begin, std::max(queries[q].begin, from));
                end = std::max(end, std::min(queries[q].end, to));
            }
            if (begin < end) tiles_.push_back({begin, end, first + q0, q1 - q0, row, 0, 1});
        }
    }

    void add_private(const Row& row, int64_t from) { add_tiles(row.query, row.queries, row.row, from, row.length); }

    // Columns before the first visible token may hold anything; they count as equal, and no tile reaches there.
    int64_t first_column() const {
        int64_t begin = rows_[0].begin;
        for (const Row& row : rows_) begin = std::min(begin, row.begin);
        return begin / in_->block_size;
    }

    // Sorts rows so that those with equal leading blocks are neighbours, and notes how much neighbours share.
    void order_by_table() {
        const int64_t skip = first_column();
        const auto common = [&](const Row& a, const Row& b) {
            const int32_t *x = table_row(a.row), *y = table_row(b.row);
            const int64_t most = std::min(columns(a), columns(b));
            int64_t c = std::min(skip, most);
            while (c < most && x[c] == y[c]) ++c;
            return c;
        };
        const auto before = [&](const Row& a, const Row& b) {
            const int64_t c = common(a, b), limit_a = columns(a), limit_b = columns(b);
            if (c < limit_a && c < limit_b) return table_row(a.row)[c] < table_row(b.row)[c];
            return limit_a < limit_b;
        };
        sorted_ = rows_;
        std::stable_sort(sorted_.begin(), sorted_.end(), before);
        moved_.clear();
        for (Row& row : sorted_) {
            const auto start = static_cast<int32_t>(moved_.size());
            moved_.insert(moved_.end(), queries.begin() + row.query, queries.begin() + row.query + row.queries);
            row.query = start;
        }
        queries.swap(moved_);
        rows_.swap(sorted_);
        for (size_t i = 0; i + 1 < rows_.size(); ++i) {
            const int64_t tokens = common(rows_[i], rows_[i + 1]) * in_->block_size;
            rows_[i].shared = std::min({tokens, rows_[i].length, rows_[i + 1].length});
        }
    }

    // Rows [a, b) of rows_ have their tokens before `from` behind them. What all of them share becomes one stacked
    // tile; the rest falls into runs that share more.
    void add_shared(size_t a, size_t b, int64_t from) {
        if (b - a == 1) return add_private(rows_[a], from);
        int64_t common = rows_[a].shared;
        for (size_t i = a + 1; i + 1 < b; ++i) common = std::min(common, rows_[i].shared);
        if (common - from >= kMinShared) {
            const int32_t first = rows_[a].query, last = rows_[b - 1].query + rows_[b - 1].queries;
            add_tiles(first, last - first, rows_[a].row, from, common);
            from = common;
        }
        size_t start = a;
        for (size_t i = a; i < b; ++i) {
            if (i + 1 < b && rows_[i].shared > common) continue;
            add_shared(start, i + 1, from);
            start = i + 1;
        }
    }

    // Items of about equal cost: one per tile and head for many queries, all heads at once for few (their keys lie side
    // by side in memory); long tiles are cut over the tokens while there are fewer items than threads can balance.
    void cut_tiles() {
        int64_t total = 0;
        for (const Tile& t : tiles_) total += tile_cost(t) * in_->heads;
        const bool split = in_->split && (in_->threads > 1 || in_->split_always);
        const int64_t target = std::max<int64_t>(total / (in_->threads * 4), 1);
        const int64_t smallest = in_->split_always ? 32 : kMinSplit;
        for (Tile& tile : tiles_) {
            tile.heads = tile.queries * in_->group >= kOneHead ? 1 : in_->heads;
            if (split) {
                const int64_t cost = tile_cost(tile) * tile.heads, length = tile.end - tile.begin;
                const int64_t wanted = in_->split_always ? length : (cost + target / 2) / target;
                tile.pieces = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(length / smallest, 1));
                if (wanted > tile.pieces)  // too short to be cut as often as wanted: cut over the heads too
                    tile.heads = static_cast<int>(std::max<int64_t>(tile.heads * tile.pieces / wanted, 1));
            }
            for (int32_t q = tile.query; q < tile.query + tile.queries; ++q)
                queries[q].parts += static_cast<int32_t>(tile.pieces);
        }
        for (const Tile& tile : tiles_) add_items(tile);
        std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    }

    int64_t tile_cost(const Tile& t) const { return (t.end - t.begin) * (t.queries * in_->group + kItemOverhead); }

    void add_items(const Tile& tile) {
        bool direct = true;
        for (int32_t q = tile.query; q < tile.query + tile.queries; ++q) direct = direct && queries[q].parts == 1;
        const int64_t length = tile.end - tile.begin;
        for (int64_t i = 0; i < tile.pieces; ++i) {
            const int64_t begin = tile.begin + length * i / tile.pieces;
            const int64_t end = tile.begin + length * (i + 1) / tile.pieces;
            const int32_t part = direct ? -1 : add_parts(tile);
            for (int h = 0; h < in_->heads; h += tile.heads) {
                const int heads = std::min(tile.heads, in_->heads - h);
                const int64_t cost = tile_cost(tile) * (end - begin) / length * heads;
                items.push_back({begin, end, cost, tile.query, tile.queries, tile.row, h, heads, part});
            }
        }
    }

    int32_t add_parts(const Tile& tile) {
        const auto first = static_cast<int32_t>(next_part.size());
        for (int32_t q = tile.query; q < tile.query + tile.queries; ++q) {
            next_part.push_back(queries[q].part);
            queries[q].part = static_cast<int32_t>(next_part.size() - 1);
        }
        return first;
    }
};

}  // namespace hf_paged
