// Shared declarations of the engine: operators of MXNet, calls, scratch memory.
//
// MXNet's operators dispatch on type (dispatch.cc): the engine runs calls with a float16 or bfloat16 array.
// Its generic operator (generic.cc) widens these inputs to float32, runs MXNet's code, and rounds the results
// once. Memory-bound operators have hand-written kernels.
#pragma once
#include "native.h"

#include <algorithm>

#include "dispatch/settings.h"
#include "dispatch/traits.h"
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
  const nnvm::Op* nnvm_op;
  mxnet::FCompute compute;
  mxnet::FComputeEx compute_ex;
  mxnet::FStatefulCompute stateful;
  mxnet::FStatefulComputeEx stateful_ex;
  mxnet::FCreateOpState create_state;
  mxnet::FInferStorageType storage;
  nnvm::FMutateInputs mutates;
  nnvm::FInferType types;
  mxnet::FInferShape shapes;
  nnvm::FNumVisibleOutputs visible;  // the outputs beyond them are for the backward pass
  const struct HandWritten* hand_written;  // or null
  const OperatorRow* row;

  const std::string& name() const { return nnvm_op->name; }
  bool is(Trait trait) const { return row->traits & trait; }
  bool has_generic() const { return compute || compute_ex; }

  // Changes the write requests for MXNet's code; a request that it adds for output 1 goes to scratch.
  void adapt_requests(std::vector<OpReqType>& req) const {
    if (is(kForgetsBias) && req.size() > 2 && req[2] != mxnet::kNullOp && req[1] == mxnet::kNullOp)
      req[1] = req[2];
  }
};

// ---- one call ----------------------------------------------------------------------

// Which arrays of a call are in oneDNN's layout (layout.h).
struct InLayout {
  std::vector<bool> in, out;  // empty where the node has no such setting

  InLayout() = default;
  InLayout(const Settings& settings, const std::vector<TBlob>& ins, const std::vector<TBlob>& outs);
  bool input(size_t i) const { return i < in.size() && in[i]; }
  bool output(size_t i) const { return i < out.size() && out[i]; }
  bool any() const;
  bool all() const;
};

struct Call {
  const Operator& op;
  const NodeAttrs& attrs;
  const Settings& settings;
  const OpContext& context;
  const std::vector<TBlob>& in;
  const std::vector<OpReqType>& req;
  const std::vector<TBlob>& out;
  const OpStatePtr* state = nullptr;  // MXNet's state of a stateful operator
  InLayout in_layout = {};

  Write write(size_t i) const {
    return req[i] == mxnet::kNullOp ? kNothing : req[i] == mxnet::kAddTo ? kAdd : kStore;
  }
  // The same call on other arrays, in the plain layout.
  Call on(const std::vector<TBlob>& inputs, const std::vector<OpReqType>& requests,
          const std::vector<TBlob>& outputs) const {
    return {op, attrs, settings, context, inputs, requests, outputs, state};
  }
};

constexpr int kNoType16 = -1;  // no 16-bit type
inline bool is_16bit(int type) { return type == mshadow::kFloat16 || type == mshadow::kBfloat16; }
inline bool is_16bit(const TBlob& array) { return is_16bit(array.type_flag_); }
// The 16-bit type among types, bfloat16 if there are both, or kNoType16.
inline int type16_among(const std::vector<int>& types) {
  int type16 = kNoType16;
  for (int type : types)
    if (is_16bit(type)) type16 = std::max(type16, type);
  return type16;
}
inline const Kernels* kernels_of(int type) {
  return type == mshadow::kBfloat16 ? bfloat16_kernels : type == mshadow::kFloat16 ? float16_kernels : kernels;
}
inline const Kernels* kernels_of(const TBlob& array) { return kernels_of(array.type_flag_); }
inline bool is_float(const TBlob& array) { return array.type_flag_ == mshadow::kFloat32; }
inline Number16* numbers16(const TBlob& array) { return static_cast<Number16*>(array.dptr_); }
inline float* floats(const TBlob& array) { return static_cast<float*>(array.dptr_); }
inline int64_t size(const TBlob& array) { return static_cast<int64_t>(array.Size()); }
inline int64_t bytes_of(int type) { return static_cast<int64_t>(mshadow::mshadow_sizeof(type)); }
// The address of an array's element.
inline void* at(const TBlob& array, int64_t element) {
  return static_cast<char*>(array.dptr_) + element * bytes_of(array.type_flag_);
}
inline std::vector<TBlob> blobs(const std::vector<NDArray>& arrays) {
  std::vector<TBlob> blobs_of_arrays;
  for (const NDArray& array : arrays) blobs_of_arrays.push_back(array.data());
  return blobs_of_arrays;
}
// Whether two arrays share memory.
inline bool overlap(const TBlob& a, const TBlob& b) {
  const auto* const from = static_cast<const char*>(a.dptr_);
  const auto* const other = static_cast<const char*>(b.dptr_);
  return from < other + size(b) * bytes_of(b.type_flag_) && other < from + size(a) * bytes_of(a.type_flag_);
}
// Writes numbers of the array's type to it, or adds them.
inline void put(const void* numbers, const TBlob& to, Write write) {
  if (write == kStore) kernels->copy(numbers, to.dptr_, size(to) * bytes_of(to.type_flag_));
  if (write == kAdd) kernels_of(to)->sum(&numbers, 1, to.dptr_, size(to), kAdd);
}
// Copies an array of 16-bit numbers or floats to floats.
inline void widen(const TBlob& from, float* to) { kernels_of(from)->widen(from.dptr_, to, size(from)); }

