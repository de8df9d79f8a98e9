#include "abi.h"
PENSTOCK_EXPORT double penstock_limit_read() { return -1; }
PENSTOCK_EXPORT double penstock_limit_multiply() { return -1; }
