// In-place options by type (plan.cc).
#pragma once
#include "engine.h"

namespace gluon_amp {

void plan_by_type();  // replaces the body of MXNet's pass MXPlanMemory

// Whether MXNet's memory planning, on this thread, has reached a graph in which the engine runs this node.
bool is_planned(const NodeAttrs& attrs);

}  // namespace gluon_amp
