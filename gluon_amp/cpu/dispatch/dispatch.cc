// Dispatches MXNet's operators on type.
//
// The CPU functions of MXNet's operators are replaced. The new functions run the engine if an input or output
// is float16 or bfloat16, or if the node has a setting, and MXNet's function otherwise, as if nothing were replaced
// (but see repairs.h). Sparse arrays always go to MXNet's function.
#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>

#include "dispatch/arrays.h"
#include "dispatch/attributes.h"
#include "dispatch/layout.h"
#include "dispatch/gradients.h"
#include "dispatch/moving_averages.h"
#include "dispatch/plan.h"
#include "dispatch/repairs.h"
#include "dispatch/watch.h"

namespace gluon_amp {

bool generic_only = false;

namespace {

std::map<const nnvm::Op*, const Operator*> dispatched;
std::set<const Operator*> generic_operators;  // those without a hand-written kernel, by use_generic

// ---- which calls the engine runs -----------------------------------------------------------

// Whether MXNet's code of float16 arrays is as fast: the engine runs such operators only with a setting.
bool is_fast_in_mxnet(const Operator& op) { return op.is(kMoves) || (op.is(kWidens) && !op.hand_written); }

bool engine_runs(const Operator& op, const Settings& settings, int type16) {
  return type16 == mshadow::kBfloat16 || (type16 != kNoType16 && !is_fast_in_mxnet(op)) || settings.needs_engine();
}

// ---- overflow ----------------------------------------------------------------------------

std::mutex overflow_lock;
std::set<std::string> overflows;  // of lines: an operator, and the node's name, which imperative calls lack

// Notes the operator of a call in training that has just run, if its results have overflowed.
void note_overflow(const Operator& op, const NodeAttrs& attrs, const OpContext& context) {
  if (!__atomic_load_n(&overflowed, __ATOMIC_RELAXED)) return;
  __atomic_store_n(&overflowed, 0, __ATOMIC_RELAXED);
  if (!context.is_train) return;
  const std::lock_guard<std::mutex> guard(overflow_lock);
  overflows.insert(op.name() + " " + attrs.name);
}

// ---- one call ----------------------------------------------------------------------------

// Whether an output shares memory with an input that the hand-written kernel still reads.
bool overlaps(const Call& call, const HandWritten& kernel) {
  if (kernel.in_place == kAnyInput) return false;
  for (size_t o = 0; o < call.out.size(); ++o)
    for (size_t i = 0; i < call.in.size(); ++i) {
      const bool in_place = call.in[i].dptr_ == call.out[o].dptr_ && o == 0 && i < kernel.in_place;
      if (call.req[o] != mxnet::kNullOp && overlap(call.in[i], call.out[o]) && !in_place) return true;
    }
  return false;
}

// Whether an operator has a hand-written kernel that may run now.
bool may_run_hand_written(const Call& call) {
  const Operator& op = call.op;
  return op.hand_written && !(generic_only && op.has_generic()) && !generic_operators.count(&op) && !overlaps(call, *op.hand_written);
}

// Runs an operator's hand-written kernel if it supports this case, else `generic`.
template <class F>
void run_engine(const Call& call, const Watch& watch, F generic) {
  const Operator& op = call.op;
  const HandWritten* kernel = op.hand_written;
  const bool usable = may_run_hand_written(call);
  if (usable && watch && kernel->supports & kFloats && count_hand_written(call, *kernel)) return;
  if (!usable || !kernel->run(call)) generic();
}

void run_plain(const Call& call) {
  Watch watch(call);
  run_engine(call, watch, [&] { run(call); });
  watch.record();
}

// Runs an operator's hand-written kernel on arrays in oneDNN's layout. False if there is none for this case.
bool run_in_layout(const Call& call) {
  const HandWritten* const kernel = call.op.hand_written;
  return may_run_hand_written(call) && !watching() &&
         (kernel->supports & kLayout || (kernel->supports & kAnyOrder && call.in_layout.all())) && kernel->run(call);
}

void run_stateless(const Operator& op, const NodeAttrs& attrs, const Settings& settings, int type16,
                   const OpContext& context, const std::vector<TBlob>& in, const std::vector<OpReqType>& req,
                   const std::vector<TBlob>& out) {
  const auto substitute = type16 != kNoType16 ? node_for_type16(op, attrs, type16) : nullptr;
  Call call{op, substitute ? substitute->attrs : attrs, settings, context, in, req, out, nullptr,
            InLayout(settings, in, out)};
  if (call.in_layout.any()) {
    if (!run_in_layout(call)) in_plain(call, [](const Call& plain) { run_plain(plain); });
    return;
  }
  run_plain(call);
}

// `original`: MXNet's function.
template <class F, class T>
void compute(const Operator& op, const F& original, const NodeAttrs& attrs, const OpContext& context,
             const std::vector<T>& in, const std::vector<OpReqType>& req, const std::vector<T>& out) {
  const Settings& settings = settings_of(attrs);
  const int type16 = type16_of(in, out);
  const bool acts = type16 != kNoType16 || has_settings(settings);
  if (!acts && !repairs_empty_calls) return original(attrs, context, in, req, out);
  if (is_empty_call(op, &attrs, in, req, out)) return;
  if (!acts) return original(attrs, context, in, req, out);
  const FiniteAverages finite(op, in);
  if (!engine_runs(op, settings, type16) || !all_dense(in) || !all_dense(out))
    return original(attrs, context, in, req, out);
  std::vector<NDArray> copies;
  const auto& inputs = plain(in, &copies);
  run_stateless(op, attrs, settings, type16, context, inputs, req, plain_outputs(out, req));
  note_overflow(op, attrs, context);
}

// ---- operators with state ----------------------------------------------------------------

// MXNet's state, created for float32 arrays, and the scratch to which it may point until the end of its
// backward pass. Stateful code does not get its node's attributes, so the state has a copy.
struct OperatorState {
  const Operator& op;
  const nnvm::ObjectPtr node;
  const Settings& settings;
  const size_t outputs_count;
  OpStatePtr inner;
  std::unique_ptr<Scratch> kept;
  bool onednn;
  bool trained = false;      // whether the last forward pass was in training, and did not fail
  std::unique_ptr<Rnn> rnn;  // of an RNN that may run as our loop
  bool ran_rnn = false;      // whether it ran the last forward pass

