// Poolings, some images at a time, so that their float32 scratch stays in the cache.
#include "pieces.h"

namespace gluon_amp {
namespace {

constexpr int64_t kPiece = int64_t(1) << 18;  // floats of scratch that a piece may have: 1 MB

// Some images of an array, whose first axis is the batch.
TBlob images_of(const TBlob& all, int64_t first, int64_t count) {
  mxnet::TShape shape = all.shape_;
  const int64_t image = size(all) / shape[0];
  shape[0] = count;
  return part(all, first * image, shape);
}

// A maximum's places, which the backward pass reads, lie by pieces: so both passes have the same.
bool run_pooling(const Call& call, const TBlob& x, const TBlob& y) {
  if (!is_half(x) || x.ndim() < 3 || size(x) == 0 || size(y) == 0) return false;
  const int64_t batch = x.shape_[0];
  const int64_t some = std::max<int64_t>(1, kPiece / (2 * (size(x) + size(y)) / batch));
  if (some >= batch) return false;
  for (int64_t first = 0; first < batch; first += some) {
    const int64_t count = std::min(some, batch - first);
    std::vector<TBlob> in, out;
    for (auto& array : call.in) in.push_back(images_of(array, first, count));
    for (auto& array : call.out) out.push_back(images_of(array, first, count));
    run({call.of, call.attrs, call.context, in, call.req, out, {}});
  }
  return true;
}

bool forward(const Call& call) { return run_pooling(call, call.in[0], call.out[0]); }
bool backward(const Call& call) { return run_pooling(call, call.out[0], call.in[0]); }

}  // namespace

void add_pooling(Rows& rows) {
  rows.insert({{"Pooling", {forward, 0}}, {"_backward_Pooling", {backward, 0}}});
}

}  // namespace gluon_amp
