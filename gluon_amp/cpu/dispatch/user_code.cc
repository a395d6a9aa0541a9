// Operators that run the user's Python (CustomOp, autograd.Function) in another thread, asynchronously to
// MXNet's engine.
//
// - MXNet frees its plain copies of inputs in oneDNN's layout (the result of a convolution) when the operator
//   returns. They are kept until the user's Python has run.
// - A process exits only when none runs. Python blocks threads that run Python during exit, for which MXNet
//   would wait, and MXNet's shutdown of these threads expects no pending work. After that, nothing calls Python
//   to free a user's operator.
#include "dispatch/repairs.h"

#include <atomic>
#include <chrono>
#include <map>
#include <thread>

namespace gluon_amp {
namespace {

std::atomic<int64_t> under_way{0};

// The user's operators; unused ones are freed when another starts. The list itself is never freed.
std::mutex lock;
auto& operators = *new std::map<const MXCallbackList*, std::shared_ptr<MXCallbackList>>;

void hold(const std::shared_ptr<MXCallbackList>& python) {
  std::vector<std::shared_ptr<MXCallbackList>> unused;  // freed after the lock, because it runs Python
  std::lock_guard<std::mutex> guard(lock);
  for (auto at = operators.begin(); at != operators.end();) {
    const bool used = at->second.use_count() > 1;
    if (!used) unused.push_back(std::move(at->second));
    at = used ? std::next(at) : operators.erase(at);
  }
  operators.emplace(python.get(), python);
}

mxnet::FCreateOpState create_original;

OpStatePtr create(const NodeAttrs& attrs, mxnet::Context context, const mxnet::ShapeVector& shapes,
                  const std::vector<int>& types) {
  OpStatePtr state = call_original(create_original, attrs, context, shapes, types);
  hold(custom_parameters(attrs).python);
  hold(state.get_state<CustomParameters>().python);
  return state;
}

struct Kept {
  mxnet::Engine::CallbackOnComplete complete;
  std::vector<NDArray> inputs;
};

void complete(mxnet::Engine*, void* address, const dmlc::Error* error) {
  auto* kept = static_cast<Kept*>(address);
  const auto original = kept->complete;
  delete kept;
  original(error);
  --under_way;
}

void run_python(const mxnet::FStatefulComputeEx& original, const OpStatePtr& state, const OpContext& context,
                const std::vector<NDArray>& in, const std::vector<OpReqType>& req, const std::vector<NDArray>& out) {
  auto* kept = new Kept{context.async_on_complete, in};
  OpContext ours = context;
  ours.async_on_complete.callback_ = &complete;
  ours.async_on_complete.param_ = kept;
  ++under_way;
  try {
    original(state, ours, in, req, out);
  } catch (...) {  // it has not started
    delete kept;
    --under_way;
    throw;
  }
}

void run_function(const mxnet::FStatefulComputeEx& original, const OpStatePtr& state, const OpContext& context,
                  const std::vector<NDArray>& in, const std::vector<OpReqType>& req,
                  const std::vector<NDArray>& out) {
  hold(state.get_state<CustomFunctionParameters>().python);
  run_python(original, state, context, in, req, out);
}

}  // namespace

void guard_user_code() {
  nnvm::Op& custom = op_named("Custom");
  create_original = *get<mxnet::FCreateOpState>(&custom, "FCreateOpState");
  set<mxnet::FCreateOpState>(custom, "FCreateOpState", by_value(&create));
  const auto guard = [](const char* name, auto function) {
    replace<mxnet::FStatefulComputeEx>(op_named(name), "FStatefulComputeEx<cpu>", function);
  };
  guard("Custom", run_python);
  guard("_backward_Custom", run_python);
  guard("_backward_CustomFunction", run_function);
}

void end_user_code() {
  {
    std::lock_guard<std::mutex> guard(lock);
    if (operators.empty()) return;
  }
  try {
    mxnet::Engine::Get()->WaitForAll();
  } catch (const std::exception&) {  // an error of an operator whose results are not read
  }
  while (under_way) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace gluon_amp
