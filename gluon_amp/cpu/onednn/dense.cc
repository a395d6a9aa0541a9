// Dense layers by oneDNN.
#include "onednn/layers.h"
#include "onednn/onednn.h"

namespace gluon_amp {

bool onednn_dense(const Call& call, bool backward) {
  const TBlob &x = call.in[backward ? 1 : 0], &w = call.in[backward ? 2 : 1];
  if (!multiplies_layer(call, w) || size(x) == 0 || size(w) == 0) return false;
  const int64_t high = w.shape_[0], wide = w.shape_[1], rows = size(x) / wide;
  const bool has_bias = (backward ? call.out : call.in).size() > 2;
  const Sizes bias{high};
  const std::lock_guard<std::mutex> mine(turn());
  Dense layer(rows, wide, high, has_bias ? &bias : nullptr);
  layer.parameters = type_in_memory(w);
  return run_layer(call, backward, layer);
}

bool onednn_rows(DensePass of, int64_t rows, int64_t outputs, int64_t inputs, const Half* a, const Half* b,
                 float* to, Product::Inside* read) {
  if (instructions() == Instructions::kNone) return false;
  Dense layer(rows, inputs, outputs, nullptr);
  layer.result = dnnl_f32;
  if (of == DensePass::kWeight) layer.parameters = dnnl_f32;
  const int pass = of == DensePass::kForward ? kForward : of == DensePass::kData ? kBackwardData
                                                                                 : kBackwardWeights;
  const auto product = layer.product(pass);
  if (!product) return false;
  const auto array = [](const void* numbers, const Sizes& dims, int type) {
    return TBlob(const_cast<void*>(numbers), mxnet::TShape({dims[0], dims[1]}), mshadow::cpu::kDevMask, type, 0);
  };
  const Sizes& made = pass == kForward ? layer.y : pass == kBackwardData ? layer.x : layer.w;
  const Sizes& first = pass == kForward ? layer.x : layer.y;
  const Sizes& second = pass == kBackwardWeights ? layer.x : layer.w;
  const TBlob to_array = array(to, made, mshadow::kFloat32), a_array = array(a, first, mshadow::kBfloat16),
              b_array = array(b, second, mshadow::kBfloat16);
  const int to_is[] = {DNNL_ARG_DST, DNNL_ARG_DIFF_SRC, DNNL_ARG_DIFF_WEIGHTS};
  product->run({{pass == kForward ? DNNL_ARG_SRC : DNNL_ARG_DIFF_DST, a_array, plain_layout(first)},
                {pass == kBackwardWeights ? DNNL_ARG_SRC : DNNL_ARG_WEIGHTS, b_array, plain_layout(second)},
                {to_is[static_cast<int>(of)], to_array, plain_layout(made, dnnl_f32), kStore}}, read);
  return true;
}

}  // namespace gluon_amp
