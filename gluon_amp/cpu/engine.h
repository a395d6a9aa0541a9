// Shared declarations of the engine: operators of MXNet, calls, scratch memory.
//
// MXNet's operators dispatch on type (dispatch.cc): the engine runs calls with a float16 or bfloat16 array.
// Its generic operator (every.cc) widens these inputs to float32, runs MXNet's code, and rounds the results
// once. Memory-bound operators have hand-written kernels. A "half" is a number of either 16-bit type.
#pragma once
#include "native.h"

#include <algorithm>

#include "kernels/kernels.h"

namespace gluon_amp {

using mxnet::NDArray;
using mxnet::OpContext;
using mxnet::OpReqType;
using mxnet::OpStatePtr;
using mxnet::TBlob;
using nnvm::NodeAttrs;

constexpr char kPrefix[] = "_gluon_amp_";  // prefix of operators that MXNet does not have

// The kernels for this processor, by the type of tensors: `kernels` is for float32. Set when the library is loaded.
extern const Kernels *kernels, *float16_kernels, *bfloat16_kernels;

// ---- an operator of MXNet ------------------------------------------------------

struct Operator {
  const nnvm::Op* op;  // X
  mxnet::FCompute compute;
  mxnet::FComputeEx compute_ex;
  mxnet::FStatefulCompute stateful;
  mxnet::FStatefulComputeEx stateful_ex;
  mxnet::FCreateOpState create_state;
  mxnet::FInferStorageType storage;
  nnvm::FMutateInputs mutates;
  nnvm::FInferType types;
  mxnet::FInferShape shapes;
  mxnet::FResourceRequestEx resources;
  const struct OwnCode* own;  // or null
  void (*product)(const struct Call& call);  // emulates a GPU's Tensor Cores, or null
  bool moves;              // MXNet's code supports float16 as well: it copies values, or updates weights
  bool leaves_outputs;     // it does not write some outputs, which are initialized to zeros
  bool pushes_its_weight;  // in predictions it reorders its weight in a later task of MXNet's engine
  bool casts;              // its `dtype` is the type of its result
  bool has_parameters;     // a convolution or a dense layer, or its backward pass (kParametersKey)
  bool forgets_bias;       // oneDNN's code writes the bias gradient (2) only with the weight's (1)
  std::vector<size_t> averages;  // the inputs that are moving averages, which it updates

  bool has_generic() const { return compute || compute_ex; }

