#include "attention/fold.inc.h"
