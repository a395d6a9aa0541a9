// The generic operator: runs MXNet's float32 code on float16 and bfloat16 arrays.
//
// It widens inputs into scratch, runs MXNet's operator, and rounds the results once. It reads all 16-bit inputs
// before it writes any output, so an output may share memory with any of them.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "dispatch/watch.h"

namespace gluon_amp {

const Kernels *kernels = nullptr, *float16_kernels = nullptr, *bfloat16_kernels = nullptr;
int overflowed = 0;

// ---- one call ----------------------------------------------------------------------

namespace {

// Whether MXNet's operator writes directly to the output's memory, not to scratch.
bool is_direct(const Call& call, size_t i, bool onednn) {
  const TBlob& to = call.out[i];
  return !is_16bit(to) && !(is_float(to) && onednn);
}

// Whether MXNet's operator may write to an input before it has read all of it, because an output shares its memory.
bool overwritten(const Call& call, const TBlob& from, const std::vector<bool>& direct) {
  for (size_t i = 0; i < direct.size(); ++i)
    if (direct[i] && from.dptr_ && from.dptr_ == call.out[i].dptr_) return true;
  return false;
}

// oneDNN's RNN copies its weights and has pointers to the other data of the forward pass, so the backward pass
// reads only gradients: of y and of its two states. The inputs of MXNet's RNNGrad: data, weights, state, y, dy,
// new state, its gradient, cell, new cell, its gradient.
constexpr size_t kWeightsOfRnn = 1;
constexpr size_t kGradientOfY = 4, kGradientOfState = 6, kGradientOfCell = 9;
bool is_read(const Operator& op, size_t i) {
  return op.name() != "_backward_RNN" || i == kGradientOfY || i == kGradientOfState ||
         i == kGradientOfCell;
}

TBlob copy_of(const TBlob& from, Scratch* scratch) {
  const TBlob copy = scratch->like(from);
  put(from.dptr_, copy, kStore);
  return copy;
}

// One run of MXNet's operator, in float32.
struct Float32Run {
  const Call& call;
  const bool onednn;
  const std::vector<uint32_t>& mutated;
  const OpStatePtr* const state;
  Scratch* const scratch;
  Scratch brief = {};  // until the end of the run; MXNet's state never points to it
  std::vector<bool> direct = {};
  std::vector<NDArray> in = {}, out = {};
  std::vector<OpReqType> req = call.req;

  void run() {
    for (size_t i = 0; i < call.out.size(); ++i) direct.push_back(is_direct(call, i, onednn));
    for (size_t i = 0; i < call.in.size(); ++i) in.push_back(input(i));
    add_outputs();
    run_mxnet();
    write_results();
  }

 private:
  NDArray input(size_t i) {
    const Operator& op = call.op;
    const TBlob& from = call.in[i];
    const size_t weight = !op.is(kHasParameters) ? call.in.size() : op.name()[0] == '_' ? 2 : 1;
    const bool is_rounded = i == weight && is_float(from) && is_16bit(call.in[0]);  // to bfloat16
    if (!is_16bit(from) && !is_rounded) {
      const bool copied = overwritten(call, from, direct) && !std::count(mutated.begin(), mutated.end(), i);
      return {copied ? copy_of(from, scratch) : from, 0};
    }
    if (state && onednn && is_16bit(from) && !is_read(op, i))
      return {TBlob(from.dptr_, from.shape_, mshadow::cpu::kDevMask, mshadow::kFloat32, 0), 0};
    const bool copied = state && onednn && i == kWeightsOfRnn;
    NDArray wide = (copied ? &brief : scratch)->array(from.shape_);
    float* const widened = floats(wide.data());
    if (!is_rounded) {
      widen(from, widened);
      return wide;
    }
    Number16* const narrowed = brief.numbers16(size(from));
    bfloat16_kernels->narrow(floats(from), narrowed, size(from), kStore);
    bfloat16_kernels->widen(narrowed, widened, size(from));
    return wide;
  }

