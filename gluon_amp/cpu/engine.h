// What the files of the engine share: an operator of MXNet, one call of it, scratch memory.
//
// MXNet's operators dispatch on type (dispatch.cc): where an array is float16 or bfloat16, the engine
// runs. Its generic code (every.cc) widens these inputs to float32, runs MXNet's own code, and rounds its
// results once. Memory-bound operators have code of their own. A "half" is a number of either type.
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

constexpr char kPrefix[] = "_gluon_amp_";  // of operators that MXNet does not have

// The code for this processor's instruction set: for float32 and float16, and for bfloat16; set when the
// library is loaded.
extern const Kernels *kernels, *bfloat16_kernels;

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
  void (*product)(const struct Call& call);  // as a GPU's Tensor Cores make it, or null
  bool moves;              // MXNet's own code serves float16 as well: it moves values, or updates weights
  bool leaves_outputs;     // it does not write some outputs: they begin as zeros
  bool pushes_its_weight;  // to MXNet's engine, to reorder it there, when it does not train
  bool casts;              // its `dtype` is a type of arrays, not a choice of code
  bool has_parameters;     // a convolution or a dense layer, or its backward pass (kParametersKey)
  bool forgets_bias;       // oneDNN's code: its gradient (2) comes with the weight's (1), or not at all

  bool has_generic() const { return compute || compute_ex; }

  // What its code is to be asked for where the caller asks for `req`; `req[1]` goes to scratch.
  void ask(std::vector<OpReqType>& req) const {
    if (forgets_bias && req.size() > 2 && req[2] != mxnet::kNullOp && req[1] == mxnet::kNullOp)
      req[1] = req[2];
  }
};

// Settings are node attributes of ours: MXNet's parsers skip keys between double underscores. A node
// that has one runs the engine whatever the types of its arrays are; the nodes of its gradient inherit
// them (gradients.cc). kEngineKey has no other effect on a CPU; on a GPU see gpu.cc.
constexpr char kEngineKey[] = "__gluon_amp_engine__";

// What a node says of formats other than float16. Their tensors are float32 arrays, so types do not
// tell which are of a low type: strings with a digit for each do. graph/build.py writes them.
constexpr char kSetting[] = "__gluon_amp_";  // how all of them begin
constexpr char kInputsKey[] = "__gluon_amp_inputs__";    // 1: an input of a low type
constexpr char kOutputsKey[] = "__gluon_amp_outputs__";  // 1: an output to be rounded
constexpr char kReadsKey[] = "__gluon_amp_reads__";      // p or g: an input to be rounded first
// The grids: of outputs; of what a product reads ("p"), and of the gradient that is read ("g");
// and of the outputs of the node's gradients.
constexpr char kOutputGridKey[] = "__gluon_amp_output_grid__";
constexpr char kProductGridKey[] = "__gluon_amp_product_grid__";
constexpr char kGradientGridKey[] = "__gluon_amp_gradient_grid__";
constexpr char kBackGridKey[] = "__gluon_amp_back_grid__";

// Of a node that rounds stochastically, or scales: MXNet runs such nodes in the order in which they
// were asked for, as it does all that draw from its generator of random numbers.
constexpr char kOrderedKey[] = "__gluon_amp_ordered__";
// Of a product whose inputs are scaled before they are rounded (scaling.cc): "id mode history margin
// name"; and, in nodes of gradients, for each input which history it has.
constexpr char kScalingKey[] = "__gluon_amp_scaling__";
constexpr char kScaledKey[] = "__gluon_amp_scaled__";

// Of a convolution or a dense layer of bfloat16 data: its parameters are float32 arrays, and so are their
// gradients. It rounds the weight that it reads.
constexpr char kParametersKey[] = "__gluon_amp_float32_parameters__";

// Of an RNN whose products have another format than what lies between: it runs RnnLoop.
constexpr char kLoopKey[] = "__gluon_amp_loop__";

// Of _identity_with_attr_like_rhs(x, s), which gives x on its way to a loss head: its gradient is
// multiplied by the one number in s, a loss scale.
constexpr char kLossScaleKey[] = "__gluon_amp_loss_scale__";

