#include "products/float_vectors.inc.h"
