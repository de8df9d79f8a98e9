#include "abi.h"
PENSTOCK_EXPORT std::int32_t penstock_pack_rows() { return -1; }