inline bool is_setting(const std::string& key) {
  return key.compare(0, sizeof kSetting - 1, kSetting) == 0;
}
// The value of a setting, or null: MXNet copies a node's attributes to those of its gradient, where an
// empty value takes a setting away.
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
  bool any = false;  // whether the node says anything
  Grid output, product, gradient;
  const std::string *inputs = nullptr, *outputs = nullptr, *reads = nullptr;
  const std::string *scaling = nullptr, *scaled = nullptr;
  uint64_t key = 0;  // of stochastic rounding, for this run of the node

  Rounding() = default;
  explicit Rounding(const NodeAttrs& attrs);
  bool is_stochastic() const {
    return output.rounding == kStochastic || product.rounding == kStochastic ||
           gradient.rounding == kStochastic;
  }
  // Draws the key from MXNet's generator, which such a node has asked for.
  void draw(const OpContext& context);

  static char letter(const std::string* letters, size_t i, char otherwise) {
    return letters && i < letters->size() ? (*letters)[i] : otherwise;
  }
  // What input i is rounded to before it is read, or null.
  const Grid* read(size_t i) const {
    const char said = any ? letter(reads, i, '0') : '0';
    return said == 'p' ? keyed(product, i) : said == 'g' ? keyed(gradient, i) : nullptr;
  }
  // What output i is rounded to, or null.
  const Grid* written(size_t i) const {
    return any && letter(outputs, i, '1') == '1' ? keyed(output, 64 + i) : nullptr;
  }

  // A grid with a key of its own at each call.
  Grid keyed_anew(const Grid& grid) const { return *keyed(grid, 128 + keyed_.size()); }

 private:
  mutable std::list<Grid> keyed_;  // grids with keys of their own, one for each tensor

  const Grid* keyed(const Grid& grid, uint64_t tensor) const;
};

// The grid for what a product reads as its input i, if its node scales it: the same numbers times a
// power of two, by the largest of the array. Forward, it also remembers.
Grid scaled(const Grid& grid, const Rounding& rounding, const OpContext& context, size_t i,
            const float* numbers, int64_t n);
// The same for a node that says so (kScalingKey), and names the place of each array itself.
Grid scaled(const Grid& grid, const std::string& said, const OpContext& context,
            const std::string& place, bool backward, const float* numbers, int64_t n);
// For Python: all that is remembered under an id, a line each, and the way back; and its end.
std::string scales(int64_t id);
void set_scales(int64_t id, const char* lines);
void forget_scales(int64_t id);

// What a product's node says of how it adds, where not in float32: the numbers of struct TensorCore
// with blanks between (tensor_core_math.py). Its gradients' nodes get the same.
constexpr char kAccumulateKey[] = "__gluon_amp_accumulate__";

// Of a product of which some are made in high precision (graph/high_precision.py): for each input 1
// where the product that makes its gradient is. Where the forward product is, its settings for low
// precision have these names, under which only nodes of gradients read them.
constexpr char kHighKey[] = "__gluon_amp_high__";
constexpr char kBackReadsKey[] = "__gluon_amp_back_reads__";
constexpr char kBackScalingKey[] = "__gluon_amp_back_scaling__";
constexpr char kBackAccumulateKey[] = "__gluon_amp_back_accumulate__";

// ---- one call ----------------------------------------------------------------------

struct Call {
  const Operator& of;
  const NodeAttrs& attrs;
  const OpContext& context;
  const std::vector<TBlob>& in;
  const std::vector<OpReqType>& req;
  const std::vector<TBlob>& out;
  Rounding rounding;
  const OpStatePtr* state = nullptr;  // MXNet's, of an operator that has one

  Write write(size_t i) const {
    return req[i] == mxnet::kNullOp ? kNothing : req[i] == mxnet::kAddTo ? kAdd : kStore;
  }
};

constexpr int kNoHalf = -1;  // among types of arrays
inline bool is_half(int type) { return type == mshadow::kFloat16 || type == mshadow::kBfloat16; }
inline bool is_half(const TBlob& array) { return is_half(array.type_flag_); }
// The 16-bit type among types, bfloat16 where there are both; else kNoHalf.
inline int half_among(const std::vector<int>& types) {
  int found = kNoHalf;
  for (int type : types)
    if (is_half(type)) found = std::max(found, type);
  return found;
}
inline const Kernels* kernels_of(int type) {
  return type == mshadow::kBfloat16 ? bfloat16_kernels : kernels;
}
inline const Kernels* kernels_of(const TBlob& array) { return kernels_of(array.type_flag_); }
inline bool is_float(const TBlob& array) { return array.type_flag_ == mshadow::kFloat32; }
inline Half* halves(const TBlob& array) { return static_cast<Half*>(array.dptr_); }
inline float* floats(const TBlob& array) { return static_cast<float*>(array.dptr_); }
inline int64_t size(const TBlob& array) { return static_cast<int64_t>(array.Size()); }

