// Convolutions and deconvolutions, some images at a time, so that their float32 scratch stays in the
// cache.
//
// Data goes straight from plain halves into oneDNN's blocks of channels and back.
#include <algorithm>

#include "pieces.h"

namespace gluon_amp {
namespace {

constexpr int64_t kPiece = int64_t(1) << 21;  // floats of data that a piece may have: 8 MB

bool fits(const Call& call, const TBlob& data) {
  return data.ndim() >= 3 && data.ndim() <= 5 && data.Size() > 0 && has_channels_first(call) &&
         (all_half(call) || all_float(call));
}

bool run_convolution(const Call& call, bool backward) {
  const TBlob& x = call.in[backward ? 1 : 0];
  const TBlob& y = backward ? call.in[0] : call.out[0];
  const TBlob& weight = call.in[backward ? 2 : 1];
  if (!fits(call, x) || y.Size() == 0 || !call.of.compute_ex) return false;
  const int64_t batch = x.shape_[0], per_x = size(x) / batch, per_y = size(y) / batch;
  int64_t images = kPiece / ((backward ? 2 : 1) * per_x + per_y);
  // oneDNN rearranges the weights for each piece: a piece has more data than there are weights
  images = std::max({images, int64_t(2), 2 * size(weight) / (per_x + per_y)});
  const int64_t pieces = std::max<int64_t>(1, batch / std::min(images, batch));
  images = (batch + pieces - 1) / pieces;

  const auto groups = static_cast<int64_t>(number(call.attrs, "num_group", 1));
  mxnet::TShape x_piece = x.shape_, y_piece = y.shape_;
  x_piece[0] = y_piece[0] = images;
  run_in_pieces(call, backward, x.shape_, y.shape_, images, room(x_piece), room(y_piece),
                [groups](const NDArray& holder, const TBlob& piece) {
                  return widened_images(groups, holder, piece);
                });
  return true;
}

bool forward(const Call& call) { return run_convolution(call, false); }

bool backward(const Call& call) { return run_convolution(call, true); }

// oneDNN has no gradient of the data of a deconvolution from blocks of channels to one: there MXNet
// stops in float32 ("could not create a primitive descriptor"). MXNet's other code does it.
bool deconvolution_backward(const Call& call) {
  const TBlob &x = call.in[1], &y = call.in[0];
  const bool to_one = fits(call, x) && y.shape_[1] == 1 && in_blocks_of(x.shape_[1], 1);
  if (!to_one) return backward(call);
  run(call, false, {}, nullptr, nullptr);
  return true;
}

}  // namespace

void add_convolution(Rows& rows) {
  rows.insert({{"Convolution", {forward, 1}}, {"_backward_Convolution", {backward, 2}},
               {"Deconvolution", {forward, 1}}, {"_backward_Deconvolution", {deconvolution_backward, 2}}});
}

}  // namespace gluon_amp
