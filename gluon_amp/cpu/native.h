// The binary interface (ABI) of MXNet 1.9.1's wheels: all assumptions with which the engine registers
// operators in the NNVM inside them.
//
// The wheels (`mxnet` and `mxnet-cu112`, 1.9.1) were compiled by GCC 4.8.5 with its C++11 library types. A
// current compiler lays out five parts of the same headers differently, and a sixth is in no header; each
// has a section below. `probe` in entry.cc checks a loaded MXNet, and library.py refuses one that differs.
//
// Strings have the old ABI: compile with -D_GLIBCXX_USE_CXX11_ABI=0.
#pragma once
#include <any>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <dmlc/parameter.h>
#define private public  // Op::index_, Op::GetAttrMap, Op::UpdateAttrMap, OpMap::data_; NDArray::entry_
#include <nnvm/op.h>
#include <mxnet/ndarray.h>
#undef private
#include <mxnet/c_api.h>
#include <mxnet/op_attr_types.h>
#include <nnvm/graph.h>
#include <nnvm/node.h>
#include <nnvm/op_attr_types.h>
#include <nnvm/pass.h>

namespace gluon_amp {

// ---- 1. std::function --------------------------------------------------------
//
// GCC 4.8's std::function passes by-value arguments to its target by value; newer ones pass references. If
// all arguments are references (FCompute, FComputeEx, FGradient, FInplaceOption, FMutateInputs), both are
// the same. For the others:
//   by_value    returns a function that MXNet may call,
//   call_original calls a function of MXNet.
// Copying a function of MXNet to another operator is always safe.

template <class R, class... A>
struct ByValue {
  static R invoke(const std::_Any_data& data, A... arguments) {
    return (*reinterpret_cast<R (*const*)(A...)>(&data))(std::move(arguments)...);
  }
};

// The word with the address of a std::function's invoker, after 16 bytes of data and the manager.
constexpr size_t kInvoker = 3;

template <class R, class... A>
std::function<R(A...)> by_value(R (*f)(A...)) {
  std::function<R(A...)> function(f);
  reinterpret_cast<void**>(&function)[kInvoker] = reinterpret_cast<void*>(&ByValue<R, A...>::invoke);
  return function;
}

template <class R, class... A, class... Given>
R call_original(const std::function<R(A...)>& f, Given&&... given) {
  using Invoker = R (*)(const std::_Any_data&, A...);
  auto invoker = reinterpret_cast<Invoker>(reinterpret_cast<void* const*>(&f)[kInvoker]);
  return invoker(*reinterpret_cast<const std::_Any_data*>(&f), std::forward<Given>(given)...);
}

// Replacements of Op::set_attr and Op::GetAttr, which pass such functions.
template <class T>
struct Setting {
  static inline nnvm::Op* op;
  static inline const char* key;
  static inline std::pair<T, int> value;  // and its level; 0: the operator does not have the attribute

