// Products of float16 matrices with float32 sums as on a GPU's Tensor Cores, for each instruction set (kernels.cc).
#pragma once
#include "kernels/kernels.h"
#include "tensor_core/rule.h"

namespace gluon_amp {

// A strided matrix of 16-bit numbers: element (i, j) is data[i * row + j * column].
struct Matrix16 {
  const Number16* data;
  int64_t row, column;
  Matrix16 transposed() const { return {data, column, row}; }
};
struct FloatMatrix {
  float* data;
  int64_t row, column;
};

// y = c + a * b: (rows, depth) times (depth, columns). c has y's layout; null: zeros; it may be y.
using TensorCoreProduct = void(const TensorCore&, int64_t rows, int64_t columns, int64_t depth, Matrix16 a,
                               Matrix16 b, const float* c, FloatMatrix y);
namespace portable_float16 { TensorCoreProduct tensor_core_product; }
namespace avx2_float16 { TensorCoreProduct tensor_core_product; }
namespace avx512_float16 { TensorCoreProduct tensor_core_product; }

}  // namespace gluon_amp
