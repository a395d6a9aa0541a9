// Poolings, some images at a time, so that their float32 scratch stays in the cache: both passes have
// the same pieces, since the places of maxima, which the backward pass reads, lie by pieces.
//
// Where oneDNN keeps the channels in blocks, data goes straight from plain halves into those and back.
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

// oneDNN takes ten times as long for plain arrays. Backward, the arguments are the gradients of the
// outputs, x, and the outputs. The last two are not read: x's blocks tell oneDNN how the places lie, and
// the outputs' type is checked where MXNet's own code runs ("full" averages with unequal padding).
bool run_in_blocks(const Call& call, const TBlob& x, const TBlob& y) {
  if (!fits(x, y) || x.ndim() > 5 || !has_channels_first(call) || !in_blocks_of(x.shape_[1], 1) ||
      !prefers_onednn(call.of, call.attrs, call.in.size(), call.out.size()))
    return false;
  if (call.write(0) == kNothing) return true;
  const int64_t batch = x.shape_[0], some = images_in_a_piece(x, y);
  const size_t place_of_x = call.in.size() / 2;
  const std::lock_guard<std::mutex> mine(turn());
  for (int64_t first = 0; first < batch; first += some) {
    const auto piece = [&](const TBlob& all) { return images(all, first, some); };
    Lease lease;
    const TBlob result = piece(call.out[0]), read = piece(call.in[0]);
    std::vector<NDArray> in{widened_images(1, lease.array(read.shape_), read)};
    for (size_t i = 1; i < call.in.size(); ++i) {
      TBlob other = piece(call.in[i]);
      if (is_half(other)) other = {other.dptr_, other.shape_, mshadow::cpu::kDevMask, mshadow::kFloat32, 0};
      in.push_back(i == place_of_x ? lease.array(other.shape_) : NDArray(other, 0));
      if (i == place_of_x) in[i].CreateMKLDNNData(in_blocks(other.shape_, block_size()));
    }
    std::vector<NDArray> out{lease.array(result.shape_)};
    for (size_t i = 1; i < call.out.size(); ++i) out.emplace_back(piece(call.out[i]), 0);
    std::vector<OpReqType> req = call.req;
    req[0] = mxnet::kWriteTo;
    call.of.compute_ex(call.attrs, call.context, in, req, out);
    narrow(out[0], result, call.write(0));
  }
  return true;
}

// Plain arrays.
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
  kernels_of(x)->max_pool({x.shape_[0] * x.shape_[1], x.shape_[2], x.shape_[3], y.shape_[2], y.shape_[3],
                     kernel[0], kernel[1], stride[0], stride[1], pad[0], pad[1]},
                    halves(x), halves(y), call.write(0));
  return true;
}

bool forward(const Call& call) {
  const TBlob &x = call.in[0], &y = call.out[0];
  return run_maximum(call) || run_in_blocks(call, x, y) || run_pooling(call, x, y);
}

bool backward(const Call& call) {
  const TBlob &x = call.out[0], &y = call.in[0];
  return run_in_blocks(call, x, y) || run_pooling(call, x, y);
}

}  // namespace

void add_pooling(Rows& rows) {
  rows.insert({{"Pooling", {forward, 0}}, {"_backward_Pooling", {backward, 0}}});
}

}  // namespace gluon_amp
