// Two of MXNet's GPU functions (gpu.cc), and operators for GPUs (gpu_norms.cc).
#pragma once
#include "engine.h"

namespace gluon_amp {

void replace_gpu_functions();
void register_gpu_norms();

// The state of a Dropout of MXNet with p = 0.25, which always drops, along the axes 1 and 2.
OpStatePtr dropout_state();

// Whether the bytes of that state are those of MXNet 1.9.1.
int dropout_fits(const unsigned char* state);

}  // namespace gluon_amp
