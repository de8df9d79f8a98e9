// A mixture of experts: rows are grouped by expert, every expert multiplies its own rows, and each row adds up what its
// experts made of it.

#include <algorithm>

#include "abi.h"
#include "context.h"
#include "functions.h"
#include "products/linear.h"

namespace penstock {

namespace {

constexpr std::int64_t ROWS_PER_PASS = 512;          // bounds the memory for what lies between the two products
constexpr std::int64_t ALONE_ELEMENTS = 32 << 10;    // sums that take no longer than waking a helper

struct Experts {
    const PenstockWeight* gate_up;  // [count]
    const PenstockWeight* down;     // [count]
    std::int64_t count;
    std::int64_t top_k;
    std::int32_t x_type;
    std::int32_t activation;
};

// Where each pair of a row and one of its experts stands when pairs are sorted by expert: at a place.
struct Routing {
    std::int64_t rows, pairs;
    std::int64_t* starts;  // [experts + 1] an expert's first place
    std::int64_t* next;    // [experts]
    std::int64_t* pair;    // [pairs] the pair at a place
    std::int64_t* row;     // [pairs] the row at a place
    std::int64_t* places;  // [rows, top_k] a row's places in ascending expert id
    std::int64_t* filled;  // [rows]
};

struct Buffers {
    Routing routing;
    Product* products;  // [experts that have rows]
    char* inner;        // [pairs, n / 2] of x_type
    float* results;     // [pairs, n]
};

Buffers cut_buffers(const Experts& experts, std::int64_t rows, Carver& carver) {
    const std::int64_t pairs = rows * experts.top_k;
    const std::int64_t inner = result_columns(experts.gate_up[0]), outer = result_columns(experts.down[0]);
    Buffers buffers{};
    Routing& routing = buffers.routing;
    routing.rows = rows;
    routing.pairs = pairs;
    routing.starts = carver.cut<std::int64_t>(experts.count + 1);
    routing.next = carver.cut<std::int64_t>(experts.count);
    routing.pair = carver.cut<std::int64_t>(pairs);
    routing.row = carver.cut<std::int64_t>(pairs);
    routing.places = carver.cut<std::int64_t>(pairs);
    routing.filled = carver.cut<std::int64_t>(rows);
    buffers.products = carver.cut<Product>(std::min(experts.count, pairs));
    buffers.inner = carver.cut<char>(pairs * inner * type_bytes(experts.x_type));
    buffers.results = carver.cut<float>(pairs * outer);
    return buffers;
}

// A counting sort, which keeps rows in order within an expert.
void sort_by_expert(const Experts& experts, const std::int64_t* ids, const Routing& routing) {
    std::fill_n(routing.starts, experts.count + 1, 0);
    for (std::int64_t pair = 0; pair < routing.pairs; ++pair) ++routing.starts[ids[pair] + 1];
    for (std::int64_t expert = 0; expert < experts.count; ++expert)
        routing.starts[expert + 1] += routing.starts[expert];
    std::copy_n(routing.starts, experts.count, routing.next);
    for (std::int64_t pair = 0; pair < routing.pairs; ++pair) {
        const std::int64_t place = routing.next[ids[pair]]++;
        routing.pair[place] = pair;
        routing.row[place] = pair / experts.top_k;
    }
    std::fill_n(routing.filled, routing.rows, 0);
    for (std::int64_t place = 0; place < routing.pairs; ++place) {
        const std::int64_t row = routing.row[place];
        routing.places[row * experts.top_k + routing.filled[row]++] = place;
    }
}

// activation(gate) * up of every pair.
void multiply_gate_up(Context& context, const Experts& experts, const void* x, const Buffers& buffers) {
    const std::int64_t* starts = buffers.routing.starts;
    std::int64_t count = 0;
    for (std::int64_t e = 0; e < experts.count; ++e) {
        if (starts[e] == starts[e + 1]) continue;
        const PenstockWeight& weight = experts.gate_up[e];
        void* out = row_of(static_cast<void*>(buffers.inner), experts.x_type, result_columns(weight), starts[e]);
        buffers.products[count++] = {&weight, x, experts.x_type, buffers.routing.row + starts[e],
                                     starts[e + 1] - starts[e], out, result_columns(weight), experts.x_type,
                                     experts.activation};
    }
    multiply_all(context, buffers.products, count);
}

void multiply_down(Context& context, const Experts& experts, const Buffers& buffers) {
    const std::int64_t* starts = buffers.routing.starts;
    std::int64_t count = 0;
    for (std::int64_t e = 0; e < experts.count; ++e) {
        if (starts[e] == starts[e + 1]) continue;
        const PenstockWeight& weight = experts.down[e];
        const void* x = row_of(static_cast<const void*>(buffers.inner), experts.x_type, weight.k, starts[e]);
        buffers.products[count++] = {&weight, x, experts.x_type, nullptr, starts[e + 1] - starts[e],
                                     buffers.results + starts[e] * weight.n, weight.n, TYPE_F32, ACT_NONE};
    }
    multiply_all(context, buffers.products, count);
}

// out = sum of weight * result in ascending expert id, beginning at zero.
void add_up_row(const Experts& experts, const Buffers& buffers, const float* weights, std::int64_t row, float* out) {
    const std::int64_t columns = experts.down[0].n;
    const Routing& routing = buffers.routing;
    std::fill_n(out, columns, 0.0f);
    for (std::int64_t j = 0; j < experts.top_k; ++j) {
        const std::int64_t place = routing.places[row * experts.top_k + j];
        const float weight = weights[routing.pair[place]];
        const float* result = buffers.results + place * columns;
        for (std::int64_t c = 0; c < columns; ++c) out[c] += weight * result[c];
    }
}

void add_up(Context& context, const Experts& experts, const Buffers& buffers, const float* weights, float* out) {
    const std::int64_t columns = experts.down[0].n;
    const auto task = [&](std::int64_t row, int) {
        add_up_row(experts, buffers, weights, row, out + row * columns);
    };
    if (buffers.routing.pairs * columns >= ALONE_ELEMENTS) return context.pool.run(buffers.routing.rows, task);
    for (std::int64_t row = 0; row < buffers.routing.rows; ++row) task(row, 0);
}

void run_rows(Context& context, const Experts& experts, const void* x, std::int64_t rows, const std::int64_t* ids,
              const float* weights, float* out) {
    Carver counter(nullptr);
    cut_buffers(experts, rows, counter);
    Carver carver(context.workspace.take(counter.bytes()));
    const Buffers buffers = cut_buffers(experts, rows, carver);
    sort_by_expert(experts, ids, buffers.routing);
    multiply_gate_up(context, experts, x, buffers);
    multiply_down(context, experts, buffers);
    add_up(context, experts, buffers, weights, out);
}

// Notes what a call is about to do; false where an id is no expert's.
bool count_experts(Context& context, std::int64_t count, const std::int64_t* ids, std::int64_t pairs) {
    char* chosen = static_cast<char*>(context.workspace.take(count));
    std::fill_n(chosen, count, char{0});
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
        if (ids[pair] < 0 || ids[pair] >= count) return false;
        chosen[ids[pair]] = 1;
    }
    context.experts_read += std::count(chosen, chosen + count, char{1});
    context.expert_rows += pairs;
    return true;
}

}  // namespace

}  // namespace penstock

