// An item of a plan: some query rows of some kv heads against those tiles of some spans that any of the rows may see.
// The order is tile by tile and, within a tile, head by head, because neighbouring heads of a block are adjacent in
// memory.

#include "attention/call.h"

namespace penstock {
namespace {

constexpr int BLOCK_ROWS = ROW_CAPACITY;

// Rows that a kernel processes together, as one operand.
struct RowBlock {
    std::int32_t first, rows;
    std::int32_t earliest, latest;  // positions of the rows
};

// Keys of a tile that one query of each row serves: positions begin .. end - 1.
struct Keys {
    std::int64_t begin, end;
    bool are_sinks;
};

struct Granules {
    const char* at[TILE_GRANULES];
};

class Item {
  public:
    Item(const AttentionCall& call, const PenstockAttentionItem& item, void* scratch)
        : call_(call),
          item_(item),
          heads_(item.head_end - item.head_begin),
          rows_(item.row_end - item.row_begin),
          dim_(call.cache.padded_dim),
          window_(call.step.sliding_window),
          sinks_(call.step.num_sink_tokens),
          chunked_(call.step.chunked != 0),
          bidirectional_(call.step.bidirectional != 0),
          length_(call.step.seq_lens[item.sequence]),
          cached_(call.cached_tokens(item.sequence)),
          head_bytes_(query_bytes(call.cache.kind, dim_, call.cache.slices, rows_)),
          block_bytes_(query_bytes(call.cache.kind, dim_, call.cache.slices, BLOCK_ROWS)),
          blocks_(divide_up(rows_, BLOCK_ROWS)),
          head_states_(item.partial >= 0 ? rows_ : row_room(rows_)),
          block_granules_(static_cast<std::uint32_t>(call.cache.block_size / GRANULE)),
          first_staged_(cached_ == length_ ? divide_up(length_, GRANULE) : cached_ / GRANULE),
          end_granule_(divide_up(length_, GRANULE)),
          block_table_(call.step.block_table + item.sequence * call.step.max_blocks) {
        const std::int64_t room = row_room(rows_);
        BumpAllocator memory(scratch);
        outputs_ = allocate_outputs(memory, rows_);
        block_ = memory.allocate<RowBlock>(blocks_);
        positions_ = memory.allocate<std::int32_t>(room);
        low_ = memory.allocate<std::int32_t>(room);
        high_ = memory.allocate<std::int32_t>(room);
        slopes_ = memory.allocate<float>(heads_ * room);
        operands_ = memory.allocate<char>(heads_ * head_bytes_);
        row_operand_ = memory.allocate<char>(query_bytes(call.cache.kind, dim_, call.cache.slices, 1));
        row_tile_ = memory.allocate<char>(TILE_GRANULES * call.granule);
        if (partial()) return;
        row_state_ = allocate_states(memory, heads_ * room, dim_);
        if (item.span_end - item.span_begin > 1) span_state_ = allocate_states(memory, heads_ * room, dim_);
    }

    void attend() {
        locate_rows();
        for (std::int64_t span = item_.span_begin; span < item_.span_end; ++span) attend_span(span);
        if (call_.kernel.release != nullptr) call_.kernel.release(thread_state_);
        if (!partial()) write_results();
    }

  private:
    // Set positions and slopes of the rows, their blocks, and the tiles that any of them may see.
    void locate_rows() {
        for (std::int64_t row = 0; row < rows_; ++row)
            positions_[row] = call_.step.positions[(item_.row_begin + row) / call_.group];
        std::int64_t earliest = std::numeric_limits<std::int32_t>::max(), latest = -1;
        for (std::int64_t i = 0; i < blocks_; ++i) {
            const std::int64_t first = i * BLOCK_ROWS, rows = std::min<std::int64_t>(BLOCK_ROWS, rows_ - first);
            const auto [low, high] = std::minmax_element(positions_ + first, positions_ + first + rows);
            block_[i] = {static_cast<std::int32_t>(first), static_cast<std::int32_t>(rows), *low, *high};
            earliest = std::min<std::int64_t>(earliest, *low);
            latest = std::max<std::int64_t>(latest, *high);
        }
        begin_tile_ = window_ > 0 ? std::max<std::int64_t>(first_seen(earliest), 0) / TILE : 0;
        end_tile_ = std::min<std::int64_t>(last_seen(latest) / TILE + 1, std::int64_t{item_.span_end} * SPAN_TILES);
        if (call_.params.slopes == nullptr) return;
        for (std::int64_t head = 0; head < heads_; ++head)
            for (std::int64_t row = 0; row < rows_; ++row)
                slopes_[head * row_room(rows_) + row] =
                    call_.params.slopes[kv_head(head) * call_.group + (item_.row_begin + row) % call_.group];
    }

