// Shared declarations of recurrent layers: rnn_loop.cc and bfloat16_rnn.cc.
#pragma once
#include "engine.h"

namespace gluon_amp {

// The sizes of an RNN's layers, from its attributes.
struct RnnShape {
  RnnMode mode;
  int64_t units, layers, directions, gates;  // gates: for each unit

  // The offsets of the parameters of one direction of a layer in the array of all parameters.
  struct Places {
    int64_t inputs, wx, wh, bx, bh;
  };

  explicit RnnShape(const NodeAttrs& attrs);
  Places places(int64_t layer, int64_t direction, int64_t data) const;  // data: the input size
};

// y = a * b by MXNet's float32 code
void float_product(const OpContext& context, int64_t rows, int64_t columns, int64_t depth,
                   const RowsOrColumns& a, const RowsOrColumns& b, float* y);

}  // namespace gluon_amp