  static void exchange(dmlc::any* map) {
    if (map->empty()) {
      nnvm::OpMap<T> attributes;
      attributes.attr_name_ = key;
      *map = std::move(attributes);
    }
    auto& values = nnvm::get<nnvm::OpMap<T>>(*map).data_;
    if (values.size() <= op->index_) values.resize(op->index_ + 1, std::make_pair(T(), 0));
    std::swap(values[op->index_], value);
  }
};

// Exchanges an operator's attribute with `value`, and returns the former one.
template <class T>
std::pair<T, int> exchange(nnvm::Op& op, const char* key, const std::pair<T, int>& value) {
  Setting<T>::op = &op;
  Setting<T>::key = key;
  Setting<T>::value = value;
  nnvm::Op::UpdateAttrMap(key, by_value<void, dmlc::any*>(&Setting<T>::exchange));
  return std::move(Setting<T>::value);
}

// Functions that undo the replacements of MXNet's functions, the newest last. `start` calls them if it fails.
inline std::vector<std::function<void()>> undo;

template <class T>
void set(nnvm::Op& op, const char* key, const T& value) {
  undo.push_back([&op, key, former = exchange<T>(op, key, {value, 10})] { exchange<T>(op, key, former); });
}

template <class T>
const T* get(const nnvm::Op* op, const char* key) {
  const dmlc::any* map = nnvm::Op::GetAttrMap(key);
  if (!map) return nullptr;
  const auto& values = nnvm::get<nnvm::OpMap<T>>(*map).data_;
  return op->index_ < values.size() && values[op->index_].second ? &values[op->index_].first
                                                                 : nullptr;
}

inline nnvm::Op& op_named(const char* name) { return const_cast<nnvm::Op&>(*nnvm::Op::Get(name)); }

// Replaces an operator's function, if it has one, by f(original, arguments...). All arguments are references.
template <class T, class F>
void replace(nnvm::Op& op, const char* key, F f) {
  if (const T* original = get<T>(&op, key))
    set<T>(op, key, [original = T(*original), f](const auto&... arguments) { return f(original, arguments...); });
}

template <class T>
void copy(const nnvm::Op* from, nnvm::Op& to, const char* key) {
  const T* value = get<T>(from, key);
  if (value) set<T>(to, key, T(*value));  // a copy, since set may move what `value` points at
}

// ---- 2. std::unordered_map ---------------------------------------------------
//
// It is 8 bytes shorter in GCC 4.8. The members after NodeAttrs::dict (parsed, subgraphs, and all of Node
// after its attrs) have offsets 8 bytes below those of the headers. Iterating over dict works, because its
// list has the same offset. Never insert into it, and never copy or destroy a NodeAttrs: use MXNet's C API
// (`annotate`).

constexpr size_t kInputs = sizeof(nnvm::NodeAttrs) - 8;

inline std::vector<nnvm::NodeEntry>& inputs_of(nnvm::Node* node) {
  return *reinterpret_cast<std::vector<nnvm::NodeEntry>*>(reinterpret_cast<char*>(node) + kInputs);
}

// The graphs of a loop or a condition.
inline const std::vector<std::shared_ptr<nnvm::Symbol>>& bodies_of(const nnvm::NodeAttrs& attrs) {
  return *reinterpret_cast<const std::vector<std::shared_ptr<nnvm::Symbol>>*>(
      reinterpret_cast<const char*>(&attrs.subgraphs) - 8);
}

// Autograd's information on a node, after its inputs and control_deps.
inline dmlc::any& info_of(nnvm::Node* node) {
  return *reinterpret_cast<dmlc::any*>(reinterpret_cast<char*>(&inputs_of(node)) +
                                       2 * sizeof(std::vector<nnvm::NodeEntry>));
}

inline const std::string* find(const nnvm::NodeAttrs& attrs, const char* key) {
  for (const auto& item : attrs.dict)
    if (item.first == key) return &item.second;
  return nullptr;
}

// Sets attributes of a node with MXNet's code. It clears `attrs.op` meanwhile: MXNet would parse all
// attributes again, and some nodes of gradients have only parsed attributes.
inline void annotate(const nnvm::ObjectPtr& node, const std::vector<const char*>& keys,
                     const std::vector<const char*>& values) {
  std::vector<nnvm::NodeEntry> symbol;  // what an nnvm::Symbol consists of
  symbol.emplace_back(node, 0, 0);
  const nnvm::Op* op = node->attrs.op;
  node->attrs.op = nullptr;
  NNSymbolSetAttrs(&symbol, keys.size(), const_cast<const char**>(keys.data()),
                   const_cast<const char**>(values.data()));
  node->attrs.op = op;
}

// ---- 3. oneDNN ---------------------------------------------------------------
//
// The wheel has oneDNN's headers, but exports none of its C functions. The descriptor of an array follows
// the first 24 bytes of dnnl_memory.

constexpr size_t kDescription = 24;

inline const dnnl_memory_desc_t& description(const mkldnn::memory* memory) {
  return *reinterpret_cast<const dnnl_memory_desc_t*>(
      reinterpret_cast<const char*>(memory->get()) + kDescription);
}

// What the wheel exports of oneDNN 2.4.4: members of its C++ classes that MXNet's objects use, under their
// mangled names. They are weak here, so that a wheel without them loads; `can_call_onednn` tells. Their
// classes hold a shared_ptr each, a primitive_desc two. `execute` walks its arguments and does nothing else
// with the map (see 2).
namespace onednn {

struct Handle {
  std::shared_ptr<void> held;
  void* get() const { return held.get(); }
};
struct Engine : Handle {};
struct Stream : Handle {};
struct Memory : Handle {};
struct ReorderDescription : Handle {};  // reorder::primitive_desc
struct Description : Handle {           // primitive_desc
  bool allow_empty = false;
  std::shared_ptr<void> iterator;
};
struct Primitive : Handle {};
struct Attributes : Handle {};
using Arguments = std::unordered_map<int, Memory>;

static_assert(sizeof(Handle) == sizeof(mkldnn::memory) && sizeof(Handle) == sizeof(mkldnn::primitive) &&
              sizeof(Handle) == sizeof(mkldnn::stream) && sizeof(Handle) == sizeof(mkldnn::engine) &&
              sizeof(Handle) == sizeof(mkldnn::primitive_attr) &&
              sizeof(ReorderDescription) == sizeof(mkldnn::reorder::primitive_desc) &&
              sizeof(Description) == sizeof(mkldnn::primitive_desc), "oneDNN's classes have other members");

extern "C" {
#define EXPORTED(name) asm(name) __attribute__((weak))
void* cpu_engine() EXPORTED("_ZN5mxnet9CpuEngine3GetEv");  // it holds its engine, and nothing before it
void make_layout(dnnl_memory_desc_t*, const std::vector<int64_t>& dims, int type, int tag, bool)
    EXPORTED("_ZN4dnnl6memory4descC1ERKSt6vectorIlSaIlEENS0_9data_typeENS0_10format_tagEb");
void make_description(Description*, const void* operation, const void* attributes, const Engine&,
                      const void* hint, bool allow_empty)
    EXPORTED("_ZN4dnnl14primitive_descC1EPKvPKNS_14primitive_attrERKNS_6engineEPK19dnnl_primitive_descb");
void make_reorder(ReorderDescription*, const Memory&, const Memory&, const Attributes&, bool allow_empty)
    EXPORTED("_ZN4dnnl7reorder14primitive_descC1ERKNS_6memoryES4_RKNS_14primitive_attrEb");
void make_attributes(Attributes*) EXPORTED("_ZN4dnnl14primitive_attrC1Ev");
dnnl_memory_desc_t query_layout(const Handle*, int what, int argument)
    EXPORTED("_ZNK4dnnl19primitive_desc_base8query_mdENS_5queryEi");
void make_primitive(Primitive*, const void* description)
    EXPORTED("_ZN4dnnl9primitiveC1EPK19dnnl_primitive_desc");
void make_memory(Memory*, const dnnl_memory_desc_t&, const Engine&, void* at)
    EXPORTED("_ZN4dnnl6memoryC1ERKNS0_4descERKNS_6engineEPv");
void make_stream(Stream*, const Engine&, unsigned flags)
    EXPORTED("_ZN4dnnl6streamC1ERKNS_6engineENS0_5flagsE");
void execute(const Primitive*, const Stream&, const Arguments&)
    EXPORTED("_ZNK4dnnl9primitive7executeERKNS_6streamERKSt13unordered_mapIiNS_6memoryESt4hashIiESt8equal_toIiESaI"
             "St4pairIKiS5_EEE");
#undef EXPORTED
}

inline bool can_call_onednn() {
  return cpu_engine && make_layout && make_description && make_reorder && make_attributes &&
         query_layout && make_primitive && make_memory && make_stream && execute;
}

}  // namespace onednn

// ---- 4. OpStatePtr -----------------------------------------------------------
//
// Replaces OpStatePtr::Create, which passes the engine a function with a RunContext by value (see 1). An
// OpStatePtr is a shared_ptr to the engine's variable and the state.

struct StateLayout {
  mxnet::engine::VarHandle var;
  void* state;
};

inline void nothing(mxnet::RunContext) {}

template <class T>
struct StateDeleter {
  void operator()(StateLayout* p) const {
    mxnet::Engine::Get()->DeleteVariable(by_value<void, mxnet::RunContext>(&nothing),
                                         mxnet::Context::CPU(), p->var);
    delete static_cast<T*>(p->state);
    delete p;
  }
};

inline std::shared_ptr<StateLayout>& pointer_in(const mxnet::OpStatePtr& state) {
  const void* at = &state;
  return *static_cast<std::shared_ptr<StateLayout>*>(const_cast<void*>(at));
}

template <class T>
mxnet::OpStatePtr make_state(T* state) {
  mxnet::OpStatePtr pointer;
  pointer_in(pointer) = std::shared_ptr<StateLayout>(
      new StateLayout{mxnet::Engine::Get()->NewVariable(), state}, StateDeleter<T>());
  return pointer;
}

// The state if `make_state` created it with this type, else null; its deleter identifies it.
template <class T>
T* state_of(const mxnet::OpStatePtr& state) {
  return std::get_deleter<StateDeleter<T>>(pointer_in(state))
             ? static_cast<T*>(pointer_in(state)->state) : nullptr;
}

// ---- 5. nnvm::Graph ----------------------------------------------------------
//
// It has an unordered_map of attributes (see 2), so the offset of the nodes after it is 8 bytes below that of
// the headers. Never copy or destroy a Graph.

class GraphView {
 public:
  explicit GraphView(const void* graph) : graph_(static_cast<const char*>(graph)) {}

