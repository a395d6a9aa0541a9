// Products of bfloat16 arrays by oneDNN's own primitives, where the processor has instructions for them.
#pragma once
#include "onednn/product.h"

namespace gluon_amp {

// Whether arrays between convolutions are to have the layout that those read and write.
int keeps_layout();

// By oneDNN; false where it has no primitive, or the processor no instructions.
bool onednn_convolution(const Call& call, bool backward);
bool onednn_deconvolution(const Call& call, bool backward);
bool onednn_dense(const Call& call, bool backward);

// A matrix of floats, row-major or, transposed, column-major.
struct RowsOrColumns {
  const float* data;
  bool transposed;
};

// y = a * b, all float32: on any processor, if `can_call_onednn`. MXNet's code is OpenBLAS's, which is 4 times slower on
// processors that are newer than it. Under the lock `scratch_lock()`.
void onednn_product(int64_t rows, int64_t columns, int64_t depth, const RowsOrColumns& a, const RowsOrColumns& b,
                    float* y);

// Products of a dense layer's matrices, rows of x, of w and of y, into a float32 one: kForward x and w into y;
// kBackwardData dy and w into dx; kBackwardWeights dy and x into dw. Under the lock `scratch_lock()`.
bool onednn_rows(int pass, int64_t rows, int64_t outputs, int64_t inputs, const Number16* a, const Number16* b,
                 float* to, Product::Inside* read);

}  // namespace gluon_amp