    void pack_queries(const void* q) {
        if (q == packed_) return;
        packed_ = q;
        for (std::int64_t head = 0; head < heads_; ++head)
            for (std::int64_t i = 0; i < blocks_; ++i)
                call_.kernel.pack_queries({&call_.cache, call_.type, q, call_.heads, kv_head(head),
                                           item_.row_begin + block_[i].first, block_[i].rows,
                                           operand(head, block_[i].first)});
    }

    // The state of the first span serves as that of the row: folding it into an empty state could only change the sign
    // of a zero, which write_results removes.
    void attend_span(std::int64_t span) {
        const bool first = span == item_.span_begin;
        const std::int64_t states = heads_ * head_states_;
        state_ = first ? row_state_ : span_state_;
        if (partial()) state_ = call_.partial.from(item_.partial + (span - item_.span_begin) * states);
        clear_states(state_, states);
        const std::int64_t end = std::min((span + 1) * SPAN_TILES, end_tile_);
        for (const bool sinks : {true, false}) {  // sink tokens, which have queries of their own, come first
            std::int64_t tile = span * SPAN_TILES;
            for (tile = first_visible(tile, sinks); tile < end; tile = first_visible(tile + 1, sinks)) {
                pack_queries(sinks ? call_.sink_q : call_.q);
                attend_tile(tile, sinks);
            }
        }
        if (first || partial()) return;
        for (std::int64_t at = 0; at < states; at += head_states_)
            call_.fold.fold(static_cast<int>(rows_), row_state_.from(at), state_.from(at));
    }

    void attend_tile(std::int64_t tile, bool sinks) {
        TileArgs args{};
        args.cache = &call_.cache;
        args.params = &call_.params;
        args.group = call_.group;
        args.base = tile * TILE;
        args.thread_state = &thread_state_;
        const std::int64_t border = std::clamp(sinks_, args.base, args.base + TILE);
        const Keys keys = sinks ? Keys{args.base, border, true} : Keys{border, args.base + TILE, false};
        bool hidden_tokens = false;
        for (std::int64_t i = 0; i < blocks_; ++i) {
            if (!sees_all(block_[i], keys)) set_visible(block_[i], keys, args.base);
            hidden_tokens |= sees(block_[i], keys) && hides_tokens(block_[i], keys, args.base);
        }
        Granules granules = locate(tile, 0);
        for (std::int64_t head = 0; head < heads_; ++head) {
            const Granules next = next_granules(tile, head, sinks);
            const bool one_by_one = hidden_tokens && !all_finite(granules);
            args.kv_head = kv_head(head);
            std::copy_n(granules.at, TILE_GRANULES, args.granules);
            std::copy_n(next.at, TILE_GRANULES, args.next);
            for (std::int64_t i = 0; i < blocks_; ++i) {
                if (!sees(block_[i], keys)) continue;
                if (one_by_one && hides_tokens(block_[i], keys, args.base)) {
                    for (int row = 0; row < block_[i].rows; ++row) attend_row(args, head, block_[i].first + row);
                } else {
                    attend_block(args, head, block_[i], !sees_all(block_[i], keys));
                    std::fill_n(args.next, TILE_GRANULES, nullptr);  // already prefetched
                }
            }
            granules = next;
        }
    }

    void attend_block(TileArgs& args, std::int64_t head, const RowBlock& block, bool masked) const {
        set_rows(args, head, block.first, block.rows, masked);
        args.operand = operand(head, block.first);
        call_.kernel.attend_tile(args);
    }

