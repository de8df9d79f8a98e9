#include "products.h"

namespace penstock {
namespace {

#include "quantize_rows.inc.h"

constexpr int TILE_ROWS = 12;

int max_panels(int) { return 1; }

// Sums of operands, one a leaf. No sum or product of a leaf overflows: packing allows a leaf at most 65536 elements.
void pack(const OperandArgs& args) { quantize_interleaved(args, 0); }

void multiply(const MultiplyArgs&) {}

}  // namespace

ProductKernel portable_int8() { return {TILE_ROWS, max_panels, pack, multiply}; }

}  // namespace penstock
