// In-place options by type (plan.cc).
#pragma once
#include "engine.h"

namespace gluon_amp {

void plan_by_type();  // replaces the function of MXNet's pass MXPlanMemory

// Whether MXNet, on this thread, plans memory of a graph in which the engine runs this node.
bool is_planned(const NodeAttrs& attrs);

}  // namespace gluon_amp
