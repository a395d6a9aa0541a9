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
  const std::string layout = word(call.attrs, "layout", "None");
  return data.ndim() >= 3 && data.ndim() <= 5 && data.Size() > 0 &&
         (layout == "None" || layout.compare(0, 2, "NC") == 0) &&
         (all_half(call) || all_float(call));
}

// Whether oneDNN keeps so many channels in blocks.
bool in_blocks_of(int64_t channels, int64_t groups) {
  const int block = block_size();
  if (groups > 1 && groups != channels) return channels / groups % block == 0;
  return channels % block == 0;
}

// As many floats as a piece takes, in oneDNN's blocks, too.
int64_t room(const mxnet::TShape& shape) {
  const int64_t block = block_size();
  return shape.Size() / shape[1] * ((shape[1] + block - 1) / block * block);
}

NDArray widened_images(int64_t groups, const NDArray& holder, const TBlob& piece) {
  const mxnet::TShape& shape = piece.shape_;
  const bool blocks = in_blocks_of(shape[1], groups);
  if (!blocks && is_float(piece)) return NDArray(piece, 0);
  NDArray made = holder.AsArray(shape, mshadow::kFloat32);
  float* to = floats(made.data());
  if (!blocks) {
    kernels->widen(halves(piece), to, size(piece));
    return made;
  }
  const int64_t plane = size(piece) / (shape[0] * shape[1]);
  if (is_half(piece))
    kernels->widen_blocked(halves(piece), to, shape[0], shape[1], plane, block_size());
  else
    kernels->block_floats(floats(piece), to, shape[0], shape[1], plane, block_size());
  made.CreateMKLDNNData(in_blocks(shape, block_size()));
  return made;
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

}  // namespace

void add_convolution(Rows& rows) {
  rows.insert({{"Convolution", {forward, 1}}, {"_backward_Convolution", {backward, 2}},
               {"Deconvolution", {forward, 1}}, {"_backward_Deconvolution", {backward, 2}}});
}

}  // namespace gluon_amp
