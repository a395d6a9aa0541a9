// Convolutions by oneDNN.
#include "onednn/layers.h"
#include "onednn/onednn.h"

namespace gluon_amp {
namespace {

// ---- a convolution as a dense layer of gathered windows (im2col)
//
// With AMX oneDNN's convolutions are up to 20 times slower for small images with many channels, and weight gradients
// of 1x1 kernels are 3 times slower.

Dense rows_of(const Convolution& layer) {
  const int64_t rows = layer.y[0] * layer.y[2] * layer.y[3], read = layer.w[1] * layer.w[2] * layer.w[3];
  Dense dense(rows, read, layer.w[0], layer.bias);
  dense.images = layer.x[0];
  dense.parameters = layer.parameters;
  return dense;
}

bool is_pointwise(const Convolution& layer) {
  return layer.w[2] * layer.w[3] * layer.stride[0] * layer.stride[1] == 1 && !layer.pad[0] && !layer.pad[1];
}

bool pays_by_rows(const Convolution& layer, int pass) {
  if (instructions() != Instructions::kAmx || layer.x.size() != 4 || layer.w.size() != 4) return false;
  const int64_t kernel = layer.w[2] * layer.w[3], rows = rows_of(layer).x[0], outputs = layer.w[0];
  if (pass == kForward) return kernel > 1 && 4 * rows <= outputs;
  return pass == kBackwardWeights && (kernel == 1 || rows <= 2 * outputs);
}

// For each image, a matrix with a row for each channel and position of the kernel, and a column for each position
// of y.
void unfold(const Convolution& layer, const Number16* x, Number16* to) {
  const int64_t high = layer.x[2], wide = layer.x[3], y_high = layer.y[2], y_wide = layer.y[3];
  const int64_t planes = layer.x[0] * layer.x[1], kernel = layer.w[2] * layer.w[3];
  for_all(planes, planes * kernel * y_high * y_wide, [&](int64_t plane) {
    const Number16* const from = x + plane * high * wide;
    Number16* row_to = to + plane * kernel * y_high * y_wide;
    for (int64_t i = 0; i < layer.w[2]; ++i)
      for (int64_t j = 0; j < layer.w[3]; ++j)
        for (int64_t row = 0; row < y_high; ++row, row_to += y_wide) {
          const int64_t at_row = row * layer.stride[0] + i * layer.dilate[0] - layer.pad[0];
          for (int64_t column = 0; column < y_wide; ++column) {
            const int64_t at = column * layer.stride[1] + j * layer.dilate[1] - layer.pad[1];
            const bool inside = at_row >= 0 && at_row < high && at >= 0 && at < wide;
            row_to[column] = inside ? from[at_row * wide + at] : Number16(0);
          }
        }
  });
}

}  // namespace

bool onednn_convolution(const Call& call, bool backward) {
  const TBlob &x = call.in[backward ? 1 : 0], &w = call.in[backward ? 2 : 1];
  const TBlob& y = backward ? call.in[0] : call.out[0];
  if (!multiplies_images(call, x, w, y)) return false;
  const bool has_bias = (backward ? call.out : call.in).size() > 2;
  const Sizes bias{y.shape_[1]};
  const Convolution layer(call, x, w, y, has_bias ? &bias : nullptr);
  const std::lock_guard<std::mutex> mine(scratch_lock());
  if (!pays_by_rows(layer, backward ? kBackwardWeights : kForward))
    return run_layer(call, backward, layer);
  if (call.in_layout.any()) return false;
  Scratch scratch;
  ByRows rows{rows_of(layer), x};
  if (!is_pointwise(layer)) {
    rows.x.dptr_ = scratch.numbers16(rows.layer.x[0] * rows.layer.x[1]);
    unfold(layer, numbers16(x), numbers16(rows.x));
  }
  return run_layer(call, backward, layer, &rows);
}

}  // namespace gluon_amp
