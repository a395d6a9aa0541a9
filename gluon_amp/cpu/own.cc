// Operators that have code of their own, since they compute little for each byte that they read.
//
// Each reads its attributes here and calls a kernel. Where a function returns false, the generic
// operator runs: it is right for every case, and the tests hold each row against it.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "engine.h"

namespace gluon_amp {
namespace {

bool all_half(const Call& call) {
  return std::all_of(call.in.begin(), call.in.end(), is_half) &&
         std::all_of(call.out.begin(), call.out.end(), is_half);
}

// ---- one value at a time ---------------------------------------------------------------

bool unary(const Call& call, Unary f, float a = 0, float b = 0) {
  if (!all_half(call)) return false;
  kernels->unary(f, halves(call.in[0]), halves(call.out[0]), size(call.out[0]), a, b,
                 call.write(0));
  return true;
}

// in[0] is the gradient; `read`: the input that holds x or y, whichever the kernel reads
bool unary_gradient(const Call& call, Unary f, size_t read, float a = 0, float b = 0) {
  if (!all_half(call)) return false;
  kernels->unary_gradient(f, halves(call.in[0]), read ? halves(call.in[read]) : nullptr,
                          halves(call.out[0]), size(call.out[0]), a, b, call.write(0));
  return true;
}

bool relu(const Call& call) { return unary(call, kReluOf); }
bool relu_gradient(const Call& call) { return unary_gradient(call, kReluOf, 1); }
bool sigmoid(const Call& call) { return unary(call, kSigmoidOf); }
bool sigmoid_gradient(const Call& call) { return unary_gradient(call, kSigmoidOf, 1); }
bool tanh(const Call& call) { return unary(call, kTanhOf); }
bool tanh_gradient(const Call& call) { return unary_gradient(call, kTanhOf, 1); }

bool activation(const Call& call) {
  const std::string type = word(call.attrs, "act_type", "");
  return type == "relu"      ? relu(call)
         : type == "sigmoid" ? sigmoid(call)
         : type == "tanh"    ? tanh(call)
                             : false;
}

bool activation_gradient(const Call& call) {  // of y; of y and x for all but relu
  const std::string type = word(call.attrs, "act_type", "");
  return type == "relu"      ? relu_gradient(call)
         : type == "sigmoid" ? sigmoid_gradient(call)
         : type == "tanh"    ? tanh_gradient(call)
                             : false;
}

bool leaky(const Call& call) {
  const std::string type = word(call.attrs, "act_type", "leaky");
  const float slope = number(call.attrs, "slope", 0.25f);
  if (type == "gelu") return unary(call, kGeluOf);
  return type == "leaky" && slope > 0 && unary(call, kLeakyOf, slope);
}

bool leaky_gradient(const Call& call) {  // gradient, x, y
  const std::string type = word(call.attrs, "act_type", "leaky");
  const float slope = number(call.attrs, "slope", 0.25f);
  if (call.in.size() != 3) return false;
  if (type == "gelu") return unary_gradient(call, kGeluOf, 1);
  return type == "leaky" && slope > 0 && unary_gradient(call, kLeakyOf, 2, slope);
}

bool clip(const Call& call) {
  return unary(call, kClipOf, number(call.attrs, "a_min", 0), number(call.attrs, "a_max", 0));
}

bool clip_gradient(const Call& call) {
  return unary_gradient(call, kClipOf, 1, number(call.attrs, "a_min", 0),
                        number(call.attrs, "a_max", 0));
}

template <Unary f, int sign>
bool with_scalar(const Call& call) {
  return unary(call, f, sign * number(call.attrs, "scalar", 1));
}

template <Binary f>
bool binary(const Call& call) {
  if (!all_half(call)) return false;
  kernels->binary(f, halves(call.in[0]), halves(call.in[1]), halves(call.out[0]),
                  size(call.out[0]), call.write(0));
  return true;
}

// ---- copies ----------------------------------------------------------------------------

// The input to each of the outputs: the gradient of an addition.
bool copies(const Call& call) {
  if (!all_half(call)) return false;
  const Half* from = halves(call.in[0]);
  // an output in the input's place is written last
  for (bool in_place : {false, true})
    for (size_t i = 0; i < call.out.size(); ++i) {
      Half* to = halves(call.out[i]);
      if ((to == from) != in_place) continue;
      if (call.write(i) == kStore && !in_place)
        kernels->copy(from, to, size(call.out[i]) * sizeof(Half));
      if (call.write(i) == kAdd) kernels->sum(&from, 1, to, size(call.out[i]), kAdd);
    }
  return true;
}

bool cast(const Call& call) {
  const TBlob &from = call.in[0], &to = call.out[0];
  if (call.rounding.grid != kFloat16Grid) return false;
  if (is_half(from) && is_float(to) && call.write(0) == kStore)
    kernels->widen(halves(from), floats(to), size(to));
  else if (is_float(from) && is_half(to))
    kernels->narrow(floats(from), halves(to), size(to), call.write(0));
  else
    return call.write(0) == kNothing;
  return true;
}

// MXNet's own code only moves values; it does so with halves, too.
bool as_it_is(const Call& call) {
  std::vector<OpReqType> req = call.req;
  for (size_t i = 0; i < call.out.size(); ++i) {
    if (req[i] == mxnet::kWriteInplace) req[i] = mxnet::kWriteTo;
    if (!is_half(call.out[i])) return false;
    for (auto& from : call.in)
      if (from.dptr_ == call.out[i].dptr_) return false;
  }
  call.of.compute(call.attrs, call.context, call.in, req, call.out);
  return true;
}

// Rows from one place to another; steps: from one row to the next.
template <class T>
void copy_rows(const T* from, int64_t from_step, T* to, int64_t to_step, int64_t rows,
               int64_t width, Write write) {
  if (write == kNothing || from == to) return;
#pragma omp parallel for schedule(static) if (rows * width >= 32768)
  for (int64_t i = 0; i < rows; ++i) {
    const T* x = from + i * from_step;
    T* y = to + i * to_step;
    if (write == kStore) std::memcpy(y, x, width * sizeof(T));
    else if constexpr (sizeof(T) == sizeof(Half)) kernels->sum(&x, 1, y, width, kAdd);
    else for (int64_t k = 0; k < width; ++k) y[k] += x[k];
  }
}

// How many rows a concatenation consists of: the product of the sizes before its axis.
int64_t rows_of(const Call& call, const char* key, const mxnet::TShape& whole) {
  int axis = static_cast<int>(number(call.attrs, key, 1));
  if (axis < 0) axis += whole.ndim();
  int64_t rows = 1;
  for (int i = 0; i < axis; ++i) rows *= whole[i];
  return rows;
}

// All inputs side by side in the one output: a concatenation, or the gradient of a split.
template <class T>
void join(const Call& call, int64_t rows) {
  const int64_t step = size(call.out[0]) / rows;
  T* to = static_cast<T*>(call.out[0].dptr_);
  for (auto& part : call.in) {
    const int64_t width = size(part) / rows;
    copy_rows(static_cast<const T*>(part.dptr_), width, to, step, rows, width, call.write(0));
    to += width;
  }
}

// The first input in pieces, one for each output: a split, or the gradient of a concatenation.
template <class T>
void part(const Call& call, int64_t rows) {
  const int64_t step = size(call.in[0]) / rows;
  const T* from = static_cast<const T*>(call.in[0].dptr_);
  for (size_t i = 0; i < call.out.size(); ++i) {
    const int64_t width = size(call.out[i]) / rows;
    copy_rows(from, step, static_cast<T*>(call.out[i].dptr_), width, rows, width, call.write(i));
    from += width;
  }
}

// Arrays are of halves or, on another grid, of floats, all of them.
bool in_rows(const Call& call, const TBlob& whole, const char* axis, void (*halves_code)(const Call&, int64_t),
             void (*floats_code)(const Call&, int64_t)) {
  if (size(whole) == 0) return true;
  (is_half(whole) ? halves_code : floats_code)(call, rows_of(call, axis, whole.shape_));
  for (size_t i = 0; i < call.out.size(); ++i)
    if (call.rounding.rounds_output(i, call.out[i]) && call.write(i) != kNothing)
      kernels->round(call.rounding.grid, floats(call.out[i]), floats(call.out[i]),
                     size(call.out[i]), kStore);
  return true;
}

bool joins(const Call& call, const char* axis) {
  return in_rows(call, call.out[0], axis, join<Half>, join<float>);
}
bool parts(const Call& call, const char* axis) {
  return in_rows(call, call.in[0], axis, part<Half>, part<float>);
}

bool concat(const Call& call) { return all_half(call) && joins(call, "dim"); }
bool concat_gradient(const Call& call) {  // the gradient, and the inputs, which are not read
  return is_half(call.in[0]) && parts(call, "dim");
}
bool split(const Call& call) { return parts(call, "axis"); }
bool split_gradient(const Call& call) { return joins(call, "axis"); }

// ---- norms -----------------------------------------------------------------------------

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

// ---- dropout ---------------------------------------------------------------------------
//
// MXNet's code draws the mask. Its state only tells its backward pass whether anything was
// dropped, and forgets that after the first one; here the mask tells: 1 where nothing was.

float scale_of(const NodeAttrs& attrs) { return 1.0f / (1.0f - number(attrs, "p", 0.5f)); }

bool dropout(const Call& call) {
  const float p = number(call.attrs, "p", 0.5f);
  const bool drops = p > 0 && (call.context.is_train || word(call.attrs, "mode", "") == "always");
  mxnet::ShapeVector shapes{call.in[0].shape_};
  const std::vector<int> types{mshadow::kFloat32};
  const OpStatePtr state =
      call_theirs<OpStatePtr, const NodeAttrs&, mxnet::Context, const mxnet::ShapeVector&,
                  const std::vector<int>&>(call.of.create_state, call.attrs,
                                           call.context.run_ctx.ctx, shapes, types);
  run(call, false, {}, &state, nullptr);
  if (!drops && call.out.size() > 1 && call.write(1) != kNothing) {
    const TBlob& mask = call.out[1];
    if (is_half(mask)) std::fill_n(halves(mask), size(mask), Half(0x3c00));
    else if (is_float(mask)) std::fill_n(floats(mask), size(mask), 1.0f);
  }
  return true;
}

// A mask of another shape is shared along its axes: MXNet's multiplication of arrays does it.
bool dropout_gradient(const Call& call) {  // gradient, mask
  const TBlob &g = call.in[0], &mask = call.in[1], &d = call.out[0];
  const float scale = scale_of(call.attrs);
  if (call.write(0) == kNothing) return true;
  if (all_half(call) && g.shape_ == mask.shape_) {
    kernels->dropout_gradient(halves(g), halves(mask), halves(d), size(d), scale, call.write(0));
    return true;
  }
  // any shape and type: one value after another
  std::vector<int64_t> stride(g.ndim());
  int64_t step = 1;
  for (int i = g.ndim(); i-- > 0;) {
    stride[i] = mask.shape_[i] == 1 ? 0 : step;
    step *= mask.shape_[i];
  }
  Lease lease;
  const int64_t n = size(d);
  float* out = lease.memory(n);
  float* m = lease.memory(size(mask));
  if (is_half(g)) kernels->widen(halves(g), out, n);
  else kernels->round(call.rounding.grid, floats(g), out, n, kStore);
  if (is_half(mask)) kernels->widen(halves(mask), m, size(mask));
  else kernels->copy(mask.dptr_, m, size(mask) * sizeof(float));
  for (int64_t i = 0; i < n; ++i) {
    int64_t rest = i, at = 0;
    for (int k = g.ndim(); k-- > 0;) {
      at += rest % g.shape_[k] * stride[k];
      rest /= g.shape_[k];
    }
    out[i] *= m[at] == 0 || m[at] == 1 ? m[at] : scale;
  }
  if (is_half(d)) kernels->narrow(out, halves(d), n, call.write(0));
  else kernels->round(call.rounding.grid, out, floats(d), n, call.write(0));
  return true;
}

// ---- the rows --------------------------------------------------------------------------

bool convolution(const Call& call) { return run_convolution(call, false); }
bool convolution_gradient(const Call& call) { return run_convolution(call, true); }

// `places`: output 0 may have the memory of so many of the first inputs.
const std::map<std::string, OwnCode>& rows() {
  static const std::map<std::string, OwnCode> made = {
      {"Convolution", {convolution, 1}}, {"_backward_Convolution", {convolution_gradient, 2}},
      {"BatchNorm", {batch_norm<false>, 1}},
      {"_backward_BatchNorm", {batch_norm_gradient<false>, 1}},
      {"_contrib_BatchNormWithReLU", {batch_norm<true>, 1}},
      {"_backward_contrib_BatchNormWithReLU", {batch_norm_gradient<true>, 1}},
      {"relu", {relu, 1}}, {"_backward_relu", {relu_gradient, 2}}, {"sigmoid", {sigmoid, 1}},
      {"_backward_sigmoid", {sigmoid_gradient, 2}}, {"tanh", {tanh, 1}},
      {"_backward_tanh", {tanh_gradient, 2}}, {"Activation", {activation, 1}},
      {"_backward_Activation", {activation_gradient, 2}}, {"LeakyReLU", {leaky, 1}},
      {"_backward_LeakyReLU", {leaky_gradient, 2}}, {"clip", {clip, 1}},
      {"_backward_clip", {clip_gradient, 2}}, {"_mul_scalar", {with_scalar<kTimes, 1>, 1}},
      {"_backward_mul_scalar", {with_scalar<kTimes, 1>, 1}},
      {"_div_scalar", {with_scalar<kOverOf, 1>, 1}},
      {"_backward_div_scalar", {with_scalar<kOverOf, 1>, 1}},
      {"_plus_scalar", {with_scalar<kPlus, 1>, 1}},
      {"_minus_scalar", {with_scalar<kPlus, -1>, 1}},
      {"_rminus_scalar", {with_scalar<kFromOf, 1>, 1}}, {"elemwise_add", {binary<kSum>, 2}},
      {"_grad_add", {binary<kSum>, 2}}, {"elemwise_sub", {binary<kDifference>, 2}},
      {"elemwise_mul", {binary<kProduct>, 2}}, {"elemwise_div", {binary<kQuotient>, 2}},
      {"_backward_add", {copies, 1}}, {"_copy", {copies, 1}}, {"_backward_copy", {copies, 1}},
      {"_backward_reshape", {copies, 1}}, {"Cast", {cast, 0}}, {"_backward_cast", {cast, 0}},
      {"amp_cast", {cast, 0}}, {"_backward_amp_cast", {cast, 0}}, {"Embedding", {as_it_is, 0}},
      {"take", {as_it_is, 0}}, {"transpose", {as_it_is, 0}}, {"slice", {as_it_is, 0}},
      {"slice_axis", {as_it_is, 0}}, {"stack", {as_it_is, 0}}, {"tile", {as_it_is, 0}},
      {"SliceChannel", {split, 0}}, {"_backward_SliceChannel", {split_gradient, 0}},
      {"Concat", {concat, 0}}, {"_backward_Concat", {concat_gradient, 0}},
      {"LayerNorm", {layer_norm, 1}}, {"_backward_LayerNorm", {layer_norm_gradient, 1}},
      {"softmax", {softmax, 1}}, {"_backward_softmax", {softmax_gradient, 2}},
      {"Dropout", {dropout, 1}}, {"_backward_Dropout", {dropout_gradient, 1}},
  };
  return made;
}

}  // namespace

const OwnCode* own_code(const std::string& name) {
  auto found = rows().find(name);
  return found == rows().end() ? nullptr : &found->second;
}

}  // namespace gluon_amp
