// Operators that have no counterpart in MXNet: casts of arrays outside graphs, masters that follow
// their weights, the update of SGD, and sums of squares.
#include <locale.h>
#include <stdlib.h>

#include <algorithm>

#include "engine.h"

namespace gluon_amp {
namespace {

using Shapes = mxnet::ShapeVector;
using Types = std::vector<int>;

bool one_shape(const NodeAttrs&, Shapes* in, Shapes* out) {
  for (auto& shape : *in)
    if (shape != (*in)[0]) throw dmlc::Error("the inputs differ in shape");
  (*out)[0] = (*in)[0];
  return true;
}

template <int first, int others, int output>
bool types(const NodeAttrs&, Types* in, Types* out) {
  for (size_t i = 0; i < in->size(); ++i) {
    const int wanted = i == 0 ? first : others;
    if ((*in)[i] != wanted) throw dmlc::Error("an input has another type than the operator takes");
  }
  (*out)[0] = output;
  return true;
}

constexpr int kF16 = mshadow::kFloat16, kF32 = mshadow::kFloat32, kF64 = mshadow::kFloat64;

bool squares_types(const NodeAttrs&, Types* in, Types* out) {
  for (int type : *in)
    if (type != kF16 && type != kF32)
      throw dmlc::Error("squares takes float16 and float32 arrays");
  (*out)[0] = kF64;
  return true;
}

bool squares_shape(const NodeAttrs&, Shapes* in, Shapes* out) {
  const mxnet::TShape shape(1, static_cast<dim_t>(in->size()));
  (*out)[0] = shape;
  return true;
}

void parse_nothing(NodeAttrs*) {}

using Shape = bool (*)(const NodeAttrs&, Shapes*, Shapes*);
using Type = bool (*)(const NodeAttrs&, Types*, Types*);
using Compute = void (*)(const NodeAttrs&, const OpContext&, const std::vector<TBlob>&,
                         const std::vector<OpReqType>&, const std::vector<TBlob>&);

nnvm::Op& add(const std::string& name, uint32_t inputs, Shape shape, Type type, Compute compute) {
  nnvm::Op& op = dmlc::Registry<nnvm::Op>::Get()->__REGISTER__(kPrefix + name);
  op.num_inputs = inputs;
  op.num_outputs = 1;
  op.attr_parser = by_value<void, NodeAttrs*>(&parse_nothing);
  set<mxnet::FInferShape>(op, "FInferShape",
                          by_value<bool, const NodeAttrs&, Shapes*, Shapes*>(shape));
  set<nnvm::FInferType>(op, "FInferType", by_value<bool, const NodeAttrs&, Types*, Types*>(type));
  set<mxnet::FCompute>(op, "FCompute<cpu>", mxnet::FCompute(compute));
  return op;
}

void widen(const NodeAttrs&, const OpContext&, const std::vector<TBlob>& in,
           const std::vector<OpReqType>&, const std::vector<TBlob>& out) {
  kernels->widen(halves(in[0]), floats(out[0]), size(in[0]));
}

void narrow_all(const NodeAttrs&, const OpContext&, const std::vector<TBlob>& in,
                const std::vector<OpReqType>&, const std::vector<TBlob>& out) {
  kernels->narrow(floats(in[0]), halves(out[0]), size(in[0]), kStore);
}

void round(const NodeAttrs& attrs, const OpContext&, const std::vector<TBlob>& in,
           const std::vector<OpReqType>&, const std::vector<TBlob>& out) {
  const std::string* grid = find(attrs, "grid");
  kernels->round(grid ? grid_of(grid->c_str()) : Grid(), floats(in[0]), floats(out[0]), size(in[0]),
                 kStore);
}

// The output is the master's own array.
void follow(const NodeAttrs&, const OpContext&, const std::vector<TBlob>& in,
            const std::vector<OpReqType>&, const std::vector<TBlob>& out) {
  if (out[0].dptr_ != in[0].dptr_) kernels->copy(in[0].dptr_, out[0].dptr_, 4 * size(in[0]));
  kernels->follow(floats(out[0]), halves(in[1]), size(in[0]));
}

// Numbers between commas, one for each weight.
std::vector<float> numbers(const NodeAttrs& attrs, const char* key, size_t count) {
  static const locale_t c = newlocale(LC_ALL_MASK, "C", nullptr);
  const std::string* text = find(attrs, key);
  const char* at = text ? text->c_str() : "";
  std::vector<float> made;
  while (*at && made.size() < count) {
    char* end;
    made.push_back(strtof_l(at, &end, c));
    at = *end ? end + 1 : end;
  }
  if (made.size() != count) throw dmlc::Error(std::string(key) + " needs a number for each weight");
  return made;
}

// All weights, then all gradients, masters, and momenta if there are any. Outputs: the weights.
void sgd(const NodeAttrs& attrs, const OpContext&, const std::vector<TBlob>& in,
         const std::vector<OpReqType>&, const std::vector<TBlob>& out) {
  const size_t count = out.size();
  const auto rates = numbers(attrs, "lrs", count), decays = numbers(attrs, "wds", count);
  const float momentum = number(attrs, "momentum", 0), rescale = number(attrs, "rescale_grad", 1),
              clip = number(attrs, "clip", -1);
  for (size_t i = 0; i < count; ++i) {
    if (out[i].dptr_ != in[i].dptr_)
      kernels->copy(in[i].dptr_, out[i].dptr_, size(in[i]) * sizeof(Half));
    kernels->sgd(halves(out[i]), halves(in[count + i]), floats(in[2 * count + i]),
                 momentum ? floats(in[3 * count + i]) : nullptr, size(in[i]), rates[i], decays[i],
                 momentum, rescale, clip);
  }
}

uint32_t sgd_weights(const NodeAttrs& attrs) {
  return static_cast<uint32_t>(number(attrs, "num_weights", 1));
}
uint32_t sgd_inputs(const NodeAttrs& attrs) {
  return (number(attrs, "momentum", 0) != 0 ? 4 : 3) * sgd_weights(attrs);
}

bool sgd_shapes(const NodeAttrs&, Shapes* in, Shapes* out) {
  for (size_t i = 0; i < in->size(); ++i)
    if ((*in)[i] != (*in)[i % out->size()]) throw dmlc::Error("sgd's arrays differ in shape");
  std::copy_n(in->begin(), out->size(), out->begin());
  return true;
}

bool sgd_types(const NodeAttrs&, Types* in, Types* out) {
  for (size_t i = 0; i < in->size(); ++i)
    if ((*in)[i] != (i < 2 * out->size() ? kF16 : kF32))
      throw dmlc::Error("sgd takes float16 weights and gradients");
  std::fill(out->begin(), out->end(), kF16);
  return true;
}

void squares(const NodeAttrs&, const OpContext&, const std::vector<TBlob>& in,
             const std::vector<OpReqType>&, const std::vector<TBlob>& out) {
  auto* sums = static_cast<double*>(out[0].dptr_);
  for (auto& array : in)
    *sums++ = is_half(array) ? kernels->squares_of_halves(halves(array), size(array))
                             : kernels->squares_of_floats(floats(array), size(array));
}

}  // namespace

void register_training() {
  add("widen", 1, one_shape, types<kF16, kF16, kF32>, widen);
  add("narrow", 1, one_shape, types<kF32, kF32, kF16>, narrow_all);
  add("round_to_grid", 1, one_shape, types<kF32, kF32, kF32>, round);
  add("follow", 2, one_shape, types<kF32, kF16, kF32>, follow);
  nnvm::Op& update = add("sgd", 3, sgd_shapes, sgd_types, sgd);
  update.get_num_inputs = [](const NodeAttrs& attrs) { return sgd_inputs(attrs); };
  update.get_num_outputs = [](const NodeAttrs& attrs) { return sgd_weights(attrs); };
  set<nnvm::FMutateInputs>(update, "FMutateInputs", nnvm::FMutateInputs([](const NodeAttrs& attrs) {
    std::vector<uint32_t> changed;  // masters and momenta
    for (uint32_t i = 2 * sgd_weights(attrs); i < sgd_inputs(attrs); ++i) changed.push_back(i);
    return changed;
  }));
  nnvm::Op& sums = add("squares", 1, squares_shape, squares_types, squares);
  sums.get_num_inputs = [](const NodeAttrs& attrs) {
    return static_cast<uint32_t>(number(attrs, "num_arrays", 1));
  };
}

}  // namespace gluon_amp
