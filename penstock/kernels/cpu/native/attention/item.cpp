// An item of a plan: some query rows of some kv heads through the tiles of some spans that any of them sees. Tile by
// tile, and within one head by head: neighbouring heads of a block lie behind each other in memory.

#include "attention/call.h"

namespace penstock {
namespace {

constexpr int BLOCK_ROWS = ROW_CAPACITY;

// Rows that go through a tile together, as one operand.
struct RowBlock {
    std::int32_t first, rows;
    std::int32_t earliest, latest;  // positions
};

struct Granules {
    const char* at[TILE_GRANULES];
};

class Item {
  public:
    Item(const AttentionCall& call, const PenstockAttentionItem& item, void* scratch);
    void attend();

  private:
    void note_rows();
    void pack_queries();
    void attend_span(std::int64_t span);
    void attend_tile(std::int64_t tile);
    void attend_block(TileArgs& args, std::int64_t head, const RowBlock& block) const;
    void attend_row(TileArgs args, std::int64_t head, std::int64_t row) const;
    void deliver() const;

    bool sees(const RowBlock& block, std::int64_t base) const;
    bool sees_all(const RowBlock& block, std::int64_t base) const;
    bool hides_tokens(const RowBlock& block, std::int64_t base) const;
    void note_visible(const RowBlock& block, std::int64_t base);
    std::int64_t seen_from(std::int64_t tile) const;
    Granules locate(std::int64_t tile, std::int64_t head) const;
    Granules following(std::int64_t tile, std::int64_t head) const;
    bool all_finite(const Granules& granules) const;

    std::int64_t kv_head(std::int64_t head) const { return item_.head_begin + head; }
    bool partial() const { return item_.partial >= 0; }
    char* operand(std::int64_t head, std::int64_t row) const {
        return operands_ + head * head_bytes_ + row / BLOCK_ROWS * block_bytes_;
    }

    const AttentionCall& call_;
    const PenstockAttentionItem& item_;
    const std::int64_t heads_, rows_, dim_;
    const std::int64_t window_, kept_;              // window_: 0 is none; kept_: first tokens that stay visible
    const std::int64_t length_, cached_;            // of the sequence
    const std::int64_t head_bytes_, block_bytes_;   // of operands: from one head, one block of rows, to the next
    const std::int64_t blocks_;
    const std::int64_t head_states_;                // from one head's first state to that of the next
    const std::uint32_t block_granules_;            // of a block of the cache
    const std::int64_t first_staged_, end_granule_; // of the sequence's granules: from where they are staged, the end
    const std::int32_t* const block_table_;
    std::int64_t begin_tile_ = 0, end_tile_ = 0;    // tiles behind the kept tokens that any row may see
    std::int32_t mode_ = 0;                         // the kernel's own