  const dmlc::any* find(const char* key) const {
    const auto* all = reinterpret_cast<const std::unordered_map<std::string, std::shared_ptr<dmlc::any>>*>(
        graph_ + kAttributes);
    for (const auto& item : *all)
      if (item.first == key) return item.second.get();
    return nullptr;
  }

  // The graph's nodes, inputs first; null if MXNet has not indexed them yet.
  const std::vector<nnvm::IndexedGraph::Node>* nodes() const {
    return *reinterpret_cast<const std::vector<nnvm::IndexedGraph::Node>* const*>(graph_ + kIndexed);
  }

 private:
  static constexpr size_t kAttributes = sizeof(std::vector<nnvm::NodeEntry>);
  static constexpr size_t kIndexed = kAttributes - 8 +
      sizeof(std::unordered_map<std::string, std::shared_ptr<dmlc::any>>);
  const char* graph_;
};

// The body of a pass is a std::function<Graph(Graph)> (see 1). In the binary interface its argument and its
// result are addresses.
using PassBody = std::function<nnvm::Graph(nnvm::Graph)>;
using PassInvoker = void* (*)(void* result, const std::_Any_data& data, void* graph);

inline nnvm::Graph no_graph(nnvm::Graph) { return {}; }

inline PassBody as_pass(PassInvoker invoker) {
  PassBody pass(&no_graph);
  reinterpret_cast<void**>(&pass)[kInvoker] = reinterpret_cast<void*>(invoker);
  return pass;
}

inline void* call_pass(const PassBody& body, void* result, void* graph) {
  auto invoker = reinterpret_cast<PassInvoker>(reinterpret_cast<void* const*>(&body)[kInvoker]);
  return invoker(result, *reinterpret_cast<const std::_Any_data*>(&body), graph);
}

// ---- 6. Operators of the user's Python ---------------------------------------------
//
// MXNet's headers do not declare their parameters (attrs.parsed, see 2) and states:
// mxnet::op::custom::CustomParam, and CustomFunctionParam, up to the callbacks.

struct CustomParameters {
  std::string type;
  size_t inputs, outputs, statistics;
  std::vector<int> read_by_gradient;
  std::shared_ptr<MXCallbackList> python;
};

struct CustomFunctionParameters {
  size_t inputs, outputs;
  std::shared_ptr<MXCallbackList> python;
};

// dmlc::any holds the type, then the address of a large value, or a small value, such as the shared_ptr of a
// CachedOp, which begins with an address.
inline const void* parameters_of(const nnvm::NodeAttrs& attrs) {
  const auto* parsed = reinterpret_cast<const char*>(&attrs.parsed) - 8;
  return *reinterpret_cast<const void* const*>(parsed + sizeof(void*));
}

inline const std::shared_ptr<const void>& cached_op(const nnvm::NodeAttrs& attrs) {
  return *reinterpret_cast<const std::shared_ptr<const void>*>(
      reinterpret_cast<const char*>(&attrs.parsed) - 8 + sizeof(void*));
}

inline const CustomParameters& custom_parameters(const nnvm::NodeAttrs& attrs) {
  return *static_cast<const CustomParameters*>(parameters_of(attrs));
}

}  // namespace gluon_amp
