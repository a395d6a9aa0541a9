// Convolutions and deconvolutions, by images; deconvolutions with more weight than data, by
// channels. So float32 scratch stays in the cache.
//
// Plain 16-bit numbers are converted to oneDNN's layout and back in one pass.
#include <algorithm>

#include "dispatch/watch.h"
#include "onednn/onednn.h"
#include "operators/pieces.h"

namespace gluon_amp {
namespace {

constexpr int64_t kPiece = int64_t(1) << 21;  // the most floats of data in a piece: 8 MB
constexpr int64_t kWeights = int64_t(1) << 18;  // floats of a piece of the weight: 1 MB
constexpr int64_t kWhole = int64_t(1) << 20;    // floats that all such pieces read: 4 MB

int64_t groups_of(const Call& call) {
  return static_cast<int64_t>(number(call.attrs, "num_group", 1));
}

bool fits(const Call& call, const TBlob& data, bool backward) {
  return data.ndim() >= 3 && data.ndim() <= 5 && data.Size() > 0 && has_channels_first(call) &&
         (data_is_16bit(call, backward) || all_float(call));
}

bool run_by_images(const Call& call, bool backward) {
  const TBlob& x = call.in[backward ? 1 : 0];
  const TBlob& y = backward ? call.in[0] : call.out[0];
  const TBlob& weight = call.in[backward ? 2 : 1];
  if (!fits(call, x, backward) || y.Size() == 0 || !call.op.compute_ex) return false;
  const int64_t batch = x.shape_[0], per_x = size(x) / batch, per_y = size(y) / batch;
  int64_t images = kPiece / ((backward ? 2 : 1) * per_x + per_y);
  // oneDNN reorders the weights for each piece, so a piece has more data than there are weights
  images = std::max({images, int64_t(2), 2 * size(weight) / (per_x + per_y)});
  const int64_t pieces = std::max<int64_t>(1, batch / std::min(images, batch));
  images = (batch + pieces - 1) / pieces;

  const int64_t groups = groups_of(call);
  mxnet::TShape x_piece = x.shape_, y_piece = y.shape_;
  x_piece[0] = y_piece[0] = images;
  run_in_pieces(call, backward, x.shape_, y.shape_, images, room(x_piece), room(y_piece),
                [groups](const NDArray& holder, const TBlob& piece) {
                  return widened_images(groups, holder, piece);
                });
  return true;
}

// ---- some channels at a time

// A slice of an axis: `count` from `first` on. In memory it has contiguous rows.
struct Some {
  int axis;
  int64_t first, count;

