// Replaces GPU functions of MXNet, if the wheel has code for GPUs.
//
// - The state of MXNet's Dropout records that values were dropped, and its backward pass resets the record. A
//   second backward pass through the same graph would drop nothing. Here the record stays.
// - A channels-last convolution with the setting `plain_weight` reads a weight in MXNet's order, without a
//   transpose (graph/channels_last.py), and so does its backward pass.
// - batch_dot of float16 arrays with the setting `float32_sums` accumulates in float32, like all other float16 products;
//   MXNet's accumulates in float16.
#include <algorithm>
#include <limits>

#include "dispatch/attributes.h"
#include "gpu.h"

// From the libraries that libmxnet.so loads; null in a build for CPUs.
extern "C" __attribute__((weak)) int cublasGemmStridedBatchedEx(
    void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,
    const void* a, int a_type, int lda, long long a_stride, const void* b, int b_type, int ldb,
    long long b_stride, const void* beta, void* c, int c_type, int ldc, long long c_stride, int batch,
    int compute, int algorithm);
extern "C" __attribute__((weak)) int cublasGetStream_v2(void* handle, void** stream);

namespace gluon_amp {
namespace {

// ---- Dropout -----------------------------------------------------------------------

// The first members of MXNet's DropoutOp (src/operator/nn/dropout-inl.h); `dropout_fits` checks them.
struct DropoutState {
  float keep;
  int mode;
  mxnet::TShape axes;
  bool passes;  // nothing was dropped
};

// ---- batch_dot ---------------------------------------------------------------------

constexpr int kFloat16Data = 2, kSumsInFloat32 = 68, kTensorCores = 99;  // cuBLAS's numbers, CUDA 11

// cuBLAS matrices are column-major, so it multiplies the transposed matrices in reverse order.
void batch_dot(const NodeAttrs& attrs, const OpContext& context, const TBlob& a, const TBlob& b,
               OpReqType req, const TBlob& c) {
  const bool ta = flag(attrs, "transpose_a", false), tb = flag(attrs, "transpose_b", false);
  const auto rows = [](const TBlob& x) { return x.shape_[x.ndim() - 2]; };
  const auto columns = [](const TBlob& x) { return x.shape_[x.ndim() - 1]; };
  const int64_t batch = size(c) / (rows(c) * columns(c));
  for (const TBlob* x : {&a, &b, &c})
    if (std::max({rows(*x), columns(*x), batch}) > std::numeric_limits<int>::max())
      throw dmlc::Error("batch_dot: a dimension exceeds cuBLAS's 2^31 - 1");
  const auto* on = static_cast<const GpuStream*>(context.run_ctx.stream);
  void* stream = nullptr;
  if (cublasGetStream_v2(on->cublas, &stream) || stream != on->stream)
    throw dmlc::Error("batch_dot: MXNet's GPU stream has other members than in MXNet 1.9.1");
  const float one = 1, beta = req == mxnet::kAddTo ? 1 : 0;
  const int status = cublasGemmStridedBatchedEx(
      on->cublas, tb, ta, columns(c), rows(c),
      tb ? columns(b) : rows(b), &one, b.dptr_, kFloat16Data, columns(b), rows(b) * columns(b), a.dptr_, kFloat16Data,
      columns(a), rows(a) * columns(a), &beta, c.dptr_, kFloat16Data, columns(c), rows(c) * columns(c), batch,
      kSumsInFloat32, kTensorCores);
  if (status) throw dmlc::Error("batch_dot: cuBLAS status " + std::to_string(status));
}

void add_in_float32(nnvm::Op& op) {
  if (!get<mxnet::FCompute>(&op, "FCompute<gpu>")) return;
  if (!cublasGemmStridedBatchedEx) throw dmlc::Error("cuBLAS lacks cublasGemmStridedBatchedEx");
  if (!cublasGetStream_v2) throw dmlc::Error("cuBLAS lacks cublasGetStream_v2");
  replace<mxnet::FCompute>(
      op, "FCompute<gpu>",
      [](const auto& original, const auto& attrs, const auto& context, const auto& in, const auto& req,
         const auto& out) {
        if (!is_16bit(out[0]) || !settings_of(attrs).float32_sums || !size(in[0]) || !size(in[1]))
          return original(attrs, context, in, req, out);
        if (req[0] != mxnet::kNullOp) batch_dot(attrs, context, in[0], in[1], req[0], out[0]);
      });
}

// ---- Convolution -------------------------------------------------------------------

// The shapes of a weight: outputs x inputs x height x width in MXNet's order, outputs x height x width x inputs
// channels-last. With one input or one pixel, both are the same memory.
mxnet::TShape channels_last(const mxnet::TShape& w) { return mxnet::TShape({w[0], w[2], w[3], w[1]}); }
mxnet::TShape channels_first(const mxnet::TShape& w) { return mxnet::TShape({w[0], w[3], w[1], w[2]}); }

TBlob channels_last(const TBlob& weight) {
  const mxnet::TShape& shape = weight.shape_;
  if (shape[1] != 1 && shape[2] * shape[3] != 1)
    throw dmlc::Error("convolution: a weight with several inputs and pixels needs a transpose");
  return TBlob(weight.dptr_, channels_last(shape), weight.dev_mask(), weight.type_flag_, weight.dev_id());
}

mxnet::FInferShape& mxnets_shapes() {
  static auto* function = new mxnet::FInferShape;
  return *function;
}

bool shapes_in_mxnets_order(const NodeAttrs& attrs, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  if (!settings_of(attrs).plain_weight) return call_original(mxnets_shapes(), attrs, in, out);
  mxnet::TShape& weight = (*in)[1];
  if (weight.ndim() == 4) weight = channels_last(weight);
  const bool done = call_original(mxnets_shapes(), attrs, in, out);
  if (weight.ndim() == 4) weight = channels_first(weight);
  return done;
}

// The weight is among the inputs; `gradient`: its gradient among the outputs, or -1.
void read_mxnets_order(nnvm::Op& op, size_t weight, int gradient) {
  replace<mxnet::FCompute>(
      op, "FCompute<gpu>",
      [=](const auto& original, const NodeAttrs& attrs, const auto& context, const std::vector<TBlob>& in,
          const auto& req, const std::vector<TBlob>& out) {
        if (!settings_of(attrs).plain_weight) return original(attrs, context, in, req, out);
        std::vector<TBlob> inputs = in, outputs = out;
        inputs[weight] = channels_last(in[weight]);
        if (gradient >= 0) outputs[gradient] = channels_last(out[gradient]);
        original(attrs, context, inputs, req, outputs);
      });
}

}  // namespace

OpStatePtr dropout_state() {
  const nnvm::Op* op = nnvm::Op::Get("Dropout");
  const nnvm::ObjectPtr node = make_node(op, {{"p", "0.25"}, {"mode", "always"}, {"axes", "(1, 2)"}});
  return call_original(*get<mxnet::FCreateOpState>(op, "FCreateOpState"), node->attrs, mxnet::Context::CPU(),
                     mxnet::ShapeVector{mxnet::TShape({2, 3, 5})}, std::vector<int>{mshadow::kFloat32});
}

int dropout_fits(const unsigned char* state) {
  const auto* members = reinterpret_cast<const DropoutState*>(state);
  return members->keep == 0.75f && members->mode == 1 && members->axes == mxnet::TShape({1, 2}) &&
         state[offsetof(DropoutState, passes)] == 1;
}

void keep_masks() {
  replace<mxnet::FStatefulCompute>(
      op_named("_backward_Dropout"), "FStatefulCompute<gpu>",
      [](const auto& original, const OpStatePtr& state, const auto&... call) {
        bool& passes = static_cast<DropoutState*>(pointer_in(state)->state)->passes;
        const bool passed = passes;
        original(state, call...);
        passes = passed;
      });
}

void replace_gpu_functions() {
  add_in_float32(op_named("batch_dot"));
  nnvm::Op& convolution = op_named("Convolution");
  mxnets_shapes() = *get<mxnet::FInferShape>(&convolution, "FInferShape");
  set<mxnet::FInferShape>(convolution, "FInferShape", by_value(&shapes_in_mxnets_order));
  read_mxnets_order(convolution, 1, -1);
  read_mxnets_order(op_named("_backward_Convolution"), 2, 1);
}

}  // namespace gluon_amp
