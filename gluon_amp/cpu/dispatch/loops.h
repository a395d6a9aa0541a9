// MXNet's while_loop and cond without uninitialized results (loops.cc).
#pragma once
#include "engine.h"

namespace gluon_amp {

void initialize_loops();  // replaces their functions

}  // namespace gluon_amp