  mxnet::TShape shape(const TBlob& all) const {
    mxnet::TShape shape = all.shape_;
    shape[axis] = count;
    return shape;
  }
  int64_t width(const TBlob& all) const {
    return all.shape_.ProdShape(axis + 1, all.ndim()) * count;
  }
  template <class F>
  void each_row(const TBlob& all, F f) const {
    const int64_t rows = all.shape_.ProdShape(0, axis), step = size(all) / rows;
    for_all(rows, watching() ? 0 : rows * width(all), [&](int64_t i) {
      f(i * width(all), i * step + first * (width(all) / count));
    });
  }
  NDArray widened(const NDArray& holder, const TBlob& all) const {
    float* const to = floats(holder.data());
    each_row(all, [&](int64_t in_part, int64_t in_all) {
      kernels_of(all)->widen(numbers16(all) + in_all, to + in_part, width(all));
    });
    return holder;
  }
  void narrow(const NDArray& sums, const TBlob& all, Write write) const {
    if (write == kNothing) return;
    const NDArray plain = sums.IsMKLDNNData() ? sums.Reorder2Default() : sums;
    const float* const from = floats(plain.data());
    each_row(all, [&](int64_t in_part, int64_t in_all) {
      gluon_amp::narrow(from + in_part, part(all, in_all, mxnet::TShape(1, width(all))), write);
    });
  }
};

// Runs a deconvolution on pieces of the outputs (forward) or of the inputs (backward), so that each piece has
// its of_piece sums. MXNet's code depends on the shapes of its arrays, not on num_filter.
bool run_by_channels(const Call& call, bool backward) {
  const TBlob &x = call.in[backward ? 1 : 0], &y = backward ? call.in[0] : call.out[0];
  const TBlob &weight = call.in[backward ? 2 : 1], &whole = backward ? y : x, &some_of = backward ? x : y;
  if (!fits(call, x, backward) || !all_16bit(call) || y.Size() == 0 || !call.op.compute_ex ||
      groups_of(call) != 1 || x.ndim() != 4)
    return false;
  const int64_t pieces = size(weight) / kWeights, channels = some_of.shape_[1], together = channels_together();
  if (pieces < 2 || room(whole.shape_) > kWhole) return false;
  const int64_t most = (channels + pieces * together - 1) / (pieces * together) * together;
  if (most >= channels) return false;

  const std::lock_guard<std::mutex> mine(scratch_lock());
  Scratch scratch;
  OpContext context = call.context;
  context.is_train = true;  // in predictions MXNet would reorder our scratch in a later task
  const NDArray read = widened_images(1, scratch.array(mxnet::TShape(1, room(whole.shape_))), whole);
  for (int64_t first = 0; first < channels; first += most) {
    const Some of_data{1, first, std::min(most, channels - first)};
    const Some of_weight{backward ? 0 : 1, first, of_data.count};
    const Some of_bias{0, first, of_data.count};
    Scratch of_piece;
    const auto wide = [&](const Some& some, const TBlob& all) {
      return some.widened(of_piece.array(some.shape(all)), all);
    };
    std::vector<NDArray> in{read}, out{of_piece.array(of_data.shape(some_of))};
    std::vector<OpReqType> req{call.write(0) == kNothing ? mxnet::kNullOp : mxnet::kWriteTo};
    if (backward) in.push_back(wide(of_data, x));
    in.push_back(wide(of_weight, weight));
    for (size_t i = in.size(); i < call.in.size(); ++i)
      in.push_back(wide(backward ? Some{0, 0, call.in[i].shape_[0]} : of_bias, call.in[i]));
    for (size_t i = 1; i < call.out.size(); ++i) {  // the bias's gradient comes with the first piece
      out.push_back(of_piece.array(i == 1 ? of_weight.shape(weight) : call.out[i].shape_));
      const bool wanted = call.write(i) != kNothing && (i == 1 || first == 0);
      req.push_back(wanted ? mxnet::kWriteTo : mxnet::kNullOp);
    }
    call.op.adapt_requests(req);
    call.op.compute_ex(call.attrs, context, in, req, out);
    of_data.narrow(out[0], call.out[0], call.write(0));
    if (out.size() > 1) of_weight.narrow(out[1], call.out[1], call.write(1));
    if (out.size() > 2 && first == 0) narrow(out[2], call.out[2], call.write(2));
  }
  return true;
}

bool by_onednn(const Call& call, bool backward) {
  return has_channels_first(call) && onednn_convolution(call, backward);
}

bool run_any(const Call& call, bool backward) {
  if (call.in_layout.any()) return by_onednn(call, backward);
  return by_onednn(call, backward) ||
         with_rounded_weight(call, backward ? 2 : 1,
                             [=](const Call& rounded) { return run_by_images(rounded, backward); });
}
bool forward(const Call& call) { return run_any(call, false); }
bool backward(const Call& call) { return run_any(call, true); }

bool deconvolution(const Call& call) {
  if (has_channels_first(call) && onednn_deconvolution(call, false)) return true;
  if (call.in_layout.any()) return false;
  return run_by_channels(call, false) || run_by_images(call, false);
}

// oneDNN has no primitive for the data gradient of a deconvolution from its layout to one channel; MXNet
// fails in float32 ("could not create a primitive descriptor"). MXNet's other code supports it.
bool deconvolution_backward(const Call& call) {
  if (has_channels_first(call) && onednn_deconvolution(call, true)) return true;
  if (call.in_layout.any()) return false;
  const TBlob &x = call.in[1], &y = call.in[0];
  const bool to_one = fits(call, x, true) && y.shape_[1] == 1 && uses_layout(x.shape_[1], 1);
  if (!to_one) return run_by_channels(call, true) || run_by_images(call, true);
  run(call, false, {}, nullptr, nullptr);
  return true;
}

}  // namespace

const AddRows rows{{{"Convolution", {forward, 1, kLayout}}, {"_backward_Convolution", {backward, 2, kLayout}},
                    {"Deconvolution", {deconvolution, 1, kLayout}},
                    {"_backward_Deconvolution", {deconvolution_backward, 2, kLayout}}}};

}  // namespace gluon_amp