// Attributes as MXNet's parsers read them, whatever the user's locale.
float number(const NodeAttrs& attrs, const char* key, float otherwise);
bool flag(const NodeAttrs& attrs, const char* key, bool otherwise);
std::string word(const NodeAttrs& attrs, const char* key, const char* otherwise);
std::vector<int64_t> numbers(const NodeAttrs& attrs, const char* key);  // of "(2, 3)"

// f(i) for all i below n, which take so many numbers, by all threads if that is worth it. If not, there
// is no region of OpenMP: from one of a single thread, each parallel loop in f would begin threads anew,
// and they wait milliseconds for a core.
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
// Float32 arrays for one call at a time. They own their memory, as oneDNN wants it of what it
// writes to; they come from a pool and go back to it when the lease ends.

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

// Held while an operator works in much scratch. Where MXNet has several workers, one runs after the
// other: each uses all threads anyway, and scratch is not there once for each worker.
std::mutex& turn();

// ---- widening and narrowing ----------------------------------------------------------

// What an operator has made, plain or in oneDNN's blocks, into an array of halves, which rounds it,
// or of floats.
void narrow(const NDArray& made, const TBlob& to, Write write);
mkldnn::memory::desc in_blocks(const mxnet::TShape& shape, int block);
int block_size();  // of oneDNN's convolutions on this processor

// ---- what runs -----------------------------------------------------------------------

// The generic operator: widen, run MXNet's code, round. `kept`: where a state keeps the scratch
// that its operator may go on pointing to.
void run(const Call& call, bool onednn, const std::vector<uint32_t>& mutated,
         const OpStatePtr* state, std::unique_ptr<Lease>* kept);
void run(const Call& call);  // of an operator without state

// Whether MXNet would choose its code for oneDNN's arrays, for inputs without sparsity.
bool prefers_onednn(const Operator& of, const NodeAttrs& attrs, size_t inputs, size_t outputs);

// Code of its own for a call; false where it does not know the case: then the generic one runs.
constexpr uint32_t kAnyPlace = ~0u;  // any output may have the memory of any input
struct OwnCode {
  bool (*run)(const Call& call);
  uint32_t places;  // output 0 may have the memory of so many of the first inputs, or kAnyPlace
  int knows = 0;  // kGrids: formats other than float16; others: see show_own_code in watch.h
};
constexpr int kGrids = 1, kFloats = 2, kNumbers = 4 | kFloats;
const OwnCode* own_code(const std::string& name);
std::string names_with_own_code();  // a line for each

// A product as a GPU's Tensor Cores make it, where its node says so (tensor_core_products.cc); null
// for other operators. It refuses what it does not know.
using ProductCode = void (*)(const Call& call);
ProductCode tensor_core_code(const std::string& name);

// An RNN with its state as a loop of ours: one that adds as a GPU does, or whose products have
// another format than what lies between (rnn_loop.cc).
class RnnLoop {
 public:
  explicit RnnLoop(const NodeAttrs& attrs);
  ~RnnLoop();
  static bool runs(const NodeAttrs& attrs);  // whether a node wants it
  void run(const Call& call, bool forward);

 private:
  struct Layers;
  std::unique_ptr<Layers> layers_;
  bool drops_;
};

// An RNN of bfloat16 arrays: its products read bfloat16 numbers, all else is float32 (bfloat16_rnn.cc).
class Bfloat16Rnn {
 public:
  explicit Bfloat16Rnn(const NodeAttrs& attrs);
  ~Bfloat16Rnn();
  static bool runs(const NodeAttrs& attrs, int half);  // whether it has code for a node
  bool serves(const Call& call) const;                 // and for a call of its forward pass
  void run(const Call& call, bool forward);

 private:
  struct Layers;
  std::unique_ptr<Layers> layers_;
};

// ---- what the library offers to Python (library.py) ------------------------------------

// Lets those of these operators of MXNet that have code for CPUs dispatch on type.
void dispatch_operators(int count, const char** names);
bool is_dispatched_here(const nnvm::Op* x);
// Whether the engine runs a node on a CPU; `half`: which 16-bit type some input or output has.
bool is_taken(const NodeAttrs& attrs, int half);
std::string dispatched_names();  // a line for each
void register_training();  // training_operators.cc
void register_tensor_core();  // tensor_core.cc

// For tests: operators with code of their own run the generic code instead.
extern bool generic_only;

}  // namespace gluon_amp