// Attributes as MXNet's parsers read them, whatever the user's locale.
float number(const NodeAttrs& attrs, const char* key, float otherwise);
int64_t whole(const NodeAttrs& attrs, const char* key, int64_t otherwise);
int axis_of(const NodeAttrs& attrs, const char* key, int otherwise, int dimensions);  // from 0 on
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
// Float32 arrays for one call, from a pool to which they return when the Scratch is destroyed. They own their memory,
// which oneDNN requires of outputs.

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch();
  NDArray array(const mxnet::TShape& shape);
  float* memory(int64_t count);
  Number16* numbers16(int64_t count) { return reinterpret_cast<Number16*>(memory((count + 1) / 2)); }
  TBlob like(const TBlob& array);  // of its shape and type

 private:
  std::vector<NDArray> held_;
};

// Held while an operator uses much scratch. MXNet's workers take turns: each uses all threads anyway, and
// they share scratch.
std::mutex& scratch_lock();

// ---- widening and narrowing ----------------------------------------------------------

// Writes an operator's float32 result, plain or in oneDNN's layout, to an array of 16-bit numbers or floats.
void narrow(const NDArray& from, const TBlob& to, Write write);
mkldnn::memory::desc onednn_layout(const mxnet::TShape& shape, int together);
// The number of adjacent channels of an array of this shape in oneDNN's layout, else 0.
int channels_together(const NDArray& array, const mxnet::TShape& shape);
int channels_together();  // of oneDNN's convolutions on this processor

// ---- what runs -----------------------------------------------------------------------

// The generic operator: widens inputs, runs MXNet's code, rounds outputs. `kept`: holds scratch to which the
// operator's state points afterwards.
void run(const Call& call, bool onednn, const std::vector<uint32_t>& mutated,
         const OpStatePtr* state, std::unique_ptr<Scratch>* kept);
void run(const Call& call);  // for an operator without state

// Whether MXNet would dispatch dense inputs to its oneDNN code.
bool prefers_onednn(const Operator& op, const NodeAttrs& attrs, size_t inputs, size_t outputs);

// A hand-written kernel for a call; false if it does not support the case: then the generic operator runs.
constexpr uint32_t kAnyInput = ~0u;  // any output may share memory with any input
struct HandWritten {
  bool (*run)(const Call& call);
  uint32_t in_place;  // output 0 may share memory with this many of the first inputs, or kAnyInput
  // kLayout: images in oneDNN's layout, input 0 and output 0, with kAlike either both or none, else
  // `run` returns false; kAnyOrder: calls with such arrays only. Others: see count_hand_written in watch.h
  int supports = 0;
};
constexpr int kFloats = 1, kNumbers = 2 | kFloats, kLayout = 4, kAlike = 8 | kLayout, kAnyOrder = 16;
const HandWritten* hand_written_kernel(const std::string& name);

// A stateful RNN as our loop over time (rnn.cc).
class Rnn {
 public:
  static std::unique_ptr<Rnn> make(const NodeAttrs& attrs, int type16);  // null: MXNet's runs
  virtual ~Rnn() = default;
  virtual bool serves(const Call& call) const = 0;  // whether it supports a forward call
  virtual void forward(const Call& call) = 0;
  virtual void backward(const Call& call) = 0;
};

// ---- functions for Python (library.py) ------------------------------------------------

// Makes those of these operators of MXNet that have CPU functions dispatch on type.
void dispatch_operators(int count, const char** names);
bool is_dispatched(const nnvm::Op* x);
// Whether the engine runs a node on a CPU; `type16`: which 16-bit type some input or output has.
bool engine_runs(const NodeAttrs& attrs, int type16);
// The operators that have made finite numbers infinite in float16, in training, since the last call: lines of an operator
// and the name of its node, if it has one.
std::string overflow_rows();
std::string operator_rows();  // a line for each: its name, and words for what it supports
void register_training();  // training.cc
// An operator that MXNet does not have, with one output.
nnvm::Op& add_operator(const std::string& name, uint32_t inputs,
                       bool (*shapes)(const NodeAttrs&, mxnet::ShapeVector*, mxnet::ShapeVector*),
                       bool (*types)(const NodeAttrs&, std::vector<int>*, std::vector<int>*),
                       const mxnet::FCompute& compute);

// For tests and benchmarks: the generic operator runs instead of the hand-written kernels of these operators, their
// names or "all".
void use_generic(const char* operators);
extern bool generic_only;  // of all

}  // namespace gluon_amp