  OperatorState(const Operator& its_op, nnvm::ObjectPtr its_node, OpStatePtr state, int type16, size_t in,
        size_t out)
      : op(its_op), node(std::move(its_node)), settings(settings_of(attrs())), outputs_count(out),
        inner(std::move(state)), onednn(prefers_onednn(op, attrs(), in, out)) {
    if (op.name() == "RNN") rnn = Rnn::make(attrs(), type16);
  }

  const NodeAttrs& attrs() const { return node->attrs; }

  // The inputs that the forward or the backward pass writes.
  std::vector<uint32_t> mutated_by(const Operator& code) const {
    return code.mutates ? code.mutates(attrs()) : std::vector<uint32_t>();
  }

  void run(const Operator& code, bool forward, const OpContext& context, const std::vector<TBlob>& in,
           const std::vector<OpReqType>& req, const std::vector<TBlob>& out) {
    static const std::vector<int> inputs{0, 1, 2, 3, 4, 5, 6, 7};
    Call call{code, attrs(), settings, context, in, req, out, &inner};
    Watch watch(call, forward ? nullptr : &inputs);
    run_engine(call, watch, [&] { forward ? run_forward(call) : run_backward(call); });
    watch.record();
  }

 private:
  void run_forward(const Call& call) {
    trained = false;
    ran_rnn = rnn && rnn->serves(call);
    if (ran_rnn) {
      rnn->forward(call);
    } else {
      // oneDNN's RNN points to scratch only after a forward pass in training
      kept.reset();
      gluon_amp::run(call, onednn, mutated_by(op), &inner, onednn && !call.context.is_train ? nullptr : &kept);
    }
    trained = call.context.is_train;
  }

  void run_backward(const Call& call) {
    if ((onednn || ran_rnn) && !trained) train_again(call);
    if (ran_rnn) return rnn->backward(call);
    gluon_amp::run(call, onednn, mutated_by(call.op), &inner, nullptr);
  }

