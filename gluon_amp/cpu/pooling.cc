// Poolings, some images at a time, so that their float32 scratch stays in the cache.
//
// Averages go straight from plain halves into oneDNN's blocks of channels and back.
#include "pieces.h"

namespace gluon_amp {
namespace {

constexpr int64_t kPiece = int64_t(1) << 18;  // floats of scratch that a piece may have: 1 MB

bool fits(const TBlob& x, const TBlob& y) {
  return is_half(x) && x.ndim() >= 3 && size(x) > 0 && size(y) > 0;
}

// How many images are a piece.
int64_t images_in_a_piece(const TBlob& x, const TBlob& y) {
  const int64_t batch = x.shape_[0];
  return std::max<int64_t>(1, std::min(batch, kPiece / (2 * (size(x) + size(y)) / batch)));
}

// oneDNN takes ten times as long for few places in plain arrays. A maximum has a second output, its
// places, and is left to the other way.
bool run_average_in_blocks(const Call& call) {
  const TBlob &x = call.in[0], &y = call.out[0];
  if (!fits(x, y) || call.out.size() > 1 || x.ndim() > 5 || !has_channels_first(call) ||
      !in_blocks_of(x.shape_[1], 1) ||
      !prefers_onednn(call.of, call.attrs, call.in.size(), call.out.size()))
    return false;
  mxnet::TShape x_piece = x.shape_, y_piece = y.shape_;
  x_piece[0] = y_piece[0] = images_in_a_piece(x, y);
  run_in_pieces(call, false, x.shape_, y.shape_, x_piece[0], room(x_piece), room(y_piece),
                [](const NDArray& holder, const TBlob& piece) {
                  return widened_images(1, holder, piece);
                });
  return true;
}

// A maximum's places, which the backward pass reads, lie by pieces: so both passes have the same.
bool run_pooling(const Call& call, const TBlob& x, const TBlob& y) {
  return fits(x, y) && run_some_images(call, images_in_a_piece(x, y));
}

// Predictions of maxima, which are halves as they stand. Training also wants their places.
bool run_maximum(const Call& call) {
  const TBlob &x = call.in[0], &y = call.out[0];
  if (!fits(x, y) || !is_half(y) || x.ndim() != 4 || call.context.is_train ||
      !has_channels_first(call) || word(call.attrs, "pool_type", "max") != "max" ||
      flag(call.attrs, "global_pool", false) || x.shape_[3] < 8)  // vectors would be half empty
    return false;
  auto two = [&](const char* key, int64_t otherwise) {
    const std::vector<int64_t> said = numbers(call.attrs, key);
    return said.size() == 2 ? said : std::vector<int64_t>(2, otherwise);
  };
  const auto kernel = two("kernel", 0), stride = two("stride", 1), pad = two("pad", 0);
  if (kernel[0] < 1 || kernel[1] < 1 || stride[0] < 1 || stride[1] < 1 || stride[1] > 2) return false;
  kernels->max_pool({x.shape_[0] * x.shape_[1], x.shape_[2], x.shape_[3], y.shape_[2], y.shape_[3],
                     kernel[0], kernel[1], stride[0], stride[1], pad[0], pad[1]},
                    halves(x), halves(y), call.write(0));
  return true;
}

bool forward(const Call& call) {
  return run_maximum(call) || run_average_in_blocks(call) || run_pooling(call, call.in[0], call.out[0]);
}
bool backward(const Call& call) { return run_pooling(call, call.out[0], call.in[0]); }

}  // namespace

void add_pooling(Rows& rows) {
  rows.insert({{"Pooling", {forward, 0}}, {"_backward_Pooling", {backward, 0}}});
}

}  // namespace gluon_amp
