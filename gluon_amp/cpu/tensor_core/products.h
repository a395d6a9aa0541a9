// Shared declarations of products that emulate a GPU's Tensor Cores.
#pragma once
#include "engine.h"

namespace gluon_amp {

TensorCore tensor_core_of(const NodeAttrs& attrs);  // a node's setting
void check_halves(const Call& call);                // throws if an array is not float16

// One call of an operator of products. Results are in separate float32 arrays until all are computed, because
// an output may share memory with an input; `finish` rounds each once into its output.
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
