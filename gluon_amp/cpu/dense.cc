// Dense layers of many rows, some rows at a time, so that their float32 scratch stays small.
#include "pieces.h"

namespace gluon_amp {
namespace {

constexpr int64_t kPiece = int64_t(1) << 20;  // floats of data that a piece may have: 4 MB

NDArray widened_rows(const NDArray& holder, const TBlob& piece) {
  NDArray made = holder.AsArray(piece.shape_, mshadow::kFloat32);
  kernels->widen(halves(piece), floats(made.data()), size(piece));
  return made;
}

bool run_dense(const Call& call, bool backward) {
  const TBlob& x = call.in[backward ? 1 : 0];
  const TBlob& y = backward ? call.in[0] : call.out[0];
  const TBlob& weight = call.in[backward ? 2 : 1];
  if (!all_half(call) || !call.of.compute_ex || size(x) == 0 || size(y) == 0) return false;
  const int64_t per_y = weight.shape_[0], per_x = weight.shape_[1], rows = size(x) / per_x;
  // oneDNN may rearrange the weight for each piece: a piece has more data than there are weights
  int64_t some = std::max(kPiece / ((backward ? 2 : 1) * per_x + per_y),
                          2 * size(weight) / (per_x + per_y));
  if (some >= rows) return false;
  const int64_t pieces = (rows + some - 1) / some;
  some = (rows + pieces - 1) / pieces;
  run_in_pieces(call, backward, {rows, per_x}, {rows, per_y}, some, some * per_x, some * per_y,
                widened_rows);
  return true;
}

bool forward(const Call& call) { return run_dense(call, false); }
bool backward(const Call& call) { return run_dense(call, true); }

}  // namespace

void add_dense(Rows& rows) {
  rows.insert({{"FullyConnected", {forward, 1}}, {"_backward_FullyConnected", {backward, 2}}});
}

}  // namespace gluon_amp