  // Changes the write requests for MXNet's code; a request that it adds for output 1 goes to scratch.
  void ask(std::vector<OpReqType>& req) const {
    if (forgets_bias && req.size() > 2 && req[2] != mxnet::kNullOp && req[1] == mxnet::kNullOp)
      req[1] = req[2];
  }
};

// Settings are node attributes between double underscores, which MXNet's parsers skip. The engine runs a node
// with a setting for all types of arrays. The nodes of its gradient inherit the settings (gradients.cc).
// kEngineKey has no other effect on a CPU; on a GPU see gpu.cc.
constexpr char kEngineKey[] = "__gluon_amp_engine__";

// Settings of emulated formats. Their tensors are float32 arrays, so strings with a character for each input
// or output select which are rounded. graph/build.py writes them.
constexpr char kSetting[] = "__gluon_amp_";  // prefix of all settings
constexpr char kInputsKey[] = "__gluon_amp_inputs__";    // 1: an input in the low format
constexpr char kOutputsKey[] = "__gluon_amp_outputs__";  // 1: an output to round
constexpr char kReadsKey[] = "__gluon_amp_reads__";      // p or g: an input to round before it is read
// The grids of outputs, of a product's inputs ("p"), of the head gradient that it reads ("g"), and of the
// outputs of the node's gradients.
constexpr char kOutputGridKey[] = "__gluon_amp_output_grid__";
constexpr char kProductGridKey[] = "__gluon_amp_product_grid__";
constexpr char kGradientGridKey[] = "__gluon_amp_gradient_grid__";
constexpr char kBackGridKey[] = "__gluon_amp_back_grid__";

// A node that rounds stochastically, or scales. MXNet runs such nodes in the order of their calls, like all
// operators that draw random numbers.
constexpr char kOrderedKey[] = "__gluon_amp_ordered__";
// A product whose inputs are scaled before rounding (scaling.cc): "id mode history margin name"; in nodes of
// gradients, also the history of each input.
constexpr char kScalingKey[] = "__gluon_amp_scaling__";
constexpr char kScaledKey[] = "__gluon_amp_scaled__";

// A convolution or a dense layer of bfloat16 data with float32 parameters and gradients. It rounds the weight.
constexpr char kParametersKey[] = "__gluon_amp_float32_parameters__";

// Which inputs and outputs have their channels in blocks (blocks.h): "100,1", 1 for each that has.
constexpr char kBlockedKey[] = "__gluon_amp_blocked__";

// An RNN whose products have another format than its other tensors. It runs in RnnLoop.
constexpr char kLoopKey[] = "__gluon_amp_loop__";

// _identity_with_attr_like_rhs(x, s) before a loss head returns x. Its gradient is multiplied by the loss
// scale s, an array of one element.
constexpr char kLossScaleKey[] = "__gluon_amp_loss_scale__";

inline bool is_setting(const std::string& key) {
  return key.compare(0, sizeof kSetting - 1, kSetting) == 0;
}
// The value of a setting, or null. MXNet copies a node's attributes to its gradient, where an empty value
// removes a setting.
inline const std::string* setting(const NodeAttrs& attrs, const char* key) {
  const std::string* found = find(attrs, key);
  return found && !found->empty() ? found : nullptr;
}
inline bool has_setting(const NodeAttrs& attrs) {
  for (const auto& item : attrs.dict)
    if (is_setting(item.first)) return true;
  return false;
}

// Reads "fraction normal largest above infinity rounding".
Grid grid_of(const char* text);

struct Rounding {
  bool any = false;  // whether the node rounds at all
  Grid output, product, gradient;
  const std::string *inputs = nullptr, *outputs = nullptr, *reads = nullptr;
  const std::string *scaling = nullptr, *scaled = nullptr;
  uint64_t key = 0;  // of stochastic rounding, for this call

  Rounding() = default;
  explicit Rounding(const NodeAttrs& attrs);
  bool is_stochastic() const {
    return output.rounding == kStochastic || product.rounding == kStochastic ||
           gradient.rounding == kStochastic;
  }
  // Draws the key from MXNet's random generator, a resource of such nodes.
  void draw(const OpContext& context);

  static char letter(const std::string* letters, size_t i, char otherwise) {
    return letters && i < letters->size() ? (*letters)[i] : otherwise;
  }
  // The grid to which input i is rounded before it is read, or null.
  const Grid* read(size_t i) const {
    const char said = any ? letter(reads, i, '0') : '0';
    return said == 'p' ? keyed(product, i) : said == 'g' ? keyed(gradient, i) : nullptr;
  }
  // The grid to which output i is rounded, or null.
  const Grid* written(size_t i) const {
    return any && letter(outputs, i, '1') == '1' ? keyed(output, 64 + i) : nullptr;
  }

  // A copy of a grid with a new key at each call.
  Grid keyed_anew(const Grid& grid) const { return *keyed(grid, 128 + keyed_.size()); }

 private:
  mutable std::list<Grid> keyed_;  // copies of grids with keys, one for each tensor

  const Grid* keyed(const Grid& grid, uint64_t tensor) const;
};

// The grid for input i of a product whose node scales it: the numbers times a power of two, which depends on
// the array's maximum. A forward pass also updates the history.
Grid scaled(const Grid& grid, const Rounding& rounding, const OpContext& context, size_t i,
            const float* numbers, int64_t n);
// The same for a node with kScalingKey that names the history of each array.
Grid scaled(const Grid& grid, const std::string& said, const OpContext& context,
            const std::string& place, bool backward, const float* numbers, int64_t n);
// For Python: reads, replaces and frees the histories of an id; the text has a line for each.
std::string scales(int64_t id);
void set_scales(int64_t id, const char* lines);
void forget_scales(int64_t id);

// The accumulation of a product, if not in float32: "block fraction split" of TensorCore (tensor_core/rule.h).
// The nodes of its gradients have the same.
constexpr char kAccumulateKey[] = "__gluon_amp_accumulate__";

// A node with products in high precision (graph/high_precision.py): for each input 1 if the product of its
// gradient is. If the forward product is, its low-precision settings have names that only the nodes of
// gradients read.
constexpr char kHighKey[] = "__gluon_amp_high__";
constexpr char kBackReadsKey[] = "__gluon_amp_back_reads__";
constexpr char kBackScalingKey[] = "__gluon_amp_back_scaling__";
constexpr char kBackAccumulateKey[] = "__gluon_amp_back_accumulate__";

// ---- one call ----------------------------------------------------------------------

// Which arrays of a call have their channels in blocks.
struct Blocked {
  std::vector<bool> in, out;  // empty where the node has no such setting

