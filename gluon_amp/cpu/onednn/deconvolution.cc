// Deconvolutions by oneDNN.
#include <numeric>

#include "dispatch/layout.h"
#include "dispatch/watch.h"
#include "onednn/layers.h"
#include "onednn/onednn.h"

namespace gluon_amp {

// A deconvolution is the backward pass of a convolution from its result to its data.
bool onednn_deconvolution(const Call& call, bool backward) {
  const TBlob &x = call.in[backward ? 1 : 0], &w = call.in[backward ? 2 : 1];
  const TBlob& y = backward ? call.in[0] : call.out[0];
  if (!multiplies_images(call, x, w, y) || !all_16bit(call) || !numbers(call.attrs, "target_shape").empty())
    return false;
  const bool has_bias = (backward ? call.out : call.in).size() > 2;
  const int64_t channels = y.shape_[1], images = y.shape_[0], places = size(y) / (images * channels);
  Convolution layer(call, y, w, x, nullptr);
  const std::lock_guard<std::mutex> mine(scratch_lock());
  Scratch scratch;
  if (!backward) {
    if (call.write(0) == kNothing) return true;
    if (has_bias) layer.result = dnnl_f32;
    const auto product = layer.product(kBackwardData);
    if (!product) return false;
    const NDArray sums = has_bias ? scratch.array(y.shape_) : NDArray();
    const TBlob& to = has_bias ? sums.data() : y;
    const bool in_layout = call.in_layout.output(0);
    product->run({layer.operand(DNNL_ARG_DIFF_DST, x, call.in_layout.input(0)), layer.operand(DNNL_ARG_WEIGHTS, w),
                  layer.operand(DNNL_ARG_DIFF_SRC, to, in_layout, has_bias ? kStore : call.write(0))});
    if (!has_bias) return true;
    std::vector<float> bias(channels);
    widen(call.in[2], bias.data());
    const int64_t together = in_layout ? kTogether : 1;  // adjacent channels
    for_all(images * channels / together, size(y), [&](int64_t i) {
      float* const row = floats(to) + i * places * together;
      const float* const added = &bias[i * together % channels];
      for (int64_t k = 0; k < places * together; ++k) row[k] += added[k % together];
    });
    narrow(floats(to), y, call.write(0));
    return true;
  }
  const auto data = call.write(0) != kNothing ? layer.product(kForward) : nullptr;
  const auto weight = call.write(1) != kNothing ? layer.product(kBackwardWeights) : nullptr;
  if ((call.write(0) != kNothing && !data) || (call.write(1) != kNothing && !weight)) return false;
  if (has_bias && call.write(2) != kNothing) {
    const NDArray sums = scratch.array(call.out[2].shape_);
    const Number16* gradients = numbers16(y);
    if (call.in_layout.input(0)) {
      Number16* const plain = scratch.numbers16(size(y));
      to_plain(y, plain);
      gradients = plain;
    }
    for_all(channels, size(y), [&](int64_t channel) {
      std::vector<float> row(places);
      double sum = 0;
      for (int64_t image = 0; image < images; ++image) {
        kernels_of(y)->widen(gradients + (image * channels + channel) * places, row.data(), places);
        sum = std::accumulate(row.begin(), row.end(), sum);
      }
      floats(sums.data())[channel] = static_cast<float>(sum);
    });
    narrow(sums, call.out[2], call.write(2));
  }
  Product::Inside read;
  // first the weight: the gradient of x may lie on that of y
  if (weight)
    weight->run({layer.operand(DNNL_ARG_SRC, y, call.in_layout.input(0)),
                 layer.operand(DNNL_ARG_DIFF_DST, x, call.in_layout.input(1)),
                 layer.operand(DNNL_ARG_DIFF_WEIGHTS, call.out[1], false, call.write(1))}, &read);
  if (data)
    data->run({layer.operand(DNNL_ARG_SRC, y, call.in_layout.input(0)), layer.operand(DNNL_ARG_WEIGHTS, w),
               layer.operand(DNNL_ARG_DST, call.out[0], call.in_layout.output(0), call.write(0))}, &read);
  return true;
}

}  // namespace gluon_amp
