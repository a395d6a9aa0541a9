// Pooling on pieces of the batch, so that float32 scratch stays in the cache. Both passes have the same pieces,
// because the backward pass reads the indices of maxima piece by piece.
//
// If oneDNN uses its layout, plain 16-bit numbers are converted to it and back in one pass.
#include "dispatch/layout.h"
#include "operators/pieces.h"

namespace gluon_amp {
namespace {

constexpr int64_t kPiece = int64_t(1) << 18;  // the most floats of scratch of a piece: 1 MB

bool fits(const TBlob& x, const TBlob& y) {
  return is_16bit(x) && x.ndim() >= 3 && size(x) > 0 && size(y) > 0;
}

// The number of images of a piece.
int64_t images_in_a_piece(const TBlob& x, const TBlob& y) {
  const int64_t batch = x.shape_[0];
  return std::max<int64_t>(1, std::min(batch, kPiece / (2 * (size(x) + size(y)) / batch)));
}

// Widens a piece to floats in oneDNN's layout. `in_layout`: whether the piece is in it.
NDArray widened(const NDArray& holder, const TBlob& piece, bool in_layout) {
  if (!in_layout) return widened_images(1, holder, piece);
  NDArray wide = holder;
  widen(piece, floats(wide.data()));
  wide.CreateMKLDNNData(onednn_layout(piece.shape_, kTogether));
  return wide;
}

// oneDNN is ten times slower on plain arrays. Backward, the arguments are the gradients of the outputs, x, and
// the outputs. The last two are not read: x gives oneDNN its layout, and MXNet's own code ("full"
// averages with unequal padding) checks the type of the outputs.
bool run_in_layout(const Call& call, const TBlob& x, const TBlob& y) {
  if (!fits(x, y) || x.ndim() > 5 || !has_channels_first(call) || !uses_layout(x.shape_[1], 1) ||
      !prefers_onednn(call.op, call.attrs, call.in.size(), call.out.size()))
    return false;
  if (call.write(0) == kNothing) return true;
  const int64_t batch = x.shape_[0], some = images_in_a_piece(x, y);
  const size_t place_of_x = call.in.size() / 2;
  const std::lock_guard<std::mutex> mine(scratch_lock());
  for (int64_t first = 0; first < batch; first += some) {
    const auto piece = [&](const TBlob& all) { return images(all, first, some); };
    Scratch scratch;
    const TBlob result = piece(call.out[0]), read = piece(call.in[0]);
    std::vector<NDArray> in{widened(scratch.array(read.shape_), read, call.in_layout.input(0))};
    for (size_t i = 1; i < call.in.size(); ++i) {
      TBlob other = piece(call.in[i]);
      if (is_16bit(other)) other = {other.dptr_, other.shape_, mshadow::cpu::kDevMask, mshadow::kFloat32, 0};
      in.push_back(i == place_of_x ? scratch.array(other.shape_) : NDArray(other, 0));
      if (i == place_of_x) in[i].CreateMKLDNNData(onednn_layout(other.shape_, channels_together()));
    }
    std::vector<NDArray> out{scratch.array(result.shape_)};
    for (size_t i = 1; i < call.out.size(); ++i) out.emplace_back(piece(call.out[i]), 0);
    std::vector<OpReqType> req = call.req;
    req[0] = mxnet::kWriteTo;
    call.op.compute_ex(call.attrs, call.context, in, req, out);
    if (call.in_layout.output(0)) narrow_to_layout(out[0], result, call.write(0));
    else narrow(out[0], result, call.write(0));
  }
  return true;
}

bool run_any(const Call& call, const TBlob& x, const TBlob& y) {
  return run_in_layout(call, x, y) ||
         (!call.in_layout.any() && fits(x, y) && run_some_images(call, images_in_a_piece(x, y)));
}
bool forward(const Call& call) { return run_any(call, call.in[0], call.out[0]); }
bool backward(const Call& call) { return run_any(call, call.out[0], call.in[0]); }

}  // namespace

const AddRows rows{{{"Pooling", {forward, 0, kLayout}}, {"_backward_Pooling", {backward, 0, kLayout}}}};

}  // namespace gluon_amp
