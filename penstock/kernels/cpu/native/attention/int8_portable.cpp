#include "attention/int8_words.inc.h"
