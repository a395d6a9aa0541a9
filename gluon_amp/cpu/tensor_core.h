// What the products of a network share that are made as a GPU's Tensor Cores make them.
#pragma once
#include "engine.h"

namespace gluon_amp {

TensorCore tensor_core_of(const NodeAttrs& attrs);  // what a node asks for
void check_halves(const Call& call);                // throws where an array is not float16

// One call of an operator of products. Results are float32 arrays of its own until all are made,
// since an output may have the memory of an input; `finish` rounds each once and puts it in place.
class Products {
 public:
  explicit Products(const Call& call);

  const TensorCore gpu;

  bool wants(size_t i) const { return call_.write(i) != kNothing; }
  float* result(size_t i);  // zeros for output i
  Half* halves_for(int64_t count) { return reinterpret_cast<Half*>(lease_.memory(count / 2 + 1)); }
  float* floats_for(int64_t count) { return lease_.memory(count); }

  // y = a * b
  void product(int64_t rows, int64_t columns, int64_t depth, HalfMatrix a, HalfMatrix b,
               FloatMatrix y) const {
    kernels->tensor_core_product(gpu, rows, columns, depth, a, b, nullptr, y);
  }
  void finish();

 private:
  const Call& call_;
  Lease lease_;
  std::vector<std::pair<size_t, float*>> made_;
};

// Rows for tensor_core_code.
using ProductRows = std::map<std::string, ProductCode>;
void add_tensor_core_convolutions(ProductRows& rows);

}  // namespace gluon_amp
