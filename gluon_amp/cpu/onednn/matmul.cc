// Products of matrices by oneDNN.
#include <algorithm>
#include <cstring>

#include "onednn/onednn.h"
#include "onednn/product.h"

namespace gluon_amp {
namespace {

// A matrix, or a batch of them; `turned`: whether it is transposed.
struct Matrix {
  const TBlob& array;
  bool turned;

  Sizes dims() const {
    Sizes sizes = sizes_of(array);
    if (turned) std::swap(sizes[sizes.size() - 1], sizes[sizes.size() - 2]);
    return sizes;
  }
  dnnl_memory_desc_t layout() const {
    const int type = type_in_memory(array);
    if (!turned) return plain_layout(dims(), type);
    return gluon_amp::layout(dims(), dims().size() == 2 ? dnnl_ba : dnnl_acb, type);
  }
};

// to = a * b. Null if oneDNN has no primitive for it.
struct Multiplication {
  Matrix a, b;
  const TBlob& to;
  Write write;

  std::shared_ptr<Product> product() const;
  void run(Product& product) const {  // under the lock `scratch_lock()`
    product.run({{DNNL_ARG_SRC, a.array, a.layout()}, {DNNL_ARG_WEIGHTS, b.array, b.layout()},
                 {DNNL_ARG_DST, to, Matrix{to, false}.layout(), write}});
  }
  void run_alone(Product& product) const {
    if (write == kNothing) return;
    const std::lock_guard<std::mutex> mine(scratch_lock());
    run(product);
  }
};

std::shared_ptr<Product> Multiplication::product() const {
  const Sizes first = a.dims(), second = b.dims(), turned{a.turned, b.turned, type_in_memory(to)};
  return Product::find(key_of("matmul", 0, {&first, &second, &turned}), [&] {
    dnnl_matmul_desc_t operation;
    std::memset(&operation, 0, sizeof operation);
    operation.primitive_kind = dnnl_matmul;
    operation.src_desc = a.layout();
    operation.weights_desc = b.layout();
    operation.dst_desc = Matrix{to, false}.layout();
    operation.accum_data_type = dnnl_f32;
    return describe(&operation);
  });
}

// Whether all arrays have this number of axes, and no output shares memory with an input.
bool are_matrices(const Call& call, int axes) {
  const auto is_one = [axes](const TBlob& array) { return array.ndim() == axes && size(array) > 0; };
  for (const TBlob& from : call.in)
    for (const TBlob& to : call.out)
      if (overlap(from, to)) return false;
  return all_16bit(call) && multiplies(call.out[0].type_flag_) && std::all_of(call.in.begin(), call.in.end(), is_one) &&
         std::all_of(call.out.begin(), call.out.end(), is_one);
}

template <int axes>
bool product(const Call& call) {
  if (!are_matrices(call, axes)) return false;
  const Multiplication multiplication{{call.in[0], flag(call.attrs, "transpose_a", false)},
                            {call.in[1], flag(call.attrs, "transpose_b", false)}, call.out[0],
                            call.write(0)};
  const auto product = multiplication.product();
  if (product) multiplication.run_alone(*product);
  return product != nullptr;
}

bool dot_gradient(const Call& call) {  // gradient, a, b
  if (!are_matrices(call, 2)) return false;
  const bool a = flag(call.attrs, "transpose_a", false), b = flag(call.attrs, "transpose_b", false);
  const Matrix g{call.in[0], false}, turned{call.in[0], true}, second{call.in[2], b != !a},
      first{call.in[1], a != !b};
  const Multiplication da{a ? second : g, a ? turned : second, call.out[0], call.write(0)};
  const Multiplication db{b ? turned : first, b ? first : g, call.out[1], call.write(1)};
  const auto of_a = da.product(), of_b = db.product();
  if (!of_a || !of_b) return false;
  da.run_alone(*of_a);
  db.run_alone(*of_b);
  return true;
}

}  // namespace

int keeps_layout() { return instructions() == Instructions::kBfloat16; }

void onednn_product(int64_t rows, int64_t columns, int64_t depth, const RowsOrColumns& a, const RowsOrColumns& b,
                    float* y) {
  const auto array = [](const RowsOrColumns& of, int64_t high, int64_t wide) {
    if (of.transposed) std::swap(high, wide);
    return TBlob(const_cast<float*>(of.data), mxnet::TShape({high, wide}), mshadow::cpu::kDevMask);
  };
  const TBlob first = array(a, rows, depth), second = array(b, depth, columns), to = array({y, false}, rows, columns);
  const Multiplication multiplication{{first, a.transposed}, {second, b.transposed}, to, kStore};
  const auto product = multiplication.product();
  if (!product) throw dmlc::Error("oneDNN has no product of float32 matrices");
  multiplication.run(*product);
}

const AddRows rows{{{"dot", {product<2>, kAnyInput}}, {"batch_dot", {product<3>, kAnyInput}},
                    {"_backward_dot", {dot_gradient, kAnyInput}}}};

}  // namespace gluon_amp
