// Products that emulate a GPU's Tensor Cores: one call of an operator.
#pragma once
#include "engine.h"
#include "tensor_core/kernels.h"

namespace gluon_amp {

// y = c + a * b by the kernel for this processor.
TensorCoreProduct& tensor_core_product();

// Results are in separate float32 arrays until all are computed, because an output may share memory with an
// input; `finish` rounds each once into its output. Throws unless the arrays are float16.
class Products {
 public:
  explicit Products(const Call& call);

  bool wants(size_t i) const { return call_.write(i) != kNothing; }
  float* result(size_t i);  // of output i; zeros at first
  Number16* numbers16(int64_t count) { return scratch_.numbers16(count); }
  float* floats_for(int64_t count) { return scratch_.memory(count); }

  // y = a * b
  void product(int64_t rows, int64_t columns, int64_t depth, Matrix16 a, Matrix16 b,
               FloatMatrix y) const {
    tensor_core_product()(gpu_, rows, columns, depth, a, b, nullptr, y);
  }
  void finish();

 private:
  const TensorCore gpu_;
  const Call& call_;
  Scratch scratch_;
  std::map<size_t, float*> made_;
};

void add_tensor_core_products(Emulation& to);
void add_tensor_core_convolutions(Emulation& to);

}  // namespace gluon_amp