using namespace penstock;

// All experts have the same shapes. Ids that are not 0 .. experts-1 are refused before anything is written.
PENSTOCK_EXPORT std::int32_t penstock_experts(Context* context, const PenstockWeight* gate_up,
                                              const PenstockWeight* down, std::int64_t count, const void* x,
                                              std::int32_t x_type, std::int64_t rows, std::int64_t top_k,
                                              const std::int64_t* ids, const float* weights, std::int32_t activation,
                                              float* out) try {
    const Turn turn(context);
    if (!count_experts(*context, count, ids, rows * top_k)) return STATUS_OUT_OF_RANGE;
    const Experts experts{gate_up, down, count, top_k, x_type, activation};
    for (std::int64_t row = 0; row < rows; row += ROWS_PER_PASS)
        run_rows(*context, experts, row_of(x, x_type, gate_up[0].k, row), std::min(ROWS_PER_PASS, rows - row),
                 ids + row * top_k, weights + row * top_k, out + row * down[0].n);
    return STATUS_DONE;
} catch (...) {
    return STATUS_NO_MEMORY;
}

// counts [2]: experts that the calls so far had to read, once a call, and rows that went through one, once for each.
PENSTOCK_EXPORT void penstock_expert_counts(Context* context, std::int64_t* counts) {
    const std::lock_guard<std::mutex> turn(context->in_use);
    counts[0] = context->experts_read;
    counts[1] = context->expert_rows;
}
