#include "abi.h"
PENSTOCK_EXPORT std::int32_t penstock_log_softmax() { return -1; }
PENSTOCK_EXPORT std::int32_t penstock_finite_rows() { return -1; }
PENSTOCK_EXPORT std::int32_t penstock_sample() { return -1; }