    // Attend one row alone, with zeros at the positions hidden from it, because 0 times a NaN would not be 0.
    void attend_row(TileArgs args, std::int64_t head, std::int64_t row) const {
        for (int g = 0; g < TILE_GRANULES; ++g) {
            char* copy = row_tile_ + g * call_.granule;
            std::memcpy(copy, args.granules[g], static_cast<std::size_t>(call_.granule));
            for (int i = 0; i < GRANULE; ++i) {
                const int j = g * GRANULE + i;
                if (j < low_[row] || j >= high_[row]) store_zeros(call_, args.kv_head, copy, i, 1);
            }
            args.granules[g] = copy;
        }
        call_.kernel.pack_queries({&call_.cache, call_.type, packed_, call_.heads, args.kv_head, item_.row_begin + row,
                                    1, row_operand_});
        set_rows(args, head, row, 1, true);
        args.operand = row_operand_;
        call_.kernel.attend_tile(args);
    }

    void set_rows(TileArgs& args, std::int64_t head, std::int64_t first, int rows, bool masked) const {
        args.rows = rows;
        args.first_row = item_.row_begin + first;
        args.positions = positions_ + first;
        args.slopes = call_.params.slopes != nullptr ? slopes_ + head * row_room(rows_) + first : nullptr;
        args.low = masked ? low_ + first : nullptr;
        args.high = masked ? high_ + first : nullptr;
        args.state = state_.from(head * head_states_ + first);
    }

    void write_results() const {
        for (std::int64_t head = 0; head < heads_; ++head)
            write_outputs(
                call_, outputs_, kv_head(head), item_.row_begin, rows_, row_state_.from(head * head_states_));
    }

    // ---- Visibility

    // With a window: the first position, besides sink tokens, that a row at a position sees. It only grows with it.
    std::int64_t first_seen(std::int64_t position) const {
        return chunked_ ? position - position % window_ : position - window_ + 1;
    }

    // The last position that a row at a position sees. It only grows with it, too.
    std::int64_t last_seen(std::int64_t position) const {
        if (!bidirectional_) return position;
        return window_ > 0 ? std::min(position + window_, length_) - 1 : length_ - 1;
    }

    bool sees(const RowBlock& block, const Keys& keys) const {
        if (keys.begin > last_seen(block.latest)) return false;
        return window_ == 0 || keys.are_sinks || keys.end > first_seen(block.earliest);
    }

    bool sees_all(const RowBlock& block, const Keys& keys) const {
        if (keys.end - keys.begin < TILE || keys.end > last_seen(block.earliest) + 1) return false;
        return window_ == 0 || keys.are_sinks || keys.begin >= first_seen(block.latest);
    }

    // Whether a token of the tile is hidden from a row of the block. Values after the end of a sequence are finite.
    bool hides_tokens(const RowBlock& block, const Keys& keys, std::int64_t base) const {
        const std::int64_t end = std::min(base + TILE, length_);
        if (keys.begin > base || keys.end < end || last_seen(block.earliest) + 1 < end) return true;
        return window_ > 0 && !keys.are_sinks && first_seen(block.latest) > base;
    }

    // Set low_ and high_: the visible positions of each row, relative to the first position of the tile.
    void set_visible(const RowBlock& block, const Keys& keys, std::int64_t base) {
        const std::int64_t window = keys.are_sinks ? 0 : window_, first = keys.begin - base, last = keys.end - base;
        for (int row = block.first; row < block.first + block.rows; ++row) {
            const std::int64_t end = last_seen(positions_[row]) + 1 - base;
            const std::int64_t low = window > 0 ? first_seen(positions_[row]) - base : first;
            low_[row] = static_cast<std::int32_t>(std::clamp(low, first, last));
            high_[row] = static_cast<std::int32_t>(std::clamp<std::int64_t>(end, 0, last));
        }
    }

    // The first tile, from this one on, that any row may see, of those with sink tokens or of those with other tokens.
    std::int64_t first_visible(std::int64_t tile, bool sinks) const {
        if (sinks) return tile * TILE < sinks_ ? tile : end_tile_;
        return std::max({tile, begin_tile_, sinks_ / TILE});
    }

    // ---- Location of granules

