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
  const std::lock_guard<std::mutex> mine(scratch_lock());
  Dense layer(rows, wide, high, has_bias ? &bias : nullptr);
  layer.parameters = type_in_memory(w);
  return run_layer(call, backward, layer);
}

bool onednn_rows(int pass, int64_t rows, int64_t outputs, int64_t inputs, const Number16* a, const Number16* b,
                 float* to, Product::Inside* read) {
  if (instructions() == Instructions::kNone) return false;
  Dense layer(rows, inputs, outputs, nullptr);
  layer.result = dnnl_f32;
  if (pass == kBackwardWeights) layer.parameters = dnnl_f32;
  const auto product = layer.product(pass);
  if (!product) return false;
  const auto array = [](const void* numbers, const Sizes& dims, int type) {
    return TBlob(const_cast<void*>(numbers), mxnet::TShape({dims[0], dims[1]}), mshadow::cpu::kDevMask, type, 0);
  };
  const auto bfloat16 = [&](const Number16* numbers, const Sizes& dims) {
    return array(numbers, dims, mshadow::kBfloat16);
  };
  const TBlob x = bfloat16(pass == kForward ? a : b, layer.x), y = bfloat16(a, layer.y), w = bfloat16(b, layer.w);
  const int to_is = pass == kForward ? DNNL_ARG_DST : pass == kBackwardData ? DNNL_ARG_DIFF_SRC : DNNL_ARG_DIFF_WEIGHTS;
  const TBlob wide = array(to, layer.sizes(to_is), mshadow::kFloat32);
  product->run({pass == kForward ? layer.operand(DNNL_ARG_SRC, x) : layer.operand(DNNL_ARG_DIFF_DST, y),
                pass == kBackwardWeights ? layer.operand(DNNL_ARG_SRC, x) : layer.operand(DNNL_ARG_WEIGHTS, w),
                layer.operand(to_is, wide, false, kStore)}, read);
  return true;
}

}  // namespace gluon_amp
