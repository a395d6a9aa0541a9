// Two of MXNet's GPU functions (gpu.cc).
#pragma once
#include "engine.h"

namespace gluon_amp {

void replace_gpu_functions();

}  // namespace gluon_amp