  void add_outputs() {
    // MXNet's code does not write some gradients of empty inputs
    const bool zeros = call.op.is(kLeavesOutputs) ||
                       std::any_of(call.in.begin(), call.in.end(), [](const TBlob& from) { return size(from) == 0; });
    for (size_t i = 0; i < call.out.size(); ++i) {
      const TBlob& to = call.out[i];
      if (direct[i]) out.emplace_back(to, 0);
      else out.push_back(scratch->array(to.shape_));
      const bool keeps = direct[i] && !(call.write(i) == kStore && is_float(to));
      if (zeros && !keeps) std::fill_n(floats(out[i].data()), size(to), 0.0f);
      if (call.op.is(kLeavesInput) && !keeps) std::copy_n(floats(in[0].data()), size(to), floats(out[i].data()));
      if (req[i] == mxnet::kWriteInplace || (!direct[i] && req[i] != mxnet::kNullOp)) req[i] = mxnet::kWriteTo;
    }
  }

  void run_mxnet() {
    const Operator& op = call.op;
    OpContext context = call.context;
    // In predictions MXNet would reorder the weight in a later task, after this scratch is reused.
    if (op.is(kPushesWeight)) context.is_train = true;
    if (onednn) op.adapt_requests(req);
    if (state && onednn) {
      // A static CachedOp does not initialize need_grad, by which an RNN decides whether it trains; is_train
      // replaces it. An RNN detects new weights by their version, so scratch gets a new version for each call.
      static std::atomic<size_t> calls{0};
      context.need_grad = false;
      for (auto& array : in) array.var()->version_ = ++calls;
      op.stateful_ex(*state, context, in, req, out);
    } else if (state) {
      op.stateful(*state, context, blobs(in), req, blobs(out));
    } else if (onednn) {
      op.compute_ex(call.attrs, context, in, req, out);
    } else {
      op.compute(call.attrs, context, blobs(in), req, blobs(out));
    }
  }

  void write_results() {
    for (size_t i = 0; i < call.out.size(); ++i) {
      const TBlob& to = call.out[i];
      const Write write = call.write(i);
      if (write == kNothing) continue;
      if (!direct[i]) narrow(out[i], to, write);
    }
    for (uint32_t i : mutated)
      if (is_16bit(call.in[i])) narrow(in[i], call.in[i], kStore);
  }
};

}  // namespace

bool prefers_onednn(const Operator& op, const NodeAttrs& attrs, size_t inputs, size_t outputs) {
  if (!op.compute && !op.stateful) return true;
  if (!(op.compute_ex || op.stateful_ex) || !op.storage) return false;
  auto mode = mxnet::DispatchMode::kUndefined;
  std::vector<int> in(inputs, mxnet::kDefaultStorage), out(outputs, mxnet::kUndefinedStorage);
  call_original(op.storage, attrs, int(mshadow::cpu::kDevMask), &mode, &in, &out);
  return mode == mxnet::DispatchMode::kFComputeEx;
}

void run(const Call& call) {
  run(call, prefers_onednn(call.op, call.attrs, call.in.size(), call.out.size()),
      call.op.mutates ? call.op.mutates(call.attrs) : std::vector<uint32_t>(), nullptr, nullptr);
}

void run(const Call& call, bool onednn, const std::vector<uint32_t>& mutated,
         const OpStatePtr* state, std::unique_ptr<Scratch>* kept) {
  const auto is_nothing = [](OpReqType request) { return request == mxnet::kNullOp; };
  if (mutated.empty() && !state && std::all_of(call.req.begin(), call.req.end(), is_nothing)) return;
  const std::lock_guard<std::mutex> mine(scratch_lock());
  auto scratch = std::make_unique<Scratch>();
  Float32Run{call, onednn, mutated, state, scratch.get()}.run();
  if (kept) *kept = std::move(scratch);
}

}  // namespace gluon_amp
