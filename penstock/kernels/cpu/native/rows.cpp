#include "abi.h"
PENSTOCK_EXPORT std::int32_t penstock_rms_norm() { return -1; }
PENSTOCK_EXPORT std::int32_t penstock_add_rms_norm() { return -1; }
PENSTOCK_EXPORT std::int32_t penstock_rotary_qkv() { return -1; }
PENSTOCK_EXPORT std::int32_t penstock_embedding() { return -1; }
PENSTOCK_EXPORT std::int32_t penstock_route() { return -1; }
