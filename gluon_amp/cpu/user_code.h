// Operators that run the user's Python (user_code.cc).
#pragma once
#include "engine.h"

namespace gluon_amp {

void guard_user_code();  // replaces their functions

void end_user_code();  // at exit: none runs, and none begins

}  // namespace gluon_amp
