// Some of MXNet's GPU functions (gpu.cc), operators for GPUs (gpu_norms.cc), and calls of operators (gpu_calls.cc).
#pragma once
#include "engine.h"

namespace gluon_amp {

// The first members of mshadow::Stream<gpu>.
struct GpuStream {
  void *stream, *cublas, *cusolver, *cudnn;
};

void replace_gpu_functions();
void keep_masks();  // a repair: a second backward pass through Dropout drops the same values
void register_gpu_norms();

// The state of a Dropout of MXNet with p = 0.25, which always drops, along the axes 1 and 2.
OpStatePtr dropout_state();

// Whether the bytes of that state are those of MXNet 1.9.1.
int dropout_fits(const unsigned char* state);

// For Python: calls of operators with the same arrays at each step. `run_calls` returns before they run. It returns -1,
// and `new_attributes` null, with MXNet's last error.
void* new_calls();
void add_call(void* calls, void* op, void** in, int64_t inputs, void** out, int64_t outputs);
int run_calls(void* calls, void** attributes);  // of each call
void free_calls(void* calls);
void* new_attributes(void* op, int64_t count, const char** names, const char** values);
void free_attributes(void* attributes);

}  // namespace gluon_amp
