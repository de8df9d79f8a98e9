// A mixture of experts: rows are grouped by expert, each expert multiplies its own rows, and each row sums the results
// of its experts.

#include <algorithm>

#include "products/linear.h"

namespace penstock {

namespace {

constexpr std::int64_t ROWS_PER_PASS = 512;          // bounds the memory between the two products
constexpr std::int64_t SERIAL_ELEMENTS = 32 << 10;   // adding fewer elements takes no longer than waking a helper

struct Experts {
    const PenstockWeight* gate_up;  // [count]
    const PenstockWeight* down;     // [count]
    std::int64_t count;
    std::int64_t top_k;
    std::int32_t x_type;
    std::int32_t activation;
    bool weigh_inputs;
};

// (row, expert) pairs, sorted by expert: each pair has a place in this order.
struct Routing {
    std::int64_t rows, pairs;
    std::int64_t* starts;  // [experts + 1] first place of each expert
    std::int64_t* next;    // [experts]
    std::int64_t* pair;    // [pairs] the pair at each place
    std::int64_t* row;     // [pairs] the row at each place
    std::int64_t* places;  // [rows, top_k] places of each row, by ascending expert id
    std::int64_t* filled;  // [rows]
};

struct Buffers {
    Routing routing;
    Product* products;  // [experts that have rows]
    void* inputs;       // [pairs, k] of x_type: rows of x times their weights, with weigh_inputs; else empty
    void* inner;        // [pairs, n / 2] of x_type
    float* results;     // [pairs, n]
};

Buffers allocate_buffers(const Experts& experts, std::int64_t rows, BumpAllocator& memory) {
    const std::int64_t pairs = rows * experts.top_k;
    const std::int64_t inner = result_columns(experts.gate_up[0]), outer = result_columns(experts.down[0]);
    const auto numbers = [&](std::int64_t count) { return memory.allocate<std::int64_t>(count); };
    const Routing routing{rows,           pairs,          numbers(experts.count + 1), numbers(experts.count),
                          numbers(pairs), numbers(pairs), numbers(pairs),             numbers(rows)};
    const std::int64_t weighed = experts.weigh_inputs ? pairs * experts.gate_up[0].k : 0;
    return {routing, memory.allocate<Product>(std::min(experts.count, pairs)),
            memory.allocate<char>(weighed * type_bytes(experts.x_type)),
            memory.allocate<char>(pairs * inner * type_bytes(experts.x_type)), memory.allocate<float>(pairs * outer)};
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

// Run one product per expert that has rows: make_product(expert, first place, rows).
template <class MakeProduct>
void multiply_experts(
    Context& context, const Experts& experts, const Buffers& buffers, const MakeProduct& make_product) {
    const std::int64_t* starts = buffers.routing.starts;
    std::int64_t count = 0;
    for (std::int64_t e = 0; e < experts.count; ++e)
        if (starts[e] < starts[e + 1])
            buffers.products[count++] = make_product(e, starts[e], starts[e + 1] - starts[e]);
    multiply_all(context, buffers.products, count);
}

// Write each pair's row of x, times its weight, to its place.
void weigh_rows(Context& context, const Experts& experts, const void* x, const float* weights, const Buffers& buffers) {
    const std::int64_t k = experts.gate_up[0].k;
    const auto task = [&](std::int64_t place, int) {
        context.rows.weigh[experts.x_type](
            row_of(x, experts.x_type, k, buffers.routing.row[place]), weights[buffers.routing.pair[place]],
            row_of(buffers.inputs, experts.x_type, k, place), k);
    };
    context.pool.parallel_for(buffers.routing.pairs, task, buffers.routing.pairs * k < SERIAL_ELEMENTS);
}

// Compute activation(gate) * up of every pair.
void multiply_gate_up(Context& context, const Experts& experts, const void* x, const Buffers& buffers) {
    multiply_experts(context, experts, buffers, [&](std::int64_t expert, std::int64_t first, std::int64_t rows) {
        const PenstockWeight& weight = experts.gate_up[expert];
        const std::int64_t columns = result_columns(weight);
        const bool weighed = experts.weigh_inputs;
        return Product{&weight, weighed ? row_of(buffers.inputs, experts.x_type, weight.k, first) : x, experts.x_type,
                       weighed ? nullptr : buffers.routing.row + first, rows,
                       row_of(buffers.inner, experts.x_type, columns, first), columns, experts.x_type,
                       experts.activation};
    });
}

void multiply_down(Context& context, const Experts& experts, const Buffers& buffers) {
    multiply_experts(context, experts, buffers, [&](std::int64_t expert, std::int64_t first, std::int64_t rows) {
        const PenstockWeight& weight = experts.down[expert];
        return Product{&weight, row_of(buffers.inner, experts.x_type, weight.k, first), experts.x_type, nullptr, rows,
                       buffers.results + first * weight.n, weight.n, TYPE_F32, ACT_NONE};
    });
}

// Compute each row of out: the sum of weight * result by ascending expert id, starting from zero. The weight is 1 if
// the inputs are weighed.
void sum_rows(Context& context, const Experts& experts, const Buffers& buffers, const float* weights, float* out) {
    const std::int64_t columns = experts.down[0].n;
    const Routing& routing = buffers.routing;
    const auto task = [&](std::int64_t row, int) {
        float* to = out + row * columns;
        std::fill_n(to, columns, 0.0f);
        for (std::int64_t j = 0; j < experts.top_k; ++j) {
            const std::int64_t place = routing.places[row * experts.top_k + j];
            const float weight = experts.weigh_inputs ? 1.0f : weights[routing.pair[place]];
            const float* result = buffers.results + place * columns;
            for (std::int64_t c = 0; c < columns; ++c) to[c] += weight * result[c];
        }
    };
    context.pool.parallel_for(routing.rows, task, routing.pairs * columns < SERIAL_ELEMENTS);
}

void run_rows(Context& context, const Experts& experts, const void* x, std::int64_t rows, const std::int64_t* ids,
              const float* weights, float* out) {
    BumpAllocator counter(nullptr);
    allocate_buffers(experts, rows, counter);
    BumpAllocator memory(context.workspace.reserve(counter.bytes()));
    const Buffers buffers = allocate_buffers(experts, rows, memory);
    sort_by_expert(experts, ids, buffers.routing);
    if (experts.weigh_inputs) weigh_rows(context, experts, x, weights, buffers);
    multiply_gate_up(context, experts, x, buffers);
    multiply_down(context, experts, buffers);
    sum_rows(context, experts, buffers, weights, out);
}

// Update the context's counts. Return false if an id is not in 0 .. count-1.
bool count_experts(Context& context, std::int64_t count, const std::int64_t* ids, std::int64_t pairs) {
    char* chosen = static_cast<char*>(context.workspace.reserve(count));
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

extern "C" std::int32_t penstock_experts(
    Context* context, const PenstockWeight* gate_up, const PenstockWeight* down, std::int64_t count, const void* x,
    std::int32_t x_type, std::int64_t rows, std::int64_t top_k, const std::int64_t* ids, const float* weights,
    std::int32_t activation, std::int32_t weigh_inputs, float* out) {
    return run_call(context, [&] {
        if (!count_experts(*context, count, ids, rows * top_k)) return STATUS_OUT_OF_RANGE;
        const Experts experts{gate_up, down, count, top_k, x_type, activation, weigh_inputs != 0};
        for (std::int64_t row = 0; row < rows; row += ROWS_PER_PASS)
            run_rows(*context, experts, row_of(x, x_type, gate_up[0].k, row), std::min(ROWS_PER_PASS, rows - row),
                     ids + row * top_k, weights + row * top_k, out + row * down[0].n);
        return STATUS_OK;
    });
}

extern "C" void penstock_expert_counts(Context* context, std::int64_t* counts) {
    const std::lock_guard<std::mutex> lock(context->in_use);
    counts[0] = context->experts_read;
    counts[1] = context->expert_rows;
}
