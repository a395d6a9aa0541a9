// Dense layers, by rows; with few rows and large weights, or with many more outputs than inputs,
// by outputs. So float32 scratch stays small and in the cache.
#include "dispatch/watch.h"
#include "onednn/onednn.h"
#include "operators/pieces.h"

namespace gluon_amp {
namespace {

constexpr int64_t kPiece = int64_t(1) << 20;  // the most floats of data in a piece: 4 MB
constexpr int64_t kHalf = int64_t(1) << 16;  // the least floats of a piece that is half of a prediction

NDArray widened_rows(const NDArray& holder, const TBlob& piece) {
  if (is_float(piece)) return NDArray(piece, 0);
  NDArray wide = holder.AsArray(piece.shape_, mshadow::kFloat32);
  widen(piece, floats(wide.data()));
  return wide;
}

bool run_dense(const Call& call, bool backward) {
  const TBlob& x = call.in[backward ? 1 : 0];
  const TBlob& y = backward ? call.in[0] : call.out[0];
  const TBlob& weight = call.in[backward ? 2 : 1];
  if (!data_is_16bit(call, backward) || !call.op.compute_ex || size(x) == 0 || size(y) == 0) return false;
  const int64_t per_y = weight.shape_[0], per_x = weight.shape_[1], rows = size(x) / per_x;
  // oneDNN may reorder the weight for each piece, so a piece has more data than there are weights
  int64_t some = std::max(kPiece / ((backward ? 2 : 1) * per_x + per_y),
                          2 * size(weight) / (per_x + per_y));
  // predictions save nothing for a backward pass, so their memory is mostly scratch
  const int64_t half = (rows + 1) / 2;
  if (some >= rows && !call.context.is_train &&
      half * (per_x + per_y) >= std::max(kHalf, 4 * size(weight)))
    some = half;
  if (some >= rows) return false;
  const int64_t pieces = (rows + some - 1) / some;
  some = (rows + pieces - 1) / pieces;
  run_in_pieces(call, backward, {rows, per_x}, {rows, per_y}, some, some * per_x, some * per_y,
                widened_rows);
  return true;
}

constexpr int64_t kWeights = int64_t(1) << 18;  // floats of a piece of the weight: 1 MB
constexpr int64_t kFewRows = 256;
// The outputs of a piece are a multiple of it: oneDNN is up to 3 times slower with other sizes.
constexpr int64_t kOutputs = 64;

// Runs pieces of the outputs: rows of the weight, and columns of y.
bool run_by_outputs(const Call& call, bool backward) {
  const size_t first_param = backward ? 2 : 1;
  const TBlob &x = call.in[first_param - 1], &weight = call.in[first_param];
  if (!data_is_16bit(call, backward) || !call.op.compute_ex || size(x) == 0 || size(weight) == 0) return false;
  const int64_t high = weight.shape_[0], wide = weight.shape_[1], rows = size(x) / wide;
  // many rows: if the result is large compared to the inputs of all pieces, as for a vocabulary
  const bool few = rows <= kFewRows;
  if (!few && (high < 4 * wide || size(x) > kPiece)) return false;
  const int64_t pieces = few ? size(weight) / kWeights : (size(weight) + rows * high) / kPiece;
  if (pieces < 2 || high < pieces) return false;
  // backward, each piece adds to the gradient of x, so it has more weights than x has numbers
  const int64_t least = std::max((high + pieces - 1) / pieces, backward && few ? 2 * rows : 0);
  const int64_t some = (least + kOutputs - 1) / kOutputs * kOutputs;
  if (some >= high) return false;
  const std::lock_guard<std::mutex> mine(scratch_lock());
  Scratch scratch;
  OpContext context = call.context;
  context.is_train = true;  // in predictions MXNet would reorder our scratch in a later task
  const NDArray all_x = widened_rows(scratch.array({rows, wide}), part(x, 0, {rows, wide}));
  NDArray dx = backward ? scratch.array({rows, wide}) : all_x;
  for (int64_t first = 0; first < high; first += some) {
    const int64_t n = std::min(some, high - first);
    Scratch of_piece;
    NDArray y = of_piece.array({rows, n});
    // of the weight or of the bias
    const auto piece = [=](const TBlob& all, bool weights) {
      return weights ? part(all, first * wide, {n, wide}) : part(all, first, mxnet::TShape(1, n));
    };
    std::vector<NDArray> in;
    if (backward) in.push_back(y);
    in.push_back(all_x);
    for (size_t i = first_param; i < call.in.size(); ++i) {
      const TBlob some_of = piece(call.in[i], i == first_param);
      in.push_back(widened_rows(of_piece.array(some_of.shape_), some_of));
    }
    std::vector<OpReqType> req{mxnet::kWriteTo};
    float* const columns = floats(y.data());
    if (!backward) {
      std::vector<NDArray> out{y};
      call.op.compute_ex(call.attrs, context, in, req, out);
      const NDArray result = out[0].IsMKLDNNData() ? out[0].Reorder2Default() : out[0];
      const auto* from = static_cast<const float*>(result.data().dptr_);
      count_exact(from, rows * n, 0, call.out[0].dptr_, call.out[0].type_flag_);
      for (int64_t i = 0; i < rows; ++i)
        kernels_of(call.out[0])->narrow(from + i * n, numbers16(call.out[0]) + i * high + first, n, call.write(0));
      continue;
    }
    for (int64_t i = 0; i < rows; ++i)
      kernels_of(call.in[0])->widen(numbers16(call.in[0]) + i * high + first, columns + i * n, n);
    std::vector<NDArray> out{dx};
    req[0] = call.write(0) == kNothing ? mxnet::kNullOp : first ? mxnet::kAddTo : mxnet::kWriteTo;
    for (size_t i = 1; i < call.out.size(); ++i) {
      out.push_back(of_piece.array(piece(call.out[i], i == 1).shape_));
      req.push_back(call.write(i) == kNothing ? mxnet::kNullOp : mxnet::kWriteTo);
    }
    call.op.adapt_requests(req);
    call.op.compute_ex(call.attrs, context, in, req, out);
    dx = out[0];
    for (size_t i = 1; i < call.out.size(); ++i)
      narrow(out[i], piece(call.out[i], i == 1), call.write(i));
  }
  if (backward) narrow(dx, part(call.out[0], 0, {rows, wide}), call.write(0));
  return true;
}

bool run_any(const Call& call, bool backward) {
  return onednn_dense(call, backward) ||
         with_rounded_weight(call, backward ? 2 : 1, [=](const Call& rounded) {
           return run_by_outputs(rounded, backward) || run_dense(rounded, backward);
         });
}
bool forward(const Call& call) { return run_any(call, false); }
bool backward(const Call& call) { return run_any(call, true); }

}  // namespace

const AddRows rows{{{"FullyConnected", {forward, 1}}, {"_backward_FullyConnected", {backward, 2}}}};

}  // namespace gluon_amp
