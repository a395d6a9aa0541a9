// Operators that MXNet does not have: synchronization of master weights with their weights, optimizers' updates, and
// sums of squares. Also MXNet's multi-precision updates of SGD and NAG.
#include <algorithm>
#include <numeric>

#include "dispatch/attributes.h"
#include "operators/table.h"

namespace gluon_amp {
namespace {

using Shapes = mxnet::ShapeVector;
using Types = std::vector<int>;

void parse_nothing(NodeAttrs*) {}

constexpr int kF16 = mshadow::kFloat16, kF32 = mshadow::kFloat32, kF64 = mshadow::kFloat64;

bool follow_shapes(const NodeAttrs&, Shapes* in, Shapes* out) {
  if ((*in)[0] != (*in)[1]) throw dmlc::Error("a master weight and its weight differ in shape");
  (*out)[0] = (*in)[0];
  return true;
}

bool follow_types(const NodeAttrs&, Types* in, Types* out) {
  if ((*in)[0] != kF32 || !is_16bit((*in)[1]))
    throw dmlc::Error("a master weight is float32, and its weight has a 16-bit type");
  (*out)[0] = kF32;
  return true;
}

bool squares_types(const NodeAttrs&, Types* in, Types* out) {
  for (int type : *in)
    if (!is_16bit(type) && type != kF32 && type != kF64)
      throw dmlc::Error("squares takes arrays of floating numbers");
  (*out)[0] = kF64;
  return true;
}

bool squares_shape(const NodeAttrs&, Shapes* in, Shapes* out) {
  const mxnet::TShape shape(1, static_cast<dim_t>(in->size()));
  (*out)[0] = shape;
  return true;
}

// The output is the array of the master weight.
void follow(const NodeAttrs&, const OpContext&, const std::vector<TBlob>& in,
            const std::vector<OpReqType>&, const std::vector<TBlob>& out) {
  if (out[0].dptr_ != in[0].dptr_) kernels->copy(in[0].dptr_, out[0].dptr_, 4 * size(in[0]));
  kernels_of(in[1])->follow(floats(out[0]), in[1].dptr_, size(in[0]));
}

// ---- optimizers ----------------------------------------------------------------------
//
// `_gluon_amp_update` updates several weights by one rule. Its inputs are all weights, then all gradients, all
// master weights (of 16-bit weights only: "masters"), and for each state of the rule, that of all weights. Its
// outputs are the weights.

struct UpdateRule {
  Rule rule;
  uint32_t states;  // SGD without momentum has none
  bool lists;       // whether MXNet's operator takes lists of learning rates and decays
};

const UpdateRule& rule_of(const NodeAttrs& attrs) {
  static const std::map<std::string, UpdateRule> rules = {
      {"sgd", {kSgd, 1, true}},
      {"descent", {kDescent, 0, false}},
      {"nag", {kNag, 1, false}},
      {"adam", {kAdam, 2, false}},
      {"adamw", {kAdamW, 2, true}},
      {"rmsprop", {kRmsProp, 1, false}},
      {"centered_rmsprop", {kCenteredRmsProp, 3, false}},
      {"lamb", {kLamb, 2, true}},
  };
  return rules.at(word(attrs, "rule", ""));
}

bool has_momentum(const NodeAttrs& attrs) {
  return rule_of(attrs).rule != kSgd || number(attrs, "momentum", 0) != 0;
}

uint32_t update_weights(const NodeAttrs& attrs) {
  return static_cast<uint32_t>(number(attrs, "num_weights", 1));
}
bool has_masters(const NodeAttrs& attrs) { return flag(attrs, "masters", true); }
uint32_t update_inputs(const NodeAttrs& attrs) {
  const uint32_t states = has_momentum(attrs) ? rule_of(attrs).states : 0;
  return (2 + has_masters(attrs) + states) * update_weights(attrs);
}

// A number parsed like MXNet's operators do, not always to the nearest float.
float mxnets_number(const NodeAttrs& attrs, const char* key, float otherwise) {
  const std::string* text = find(attrs, key);
  return text ? dmlc::strtof(text->c_str(), nullptr) : otherwise;
}

// Comma-separated numbers, one for each weight. MXNet parses lists correctly.
std::vector<float> per_weight(const NodeAttrs& attrs, const char* key, size_t count, bool lists) {
  const std::string* text = find(attrs, key);
  const char* at = text ? text->c_str() : "";
  if (*at == '(' || *at == '[') ++at;
  std::vector<float> values;
  while (*at && values.size() < count) {
    char* end;
    values.push_back(lists ? parse_float(at, &end) : dmlc::strtof(at, &end));
    if (end == at) throw dmlc::Error(std::string(key) + " needs numbers. Received: " + *text);
    at = *end ? end + 1 : end;
  }
  if (values.size() != count) throw dmlc::Error(std::string(key) + " needs a number for each weight");
  return values;
}

UpdateSettings update_settings(const NodeAttrs& attrs, bool momentum) {
  auto get = [&](const char* key, float otherwise) { return mxnets_number(attrs, key, otherwise); };
  UpdateSettings settings = {};
  settings.rescale = get("rescale_grad", 1);
  settings.clip = get("clip_gradient", -1);
  settings.momentum = get("momentum", 0);
  settings.beta1 = get("beta1", 0);
  settings.beta2 = get("beta2", 0);
  settings.epsilon = get("epsilon", 0);
  settings.clip_weights = get("clip_weights", -1);
  settings.lower = get("lower_bound", -1);
  settings.upper = get("upper_bound", -1);
  settings.bias_correction = flag(attrs, "bias_correction", true);
  settings.has_momentum = momentum;
  return settings;
}

void update(const NodeAttrs& attrs, const OpContext&, const std::vector<TBlob>& in,
            const std::vector<OpReqType>&, const std::vector<TBlob>& out) {
  const size_t count = out.size();
  const UpdateRule& rule = rule_of(attrs);
  const auto rates = per_weight(attrs, "lrs", count, rule.lists);
  const auto decays = per_weight(attrs, "wds", count, rule.lists);
  const auto steps = per_weight(attrs, "steps", rule.rule == kLamb ? count : 0, true);
  const bool masters = has_masters(attrs);
  const size_t first_state = masters ? 3 : 2;
  std::vector<Update> updates(count);
  for (size_t i = 0; i < count; ++i) {
    if (out[i].dptr_ != in[i].dptr_)
      kernels->copy(in[i].dptr_, out[i].dptr_, size(in[i]) * bytes_of(in[i].type_flag_));
    updates[i] = {out[i].dptr_, in[count + i].dptr_,
                  masters ? floats(in[2 * count + i]) : floats(out[i]), {},
                  size(in[i]), rates[i], decays[i], steps.empty() ? 0 : int(steps[i]), masters};
    for (size_t k = first_state; k * count < in.size(); ++k)
      updates[i].states[k - first_state] = floats(in[k * count + i]);
  }
  kernels_of(out[0])->update(rule.rule, updates.data(), int(count),
                              update_settings(attrs, has_momentum(attrs)));
}

// MXNet's multi-precision updates, fused. Their inputs are, for each weight: the weight, its gradient, its
// momentum if any, and its master weight, which is never synchronized with the weight.
template <Rule rule, bool momentum, bool lists>
bool mxnets_update(const Call& call) {
  const size_t count = call.out.size(), stride = 3 + momentum;
  for (size_t i = 0; i < count; ++i)
    if (call.write(i) != kStore || call.in.size() != count * stride || !is_16bit(call.in[i * stride + 1]) ||
        call.in[i * stride + 1].type_flag_ != call.out[0].type_flag_) {
      call.op.compute(call.attrs, call.context, call.in, call.req, call.out);
      return true;
    }
  const auto numbers_of = [&](const char* single, const char* list) {
    return lists ? per_weight(call.attrs, list, count, true)
                 : std::vector<float>(count, mxnets_number(call.attrs, single, 0));
  };
  const auto rates = numbers_of("lr", "lrs"), decays = numbers_of("wd", "wds");
  std::vector<Update> updates(count);
  for (size_t i = 0; i < count; ++i) {
    const TBlob* const of = &call.in[i * stride];
    updates[i] = {call.out[i].dptr_, of[1].dptr_, floats(of[stride - 1]), {}, size(of[0]),
                  rates[i], decays[i], 0, false};
    if (momentum) updates[i].states[0] = floats(of[2]);
  }
  kernels_of(call.out[0])->update(rule, updates.data(), int(count), update_settings(call.attrs, momentum));
  return true;
}

bool update_shapes(const NodeAttrs&, Shapes* in, Shapes* out) {
  for (size_t i = 0; i < in->size(); ++i)
    if ((*in)[i] != (*in)[i % out->size()]) throw dmlc::Error("an update's arrays differ in shape");
  std::copy_n(in->begin(), out->size(), out->begin());
  return true;
}

bool update_types(const NodeAttrs& attrs, Types* in, Types* out) {
  const bool masters = has_masters(attrs);
  const int type = masters && is_16bit((*in)[0]) ? (*in)[0] : masters ? kF16 : kF32;
  for (size_t i = 0; i < in->size(); ++i)
    if ((*in)[i] != (i < 2 * out->size() ? type : kF32))
      throw dmlc::Error(masters ? "an update takes weights and gradients of one 16-bit type, float32 "
                                  "masters and states"
                                : "an update without masters takes float32 arrays only");
  std::fill(out->begin(), out->end(), type);
  return true;
}

double squares_of_doubles(const TBlob& array) {
  const auto* const p = static_cast<const double*>(array.dptr_);
  return std::inner_product(p, p + size(array), p, 0.0);
}

void squares(const NodeAttrs&, const OpContext&, const std::vector<TBlob>& in,
             const std::vector<OpReqType>&, const std::vector<TBlob>& out) {
  auto* const to = static_cast<double*>(out[0].dptr_);
  for (size_t i = 0; i < in.size(); ++i)
    if (in[i].type_flag_ == kF64) to[i] = squares_of_doubles(in[i]);
  for (const Kernels* of : {kernels, float16_kernels, bfloat16_kernels}) {
    std::vector<Numbers> arrays;
    std::vector<size_t> places;
    for (size_t i = 0; i < in.size(); ++i) {
      if (kernels_of(in[i]) != of || in[i].type_flag_ == kF64) continue;
      arrays.push_back({in[i].dptr_, size(in[i])});
      places.push_back(i);
    }
    std::vector<double> sums(arrays.size());
    of->squares(arrays.data(), int(arrays.size()), sums.data());
    for (size_t k = 0; k < places.size(); ++k) to[places[k]] = sums[k];
  }
}

}  // namespace

const AddRows rows{{{"mp_sgd_update", {mxnets_update<kDescent, false, false>, kAnyInput}},
                    {"mp_sgd_mom_update", {mxnets_update<kSgd, true, false>, kAnyInput}},
                    {"mp_nag_mom_update", {mxnets_update<kNag, true, false>, kAnyInput}},
                    {"multi_mp_sgd_update", {mxnets_update<kSgd, false, true>, kAnyInput}},
                    {"multi_mp_sgd_mom_update", {mxnets_update<kSgd, true, true>, kAnyInput}}}};

nnvm::Op& add_operator(const std::string& name, uint32_t inputs, bool (*shapes)(const NodeAttrs&, Shapes*, Shapes*),
                       bool (*types)(const NodeAttrs&, Types*, Types*), const mxnet::FCompute& compute) {
  nnvm::Op& op = dmlc::Registry<nnvm::Op>::Get()->__REGISTER__(kPrefix + name);
  op.num_inputs = inputs;
  op.num_outputs = 1;
  op.attr_parser = by_value(&parse_nothing);
  set<mxnet::FInferShape>(op, "FInferShape", by_value(shapes));
  set<nnvm::FInferType>(op, "FInferType", by_value(types));
  if (compute) set<mxnet::FCompute>(op, "FCompute<cpu>", compute);
  return op;
}

void register_training() {
  add_operator("follow", 2, follow_shapes, follow_types, follow);
  nnvm::Op& updates = add_operator("update", 3, update_shapes, update_types, update);
  updates.get_num_inputs = [](const NodeAttrs& attrs) { return update_inputs(attrs); };
  updates.get_num_outputs = [](const NodeAttrs& attrs) { return update_weights(attrs); };
  set<nnvm::FMutateInputs>(updates, "FMutateInputs", [](const NodeAttrs& attrs) {
    std::vector<uint32_t> changed;  // master weights and states
    for (uint32_t i = 2 * update_weights(attrs); i < update_inputs(attrs); ++i) changed.push_back(i);
    return changed;
  });
  nnvm::Op& sums = add_operator("squares", 1, squares_shape, squares_types, squares);
  sums.get_num_inputs = [](const NodeAttrs& attrs) {
    return static_cast<uint32_t>(number(attrs, "num_arrays", 1));
  };
}

}  // namespace gluon_amp