  Blocked() = default;
  Blocked(const NodeAttrs& attrs, const std::vector<TBlob>& ins, const std::vector<TBlob>& outs);
  bool input(size_t i) const { return i < in.size() && in[i]; }
  bool output(size_t i) const { return i < out.size() && out[i]; }
  bool any() const;
  bool all() const;
};

struct Call {
  const Operator& of;
  const NodeAttrs& attrs;
  const OpContext& context;
  const std::vector<TBlob>& in;
  const std::vector<OpReqType>& req;
  const std::vector<TBlob>& out;
  Rounding rounding;
  const OpStatePtr* state = nullptr;  // MXNet's state of a stateful operator
  Blocked blocked = {};

  Write write(size_t i) const {
    return req[i] == mxnet::kNullOp ? kNothing : req[i] == mxnet::kAddTo ? kAdd : kStore;
  }
};

constexpr int kNoHalf = -1;  // no 16-bit type
inline bool is_half(int type) { return type == mshadow::kFloat16 || type == mshadow::kBfloat16; }
inline bool is_half(const TBlob& array) { return is_half(array.type_flag_); }
// The 16-bit type among types, bfloat16 if there are both, or kNoHalf.
inline int half_among(const std::vector<int>& types) {
  int found = kNoHalf;
  for (int type : types)
    if (is_half(type)) found = std::max(found, type);
  return found;
}
inline const Kernels* kernels_of(int type) {
  return type == mshadow::kBfloat16 ? bfloat16_kernels : type == mshadow::kFloat16 ? float16_kernels : kernels;
}
inline const Kernels* kernels_of(const TBlob& array) { return kernels_of(array.type_flag_); }
inline bool is_float(const TBlob& array) { return array.type_flag_ == mshadow::kFloat32; }
inline Half* halves(const TBlob& array) { return static_cast<Half*>(array.dptr_); }
inline float* floats(const TBlob& array) { return static_cast<float*>(array.dptr_); }
inline int64_t size(const TBlob& array) { return static_cast<int64_t>(array.Size()); }
inline int64_t bytes_of(int type) { return static_cast<int64_t>(mshadow::mshadow_sizeof(type)); }
// The address of an array's element.
inline void* at(const TBlob& array, int64_t element) {
  return static_cast<char*>(array.dptr_) + element * bytes_of(array.type_flag_);
}
// Copies an array of halves or floats to floats.
inline void widen(const TBlob& from, float* to) { kernels_of(from)->widen(from.dptr_, to, size(from)); }

// Attributes as MXNet's parsers read them, whatever the user's locale.
float number(const NodeAttrs& attrs, const char* key, float otherwise);
bool flag(const NodeAttrs& attrs, const char* key, bool otherwise);
std::string word(const NodeAttrs& attrs, const char* key, const char* otherwise);
std::vector<int64_t> numbers(const NodeAttrs& attrs, const char* key);  // of "(2, 3)"

// Calls f(i) for all i below n, with all threads if the count of numbers is worth it. Otherwise without an
// OpenMP region: inside a region of one thread, each parallel loop in f would create threads again, which
// takes milliseconds.
template <class F>
void for_all(int64_t n, int64_t numbers, F f) {
  if (n < 2 || numbers < kWorthThreads) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) f(i);
}

// ---- scratch -----------------------------------------------------------------------
//
// Float32 arrays for one call, from a pool to which they return when the lease ends. They own their memory,
// which oneDNN requires of outputs.

class Lease {
 public:
  Lease() = default;
  Lease(const Lease&) = delete;
  ~Lease();
  NDArray array(const mxnet::TShape& shape);
  float* memory(int64_t count);

 private:
  std::vector<NDArray> held_;
};

