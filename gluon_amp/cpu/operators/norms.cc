// Norms that have code of their own: batch norm, layer norm.
#include "dispatch/watch.h"
#include "onednn/onednn.h"
#include "operators/table.h"

namespace gluon_amp {
namespace {

bool batch_norm_of(const Call& call, const TBlob& x, bool relu, BatchNorm* norm) {
  if (!is_16bit(x) && !(is_float(x) && kernels_take_floats())) return false;
  if (size(x) == 0) return false;
  const int axis = axis_of(call.attrs, "axis", 1, x.ndim());
  const int64_t outer = x.shape_.ProdShape(0, axis), inner = x.shape_.ProdShape(axis + 1, x.ndim());
  *norm = {outer, x.shape_[axis], inner, number(call.attrs, "eps", 1e-3f),
           number(call.attrs, "momentum", 0.9f),
           call.context.is_train && !flag(call.attrs, "use_global_stats", false),
           flag(call.attrs, "fix_gamma", true), relu, call.in_layout.any()};
  return !norm->in_layout || (keeps_layout() && axis == 1 && inner >= 16);
}

// x, gamma, beta, moving mean, moving variance -> y, mean, 1 / deviation
template <bool relu>
bool batch_norm(const Call& call) {
  BatchNorm norm;
  if (!batch_norm_of(call, call.in[0], relu, &norm) || !is_float(call.in[1])) return false;
  if (norm.in_layout && !(call.in_layout.input(0) && call.in_layout.output(0))) return false;
  auto kept = [&](size_t i) {
    return i < call.out.size() && call.write(i) != kNothing ? floats(call.out[i]) : nullptr;
  };
  kernels_of(call.in[0])->batch_norm(norm, {call.in[0].dptr_, floats(call.in[1]), floats(call.in[2]),
                             floats(call.in[3]), floats(call.in[4]), call.out[0].dptr_, call.write(0), kept(1),
                             kept(2)});
  return true;
}

// gradient, mean, 1 / deviation, x, gamma, beta, moving mean, moving variance
template <bool relu>
bool batch_norm_gradient(const Call& call) {
  BatchNorm norm;
  if (!batch_norm_of(call, call.in[3], relu, &norm) || !is_float(call.in[4])) return false;
  if (norm.in_layout && !(call.in_layout.input(0) && call.in_layout.input(3) && call.in_layout.output(0))) return false;
  kernels_of(call.in[3])->batch_norm_gradient(norm, {
      call.in[0].dptr_, call.in[3].dptr_,
      floats(call.in[4]), floats(call.in[5]), floats(call.in[1]), floats(call.in[2]),
      call.out[0].dptr_, call.write(0), floats(call.out[1]), call.write(1),
      floats(call.out[2]), call.write(2)});
  return true;
}

// Over the last axis, of 16-bit numbers, or of floats if the node has that setting.
bool layer_norm_of(const Call& call, const TBlob& x, LayerNorm* norm) {
  if (!is_16bit(x) && !(is_float(x) && (kernels_take_floats() || call.settings.in_engine))) return false;
  if (x.ndim() == 0 || axis_of(call.attrs, "axis", -1, x.ndim()) != x.ndim() - 1) return false;
  const int64_t width = x.shape_[x.ndim() - 1];
  if (width == 0) return false;
  *norm = {size(x) / width, width, number(call.attrs, "eps", 1e-5f)};
  return true;
}

// A parameter or statistic as floats.
const float* as_floats(const TBlob& x, Scratch* scratch) {
  if (is_float(x)) return floats(x);
  float* const wide = scratch->memory(size(x));
  widen(x, wide);
  return wide;
}

// Output i as floats, which `round` rounds to 16-bit numbers if the output is 16-bit.
struct FloatOutput {
  const TBlob& to;
  Write asked, write;
  Scratch scratch;
  float* memory = nullptr;

  FloatOutput(const Call& call, size_t i) : to(call.out[i]), asked(call.write(i)), write(asked) {
    if (asked == kNothing) return;
    memory = is_16bit(to) ? scratch.memory(size(to)) : floats(to);
    if (is_16bit(to)) write = kStore;
  }
  void round() {
    if (is_16bit(to) && asked != kNothing) kernels_of(to)->narrow(memory, to.dptr_, size(to), asked);
  }
};

// x, gamma, beta -> y, mean, deviation
bool layer_norm(const Call& call) {
  LayerNorm norm;
  if (!layer_norm_of(call, call.in[0], &norm) || call.write(1) == kAdd || call.write(2) == kAdd)
    return false;
  Scratch scratch;
  const float *gamma = as_floats(call.in[1], &scratch), *beta = as_floats(call.in[2], &scratch);
  FloatOutput mean(call, 1), deviation(call, 2);
  kernels_of(call.in[0])->layer_norm(norm, call.in[0].dptr_, gamma, beta, call.out[0].dptr_, call.write(0),
                                     mean.memory, deviation.memory);
  mean.round();
  deviation.round();
  return true;
}

// gradient, x, gamma, mean, deviation
bool layer_norm_gradient(const Call& call) {
  LayerNorm norm;
  const TBlob &g = call.in[0], &x = call.in[1], &dx = call.out[0];
  if (!layer_norm_of(call, x, &norm)) return false;
  Scratch scratch;
  const float *gamma = as_floats(call.in[2], &scratch), *mean = as_floats(call.in[3], &scratch),
              *deviation = as_floats(call.in[4], &scratch);
  FloatOutput dgamma(call, 1), dbeta(call, 2);
  kernels_of(x)->layer_norm_gradient(norm, g.dptr_, x.dptr_, gamma, mean, deviation, dx.dptr_, call.write(0),
                                     dgamma.memory, dgamma.write, dbeta.memory, dbeta.write);
  dgamma.round();
  dbeta.round();
  return true;
}

}  // namespace

const AddRows rows{{
    {"BatchNorm", {batch_norm<false>, 1, kAlike | kFloats}},
    {"_backward_BatchNorm", {batch_norm_gradient<false>, 1, kAlike | kFloats}},
    {"_contrib_BatchNormWithReLU", {batch_norm<true>, 1, kAlike}},  // its relu is of 16-bit numbers
    {"_backward_contrib_BatchNormWithReLU", {batch_norm_gradient<true>, 1, kAlike}},
    {"LayerNorm", {layer_norm, 1, kFloats}},
    {"_backward_LayerNorm", {layer_norm_gradient, 1, kFloats}}}};

}  // namespace gluon_amp
