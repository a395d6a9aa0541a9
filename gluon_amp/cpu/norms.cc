// Norms that have code of their own: batch norm, layer norm, softmax.
#include "own.h"

namespace gluon_amp {
namespace {

bool batch_norm_of(const Call& call, const TBlob& x, bool relu, BatchNorm* made) {
  const bool halves_only = call.rounding.grid == kFloat16Grid;
  if ((halves_only ? !is_half(x) : !is_float(x)) || size(x) == 0) return false;
  if (!halves_only && !Rounding::one(call.rounding.inputs, 0, true)) return false;
  int axis = static_cast<int>(number(call.attrs, "axis", 1));
  if (axis < 0) axis += x.ndim();
  int64_t outer = 1, inner = 1;
  for (int i = 0; i < axis; ++i) outer *= x.shape_[i];
  for (int i = axis + 1; i < x.ndim(); ++i) inner *= x.shape_[i];
  *made = {outer, x.shape_[axis], inner, number(call.attrs, "eps", 1e-3f),
           number(call.attrs, "momentum", 0.9f),
           call.context.is_train && !flag(call.attrs, "use_global_stats", false),
           flag(call.attrs, "fix_gamma", true), call.rounding.grid,
           relu ? kRelu : kNoActivation, 0, 0};
  return true;
}

// x, gamma, beta, moving mean, moving variance -> y, mean, 1 / deviation
template <bool relu>
bool batch_norm(const Call& call) {
  BatchNorm norm;
  if (!batch_norm_of(call, call.in[0], relu, &norm) || !is_float(call.in[1])) return false;
  auto kept = [&](size_t i) {
    return i < call.out.size() && call.write(i) != kNothing ? floats(call.out[i]) : nullptr;
  };
  kernels->batch_norm(norm, {call.in[0].dptr_, nullptr, floats(call.in[1]), floats(call.in[2]),
                             floats(call.in[3]), floats(call.in[4]), call.out[0].dptr_,
                             call.write(0), kept(1), kept(2)});
  return true;
}

// gradient, mean, 1 / deviation, x, gamma, beta, moving mean, moving variance
template <bool relu>
bool batch_norm_gradient(const Call& call) {
  BatchNorm norm;
  if (!batch_norm_of(call, call.in[3], relu, &norm) || !is_float(call.in[4])) return false;
  kernels->batch_norm_gradient(norm, {call.in[0].dptr_, call.in[3].dptr_, nullptr,
      floats(call.in[4]), floats(call.in[5]), floats(call.in[1]), floats(call.in[2]),
      call.out[0].dptr_, call.write(0), nullptr, kNothing, floats(call.out[1]), call.write(1),
      floats(call.out[2]), call.write(2)});
  return true;
}

// Of halves with float32 parameters, over the last axis.
bool layer_norm_of(const Call& call, const TBlob& x, LayerNorm* made) {
  const int axis = static_cast<int>(number(call.attrs, "axis", -1));
  if (!is_half(x) || x.ndim() == 0 || (axis != -1 && axis != x.ndim() - 1)) return false;
  const int64_t width = x.shape_[x.ndim() - 1];
  if (width == 0) return false;
  *made = {size(x) / width, width, number(call.attrs, "eps", 1e-5f)};
  return true;
}

// x, gamma, beta -> y, mean, deviation
bool layer_norm(const Call& call) {
  LayerNorm norm;
  if (!layer_norm_of(call, call.in[0], &norm) || !is_float(call.in[1]) || !is_float(call.in[2]) ||
      call.write(1) == kAdd || call.write(2) == kAdd)
    return false;
  auto kept = [&](size_t i) { return call.write(i) == kStore ? floats(call.out[i]) : nullptr; };
  kernels->layer_norm(norm, halves(call.in[0]), floats(call.in[1]), floats(call.in[2]),
                      halves(call.out[0]), call.write(0), kept(1), kept(2));
  return true;
}

// gradient, x, gamma, mean, deviation
bool layer_norm_gradient(const Call& call) {
  LayerNorm norm;
  if (!layer_norm_of(call, call.in[1], &norm) || !is_half(call.in[0]) || !is_float(call.in[2]) ||
      !is_float(call.in[3]) || !is_half(call.out[0]) || !is_float(call.out[1]))
    return false;
  kernels->layer_norm_gradient(norm, halves(call.in[0]), halves(call.in[1]), floats(call.in[2]),
                               floats(call.in[3]), floats(call.in[4]), halves(call.out[0]),
                               call.write(0), floats(call.out[1]), call.write(1),
                               floats(call.out[2]), call.write(2));
  return true;
}

// ---- softmax over the last axis ------------------------------------------------------------

bool last_axis(const Call& call, const TBlob& x) {
  const int axis = static_cast<int>(number(call.attrs, "axis", -1));
  return (axis == -1 || axis == x.ndim() - 1) && !flag(call.attrs, "use_length", false) &&
         x.ndim() > 0 && x.shape_[x.ndim() - 1] > 0;
}

float temperature(const Call& call) {
  const std::string set = word(call.attrs, "temperature", "None");
  return set == "None" ? 1 : number(call.attrs, "temperature", 1);
}

bool softmax(const Call& call) {
  if (!all_half(call) || call.in.size() != 1 || !last_axis(call, call.in[0])) return false;
  const int64_t width = call.in[0].shape_[call.in[0].ndim() - 1];
  kernels->softmax(halves(call.in[0]), halves(call.out[0]), size(call.in[0]) / width, width,
                   temperature(call), call.write(0));
  return true;
}

bool softmax_gradient(const Call& call) {  // gradient, y
  if (!all_half(call) || call.in.size() != 2 || !last_axis(call, call.in[0])) return false;
  const int64_t width = call.in[0].shape_[call.in[0].ndim() - 1];
  kernels->softmax_gradient(halves(call.in[0]), halves(call.in[1]), halves(call.out[0]),
                            size(call.in[0]) / width, width, temperature(call), call.write(0));
  return true;
}

}  // namespace

void add_norms(Rows& rows) {
  rows.insert({
      {"BatchNorm", {batch_norm<false>, 1}},
      {"_backward_BatchNorm", {batch_norm_gradient<false>, 1}},
      {"_contrib_BatchNormWithReLU", {batch_norm<true>, 1}},
      {"_backward_contrib_BatchNormWithReLU", {batch_norm_gradient<true>, 1}},
      {"LayerNorm", {layer_norm, 1}}, {"_backward_LayerNorm", {layer_norm_gradient, 1}},
      {"softmax", {softmax, 1}}, {"_backward_softmax", {softmax_gradient, 2}}});
}

}  // namespace gluon_amp