// Held while an operator uses much scratch. MXNet's workers take turns: each uses all threads anyway, and
// they share scratch.
std::mutex& turn();

// ---- widening and narrowing ----------------------------------------------------------

// Writes an operator's float32 result, plain or in oneDNN's blocked layout, to an array of halves or floats.
void narrow(const NDArray& made, const TBlob& to, Write write);
mkldnn::memory::desc in_blocks(const mxnet::TShape& shape, int block);
// The block of channels of an array of this shape in oneDNN's blocked layout, else 0.
int block_of(const NDArray& made, const mxnet::TShape& shape);
int block_size();  // the block of channels of oneDNN's convolutions on this processor

// ---- what runs -----------------------------------------------------------------------

// The generic operator: widens inputs, runs MXNet's code, rounds outputs. `kept`: holds scratch to which the
// operator's state points afterwards.
void run(const Call& call, bool onednn, const std::vector<uint32_t>& mutated,
         const OpStatePtr* state, std::unique_ptr<Lease>* kept);
void run(const Call& call);  // for an operator without state

// Whether MXNet would dispatch dense inputs to its oneDNN code.
bool prefers_onednn(const Operator& of, const NodeAttrs& attrs, size_t inputs, size_t outputs);

// A hand-written kernel for a call; false if it does not support the case: then the generic operator runs.
constexpr uint32_t kAnyPlace = ~0u;  // any output may share memory with any input
struct OwnCode {
  bool (*run)(const Call& call);
  uint32_t places;  // output 0 may share memory with this many of the first inputs, or kAnyPlace
  // kGrids: emulated formats. kBlocks: blocked arrays, else `run` returns false; kAnyOrder: calls with blocked
  // arrays only. Others: see show_own_code in watch.h
  int supports = 0;
};
constexpr int kGrids = 1, kFloats = 2, kNumbers = 4 | kFloats, kBlocks = 8, kAnyOrder = 16;
const OwnCode* own_code(const std::string& name);
std::string names_with_own_code();  // a line for each

// A matrix of floats, row-major or, transposed, column-major.
struct RowsOrColumns {
  const float* data;
  bool transposed;
};

// Products that emulate a GPU's, for nodes with kAccumulateKey; tensor_core/ registers them. They throw for cases
// that they do not support.
struct Emulation {
  std::map<std::string, void (*)(const Call& call)> products;  // of operators
  // y = a * b, whose numbers are halves, for an RNN
  void (*multiply)(const Call& call, int64_t rows, int64_t columns, int64_t depth, const RowsOrColumns& a,
                   const RowsOrColumns& b, float* y);
};
inline Emulation emulation;
void register_tensor_core();  // tensor_core/operator.cc

// A stateful RNN as our loop over time: for emulated Tensor Cores, or products with another format than other
// tensors (rnn_loop.cc).
class RnnLoop {
 public:
  explicit RnnLoop(const NodeAttrs& attrs);
  ~RnnLoop();
  static bool runs(const NodeAttrs& attrs);  // whether it runs a node
  void run(const Call& call, bool forward);

 private:
  struct Layers;
  std::unique_ptr<Layers> layers_;
  bool drops_;
};

// An RNN of bfloat16 arrays: its products read bfloat16 numbers; all else is float32 (bfloat16_rnn.cc).
class Bfloat16Rnn {
 public:
  explicit Bfloat16Rnn(const NodeAttrs& attrs);
  ~Bfloat16Rnn();
  static bool runs(const NodeAttrs& attrs, int half);  // whether it supports a node
  bool serves(const Call& call) const;                 // whether it supports a forward call
  void run(const Call& call, bool forward);

 private:
  struct Layers;
  std::unique_ptr<Layers> layers_;
};

// ---- functions for Python (library.py) ------------------------------------------------

// Makes those of these operators of MXNet that have CPU functions dispatch on type.
void dispatch_operators(int count, const char** names);
bool is_dispatched_here(const nnvm::Op* x);
// Whether the engine runs a node on a CPU; `half`: which 16-bit type some input or output has.
bool is_taken(const NodeAttrs& attrs, int half);
std::string dispatched_names();  // a line for each
void register_training();  // training.cc

// For tests: the generic operator runs instead of hand-written kernels.
extern bool generic_only;

}  // namespace gluon_amp
