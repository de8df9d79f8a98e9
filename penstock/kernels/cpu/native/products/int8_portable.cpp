#include "products/int8_words.inc.h"