    Granules locate(std::int64_t tile, std::int64_t head) const {
        const std::int64_t first = tile * TILE_GRANULES;
        std::uint32_t column = static_cast<std::uint32_t>(first) / block_granules_;
        std::uint32_t index = static_cast<std::uint32_t>(first) % block_granules_;
        Granules granules;
        for (int g = 0; g < TILE_GRANULES; ++g) {
            if (first + g >= end_granule_)
                granules.at[g] = call_.zeros;
            else if (first + g >= first_staged_)
                granules.at[g] = call_.staged_granule(item_.sequence, kv_head(head), first + g - first_staged_);
            else
                granules.at[g] = call_.granule_of_block(block_table_[column], kv_head(head), index);
            if (++index == block_granules_) index = 0, ++column;
        }
        return granules;
    }

    // The granules that are read next; null after the last tile and head of the item.
    Granules next_granules(std::int64_t tile, std::int64_t head, bool sinks) const {
        if (head + 1 < heads_) return locate(tile, head + 1);
        const std::int64_t next = first_visible(tile + 1, sinks);
        return next < end_tile_ ? locate(next, 0) : Granules{};
    }

    bool all_finite(const Granules& granules) const {
        return std::all_of(granules.at, granules.at + TILE_GRANULES,
                           [&](const char* granule) { return values_are_finite(call_.cache, granule); });
    }

    std::int64_t kv_head(std::int64_t head) const { return item_.head_begin + head; }
    bool partial() const { return item_.partial >= 0; }
    char* operand(std::int64_t head, std::int64_t row) const {
        return operands_ + head * head_bytes_ + row / BLOCK_ROWS * block_bytes_;
    }

    const AttentionCall& call_;
    const PenstockAttentionItem& item_;
    const std::int64_t heads_, rows_, dim_;
    const std::int64_t window_, sinks_;              // window_: 0 if none; sinks_: first tokens, always visible
    const bool chunked_, bidirectional_;            // as in PenstockAttentionStep
    const std::int64_t length_, cached_;            // of the sequence
    const std::int64_t head_bytes_, block_bytes_;   // of operands: per head, per block of rows
    const std::int64_t blocks_;
    const std::int64_t head_states_;                // states per head
    const std::uint32_t block_granules_;            // per block of the cache
    const std::int64_t first_staged_, end_granule_; // of the sequence: first staged granule, end
    const std::int32_t* const block_table_;
    std::int64_t begin_tile_ = 0, end_tile_ = 0;    // tiles that any row may see, not counting sink tokens
    std::int32_t thread_state_ = 0;                 // TileArgs::thread_state
    const void* packed_ = nullptr;                  // the queries in operands_

    RowOutputs outputs_;
    RowBlock* block_;          // [blocks]
    std::int32_t* positions_;  // [rows], like low_ and high_
    std::int32_t* low_;
    std::int32_t* high_;
    float* slopes_;            // [heads][row_room(rows)]
    char* operands_;           // [heads][blocks]
    char* row_operand_;
    char* row_tile_;           // [4] granules
    States row_state_, span_state_;
    States state_;             // into which tiles fold: row_state_, span_state_ or partial rows
};

}  // namespace

void write_outputs(const AttentionCall& call, const RowOutputs& outputs, std::int64_t kv_head, std::int64_t first_row,
                   std::int64_t rows, const States& state) {
    const float* sink_logits = call.params.sink_logits;
    for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t head = kv_head * call.group + (first_row + i) % call.group;
        const std::int64_t row = (first_row + i) / call.group * call.heads + head;
        outputs.out[i] = static_cast<char*>(call.out) + row * call.cache.head_dim * type_bytes(call.type);
        if (call.lse != nullptr) outputs.lse[i] = call.lse + row;
        if (sink_logits != nullptr) outputs.sinks[i] = sink_logits[head];
    }
    call.fold.write_output({static_cast<int>(rows), call.cache.head_dim, state,
                            sink_logits != nullptr ? outputs.sinks : nullptr, call.type, outputs.out,
                            call.lse != nullptr ? outputs.lse : nullptr});
}

void attend_item(const AttentionCall& call, const PenstockAttentionItem& item, void* scratch) {
    Item(call, item, scratch).attend();
}

}  // namespace penstock
