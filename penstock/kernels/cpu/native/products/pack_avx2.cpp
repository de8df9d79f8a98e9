#include "products/pack_kernels.inc.h"
