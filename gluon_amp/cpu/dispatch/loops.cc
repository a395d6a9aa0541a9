// MXNet's while_loop and cond without uninitialized results, on CPUs and GPUs.
//
// - Rows of while_loop's outputs beyond its last iteration are 0. MXNet does not write them, but layers behind
//   the loop compute them, and X-rays count them.
// - Gradients that MXNet does not write are 0: those of inputs that only the condition or the other branch
//   reads, and all of a loop without iterations.
// - If the first value of a loop variable has no gradient, MXNet does not write the variable's gradient in later
//   iterations either, but reads it. Here it is computed. So an Embedding of a loop variable gets a request for
//   the gradient of its indices, which is 0; MXNet raises an error.
#include "dispatch/repairs.h"

namespace gluon_amp {
namespace {

// The last members of mxnet::op::WhileLoopState (src/operator/control_flow.cc). Before them are three vectors,
// a CachedOpPtr, a Symbol, and an nnvm::Graph (native.h, 5).
struct WhileLoop {
  int inputs_and_bodies, outputs, stacked, most;  // the first `stacked` outputs have a row for each iteration
  mxnet::Tuple<int64_t> condition_inputs, body_inputs, variables;
  size_t iterations;
};
constexpr size_t kWhileLoop = 4 * sizeof(std::vector<int>) + sizeof(std::shared_ptr<int>) + sizeof(nnvm::Graph) - 8;

const WhileLoop& loop_of(const OpStatePtr& state, size_t inputs, size_t outputs) {
  const auto& loop = *reinterpret_cast<const WhileLoop*>(
      static_cast<const char*>(pointer_in(state)->state) + kWhileLoop);
  if (size_t(loop.inputs_and_bodies) != inputs + 2 || size_t(loop.outputs) != outputs ||
      loop.stacked > loop.outputs || loop.iterations > size_t(loop.most))
    throw dmlc::Error("while_loop: its state has other members than in MXNet 1.9.1");
  return loop;
}

using Run = mxnet::FStatefulComputeEx;
using Arrays = std::vector<NDArray>;
using Requests = std::vector<OpReqType>;

void run_loop(const Run& original, const OpStatePtr& state, const OpContext& context, const Arrays& in,
              const Requests& req, const Arrays& out) {
  original(state, context, in, req, out);
  const WhileLoop& loop = loop_of(state, in.size(), out.size());
  for (int i = 0; i < loop.stacked; ++i) {
    const int64_t rows = out[i].shape()[0], ran = loop.iterations;
    if (ran < rows) out[i].Slice(ran, rows) = 0.0f;
  }
}

void set_zero(const Requests& req, const Arrays& out) {
  for (size_t i = 0; i < out.size(); ++i)
    if (req[i] == mxnet::kWriteTo) const_cast<NDArray&>(out[i]) = 0.0f;
}

void run_loop_backward(const Run& original, const OpStatePtr& state, const OpContext& context, const Arrays& in,
                       const Requests& req, const Arrays& out) {
  const WhileLoop& loop = loop_of(state, out.size(), (in.size() - out.size()) / 2);
  set_zero(req, out);
  Arrays gradients = out;
  Requests requests = req;
  for (const int64_t variable : loop.variables) {
    const size_t i = loop.body_inputs[variable];
    if (req[i] != mxnet::kNullOp) continue;
    gradients[i] = NDArray(out[i].shape(), out[i].ctx(), true, out[i].dtype());
    requests[i] = mxnet::kWriteTo;
  }
  original(state, context, in, requests, gradients);
}

void run_condition_backward(const Run& original, const OpStatePtr& state, const OpContext& context,
                            const Arrays& in, const Requests& req, const Arrays& out) {
  set_zero(req, out);
  original(state, context, in, req, out);
}

// The first output of Embedding's backward pass is the gradient of the indices.
void add_gradients_of_indices(const char* compute) {
  const auto* zeros = get<mxnet::FCompute>(nnvm::Op::Get("_zeros"), compute);
  if (!zeros) return;
  replace<mxnet::FCompute>(
      op_named("_backward_Embedding"), compute,
      [zeros = mxnet::FCompute(*zeros)](const auto& original, const auto& attrs, const auto& context, const auto& in,
                                        const Requests& req, const std::vector<TBlob>& out) {
        if (req[0] == mxnet::kWriteTo) zeros(attrs, context, {}, {req[0]}, {out[0]});
        Requests others = req;
        others[0] = mxnet::kNullOp;
        original(attrs, context, in, others, out);
      });
}

}  // namespace

void initialize_loops() {
  for (const char* key : {"FStatefulComputeEx<cpu>", "FStatefulComputeEx<gpu>"}) {
    replace<Run>(op_named("_while_loop"), key, run_loop);
    replace<Run>(op_named("_backward_while_loop"), key, run_loop_backward);
    replace<Run>(op_named("_backward_cond"), key, run_condition_backward);
  }
  for (const char* compute : {"FCompute<cpu>", "FCompute<gpu>"}) add_gradients_of_indices(compute);
}

}  // namespace gluon_amp
