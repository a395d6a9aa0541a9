// Layers with weights on pieces of the batch, shared by convolutions and dense layers.
#include "operators/pieces.h"

namespace gluon_amp {

TBlob part(const TBlob& whole, int64_t first, const mxnet::TShape& shape) {
  return TBlob(at(whole, first), shape, mshadow::cpu::kDevMask, whole.type_flag_, 0);
}

TBlob images(const TBlob& all, int64_t first, int64_t most) {
  mxnet::TShape shape = all.shape_;
  const int64_t per_image = size(all) / shape[0];
  shape[0] = std::min<int64_t>(most, shape[0] - first);
  return part(all, first * per_image, shape);
}

bool run_some_images(const Call& call, int64_t some) {
  const int64_t batch = call.in[0].ndim() > 0 ? call.in[0].shape_[0] : 0;
  const auto differs = [batch](const TBlob& array) {
    return array.ndim() == 0 || array.shape_[0] != batch;
  };
  if (some >= batch || std::any_of(call.in.begin(), call.in.end(), differs) ||
      std::any_of(call.out.begin(), call.out.end(), differs))
    return false;
  for (int64_t first = 0; first < batch; first += some) {
    std::vector<TBlob> in, out;
    for (auto& array : call.in) in.push_back(images(array, first, some));
    for (auto& array : call.out) out.push_back(images(array, first, some));
    run(call.on(in, call.req, out));
  }
  return true;
}

bool has_channels_first(const Call& call) {
  const std::string layout = word(call.attrs, "layout", "None");
  return layout == "None" || layout.compare(0, 2, "NC") == 0;
}

bool uses_layout(int64_t channels, int64_t groups) {
  const int together = channels_together();
  if (groups > 1 && groups != channels) return channels / groups % together == 0;
  return channels % together == 0;
}

int64_t room(const mxnet::TShape& shape) {
  const int64_t together = channels_together();
  return shape.Size() / shape[1] * ((shape[1] + together - 1) / together * together);
}

NDArray widened_images(int64_t groups, const NDArray& holder, const TBlob& piece) {
  const mxnet::TShape& shape = piece.shape_;
  const bool in_layout = uses_layout(shape[1], groups);
  if (!in_layout && is_float(piece)) return NDArray(piece, 0);
  NDArray array = holder.AsArray(shape, mshadow::kFloat32);
  float* to = floats(array.data());
  if (!in_layout) {
    widen(piece, to);
    return array;
  }
  const int64_t plane = size(piece) / (shape[0] * shape[1]);
  kernels_of(piece)->widen_to_layout(piece.dptr_, to, shape[0], shape[1], plane, channels_together());
  array.CreateMKLDNNData(onednn_layout(shape, channels_together()));
  return array;
}

void run_in_pieces(const Call& call, bool backward, mxnet::TShape x, mxnet::TShape y, int64_t some,
                   int64_t x_room, int64_t y_room, const Widen& widen) {
  const int64_t all = x[0], per_x = x.Size() / all, per_y = y.Size() / all;
  const std::lock_guard<std::mutex> mine(scratch_lock());
  Scratch scratch;
  OpContext context = call.context;
  context.is_train = true;  // in predictions MXNet would reorder our scratch in a later task
  std::vector<NDArray> params, gradients;
  for (size_t i = backward ? 2 : 1; i < call.in.size(); ++i) {
    if (is_float(call.in[i])) {
      params.emplace_back(call.in[i], 0);
      continue;
    }
    params.push_back(scratch.array(call.in[i].shape_));
    gluon_amp::widen(call.in[i], floats(params.back().data()));
  }
  for (size_t i = 1; backward && i < call.out.size(); ++i)
    gradients.push_back(scratch.array(call.out[i].shape_));
  const mxnet::TShape x_holds(1, x_room), y_holds(1, y_room);
  NDArray x_holder = scratch.array(x_holds), y_holder = scratch.array(y_holds),
          dx_holder = backward ? scratch.array(x_holds) : x_holder;
  for (int64_t first = 0; first < all; first += some) {
    x[0] = y[0] = std::min(some, all - first);
    auto piece = [&](NDArray& holder, const TBlob& from, int64_t per, const mxnet::TShape& shape) {
      holder.InvalidateMKLDNNData();
      return widen(holder, part(from, first * per, shape));
    };
    std::vector<NDArray> in, out;
    std::vector<OpReqType> req;
    if (backward) in.push_back(piece(y_holder, call.in[0], per_y, y));
    in.push_back(piece(x_holder, call.in[backward ? 1 : 0], per_x, x));
    for (auto& param : params) in.push_back(param);
    const mxnet::TShape& result_shape = backward ? x : y;
    NDArray& target = backward ? dx_holder : y_holder;
    target.InvalidateMKLDNNData();
    out.push_back(target.AsArray(result_shape, mshadow::kFloat32));
    req.push_back(call.write(0) == kNothing ? mxnet::kNullOp : mxnet::kWriteTo);
    for (size_t i = 0; i < gradients.size(); ++i) {
      out.push_back(gradients[i]);
      req.push_back(call.write(i + 1) == kNothing ? mxnet::kNullOp
                    : first                       ? mxnet::kAddTo
                                                  : mxnet::kWriteTo);
    }
    call.op.adapt_requests(req);
    call.op.compute_ex(call.attrs, context, in, req, out);
    narrow(out[0], part(call.out[0], first * (backward ? per_x : per_y), result_shape), call.write(0));
    for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = out[i + 1];
  }
  for (size_t i = 0; i < gradients.size(); ++i)
    narrow(gradients[i], call.out[i + 1], call.write(i + 1));
}

}  // namespace gluon_amp
