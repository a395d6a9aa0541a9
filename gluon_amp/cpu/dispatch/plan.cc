// In-place options by type.
//
// MXNet's in-place options (FInplaceOption) get a node's attributes, but not its types. Only the pass
// MXPlanMemory reads them, and its graph has the types and devices of all nodes. While it runs on a thread,
// `is_planned` is true for the nodes that the engine runs. These get the engine's options, and all others
// MXNet's. So the memory plans of float32 graphs and of GPUs do not change.
#include <algorithm>
#include <set>

#include "dispatch/plan.h"

namespace gluon_amp {
namespace {

using Ints = std::vector<int>;

thread_local std::set<const NodeAttrs*> planned;

PassBody original;

const Ints* ints(const GraphView& graph, const char* key) {
  const dmlc::any* attribute = graph.find(key);
  return attribute ? &nnvm::get<Ints>(*attribute) : nullptr;
}

// The nodes of a graph that the engine runs on a CPU.
std::set<const NodeAttrs*> run_by_the_engine(const GraphView& graph) {
  std::set<const NodeAttrs*> in_engine;
  const Ints *types = ints(graph, "dtype"), *devices = ints(graph, "dev_mask");
  const std::vector<nnvm::IndexedGraph::Node>* nodes = graph.nodes();
  if (!types || !devices || !nodes || devices->size() != nodes->size()) return in_engine;
  std::vector<size_t> first;  // for each node, the index of its output 0 among all types
  size_t next = 0;
  for (const auto& node : *nodes) {
    first.push_back(next);
    next += node.source->num_outputs();
  }
  const auto type = [&](size_t at) { return at < types->size() ? (*types)[at] : kNoType16; };
  for (size_t i = 0; i < nodes->size(); ++i) {
    const auto& node = (*nodes)[i];
    if (node.source->is_variable() || (*devices)[i] != mshadow::cpu::kDevMask) continue;
    std::vector<int> node_types;
    for (uint32_t out = 0; out < node.source->num_outputs(); ++out) node_types.push_back(type(first[i] + out));
    for (const auto& in : node.inputs) node_types.push_back(type(first[in.node_id] + in.index));
    if (engine_runs(node.source->attrs, type16_among(node_types))) in_engine.insert(&node.source->attrs);
  }
  return in_engine;
}

// The pass: its argument and its result, graphs by value, are addresses (native.h, 5).
void* plan(void* result, const std::_Any_data&, void* graph) {
  planned = run_by_the_engine(GraphView(graph));
  struct Reset { ~Reset() { planned.clear(); } } reset;
  return call_pass(original, result, graph);
}

}  // namespace

bool is_planned(const NodeAttrs& attrs) { return planned.count(&attrs) > 0; }

void plan_by_type() {
  auto* passes = dmlc::Registry<nnvm::PassFunctionReg>::Get();
  nnvm::PassFunctionReg& pass = passes->__REGISTER_OR_GET__("MXPlanMemory");
  original = pass.body;
  pass.body = as_pass(&plan);
  undo.push_back([&pass] { pass.body = original; });
}

}  // namespace gluon_amp
