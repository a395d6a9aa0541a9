// Operators that run the user's Python (user_code.cc).
#pragma once
#include "engine.h"

namespace gluon_amp {

void guard_user_code();  // replaces their functions

void end_user_code();  // at exit: waits until none runs, and lets none start

}  // namespace gluon_amp