  // Repeats the forward pass of an RNN, because predictions save nothing for a backward pass. That reads x,
  // weights, state, y, dy; if states are outputs: the new state and its gradient; for an LSTM the cell, and the
  // same of it; lengths of sequences, if used.
  void train_again(const Call& call) {
    const bool states = outputs_count > 1, lstm = word(attrs(), "mode", "") == "lstm";
    std::vector<TBlob> in(call.in.begin(), call.in.begin() + 3), out{call.in[3]};
    if (lstm) in.push_back(call.in[states ? 7 : 5]);
    if (flag(attrs(), "use_sequence_length", false)) in.push_back(call.in.back());
    if (states) out.push_back(call.in[5]);
    if (states && lstm) out.push_back(call.in[8]);
    Scratch results;
    for (TBlob& array : out) array = results.like(array);
    OpContext training = call.context;
    training.is_train = true;
    const std::vector<OpReqType> req(out.size(), mxnet::kWriteTo);
    run_forward({op, attrs(), settings, training, in, req, out, &inner});
  }
};

using Types = std::vector<int>;

OpStatePtr create_state(const NodeAttrs& attrs, mxnet::Context context,
                        const mxnet::ShapeVector& shapes, const Types& types) {
  const Operator& op = *dispatched.at(attrs.op);
  const auto create = [&](const NodeAttrs& of_node, const Types& its) {
    return call_original(op.create_state, of_node, context, shapes, its);
  };
  const int type16 = type16_among(types);
  if (context.dev_mask() != mshadow::cpu::kDevMask || (type16 == kNoType16 && !has_settings(settings_of(attrs))))
    return create(attrs, types);
  Types wide(types);
  std::replace_if(wide.begin(), wide.end(), [](int type) { return is_16bit(type); }, int(mshadow::kFloat32));
  auto node = copy_node(op, attrs, type16);
  node->attrs.name = attrs.name;  // for note_overflow
  const OpStatePtr inner = create(node->attrs, wide);
  const uint32_t outputs = op.nnvm_op->get_num_outputs ? op.nnvm_op->get_num_outputs(attrs)
                                                  : op.nnvm_op->num_outputs;
  return make_state(new OperatorState(op, std::move(node), inner, type16, shapes.size(), outputs));
}

template <class F, class T>
void run_stateful(const Operator& op, const F& original, const OpStatePtr& state, const OpContext& context,
              const std::vector<T>& in, const std::vector<OpReqType>& req, const std::vector<T>& out) {
  OperatorState* ours = state_of<OperatorState>(state);
  if (!ours && !repairs_empty_calls) return original(state, context, in, req, out);
  if (is_empty_call(op, ours ? &ours->attrs() : nullptr, in, req, out)) return;
  if (!ours) return original(state, context, in, req, out);
  const FiniteAverages finite(op, in);
  std::vector<NDArray> copies;
  const auto& inputs = plain(in, &copies);
  ours->run(op, bool(op.create_state), context, inputs, req, plain_outputs(out, req));
  note_overflow(op, ours->attrs(), context);
}

// ---- one operator ------------------------------------------------------------------------

template <class T>
T attribute(const nnvm::Op* op, const char* key) {
  const T* value = get<T>(op, key);
  return value ? *value : T();
}

bool contains(const std::string& name, const char* part) {
  return name.find(part) != std::string::npos;
}

Operator read_operator(const nnvm::Op* x) {
  Operator op;
  op.nnvm_op = x;
  op.compute = attribute<mxnet::FCompute>(x, "FCompute<cpu>");
  op.compute_ex = attribute<mxnet::FComputeEx>(x, "FComputeEx<cpu>");
  op.stateful = attribute<mxnet::FStatefulCompute>(x, "FStatefulCompute<cpu>");
  op.stateful_ex = attribute<mxnet::FStatefulComputeEx>(x, "FStatefulComputeEx<cpu>");
  op.create_state = attribute<mxnet::FCreateOpState>(x, "FCreateOpState");
  op.storage = attribute<mxnet::FInferStorageType>(x, "FInferStorageType");
  op.mutates = attribute<nnvm::FMutateInputs>(x, "FMutateInputs");
  op.types = attribute<nnvm::FInferType>(x, "FInferType");
  op.shapes = attribute<mxnet::FInferShape>(x, "FInferShape");
  op.visible = attribute<nnvm::FNumVisibleOutputs>(x, "FNumVisibleOutputs");
  op.hand_written = hand_written_kernel(x->name);
  op.row = &row_of(x->name);
  return op;
}

void replace_functions(const Operator& op, nnvm::Op& target) {
  const Operator* const x = &op;  // MXNet copies these functions for each call; capturing a pointer is cheap
  if (op.compute)
    set<mxnet::FCompute>(target, "FCompute<cpu>", [x](const auto&... call) { compute(*x, x->compute, call...); });
  if (op.compute_ex)
    set<mxnet::FComputeEx>(target, "FComputeEx<cpu>", [x](const auto&... call) { compute(*x, x->compute_ex, call...); });
  if (op.create_state) set<mxnet::FCreateOpState>(target, "FCreateOpState", by_value(&create_state));
  if (op.stateful)
    set<mxnet::FStatefulCompute>(target, "FStatefulCompute<cpu>",
                                 [x](const auto&... call) { run_stateful(*x, x->stateful, call...); });
  if (op.stateful_ex)
    set<mxnet::FStatefulComputeEx>(target, "FStatefulComputeEx<cpu>",
                                   [x](const auto&... call) { run_stateful(*x, x->stateful_ex, call...); });
}

// ---- attributes that CPUs and GPUs share -----------------------------------------------------

// In-place options. The generic operator reads all inputs first, so any output may share memory with any input;
// a hand-written kernel lists which. MXPlanMemory tries every pair, so only the first arrays get options: an
// operator with hundreds of arrays would have tens of thousands.
std::vector<std::pair<int, int>> in_place_options(const Operator& op, const NodeAttrs& attrs) {
  const nnvm::Op* x = op.nnvm_op;
  const uint32_t inputs = x->get_num_inputs ? x->get_num_inputs(attrs) : x->num_inputs;
  const uint32_t outputs = x->get_num_outputs ? x->get_num_outputs(attrs) : x->num_outputs;
  std::vector<std::pair<int, int>> options;
  const bool any = !op.hand_written || op.hand_written->in_place == kAnyInput;
  for (uint32_t in = 0; !any && in < op.hand_written->in_place; ++in) options.emplace_back(in, 0);
  if (!any) return options;
  for (uint32_t out = 0; out < std::min(outputs, 8u); ++out)
    for (uint32_t in = 0; inputs != nnvm::kVarg && in < std::min(inputs, 16u); ++in)
      options.emplace_back(in, out);
  return options;
}

// MXNet skips operators whose output is their input, in place.
void wrap_identities(nnvm::Op& target) {
  replace<nnvm::FInplaceIdentity>(
      target, "FInplaceIdentity", [](const auto& original, const NodeAttrs& attrs) {
        return is_planned(attrs) ? std::vector<bool>(original(attrs).size(), false) : original(attrs);
      });
}

void wrap_in_place_options(const Operator& op, nnvm::Op& target) {
  set<nnvm::FInplaceOption>(
      target, "FInplaceOption",
      [x = &op, original = attribute<nnvm::FInplaceOption>(op.nnvm_op, "FInplaceOption")](const NodeAttrs& attrs) {
        if (is_planned(attrs)) return in_place_options(*x, attrs);
        return original ? original(attrs) : std::vector<std::pair<int, int>>();
      });
}

// MXNet's type inference with `stand_in` instead of `type`, which some code refuses.
template <class F>
bool infer_instead(int type, int stand_in, Types* in, Types* out, F infer) {
  bool has = false, mixed = false;
  for (const Types* types : {in, out}) {
    has |= std::count(types->begin(), types->end(), type) > 0;
    mixed |= std::count(types->begin(), types->end(), stand_in) > 0;
  }
  if (!has || mixed) return infer();
  const auto swap = [&](int from, int to) {
    for (Types* types : {in, out}) std::replace(types->begin(), types->end(), from, to);
  };
  swap(type, stand_in);
  const bool complete = infer();
  swap(stand_in, type);
  return complete;
}

// Type inference of a layer with float32 parameters: data and result have one type, and parameters are float32.
bool infer_with_parameters(Types* in, Types* out) {
  const int data = in->front() >= 0 ? in->front() : out->front();
  in->assign(in->size(), mshadow::kFloat32);
  in->front() = out->front() = data;
  return data >= 0;
}

// Operators that refuse float16 have the rules of float32. bfloat16 has the rules of float16, except for operators with
// a `dtype` attribute.
bool infer_types(const NodeAttrs& attrs, Types* in, Types* out) {
  if (settings_of(attrs).float32_parameters) return infer_with_parameters(in, out);
  const Operator& op = *dispatched.at(attrs.op);
  const auto as_mxnet = [&] { return call_original(op.types, attrs, in, out); };
  const auto infer = [&] {
    return op.is(kRefusesFloat16) ? infer_instead(mshadow::kFloat16, mshadow::kFloat32, in, out, as_mxnet) : as_mxnet();
  };
  if (std::max(type16_among(*in), type16_among(*out)) != mshadow::kBfloat16) return infer();
  const std::string dtype = word(attrs, "dtype", "");
  if (op.is(kCasts) || dtype == "bfloat16" || dtype == "float16") return infer();
  return infer_instead(mshadow::kBfloat16, mshadow::kFloat16, in, out, infer);
}

// Shape inference of the identity with a loss scale: its second input has one element, while MXNet requires
// the shape of the first.
bool infer_identity(const NodeAttrs& attrs, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  const auto& original = dispatched.at(attrs.op)->shapes;
  if (!settings_of(attrs).loss_scale) return call_original(original, attrs, in, out);
  mxnet::ShapeVector alike(2, in->front());
  const bool complete = call_original(original, attrs, &alike, out);
  *in = {alike.front(), mxnet::TShape(1, 1)};
  return complete;
}

void dispatch(nnvm::Op& target) {
  const auto* op = new Operator(read_operator(&target));  // never deleted
  dispatched[&target] = op;
  undo.push_back([&target] { dispatched.erase(&target); });
  replace_functions(*op, target);
  if (op->types) set<nnvm::FInferType>(target, "FInferType", by_value(&infer_types));
  if (target.name == "_identity_with_attr_like_rhs")
    set<mxnet::FInferShape>(target, "FInferShape", by_value(&infer_identity));
  if (target.name == "_backward_hard_sigmoid") wrap_identities(target);
  else if (!get<nnvm::FInplaceIdentity>(&target, "FInplaceIdentity")) wrap_in_place_options(*op, target);
  replace<nnvm::FGradient>(target, "FGradient", gradient);
}

// ---- which operators -----------------------------------------------------------------------

bool should_dispatch(const nnvm::Op* x) {
  const std::string& name = x->name;
  if (name.rfind(kPrefix, 0) == 0 || row_of(name).traits & kRunsInMXNet || dispatched.count(x)) return false;
  if (contains(name, "quantize")) return false;
  // of the oneDNN subgraphs of executors, only those of attention accept float16
  if (name.rfind("_sg_mkldnn", 0) == 0 && !contains(name, "selfatt")) return false;
  return get<mxnet::FCompute>(x, "FCompute<cpu>") || get<mxnet::FComputeEx>(x, "FComputeEx<cpu>") ||
         get<mxnet::FStatefulCompute>(x, "FStatefulCompute<cpu>") ||
         get<mxnet::FStatefulComputeEx>(x, "FStatefulComputeEx<cpu>");
}

}  // namespace

bool is_dispatched(const nnvm::Op* x) { return dispatched.count(x) > 0; }

bool engine_runs(const NodeAttrs& attrs, int type16) {
  const auto entry = dispatched.find(attrs.op);
  return entry != dispatched.end() && engine_runs(*entry->second, settings_of(attrs), type16);
}

void use_generic(const char* operators) {
  generic_only = !std::strcmp(operators, "all");
  generic_operators.clear();
  std::istringstream names(generic_only ? "" : operators);
  for (std::string name; names >> name;) generic_operators.insert(dispatched.at(nnvm::Op::Get(name)));
}

std::string overflow_rows() {
  const std::lock_guard<std::mutex> guard(overflow_lock);
  std::string rows;
  for (const std::string& row : overflows) rows += row + "\n";
  overflows.clear();
  return rows;
}

std::string operator_rows() {
  std::ostringstream rows;
  for (const auto& pair : dispatched) {
    const Operator& op = *pair.second;
    const std::string& name = pair.first->name;
    const int supports = op.hand_written ? op.hand_written->supports : 0;
    rows << name;
    if (op.hand_written) rows << " own_code";
    if (supports & kAnyOrder) rows << " any_order";
    if (supports & kLayout) rows << ((supports & kAlike) == kAlike ? " alike" : " layout");
    rows << "\n";
  }
  return rows.str();
}

void dispatch_operators(int count, const char** names) {
  for (int i = 0; i < count; ++i) {
    const nnvm::Op* x = nnvm::Op::Get(names[i]);
    if (should_dispatch(x)) dispatch(op_named(names[i]));
  }
}

}  // namespace gluon_amp
