// Dense layers of many rows, some rows at a time, so that their float32 scratch stays small.
//
// The weight is widened once; its gradient is added up in float32 over the pieces and rounded once.
#include "own.h"

namespace gluon_amp {
namespace {

constexpr int64_t kPiece = int64_t(1) << 20;  // floats of data that a piece may have: 4 MB

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

  Lease lease;
  auto widened = [](NDArray into, const TBlob& from, int64_t first) {
    kernels->widen(halves(from) + first, floats(into.data()), into.shape().Size());
    return into;
  };
  auto part_of = [](NDArray holder, int64_t n, int64_t width) {
    holder.InvalidateMKLDNNData();
    return holder.AsArray(mxnet::TShape({n, width}), mshadow::kFloat32);
  };
  OpContext context = call.context;
  context.is_train = true;  // else MXNet reorders our scratch later, on its engine
  std::vector<NDArray> params, gradients;
  for (size_t i = backward ? 2 : 1; i < call.in.size(); ++i)
    params.push_back(widened(lease.array(call.in[i].shape_), call.in[i], 0));
  for (size_t i = 1; backward && i < call.out.size(); ++i)
    gradients.push_back(lease.array(call.out[i].shape_));
  const mxnet::TShape x_room(1, some * per_x), y_room(1, some * per_y);
  NDArray x_holder = lease.array(x_room), y_holder = lease.array(y_room),
          dx_holder = backward ? lease.array(x_room) : x_holder;
  for (int64_t first = 0; first < rows; first += some) {
    const int64_t n = std::min(some, rows - first), per = backward ? per_x : per_y;
    std::vector<NDArray> in, out;
    std::vector<OpReqType> req;
    if (backward) in.push_back(widened(part_of(y_holder, n, per_y), y, first * per_y));
    in.push_back(widened(part_of(x_holder, n, per_x), x, first * per_x));
    in.insert(in.end(), params.begin(), params.end());
    out.push_back(part_of(backward ? dx_holder : y_holder, n, per));
    req.push_back(call.write(0) == kNothing ? mxnet::kNullOp : mxnet::kWriteTo);
    for (size_t i = 0; i < gradients.size(); ++i) {
      out.push_back(gradients[i]);
      req.push_back(call.write(i + 1) == kNothing ? mxnet::kNullOp
                    : first                       ? mxnet::kAddTo
                                                  : mxnet::kWriteTo);
    }
    call.of.compute_ex(call.attrs, context, in, req, out);
    narrow(out[0], halves(call.out[0]) + first * per, mxnet::TShape({n, per}), call.write(0));
    for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = out[i + 1];
  }
  for (size_t i = 0; i < gradients.size(); ++i)
    narrow(gradients[i], call.out[i + 1], call.write(i + 1));
  return true;
}

bool forward(const Call& call) { return run_dense(call, false); }
bool backward(const Call& call) { return run_dense(call, true); }

}  // namespace

void add_dense(Rows& rows) {
  rows.insert({{"FullyConnected", {forward, 1}}, {"_backward_FullyConnected", {backward, 2}}});
}

}  // namespace gluon_amp
