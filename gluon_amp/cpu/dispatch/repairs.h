// Repairs of MXNet's own defects. They act on float32 arrays, too, and on networks that are not converted.
// GLUON_AMP_REPAIRS=off leaves them out.
#pragma once
#include "engine.h"

namespace gluon_amp {

// Repairs MXNet's functions, before dispatch_operators replaces them.
void repair();
// A line for each repair: the defect, the operators, and a test, separated by tabs.
std::string repair_rows();

// Repairs in files of their own.
void initialize_loops();
void guard_user_code();
void end_user_code();  // at exit: waits until no operator runs the user's Python, and lets none start

// Whether calls of empty arrays without 16-bit numbers are repaired (is_empty_call in arrays.h).
extern bool repairs_empty_calls;

}  // namespace gluon_amp
