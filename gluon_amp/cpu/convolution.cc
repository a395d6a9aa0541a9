// Convolutions, some images at a time, so that their float32 scratch stays in the cache.
//
// Data goes straight from plain halves into oneDNN's blocks of channels and back. Weights are
// widened once; their gradient is added up in float32 over the pieces and rounded once.
#include <algorithm>

#include "own.h"

namespace gluon_amp {
namespace {

constexpr int64_t kPiece = int64_t(1) << 21;  // floats of data that a piece may have: 8 MB

bool fits(const Call& call, const TBlob& data) {
  const std::string layout = word(call.attrs, "layout", "None");
  return data.ndim() == 4 && (layout == "None" || layout == "NCHW") && data.Size() > 0 &&
         std::all_of(call.in.begin(), call.in.end(), is_half) &&
         std::all_of(call.out.begin(), call.out.end(), is_half);
}

// Whether oneDNN keeps so many channels in blocks.
bool in_blocks_of(int64_t channels, int64_t groups) {
  const int block = block_size();
  if (groups > 1 && groups != channels) return channels / groups % block == 0;
  return channels % block == 0;
}

// As many floats as a piece takes, in oneDNN's blocks, too.
mxnet::TShape room(const mxnet::TShape& shape) {
  const int64_t block = block_size();
  return mxnet::TShape(1, shape.Size() / shape[1] * ((shape[1] + block - 1) / block * block));
}

struct Convolution {
  const Call& call;
  const int64_t groups;
  Lease lease;

  explicit Convolution(const Call& c)
      : call(c), groups(static_cast<int64_t>(number(c.attrs, "num_group", 1))) {}

  NDArray whole(const TBlob& from) {
    NDArray made = lease.array(from.shape_);
    kernels->widen(halves(from), floats(made.data()), size(from));
    return made;
  }

  // A piece of an array, images `first` and on, as float32 in `holder`.
  NDArray widen_piece(NDArray holder, const TBlob& from, const mxnet::TShape& shape,
                      int64_t first) {
    holder.InvalidateMKLDNNData();
    NDArray made = holder.AsArray(shape, mshadow::kFloat32);
    const Half* x = halves(from) + first * (size(from) / from.shape_[0]);
    if (in_blocks_of(shape[1], groups)) {
      kernels->widen_blocked(x, floats(made.data()), shape[0], shape[1], shape[2] * shape[3],
                             block_size());
      made.CreateMKLDNNData(in_blocks(shape, block_size()));
    } else {
      kernels->widen(x, floats(made.data()), shape.Size());
    }
    return made;
  }
};

bool run_convolution(const Call& call, bool backward) {
  const TBlob& x = call.in[backward ? 1 : 0];
  const TBlob& y = backward ? call.in[0] : call.out[0];
  const TBlob& weight = call.in[backward ? 2 : 1];
  if (!fits(call, x) || y.ndim() != 4 || y.Size() == 0 || !call.of.compute_ex) return false;
  const int64_t batch = x.shape_[0], per_x = size(x) / batch, per_y = size(y) / batch;
  int64_t images = kPiece / ((backward ? 2 : 1) * per_x + per_y);
  // oneDNN rearranges the weights for each piece: a piece has more data than there are weights
  images = std::max({images, int64_t(2), 2 * size(weight) / (per_x + per_y)});
  const int64_t pieces = std::max<int64_t>(1, batch / std::min(images, batch));
  images = (batch + pieces - 1) / pieces;

  Convolution work(call);
  OpContext context = call.context;
  context.is_train = true;  // else MXNet reorders our scratch later, on its engine
  std::vector<NDArray> params, gradients;
  for (size_t i = backward ? 2 : 1; i < call.in.size(); ++i)
    params.push_back(work.whole(call.in[i]));
  for (size_t i = 1; backward && i < call.out.size(); ++i)
    gradients.push_back(work.lease.array(call.out[i].shape_));
  mxnet::TShape x_shape = x.shape_, y_shape = y.shape_;
  x_shape[0] = y_shape[0] = images;
  NDArray x_holder = work.lease.array(room(x_shape)), y_holder = work.lease.array(room(y_shape)),
          dx_holder = backward ? work.lease.array(room(x_shape)) : x_holder;
  for (int64_t first = 0; first < batch; first += images) {
    x_shape[0] = y_shape[0] = std::min(images, batch - first);
    std::vector<NDArray> in, out;
    std::vector<OpReqType> req;
    if (backward) in.push_back(work.widen_piece(y_holder, y, y_shape, first));
    in.push_back(work.widen_piece(x_holder, x, x_shape, first));
    in.insert(in.end(), params.begin(), params.end());
    NDArray target = backward ? dx_holder : y_holder;
    target.InvalidateMKLDNNData();
    out.push_back(target.AsArray(backward ? x_shape : y_shape, mshadow::kFloat32));
    req.push_back(call.write(0) == kNothing ? mxnet::kNullOp : mxnet::kWriteTo);
    for (size_t i = 0; i < gradients.size(); ++i) {
      out.push_back(gradients[i]);
      req.push_back(call.write(i + 1) == kNothing ? mxnet::kNullOp
                    : first                       ? mxnet::kAddTo
                                                  : mxnet::kWriteTo);
    }
    call.of.compute_ex(call.attrs, context, in, req, out);
    const int64_t per = backward ? per_x : per_y;
    narrow(out[0], halves(call.out[0]) + first * per, backward ? x_shape : y_shape,
           call.write(0));
    for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = out[i + 1];
  }
  for (size_t i = 0; i < gradients.size(); ++i)
    narrow(gradients[i], call.out[i + 1], call.write(i + 1));
  return true;
}

bool forward(const Call& call) { return run_convolution(call, false); }
bool backward(const Call& call) { return run_convolution(call, true); }

}  // namespace

void add_convolution(Rows& rows) {
  rows.insert({{"Convolution", {forward, 1}}, {"_backward_Convolution", {backward, 2}}});
}

}  // namespace gluon_amp