    Delivery delivery_;
    RowBlock* block_;          // [blocks]
    std::int32_t* positions_;  // [rows], as low_ and high_
    std::int32_t* low_;
    std::int32_t* high_;
    float* slopes_;            // [heads][row_room(rows)]
    char* operands_;           // [heads][blocks]
    char* row_operand_;
    char* row_tile_;           // [4] granules
    States row_state_, span_state_;
    States state_;             // that tiles fold into: one of the two, or partial rows
};

Item::Item(const AttentionCall& call, const PenstockAttentionItem& item, void* scratch)
    : call_(call),
      item_(item),
      heads_(item.head_end - item.head_begin),
      rows_(item.row_end - item.row_begin),
      dim_(call.cache.padded_dim),
      window_(call.step.sliding_window),
      kept_(call.step.num_sink_tokens),
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
    Carver carver(scratch);
    delivery_ = Delivery::cut(carver, rows_);
    block_ = reinterpret_cast<RowBlock*>(carver.cut<std::int32_t>(room));  // four numbers for up to 48 rows
    positions_ = carver.cut<std::int32_t>(room);
    low_ = carver.cut<std::int32_t>(room);
    high_ = carver.cut<std::int32_t>(room);
    slopes_ = carver.cut<float>(heads_ * room);
    operands_ = carver.cut<char>(heads_ * head_bytes_);
    row_operand_ = carver.cut<char>(query_bytes(call.cache.kind, dim_, call.cache.slices, 1));
    row_tile_ = carver.cut<char>(TILE_GRANULES * call.granule);
    if (partial()) return;
    row_state_ = States::cut(carver, heads_ * room, dim_);
    if (item.span_end - item.span_begin > 1) span_state_ = States::cut(carver, heads_ * room, dim_);
}

void Item::attend() {
    note_rows();
    pack_queries();
    for (std::int64_t span = item_.span_begin; span < item_.span_end; ++span) attend_span(span);
    if (call_.kernel.leave != nullptr) call_.kernel.leave(mode_);
    if (!partial()) deliver();
}

// Where the rows stand, block by block, and what all of them together may see.
void Item::note_rows() {
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
    begin_tile_ = window_ > 0 ? std::max<std::int64_t>(earliest - window_ + 1, 0) / TILE : 0;
    end_tile_ = std::min<std::int64_t>(latest / TILE + 1, std::int64_t{item_.span_end} * SPAN_TILES);
    if (call_.how.slopes == nullptr) return;
    for (std::int64_t head = 0; head < heads_; ++head)
        for (std::int64_t row = 0; row < rows_; ++row)
            slopes_[head * row_room(rows_) + row] =
                call_.how.slopes[kv_head(head) * call_.group + (item_.row_begin + row) % call_.group];
}

void Item::pack_queries() {
    for (std::int64_t head = 0; head < heads_; ++head)
        for (std::int64_t i = 0; i < blocks_; ++i)
            call_.kernel.pack_queries({&call_.cache, call_.type, call_.q, call_.heads, kv_head(head),
                                       item_.row_begin + block_[i].first, block_[i].rows,
                                       operand(head, block_[i].first)});
}

// The first span's state is the row's: folding it into an empty one would change no more than the sign of a zero, which
// delivering takes away.
void Item::attend_span(std::int64_t span) {
    const bool first = span == item_.span_begin;
    const std::int64_t states = heads_ * head_states_;
    state_ = first ? row_state_ : span_state_;
    if (partial()) state_ = call_.partial.from(item_.partial + (span - item_.span_begin) * states, dim_);
    state_.clear(states, dim_);
    const std::int64_t end = std::min((span + 1) * SPAN_TILES, end_tile_);
    for (std::int64_t tile = seen_from(span * SPAN_TILES); tile < end; tile = seen_from(tile + 1)) attend_tile(tile);
    if (first || partial()) return;
    for (std::int64_t head = 0; head < heads_; ++head) {
        const States into = row_state_.from(head * head_states_, dim_), part = state_.from(head * head_states_, dim_);
        call_.fold.fold(static_cast<int>(rows_), dim_, into.greatest, into.sum, into.mixed, part.greatest, part.sum,
                        part.mixed);
    }
}

void Item::attend_tile(std::int64_t tile) {
    TileArgs args{};
    args.cache = &call_.cache;
    args.how = &call_.how;
    args.base = tile * TILE;
    args.mode = &mode_;
    args.sink = static_cast<std::int32_t>(std::clamp<std::int64_t>(kept_ - args.base, 0, TILE));
    bool hidden_tokens = false;
    for (std::int64_t i = 0; i < blocks_; ++i) {
        if (!sees_all(block_[i], args.base)) note_visible(block_[i], args.base);
        hidden_tokens |= sees(block_[i], args.base) && hides_tokens(block_[i], args.base);
    }
    Granules granules = locate(tile, 0);
    for (std::int64_t head = 0; head < heads_; ++head) {
        const Granules next = following(tile, head);
        const bool one_by_one = hidden_tokens && !all_finite(granules);
        args.kv_head = kv_head(head);
        std::copy_n(granules.at, TILE_GRANULES, args.granules);
        std::copy_n(next.at, TILE_GRANULES, args.next);
        for (std::int64_t i = 0; i < blocks_; ++i) {
            if (!sees(block_[i], args.base)) continue;
            if (one_by_one && hides_tokens(block_[i], args.base)) {
                for (int row = 0; row < block_[i].rows; ++row) attend_row(args, head, block_[i].first + row);
            } else {
                attend_block(args, head, block_[i]);
                std::fill_n(args.next, TILE_GRANULES, nullptr);  // prefetched by now
            }
        }
        granules = next;
    }
}

void Item::attend_block(TileArgs& args, std::int64_t head, const RowBlock& block) const {
    const bool masked = !sees_all(block, args.base);
    const States state = state_.from(head * head_states_ + block.first, dim_);
    args.rows = block.rows;
    args.operand = operand(head, block.first);
    args.positions = positions_ + block.first;
    args.slopes = call_.how.slopes != nullptr ? slopes_ + head * row_room(rows_) + block.first : nullptr;
    args.low = masked ? low_ + block.first : nullptr;
    args.high = masked ? high_ + block.first : nullptr;
    args.greatest = state.greatest;
    args.sum = state.sum;
    args.mixed = state.mixed;
    call_.kernel.attend_tile(args);
}

// One row alone, with zeros instead of what is hidden from it: 0 times a NaN would not be 0.
void Item::attend_row(TileArgs args, std::int64_t head, std::int64_t row) const {
    for (int g = 0; g < TILE_GRANULES; ++g) {
        char* copy = row_tile_ + g * call_.granule;
        std::memcpy(copy, args.granules[g], static_cast<std::size_t>(call_.granule));
        for (int i = 0; i < GRANULE; ++i) {
            const int j = g * GRANULE + i;
            const bool visible = j < high_[row] && (j >= low_[row] || j < args.sink);
            if (!visible) store_zeros(call_, args.kv_head, copy, i, 1);
        }
        args.granules[g] = copy;
    }
    call_.kernel.pack_queries({&call_.cache, call_.type, call_.q, call_.heads, args.kv_head, item_.row_begin + row, 1,
                               row_operand_});
    const States state = state_.from(head * head_states_ + row, dim_);
    args.rows = 1;
    args.operand = row_operand_;
    args.positions = positions_ + row;
    args.slopes = call_.how.slopes != nullptr ? slopes_ + head * row_room(rows_) + row : nullptr;
    args.low = low_ + row;
    args.high = high_ + row;
    args.greatest = state.greatest;
    args.sum = state.sum;
    args.mixed = state.mixed;
    call_.kernel.attend_tile(args);
}

void Item::deliver() const {
    for (std::int64_t head = 0; head < heads_; ++head)
        delivery_.deliver(call_, kv_head(head), item_.row_begin, rows_, row_state_.from(head * head_states_, dim_));
}

// ---- Who sees what

bool Item::sees(const RowBlock& block, std::int64_t base) const {
    if (base > block.latest) return false;
    return window_ == 0 || base < kept_ || base + TILE > block.earliest - window_ + 1;
}

bool Item::sees_all(const RowBlock& block, std::int64_t base) const {
    if (base + TILE > block.earliest + 1) return false;
    return window_ == 0 || base + TILE <= kept_ || base >= block.latest - window_ + 1;
}

// Whether a row of the block does not see a token of the tile. Behind the sequence's end all values are finite.
bool Item::hides_tokens(const RowBlock& block, std::int64_t base) const {
    if (block.earliest + 1 < std::min(base + TILE, length_)) return true;
    return window_ > 0 && base + TILE > kept_ && block.latest - window_ + 1 > std::max(base, kept_);
}

// Visible positions, counted from the tile's first.
void Item::note_visible(const RowBlock& block, std::int64_t base) {
    for (int row = block.first; row < block.first + block.rows; ++row) {
        const std::int64_t end = positions_[row] + std::int64_t{1} - base;
        low_[row] = static_cast<std::int32_t>(window_ > 0 ? std::clamp<std::int64_t>(end - window_, 0, TILE) : 0);
        high_[row] = static_cast<std::int32_t>(std::clamp<std::int64_t>(end, 0, TILE));
    }
}

// The first tile from this one on that any row may see.
std::int64_t Item::seen_from(std::int64_t tile) const {
    return tile * TILE < kept_ ? tile : std::max(tile, begin_tile_);
}

// ---- Where it lies

Granules Item::locate(std::int64_t tile, std::int64_t head) const {
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

// The granules that are read after these, null behind the item's last ones.
Granules Item::following(std::int64_t tile, std::int64_t head) const {
    if (head + 1 < heads_) return locate(tile, head + 1);
    const std::int64_t next = seen_from(tile + 1);
    return next < end_tile_ ? locate(next, 0) : Granules{};
}

bool Item::all_finite(const Granules& granules) const {
    return std::all_of(granules.at, granules.at + TILE_GRANULES,
                       [&](const char* granule) { return values_are_finite(call_.cache, granule); });
}

}  // namespace

void Delivery::deliver(const AttentionCall& call, std::int64_t kv_head, std::int64_t first_row, std::int64_t rows,
                       const States& state) const {
    for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t head = kv_head * call.group + (first_row + i) % call.group;
        const std::int64_t row = (first_row + i) / call.group * call.heads + head;
        out[i] = static_cast<char*>(call.out) + row * call.cache.head_dim * type_bytes(call.type);
        if (call.lse != nullptr) lse[i] = call.lse + row;
        if (call.how.sink_logits != nullptr) logits[i] = call.how.sink_logits[head];
    }
    call.fold.deliver(static_cast<int>(rows), call.cache.padded_dim, call.cache.head_dim, state.greatest, state.sum,
                      state.mixed, call.how.sink_logits != nullptr ? logits : nullptr, call.type, out,
                      call.lse != nullptr ? lse : nullptr);
}

void attend_item(const AttentionCall& call, const PenstockAttentionItem& item, void* scratch) {
    Item(call, item, scratch).attend();
}

}  // namespace penstock
