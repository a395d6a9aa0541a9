// Weight gradients of convolutions whose depth oneDNN gets wrong.
#pragma once
#include "engine.h"

namespace gluon_amp {

// The first spatial axis of a three-dimensional convolution, from `in` to `out` planes.
struct Depth {
  int64_t in, out, kernel, stride, dilate, pad;

  // Whether oneDNN's weight gradient is wrong.
  bool is_wrong() const;
};

// MXNet's float32 code for the backward pass of a convolution or a deconvolution, with right weight gradients, and
// none that was not requested.
mxnet::FComputeEx with_right_depth(mxnet::FComputeEx original, bool deconvolution);

}  // namespace gluon_amp
