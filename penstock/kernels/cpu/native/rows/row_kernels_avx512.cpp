#include "rows/row_kernels.inc.h"
