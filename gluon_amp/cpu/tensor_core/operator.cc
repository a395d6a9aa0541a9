// Registration of products that emulate Tensor Cores: the operator of `amp.tensor_core_dot`, and the shapes of
// numpy's products that are refused.
//
// `_gluon_amp_tensor_core_dot`: y = c + a * b for stacks of matrices, with the bits of a GPU.
//
// Inputs: a (stack, rows, depth) and b (stack, depth, columns), float16, or float32 for all other formats;
// c (stack, rows, columns), float32. Attributes: the members of TensorCore.
#include <algorithm>
#include <sstream>

#include "tensor_core/emulation.h"

namespace gluon_amp {
namespace {

using Shapes = mxnet::ShapeVector;
using Types = std::vector<int>;

bool shapes(const NodeAttrs&, Shapes* in, Shapes* out) {
  const auto &a = (*in)[0], &b = (*in)[1], &c = (*in)[2];
  if (a.ndim() != 3 || b.ndim() != 3 || c.ndim() != 3 || b[0] != a[0] || b[1] != a[2] ||
      c[0] != a[0] || c[1] != a[1] || c[2] != b[2])
    throw dmlc::Error("tensor_core_dot takes matrices that fit");
  (*out)[0] = c;
  return true;
}

bool types(const NodeAttrs&, Types* in, Types* out) {
  const int float16 = mshadow::kFloat16, single = mshadow::kFloat32;
  if (((*in)[0] != float16 && (*in)[0] != single) || (*in)[1] != (*in)[0] || (*in)[2] != single)
    throw dmlc::Error("tensor_core_dot takes two float16 or float32 arrays and a float32 one");
  (*out)[0] = single;
  return true;
}

void dot(const NodeAttrs& attrs, const OpContext&, const std::vector<TBlob>& in,
         const std::vector<OpReqType>&, const std::vector<TBlob>& out) {
  const auto integer = [&](const char* key, int otherwise) {
    return static_cast<int>(number(attrs, key, otherwise));
  };
  const TensorCore gpu{integer("block", 0), integer("fraction", 0), std::stoll(word(attrs, "split", "0")),
                       integer("result", 23), flag(attrs, "halves", false), integer("smallest", -14),
                       flag(attrs, "half_sums", false)};
  const int64_t stack = in[0].shape_[0], rows = in[0].shape_[1], depth = in[0].shape_[2],
                columns = in[1].shape_[2];
  if (is_16bit(in[0])) {
    for (int64_t i = 0; i < stack; ++i)
      tensor_core_product()(gpu, rows, columns, depth, {numbers16(in[0]) + i * rows * depth, depth, 1},
                            {numbers16(in[1]) + i * depth * columns, columns, 1},
                            floats(in[2]) + i * rows * columns, {floats(out[0]) + i * rows * columns, columns, 1});
    return;
  }
  for_all(stack * rows, stack * rows * columns * depth, [&](int64_t row) {
    const float *a = floats(in[0]) + row * depth, *b = floats(in[1]) + row / rows * depth * columns;
    for (int64_t j = 0, at = row * columns; j < columns; ++j, ++at)
      floats(out[0])[at] = tensor_core::chain(gpu, depth, a, 1, b + j, columns, floats(in[2])[at]);
  });
}

bool has_code(const std::string& of, const mxnet::TShape& a, const mxnet::TShape& b) {
  if (b.ndim() <= 2) return a.ndim() > 0 && b.ndim() > 0;
  return of == "_npi_matmul" && a.ndim() == b.ndim() &&
         std::equal(a.begin(), a.end() - 2, b.begin());
}

std::map<const nnvm::Op*, mxnet::FInferShape>& mxnets_shapes() {
  static auto* made = new std::map<const nnvm::Op*, mxnet::FInferShape>;
  return *made;
}

// np.dot and np.matmul: other shapes are refused by shape inference, before anything runs.
bool shapes_with_code(const NodeAttrs& attrs, Shapes* in, Shapes* out) {
  const nnvm::Op* x = attrs.op;
  const bool known = call_original(mxnets_shapes().at(x), attrs, in, out);
  if (!known || !settings_of(attrs).gradient_products.emulates() ||
      has_code(x->name, (*in)[0], (*in)[1]))
    return known;
  std::ostringstream said;
  said << "accumulate=: valid are "
       << (x->name == "_np_dot" ? "for np.dot" : "for np.matmul two stacks of one shape, or")
       << " a second array of one or two axes. Received: " << (*in)[0] << " and " << (*in)[1];
  throw dmlc::Error(said.str());
}

}  // namespace

void register_tensor_core() {
  emulation = {};
  add_tensor_core_products(emulation);
  add_tensor_core_convolutions(emulation);
  add_operator("tensor_core_dot", 3, shapes, types, dot);
  for (const char* name : {"_np_dot", "_npi_matmul"}) {
    auto& x = const_cast<nnvm::Op&>(*nnvm::Op::Get(name));
    mxnets_shapes()[&x] = *get<mxnet::FInferShape>(&x, "FInferShape");
    set<mxnet::FInferShape>(x, "FInferShape", by_value(&shapes_with_code));
  }
}

}  // namespace gluon_amp
