// Dropout.
//
// MXNet's code draws the mask. Its state records whether values were dropped, and its first backward pass
// resets that. This code derives it from the mask, which is 1 for values that were kept without scaling.

#include <algorithm>

#include "dispatch/watch.h"
#include "operators/table.h"

namespace gluon_amp {
namespace {

float scale_of(const NodeAttrs& attrs) { return 1.0f / (1.0f - number(attrs, "p", 0.5f)); }

Number16 one_of(const TBlob& array) { return array.type_flag_ == mshadow::kFloat16 ? 0x3c00 : 0x3f80; }

bool dropout(const Call& call) {
  const float p = number(call.attrs, "p", 0.5f);
  const bool drops = p > 0 && (call.context.is_train || word(call.attrs, "mode", "") == "always");
  if (!drops && is_16bit(call.in[0]) &&
      call.in[0].type_flag_ == call.out[0].type_flag_) {
    put(call.in[0].dptr_, call.out[0], call.write(0));
  } else {
    run(call, false, {}, call.state, nullptr);
  }
  if (!drops && call.out.size() > 1 && call.write(1) != kNothing) {
    const TBlob& mask = call.out[1];
    if (is_16bit(mask)) std::fill_n(numbers16(mask), size(mask), one_of(mask));
    else if (is_float(mask)) std::fill_n(floats(mask), size(mask), 1.0f);
  }
  return true;
}

// A mask of another shape is broadcast by MXNet's multiplication.
bool dropout_gradient(const Call& call) {  // gradient, mask
  const TBlob &g = call.in[0], &mask = call.in[1], &d = call.out[0];
  const float scale = scale_of(call.attrs);
  if (call.write(0) == kNothing) return true;
  if (has_kernels(call) && g.shape_ == mask.shape_) {
    kernels_of(g)->dropout_gradient(g.dptr_, mask.dptr_, d.dptr_, size(d), scale, call.write(0));
    return true;
  }
  if (is_float(g) && is_float(mask) && is_float(d) && g.shape_ == mask.shape_) {  // with the bits of MXNet's code
    kernels->binary(kProduct, g.dptr_, mask.dptr_, d.dptr_, size(d), call.write(0));
    return true;
  }
  // any shape and type, one value at a time
  std::vector<int64_t> stride(g.ndim());
  int64_t step = 1;
  for (int i = g.ndim(); i-- > 0;) {
    stride[i] = mask.shape_[i] == 1 ? 0 : step;
    step *= mask.shape_[i];
  }
  Scratch scratch;
  const int64_t n = size(d);
  float* out = scratch.memory(n);
  float* m = scratch.memory(size(mask));
  widen(g, out);
  widen(mask, m);
  for (int64_t i = 0; i < n; ++i) {
    int64_t rest = i, at = 0;
    for (int k = g.ndim(); k-- > 0;) {
      at += rest % g.shape_[k] * stride[k];
      rest /= g.shape_[k];
    }
    out[i] *= m[at] == 0 || m[at] == 1 ? m[at] : scale;
  }
  narrow(out, d, call.write(0));
  return true;
}

}  // namespace

const AddRows rows{{
    {"Dropout", {dropout, 1}}, {"_backward_Dropout", {dropout_gradient, 1, kFloats}}}};

}  // namespace gluon_amp
