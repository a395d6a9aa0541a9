// Calls of MXNet's operators on a GPU (`Calls` of library.py). The arrays are the same at each step. One task of MXNet's
// engine runs the calls in order.
//
// An imperative call of MXNet parses attributes, infers shapes, copies the descriptions of all arrays and waits for the
// GPU, for each operator. With 225 arrays this takes a sixth of a millisecond.
#include <set>

#include "dispatch/attributes.h"
#include "gpu.h"

#include <mxnet/resource.h>

// From the library that libmxnet.so loads; null in a build for CPUs.
extern "C" __attribute__((weak)) int cudaStreamSynchronize(void* stream);

namespace gluon_amp {
namespace {

using Variables = std::vector<mxnet::Engine::VarHandle>;

struct GpuCall {
  const nnvm::Op* op;
  std::vector<NDArray> in, out;
  std::vector<OpReqType> requests;
  std::vector<mxnet::Resource> resources;
};

struct GpuCalls {
  std::vector<GpuCall> all;
  Variables read, written;  // empty before the first run
};

// A run of calls, with a node for the attributes of each. Another may be pending.
struct Run {
  std::shared_ptr<GpuCalls> calls;
  std::vector<nnvm::ObjectPtr> nodes;
};

std::vector<NDArray> arrays(void** handles, int64_t count) {
  std::vector<NDArray> detached;
  for (int64_t i = 0; i < count; ++i) detached.push_back(static_cast<NDArray*>(handles[i])->Detach());
  return detached;
}

// Throws, as MXNet's imperative call, if the arrays do not fit the operator.
void check(const GpuCall& call, const NodeAttrs& attrs, const mxnet::Context& device) {
  mxnet::ShapeVector in, out;
  std::vector<int> in_types, out_types;
  for (const auto* arrays : {&call.in, &call.out})
    for (const NDArray& array : *arrays) {
      if (array.ctx() != device || array.storage_type() != mxnet::kDefaultStorage)
        throw dmlc::Error(call.op->name + ": an array is sparse or on another device");
      (arrays == &call.in ? in : out).push_back(array.shape());
      (arrays == &call.in ? in_types : out_types).push_back(array.dtype());
    }
  if (!call_original(*get<mxnet::FInferShape>(call.op, "FInferShape"), attrs, &in, &out) ||
      !call_original(*get<nnvm::FInferType>(call.op, "FInferType"), attrs, &in_types, &out_types))
    throw dmlc::Error(call.op->name + ": shapes or types do not fit");
}

// Finds what the calls read and write. The inputs that an operator writes may depend on its attributes.
void find_variables(GpuCalls& calls, const std::vector<nnvm::ObjectPtr>& nodes) {
  for (size_t i = 0; i < calls.all.size(); ++i) check(calls.all[i], nodes[i]->attrs, calls.all[0].in[0].ctx());
  std::set<mxnet::Engine::VarHandle> read, written;
  for (size_t i = 0; i < calls.all.size(); ++i) {
    GpuCall& call = calls.all[i];
    std::set<mxnet::Engine::VarHandle> inputs;
    for (const NDArray& array : call.in) inputs.insert(array.var());
    for (const NDArray& array : call.out) {
      call.requests.push_back(inputs.count(array.var()) ? mxnet::kWriteInplace : mxnet::kWriteTo);
      written.insert(array.var());
    }
    if (const auto* mutated = get<nnvm::FMutateInputs>(call.op, "FMutateInputs"); mutated && *mutated)
      for (uint32_t which : (*mutated)(nodes[i]->attrs)) written.insert(call.in.at(which).var());
    if (const auto* needs = get<mxnet::FResourceRequest>(call.op, "FResourceRequest"); needs && *needs)
      for (const auto& request : (*needs)(nodes[i]->attrs)) {
        call.resources.push_back(mxnet::ResourceManager::Get()->Request(call.in[0].ctx(), request));
        written.insert(call.resources.back().var);
      }
    read.insert(inputs.begin(), inputs.end());
  }
  calls.written.assign(written.begin(), written.end());
  for (auto* variable : read)
    if (!written.count(variable)) calls.read.push_back(variable);
}

void run_all(void* context, void* address) {
  const auto& on = *static_cast<mxnet::RunContext*>(context);
  const auto& run = *static_cast<Run*>(address);
  for (size_t i = 0; i < run.nodes.size(); ++i) {
    const GpuCall& call = run.calls->all[i];
    const OpContext with{false, false, on, mxnet::engine::CallbackOnComplete(), call.resources};
    (*get<mxnet::FCompute>(call.op, "FCompute<gpu>"))(run.nodes[i]->attrs, with, blobs(call.in), call.requests,
                                                      blobs(call.out));
  }
  if (on.is_bulk) return;  // MXNet waits at its end
  if (const int error = cudaStreamSynchronize(static_cast<GpuStream*>(on.stream)->stream))
    throw dmlc::Error("CUDA error " + std::to_string(error) + " after " + run.nodes[0]->attrs.op->name);
}

void free_run(void* run) { delete static_cast<Run*>(run); }

}  // namespace

void* new_calls() { return new std::shared_ptr<GpuCalls>(new GpuCalls); }

void free_calls(void* calls) { delete static_cast<std::shared_ptr<GpuCalls>*>(calls); }

void add_call(void* calls, void* op, void** in, int64_t inputs, void** out, int64_t outputs) {
  (*static_cast<std::shared_ptr<GpuCalls>*>(calls))->all.push_back(
      {static_cast<const nnvm::Op*>(op), arrays(in, inputs), arrays(out, outputs), {}, {}});
}

int run_calls(void* address, void** nodes) try {
  const auto& calls = *static_cast<std::shared_ptr<GpuCalls>*>(address);
  auto run = std::make_unique<Run>(Run{calls, {}});
  for (size_t i = 0; i < calls->all.size(); ++i) run->nodes.push_back(*static_cast<nnvm::ObjectPtr*>(nodes[i]));
  if (calls->written.empty()) find_variables(*calls, run->nodes);
  const mxnet::Context device = calls->all[0].in[0].ctx();
  return MXEnginePushSync(run_all, run.release(), free_run, &device, calls->read.data(), calls->read.size(),
                          calls->written.data(), calls->written.size(), nullptr, 0, "gluon_amp_calls");
} catch (const std::exception& error) {
  NNAPISetLastError(error.what());
  return -1;
}

void* new_attributes(void* op, int64_t count, const char** names, const char** values) try {
  Texts texts;
  for (int64_t i = 0; i < count; ++i) texts.emplace_back(names[i], values[i]);
  return new nnvm::ObjectPtr(make_node(static_cast<const nnvm::Op*>(op), texts));
} catch (const std::exception& error) {
  NNAPISetLastError(error.what());
  return nullptr;
}

void free_attributes(void* node) { delete static_cast<nnvm::ObjectPtr*>(node); }

}  // namespace gluon_amp
