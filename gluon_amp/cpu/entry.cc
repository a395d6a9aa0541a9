// The only name that the library exports: a table of functions for Python (library.py).
//
// Before any registration, `probe` checks that MXNet's layout is that of native.h. It only reads bytes and
// calls no function that depends on the layout. Each check is a function of bytes, so that tests can pass
// wrong ones.

#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "dispatch/attributes.h"
#include "dispatch/plan.h"
#include "dispatch/repairs.h"
#include "dispatch/watch.h"
#include "gpu.h"
#include "onednn/onednn.h"

#include <mxnet/imperative.h>
#include <mxnet/resource.h>

// MXNet counts the users of a task's arguments with atomics, which ThreadSanitizer does not see: it has to be told that
// the task ends before their deletion.
#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
#else
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

namespace gluon_amp {
namespace {

// Whether a node's list of inputs has the offset of native.h (2): three addresses, a whole number of entries
// apart; the first entry is the node's only input. After them are control_deps and autograd's information,
// which are empty for a symbol's node.
int inputs_fit(const unsigned char* node, const void* input) {
  const unsigned char* at[7];
  std::memcpy(at, node + kInputs, sizeof at);
  if (!at[0] || at[1] - at[0] != ptrdiff_t(sizeof(nnvm::NodeEntry)) || at[2] < at[1]) return 0;
  if (at[3] || at[4] || at[5] || at[6]) return 0;
  const void* first;
  std::memcpy(&first, at[0], sizeof first);
  return first == input;
}

// Whether the size of an attribute's map is that of pairs of a std::function and a number, for at most all
// operators (1).
int map_fits(const unsigned char* vector, int64_t operators) {
  const unsigned char* at[3];
  std::memcpy(at, vector, sizeof at);
  const int64_t bytes = at[1] - at[0], each = sizeof(std::pair<mxnet::FCompute, int>);
  return at[0] && bytes > 0 && bytes % each == 0 && bytes / each <= 2 * operators &&
         at[2] >= at[1];
}

// Whether the descriptor of a oneDNN array of floats, 2 x 3 x 5 x 7, has the offset of native.h (3).
int description_fits(const unsigned char* memory) {
  dnnl_memory_desc_t d;
  std::memcpy(&d, memory + kDescription, sizeof d);
  return d.ndims == 4 && d.dims[0] == 2 && d.dims[1] == 3 && d.dims[2] == 5 && d.dims[3] == 7 &&
         d.data_type == dnnl_f32;
}

// The first member of nnvm::Symbol: its outputs.
const unsigned char* node_of(const void* symbol) {
  const unsigned char *entries, *node;
  std::memcpy(&entries, symbol, sizeof entries);
  std::memcpy(&node, entries, sizeof node);
  return node;
}

// `symbol`: an operator whose only input is `variable`; both were created with MXNet's C API. Returns what
// does not fit, or null.
const char* probe(const void* symbol, const void* variable, int64_t operators) {
  if (!inputs_fit(node_of(symbol), node_of(variable)))
    return "a node's inputs lie elsewhere (std::unordered_map)";
  const dmlc::any* map = nnvm::Op::GetAttrMap("FCompute<cpu>");
  if (!map) return "operators have no code for CPUs";
  const unsigned char* held;  // dmlc::any: its type, then the address of its value
  std::memcpy(&held, reinterpret_cast<const unsigned char*>(map) + sizeof(void*), sizeof held);
  if (!map_fits(held + sizeof(std::string), operators))
    return "an operator's attributes have another size (std::function)";
  const NDArray array(mxnet::TShape({2, 3, 5, 7}), mxnet::Context::CPU(), false,
                      mshadow::kFloat32);
  const auto* memory = array.GetMKLDNNData();
  if (!memory || !description_fits(reinterpret_cast<const unsigned char*>(memory->get())))
    return "a oneDNN array is described elsewhere";
  const OpStatePtr dropout = dropout_state();
  if (!dropout_fits(static_cast<const unsigned char*>(pointer_in(dropout)->state)))
    return "Dropout's state has other members";
  return nullptr;
}

char why[512];

// Dispatches MXNet's operators and registers ours. Returns 0; or -1, with the reason in `reason` and MXNet's
// operators as they were. `repairs`: whether defects of MXNet are repaired.
int start(const char* isa, int count, const char** names, const char* columns, int repairs) {
  try {
    const bool avx512 = !std::strcmp(isa, "avx512"), avx2 = !std::strcmp(isa, "avx2");
    kernels = avx512 ? kernels_for_avx512() : avx2 ? kernels_for_avx2() : kernels_for_portable();
    float16_kernels = avx512 ? kernels_for_avx512_float16()
                      : avx2 ? kernels_for_avx2_float16()
                             : kernels_for_portable_float16();
    bfloat16_kernels = avx512 ? kernels_for_avx512_bfloat16()
                       : avx2 ? kernels_for_avx2_bfloat16()
                              : kernels_for_portable_bfloat16();
    instructions();  // requests AMX before any operator of MXNet runs
    read_columns(columns);
    if (repairs) repair();
    replace_gpu_functions();
    register_training();
    register_gpu_norms();
    dispatch_operators(count, names);
    plan_by_type();
    undo.clear();
    return 0;
  } catch (const std::exception& error) {
    for (; !undo.empty(); undo.pop_back()) undo.back()();
    std::snprintf(why, sizeof why, "%s", error.what());
    return -1;
  }
}

const char* reason() { return why; }

// The rows for Python, valid until this thread's next call.
template <std::string (*rows)()>
const char* text() {
  static thread_local std::string latest;
  latest = rows();
  return latest.c_str();
}

// The number of the settings in a text (settings.h), or -1 with the error in `reason`.
int64_t settings(const char* text) {
  try {
    return settings_number(text);
  } catch (const std::exception& error) {
    std::snprintf(why, sizeof why, "%s", error.what());
    return -1;
  }
}

// Whether these are dense arrays on one CPU, of this type (any if below 0). Python would need three calls of
// MXNet for each.
int on_one_cpu(const NDArray* const* arrays, int64_t count, int type) {
  for (int64_t i = 0; i < count; ++i) {
    const NDArray& array = *arrays[i];
    if (array.is_none() || array.storage_type() != mxnet::kDefaultStorage ||
        array.ctx().dev_mask() != mxnet::Context::kCPU || array.ctx() != arrays[0]->ctx() ||
        (type >= 0 && array.dtype() != type))
      return 0;
  }
  return 1;
}

// The numbers of writes to arrays, after all earlier operations. MXNet's engine counts writes; only a task of
// that engine reads a count that is final.
struct Versions {
  std::vector<mxnet::Engine::VarHandle> arrays;
  NDArray into;
  bool since;
};

void write_versions(void*, void* request) {
  auto* asked = static_cast<Versions*>(request);
  auto* to = static_cast<int64_t*>(asked->into.data().dptr_);
  for (auto* array : asked->arrays) {
    const auto now = static_cast<int64_t>(array->version());
    *to = asked->since ? now - *to : now;
    ++to;
  }
  __tsan_release(request);
}

void forget_versions(void* request) {
  __tsan_acquire(request);
  delete static_cast<Versions*>(request);
}

// `arrays` are distinct NDArrays; `into` is a CPU NDArray of int64 numbers, one for each. `since`: subtracts
// the numbers in `into`.
int versions(int count, void** arrays, void* into, int since) {
  auto* request = new Versions{{}, *static_cast<NDArray*>(into), since != 0};
  for (int i = 0; i < count; ++i)
    request->arrays.push_back(static_cast<NDArray*>(arrays[i])->var());
  const mxnet::Context cpu = mxnet::Context::CPU();
  return MXEnginePushSyncND(write_versions, request, forget_versions, &cpu, arrays, count, &into,
                            1, nullptr, 0, "gluon_amp_versions");
}

// Whether backward passes have written the gradients of these weights since MXNet's marks were cleared; `clear`
// clears them.
void marks(void** weights, int64_t count, int clear, unsigned char* marked) {
  for (int64_t i = 0; i < count; ++i) {
    int mark = 0;
    MXNDArrayGetGradState(weights[i], &mark);
    marked[i] = mark != 0;
    if (mark && clear) MXNDArraySetGradState(weights[i], 0);
  }
}

using Outputs = std::vector<nnvm::NodeEntry>;

// The nodes that outputs depend on.
std::vector<nnvm::ObjectPtr> nodes_of(const Outputs& outputs) {
  std::vector<nnvm::ObjectPtr> nodes;
  std::set<const nnvm::Node*> seen{nullptr};
  auto add = [&](const nnvm::NodeEntry& entry) {
    if (seen.insert(entry.node.get()).second) nodes.push_back(entry.node);
  };
  for (const auto& entry : outputs) add(entry);
  for (size_t i = 0; i < nodes.size(); ++i)
    for (const auto& entry : inputs_of(nodes[i].get())) add(entry);
  return nodes;
}

// Autograd's information on a node of which a backward pass writes the gradient, else null.
mxnet::Imperative::AGInfo* trained(const nnvm::ObjectPtr& node) {
  dmlc::any& info = info_of(node.get());
  if (info.empty()) return nullptr;
  auto& grad_info = dmlc::get<mxnet::Imperative::AGInfo>(info);
  return grad_info.grad_req == mxnet::kNullOp ? nullptr : &grad_info;
}

// Whether an operator calls the user's Python.
bool is_user_code(const nnvm::Op* op) { return op && row_of(op->name).traits & kUserCode; }

// Whether the gradient of an operator of the user's Python is declared to read no incoming one.
bool ignores_incoming(const nnvm::ObjectPtr& node) {
  const nnvm::Op* const op = node->attrs.op;
  if (!is_user_code(op)) return false;
  const auto* gradient = get<nnvm::FGradient>(op, "FGradient");
  if (!gradient) return false;
  const uint32_t outputs = op->get_num_outputs ? op->get_num_outputs(node->attrs) : op->num_outputs;
  const nnvm::ObjectPtr incoming = make_node(nnvm::Op::Get("_zeros"), {{"shape", "(1,)"}});
  for (const auto& read : nodes_of((*gradient)(node, Outputs(outputs, nnvm::NodeEntry{incoming, 0, 0}))))
    if (read == incoming) return false;
  return true;
}

// The number of a CachedOp in this process. Its address does not identify it: a new one may be at a freed address.
int64_t number_of(const std::shared_ptr<const void>& cached) {
  struct Numbered {
    std::weak_ptr<const void> op;
    int64_t number;
  };
  static std::mutex mutex;
  static std::map<const void*, Numbered> numbers;
  static int64_t last = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto entry = numbers.find(cached.get());
  if (entry != numbers.end() && !entry->second.op.expired()) return entry->second.number;
  for (auto at = numbers.begin(); at != numbers.end();)
    at = at->second.op.expired() ? numbers.erase(at) : std::next(at);
  numbers[cached.get()] = {cached, --last};
  return last;
}

// The number of an operator in graph_operators: an address for MXNet's operators, a negative number for each CachedOp,
// 0 or 1 for an operator of the user's Python, whose gradient reads or ignores the incoming one.
int64_t number_of(const nnvm::ObjectPtr& node) {
  static const nnvm::Op *const cached = nnvm::Op::Get("_CachedOp"), *const safe = nnvm::Op::Get("_CachedOpThreadSafe");
  const nnvm::Op* const op = node->attrs.op;
  if (op == cached || op == safe) return number_of(cached_op(node->attrs));
  return is_user_code(op) ? ignores_incoming(node) : reinterpret_cast<int64_t>(op);
}

// `op` is the handle of MXNet's C API for a CachedOp.
int64_t cached_op_number(const std::shared_ptr<const void>* op) { return number_of(*op); }

// Writes a number for each operator in the graphs that autograd has recorded for these losses, up to `most`, to `into`.
// Returns how many there are.
int64_t graph_operators(void** losses, int64_t count, int64_t* into, int64_t most) {
  Outputs outputs;
  for (int64_t i = 0; i < count; ++i) outputs.push_back(static_cast<NDArray*>(losses[i])->entry_);
  std::set<int64_t> operators;
  for (const auto& node : nodes_of(outputs)) operators.insert(number_of(node));
  int64_t written = 0;
  for (int64_t number : operators)
    if (written < most) into[written++] = number;
  return operators.size();
}

// What training/heads.py reads of nodes, those of loops' bodies included, in lines of a word and the node's name:
//   trained   a variable of which a backward pass writes the gradient into one of these arrays
//   ignores   an operator that ignores the incoming gradient
//   NUMBER    a CachedOp, by its number in graph_operators
void add_facts(const Outputs& outputs, const std::set<mxnet::Engine::VarHandle>& gradients, std::string* facts) {
  for (const auto& node : nodes_of(outputs)) {
    const auto add = [&](const std::string& word) { *facts += word + " " + node->attrs.name + "\n"; };
    const auto* info = trained(node);
    if (info && gradients.count(info->out_grads.at(0).var())) add("trained");
    if (ignores_incoming(node)) add("ignores");
    if (node->attrs.op && node->attrs.op->name == "_CachedOp") add(std::to_string(number_of(node)));
    for (const auto& body : bodies_of(node->attrs)) add_facts(body->outputs, gradients, facts);
  }
}

const char* facts_on_gradients(void* symbol, void** gradients, int64_t count) {
  static thread_local std::string facts;
  facts.clear();
  std::set<mxnet::Engine::VarHandle> theirs;
  for (int64_t i = 0; i < count; ++i) theirs.insert(static_cast<NDArray*>(gradients[i])->var());
  add_facts(static_cast<nnvm::Symbol*>(symbol)->outputs, theirs, &facts);
  return facts.c_str();
}

// Copies CPU arrays into others of the same type, or 16-bit numbers into floats, after all earlier operations. Returns
// false, without copying, for other kinds of arrays.
int copy_all(const NDArray* const* from, const NDArray* const* to, int64_t count) {
  const auto fits = [](const NDArray& x, const NDArray& y) {
    for (const NDArray* array : {&x, &y})
      if (array->is_none() || array->storage_type() != mxnet::kDefaultStorage ||
          array->ctx().dev_mask() != mxnet::Context::kCPU || array->IsMKLDNNData())
        return false;
    return size(x.data()) == size(y.data()) &&
           (x.dtype() == y.dtype() || (is_16bit(x.data()) && is_float(y.data())));
  };
  for (int64_t i = 0; i < count; ++i)
    if (!fits(*from[i], *to[i])) return 0;
  for (int64_t i = 0; i < count; ++i) {
    const TBlob &x = from[i]->data(), &y = to[i]->data();
    if (x.type_flag_ != y.type_flag_) widen(x, floats(y));
    else kernels->copy(x.dptr_, y.dptr_, size(x) * bytes_of(x.type_flag_));
  }
  return 1;
}

// Counts the values of an array of floats, for Python; `counts` must be zeros.
void count(const float* numbers, int64_t n, int as_float16, Counts* counts) {
  (as_float16 ? float16_kernels : kernels)->count(numbers, n, counts);
}

using Generator = mxnet::common::random::RandGenerator<mshadow::cpu, float>;

Generator* next_generator() {
  using mxnet::ResourceRequest;
  return static_cast<Generator*>(mxnet::ResourceManager::Get()->Request(
      mxnet::Context::CPU(), ResourceRequest(ResourceRequest::kParallelRandom)).ptr_);
}

// This thread's parallel generators, MXNET_CPU_PARALLEL_RAND_COPY of them, in the order in which MXNet's
// operators get them. The next operator gets the first.
std::vector<Generator*> generators() {
  std::vector<Generator*> all{next_generator()};
  for (Generator* next; (next = next_generator()) != all[0];) all.push_back(next);
  for (size_t i = 1; i < all.size(); ++i) next_generator();
  return all;
}

// Writes this thread's state of MXNet's CPU random generators to `bytes` or, with `back`, reads it from there.
// Returns its size, also for a null `bytes`.
int64_t random_state(unsigned char* bytes, int back) {
  using mxnet::ResourceRequest;
  auto* serial = static_cast<mshadow::Random<mshadow::cpu, float>*>(mxnet::ResourceManager::Get()->Request(
      mxnet::Context::CPU(), ResourceRequest(ResourceRequest::kRandom)).ptr_);
  std::vector<Generator*> parallel = generators();
  const int64_t list = parallel.size() * sizeof(Generator*);
  int64_t at = list;
  if (bytes && back) {
    std::memcpy(parallel.data(), bytes, list);
    while (generators()[0] != parallel[0]) next_generator();
  } else if (bytes) {
    std::memcpy(bytes, parallel.data(), list);
  }
  const auto move = [&](void* state, int64_t size) {
    if (bytes && back) std::memcpy(state, bytes + at, size);
    if (bytes && !back) std::memcpy(bytes + at, state, size);
    at += size;
  };
  move(&serial->GetRndEngine(), sizeof(std::mt19937));
  for (Generator* each : parallel)
    move(each->GetStates(), each->kNumRandomStates * int64_t(sizeof(std::mt19937)));
  return at;
}

// A function for Python: its name, letters for the types of its result and of its arguments, and its address.
struct Function {
  const char *name, *types;
  void (*address)();
};

template <class T> constexpr char kLetter = 'p';  // an address
template <> constexpr char kLetter<void> = 'v';
template <> constexpr char kLetter<int> = 'i';
template <> constexpr char kLetter<int64_t> = 'l';
template <> constexpr char kLetter<const char*> = 's';
template <class... T> constexpr char kLetters[] = {kLetter<T>..., 0};

template <class R, class... A>
Function function(const char* name, R (*f)(A...)) {
  return {name, kLetters<R, A...>, reinterpret_cast<void (*)()>(f)};
}
#define FUNCTION(name) function(#name, name)

}  // namespace
}  // namespace gluon_amp

// The functions for Python, the last without a name.
extern "C" __attribute__((visibility("default"))) const void* gluon_amp_functions() {
  using namespace gluon_amp;
  static const Function functions[] = {
      FUNCTION(start), FUNCTION(reason), FUNCTION(probe), FUNCTION(inputs_fit), FUNCTION(map_fits),
      FUNCTION(description_fits), FUNCTION(dropout_fits), function("list_repairs", text<repair_rows>),
      function("operators", text<operator_rows>), function("overflows", text<overflow_rows>), FUNCTION(settings),
      FUNCTION(settings_count), function("use_generic_code", use_generic), FUNCTION(on_one_cpu), FUNCTION(versions), FUNCTION(marks),
      FUNCTION(graph_operators), FUNCTION(cached_op_number), FUNCTION(facts_on_gradients), FUNCTION(copy_all),
      FUNCTION(watched), FUNCTION(watched_rows), FUNCTION(watched_names), FUNCTION(count),
      FUNCTION(random_state), FUNCTION(end_user_code), FUNCTION(keeps_layout), FUNCTION(new_calls), FUNCTION(add_call), FUNCTION(run_calls), FUNCTION(free_calls), FUNCTION(new_attributes),
      FUNCTION(free_attributes), {}};
  return functions;
}
