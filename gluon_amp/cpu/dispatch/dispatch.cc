// Dispatches MXNet's operators on type.
//
// The CPU functions of MXNet's operators are replaced. The new functions run the engine if an input or output
// is float16 or bfloat16, or if the node has a setting, and MXNet's function otherwise. Sparse arrays always
// go to MXNet's function. Operator attributes that CPUs and GPUs share are wrapped only if a setting or a
// defect of MXNet requires it.
#include <algorithm>
#include <sstream>

#include "dispatch/attributes.h"
#include "dispatch/moving_averages.h"
#include "dispatch/blocks.h"
#include "dispatch/gradients.h"
#include "dispatch/plan.h"
#include "dispatch/watch.h"
#include "onednn/depth.h"

namespace gluon_amp {

bool generic_only = false;

namespace {

std::map<const nnvm::Op*, const Operator*> dispatched;

// ---- which calls the engine runs -----------------------------------------------------------

int type_of(const TBlob& array) { return array.type_flag_; }
int type_of(const NDArray& array) { return array.dtype(); }

// The 16-bit type of any array, or kNoHalf.
template <class T>
int half_of(const std::vector<T>& in, const std::vector<T>& out) {
  int found = kNoHalf;
  for (auto* arrays : {&in, &out})
    for (const T& array : *arrays)
      if (is_half(type_of(array))) found = std::max(found, type_of(array));
  return found;
}

// MXNet's code copies float16 values as fast, so the engine runs such operators only with a setting.
bool taken(const Operator& of, const Settings& settings, int half) {
  return half == mshadow::kBfloat16 || (half != kNoHalf && !of.is(kMoves)) || has_settings(settings);
}

bool all_dense(const std::vector<TBlob>&) { return true; }
bool all_dense(const std::vector<NDArray>& arrays) {
  return std::all_of(arrays.begin(), arrays.end(), [](const NDArray& array) {
    return array.storage_type() == mxnet::kDefaultStorage;
  });
}

// Arrays in the plain layout. Inputs in oneDNN's blocked layout are copied, and so are outputs with kAddTo,
// whose data the copy replaces.
const std::vector<TBlob>& plain(const std::vector<TBlob>& in, std::vector<NDArray>*) { return in; }
std::vector<TBlob> plain(const std::vector<NDArray>& in, std::vector<NDArray>* copies) {
  std::vector<TBlob> made;
  copies->reserve(in.size());
  for (const NDArray& array : in) {
    if (array.IsMKLDNNData()) copies->push_back(array.Reorder2Default());
    made.push_back(array.IsMKLDNNData() ? copies->back().data() : array.data());
  }
  return made;
}

const std::vector<TBlob>& plain_outputs(const std::vector<TBlob>& out, const std::vector<OpReqType>&) { return out; }
std::vector<TBlob> plain_outputs(const std::vector<NDArray>& out, const std::vector<OpReqType>& req) {
  std::vector<TBlob> made;
  for (size_t i = 0; i < out.size(); ++i) {
    auto& array = const_cast<NDArray&>(out[i]);
    if (array.IsMKLDNNData()) {
      const NDArray held = array.Reorder2Default();
      array.InvalidateMKLDNNData();
      if (req[i] == mxnet::kAddTo)
        kernels->copy(held.data().dptr_, array.data().dptr_, size(held.data()) * sizeof(float));
    }
    made.push_back(array.data());
  }
  return made;
}

// Whether an output shares memory with an input that the hand-written kernel still reads.
bool overlaps(const Call& call, const OwnCode& own) {
  if (own.places == kAnyPlace) return false;
  for (size_t o = 0; o < call.out.size(); ++o)
    for (size_t i = 0; i < call.in.size(); ++i) {
      const bool in_place = call.in[i].dptr_ == call.out[o].dptr_ && o == 0 && i < own.places;
      if (call.req[o] != mxnet::kNullOp && overlap(call.in[i], call.out[o]) && !in_place) return true;
    }
  return false;
}

// Whether an operator has a hand-written kernel that may run now.
bool may_run_own(const Call& call) {
  const Operator& of = call.of;
  return of.own && !(generic_only && of.has_generic()) && !overlaps(call, *of.own);
}

// Runs an operator's hand-written kernel if it supports this case, else `generic`.
template <class F>
void run_engine(const Call& call, const Watch& watch, F generic) {
  const Operator& of = call.of;
  if (of.product && call.settings.products.emulates()) return of.product(call);
  const OwnCode* own = of.own;
  const bool usable = may_run_own(call) && !(call.rounding.any && !(own->supports & kGrids));
  if (usable && watch && own->supports & kFloats && show_own_code(call, *own)) return;
  if (!usable || !own->run(call)) generic();
}

void run_plain(const Call& call) {
  const Watch watch(call);
  run_engine(call, watch, [&] { run(call); });
}

// Runs an operator's hand-written kernel on blocked arrays. False if there is none for this case.
bool run_in_blocks(const Call& call) {
  const OwnCode* const own = call.of.own;
  return may_run_own(call) && !call.rounding.any && !watching() &&
         (own->supports & kBlocks || (own->supports & kAnyOrder && call.blocked.all())) && own->run(call);
}

void run_stateless(const Operator& of, const NodeAttrs& attrs, const Settings& settings, int half,
                   const OpContext& context, const std::vector<TBlob>& in, const std::vector<OpReqType>& req,
                   const std::vector<TBlob>& out) {
  const auto substitute = half != kNoHalf ? in_halves(of, attrs, half) : nullptr;
  Call call{of, substitute ? substitute->get() : attrs, settings, context, in, req, out, Rounding(settings),
            nullptr, Blocked(settings, in, out)};
  call.rounding.draw(context);
  if (call.blocked.any()) {
    if (!run_in_blocks(call)) in_plain(call, [](const Call& plain) { run_plain(plain); });
    return;
  }
  run_plain(call);
}

// `theirs`: MXNet's function.
template <class F, class T>
void compute(const Operator& of, const F& theirs, const NodeAttrs& attrs, const OpContext& context,
             const std::vector<T>& in, const std::vector<OpReqType>& req, const std::vector<T>& out) {
  const Averages finite(of, in);
  const Settings& settings = settings_of(attrs);
  const int half = half_of(in, out);
  if (!taken(of, settings, half) || !all_dense(in) || !all_dense(out))
    return theirs(attrs, context, in, req, out);
  std::vector<NDArray> copies;
  const auto& inputs = plain(in, &copies);
  run_stateless(of, attrs, settings, half, context, inputs, req, plain_outputs(out, req));
}

// The second output of max pooling has the indices of maxima for the backward pass. MXNet's code writes them
// in training only; a recorded prediction needs them too.
bool is_pooling(const Operator& of) {
  static const nnvm::Op* const pooling = nnvm::Op::Get("Pooling");
  return of.op == pooling;
}

void compute_ex(const Operator& of, const NodeAttrs& attrs, const OpContext& context,
                const std::vector<NDArray>& in, const std::vector<OpReqType>& req,
                const std::vector<NDArray>& out) {
  if (context.is_train || req.size() < 2 || req[1] == mxnet::kNullOp || !is_pooling(of))
    return compute(of, of.compute_ex, attrs, context, in, req, out);
  OpContext training = context;
  training.is_train = true;
  compute(of, of.compute_ex, attrs, training, in, req, out);
}

// ---- operators with state ----------------------------------------------------------------

// MXNet's state, created for float32 arrays, and the scratch to which it may point until the end of its
// backward pass. Stateful code does not get its node's attributes, so the state has a copy.
struct State {
  const Operator& of;
  const std::shared_ptr<const Attributes> attributes;
  const Settings& settings;
  const size_t outputs_count;
  OpStatePtr inner;
  std::unique_ptr<Lease> kept;
  bool onednn;
  bool trained = false;      // whether the last forward pass was in training, and did not fail
  std::unique_ptr<Rnn> rnn;  // of an RNN that may run as our loop
  bool ran_rnn = false;      // whether it ran the last forward pass

  State(const Operator& x, std::shared_ptr<const Attributes> its, OpStatePtr state, int half, size_t in,
        size_t out)
      : of(x), attributes(std::move(its)), settings(settings_of(attrs())), outputs_count(out),
        inner(std::move(state)), onednn(prefers_onednn(x, attrs(), in, out)) {
    if (x.op->name == "RNN") rnn = Rnn::make(attrs(), settings, half);
  }

  const NodeAttrs& attrs() const { return attributes->get(); }

  // The inputs that the forward or the backward pass writes.
  std::vector<uint32_t> mutated_by(const Operator& code) const {
    return code.mutates ? code.mutates(attrs()) : std::vector<uint32_t>();
  }

  // In a backward pass, the first input is the head gradient, which is rounded (an RNN's is among other
  // inputs, which are on the same grid). The outputs are the gradients of the forward pass's inputs.
  Rounding rounding(bool forward) const {
    static const std::string all(64, 'g'), first(1, 'g'), none;
    Rounding made(settings);
    made.reads = forward ? &none : of.op->name == "RNN" ? &all : &first;
    made.gradient = &settings.back;
    if (forward) return made;
    made.output = &settings.back;
    made.product = &settings.gradient;
    made.outputs = &settings.inputs;
    return made;
  }

  void run(const Operator& code, bool forward, const OpContext& context, const std::vector<TBlob>& in,
           const std::vector<OpReqType>& req, const std::vector<TBlob>& out) {
    static const std::vector<int> inputs{0, 1, 2, 3, 4, 5, 6, 7};
    Call call{code, attrs(), settings, context, in, req, out, rounding(forward), &inner};
    call.rounding.draw(context);
    const Watch watch(call, forward ? nullptr : &inputs);
    run_engine(call, watch, [&] { forward ? run_forward(call) : run_backward(call); });
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
      gluon_amp::run(call, onednn, mutated_by(of), &inner, onednn && !call.context.is_train ? nullptr : &kept);
    }
    trained = call.context.is_train;
  }

  void run_backward(const Call& call) {
    if ((onednn || ran_rnn) && !trained) train_again(call);
    if (ran_rnn) return rnn->backward(call);
    gluon_amp::run(call, onednn, mutated_by(call.of), &inner, nullptr);
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
    Lease results;
    for (TBlob& made : out) made = results.like(made);
    OpContext training = call.context;
    training.is_train = true;
    const std::vector<OpReqType> req(out.size(), mxnet::kWriteTo);
    run_forward({of, attrs(), settings, training, in, req, out, rounding(true), &inner});
  }
};

using Types = std::vector<int>;

OpStatePtr create_state(const NodeAttrs& attrs, mxnet::Context context,
                        const mxnet::ShapeVector& shapes, const Types& types) {
  const Operator& of = *dispatched.at(attrs.op);
  const auto create = [&](const NodeAttrs& of_node, const Types& its) {
    return call_theirs(of.create_state, of_node, context, shapes, its);
  };
  const int half = half_among(types);
  if (context.dev_mask() != mshadow::cpu::kDevMask || (half == kNoHalf && !has_settings(settings_of(attrs))))
    return create(attrs, types);
  Types wide(types);
  std::replace_if(wide.begin(), wide.end(), [](int type) { return is_half(type); }, int(mshadow::kFloat32));
  auto kept = keep(of, attrs, half);
  const OpStatePtr inner = create(kept->get(), wide);
  const uint32_t outputs = of.op->get_num_outputs ? of.op->get_num_outputs(attrs)
                                                  : of.op->num_outputs;
  return make_state(new State(of, std::move(kept), inner, half, shapes.size(), outputs));
}

template <class F, class T>
void stateful(const Operator& of, const F& theirs, const OpStatePtr& state, const OpContext& context,
              const std::vector<T>& in, const std::vector<OpReqType>& req, const std::vector<T>& out) {
  const Averages finite(of, in);
  State* made = state_of<State>(state);
  if (!made) return theirs(state, context, in, req, out);
  std::vector<NDArray> copies;
  const auto& inputs = plain(in, &copies);
  made->run(of, bool(of.create_state), context, inputs, req, plain_outputs(out, req));
}

// ---- one operator ------------------------------------------------------------------------

template <class T>
T found(const nnvm::Op* op, const char* key) {
  const T* value = get<T>(op, key);
  return value ? *value : T();
}

bool contains(const std::string& name, const char* part) {
  return name.find(part) != std::string::npos;
}

// MXNet's updates and sums over several arrays support float16: they widen each number.
bool is_mixed(const std::string& name) {
  return contains(name, "_update") || name.rfind("multi_", 0) == 0 || name == "all_finite";
}

Operator describe(const nnvm::Op* x) {
  Operator of;
  of.op = x;
  of.compute = found<mxnet::FCompute>(x, "FCompute<cpu>");
  of.compute_ex = found<mxnet::FComputeEx>(x, "FComputeEx<cpu>");
  if (of.compute_ex && (x->name == "_backward_Convolution" || x->name == "_backward_Deconvolution"))
    of.compute_ex = with_right_depth(of.compute_ex, x->name == "_backward_Deconvolution");
  of.stateful = found<mxnet::FStatefulCompute>(x, "FStatefulCompute<cpu>");
  of.stateful_ex = found<mxnet::FStatefulComputeEx>(x, "FStatefulComputeEx<cpu>");
  of.create_state = found<mxnet::FCreateOpState>(x, "FCreateOpState");
  of.storage = found<mxnet::FInferStorageType>(x, "FInferStorageType");
  of.mutates = found<nnvm::FMutateInputs>(x, "FMutateInputs");
  of.types = found<nnvm::FInferType>(x, "FInferType");
  of.shapes = found<mxnet::FInferShape>(x, "FInferShape");
  of.resources = found<mxnet::FResourceRequestEx>(x, "FResourceRequestEx");
  of.own = own_code(x->name);
  const auto product = emulation.products.find(x->name);
  of.product = product == emulation.products.end() ? nullptr : product->second;
  of.traits = traits_of(x->name) | (is_mixed(x->name) && !of.own ? unsigned(kMoves) : 0);
  of.averages = averages_of(x->name);
  return of;
}

void replace_functions(const Operator& of, nnvm::Op& op) {
  const Operator* const x = &of;  // MXNet copies these functions for each call; capturing a pointer is cheap
  if (of.compute)
    set<mxnet::FCompute>(op, "FCompute<cpu>", [x](const auto&... call) { compute(*x, x->compute, call...); });
  if (of.compute_ex)
    set<mxnet::FComputeEx>(op, "FComputeEx<cpu>", [x](const auto&... call) { compute_ex(*x, call...); });
  if (of.create_state) set<mxnet::FCreateOpState>(op, "FCreateOpState", by_value(&create_state));
  if (of.stateful)
    set<mxnet::FStatefulCompute>(op, "FStatefulCompute<cpu>",
                                 [x](const auto&... call) { stateful(*x, x->stateful, call...); });
  if (of.stateful_ex)
    set<mxnet::FStatefulComputeEx>(op, "FStatefulComputeEx<cpu>",
                                   [x](const auto&... call) { stateful(*x, x->stateful_ex, call...); });
}

// ---- attributes that CPUs and GPUs share -----------------------------------------------------

// In-place options. The generic operator reads all inputs first, so any output may share memory with any input;
// a hand-written kernel lists which. MXPlanMemory tries every pair, so only the first arrays get options: an
// operator with hundreds of arrays would have tens of thousands.
std::vector<std::pair<int, int>> places(const Operator& of, const NodeAttrs& attrs) {
  const nnvm::Op* x = of.op;
  const uint32_t inputs = x->get_num_inputs ? x->get_num_inputs(attrs) : x->num_inputs;
  const uint32_t outputs = x->get_num_outputs ? x->get_num_outputs(attrs) : x->num_outputs;
  std::vector<std::pair<int, int>> made;
  const bool any = !of.own || of.own->places == kAnyPlace;
  for (uint32_t in = 0; !any && in < of.own->places; ++in) made.emplace_back(in, 0);
  if (!any) return made;
  for (uint32_t out = 0; out < std::min(outputs, 8u); ++out)
    for (uint32_t in = 0; inputs != nnvm::kVarg && in < std::min(inputs, 16u); ++in)
      made.emplace_back(in, out);
  return made;
}

// MXNet declares that an output is the same memory as an input, so that nothing runs. A node that rounds must
// not write to an array that others read. hard_sigmoid's gradient is not its head gradient, as MXNet declares.
void wrap_identity(const Operator& of, nnvm::Op& op) {
  const bool never = op.name == "_backward_hard_sigmoid";
  set<nnvm::FInplaceIdentity>(
      op, "FInplaceIdentity",
      [never, of_theirs = *get<nnvm::FInplaceIdentity>(of.op, "FInplaceIdentity")](const NodeAttrs& attrs) {
        std::vector<bool> made = of_theirs(attrs);
        if (never || settings_of(attrs).rounds()) made.assign(made.size(), false);
        return made;
      });
}

void wrap_places(const Operator& of, nnvm::Op& op) {
  set<nnvm::FInplaceOption>(
      op, "FInplaceOption",
      [x = &of, of_theirs = found<nnvm::FInplaceOption>(of.op, "FInplaceOption")](const NodeAttrs& attrs) {
        if (is_planned(attrs)) return places(*x, attrs);
        return of_theirs ? of_theirs(attrs) : std::vector<std::pair<int, int>>();
      });
}

// The resource request of MXNet's random generator, for nodes that run in order.
using Requests = std::vector<mxnet::ResourceRequest>;

Requests resources(const NodeAttrs& attrs, int device, mxnet::DispatchMode mode) {
  auto made = call_theirs(dispatched.at(attrs.op)->resources, attrs, device, mode);
  if (settings_of(attrs).ordered) made.push_back(mxnet::ResourceRequest::kRandom);
  return made;
}

void wrap_resources(const Operator& of, nnvm::Op& op) {
  set<mxnet::FResourceRequest>(
      op, "FResourceRequest",
      [of_theirs = found<mxnet::FResourceRequest>(of.op, "FResourceRequest")](const NodeAttrs& attrs) {
        auto made = of_theirs ? of_theirs(attrs) : Requests();
        if (settings_of(attrs).ordered) made.push_back(mxnet::ResourceRequest::kRandom);
        return made;
      });
  if (of.resources) set<mxnet::FResourceRequestEx>(op, "FResourceRequestEx", by_value(&resources));
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
  const bool known = infer();
  swap(stand_in, type);
  return known;
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
  if (settings_of(attrs).parameters) return infer_with_parameters(in, out);
  const Operator& of = *dispatched.at(attrs.op);
  const auto as_mxnet = [&] { return call_theirs(of.types, attrs, in, out); };
  const auto infer = [&] {
    return of.is(kInfersHalves) ? infer_instead(mshadow::kFloat16, mshadow::kFloat32, in, out, as_mxnet) : as_mxnet();
  };
  if (std::max(half_among(*in), half_among(*out)) != mshadow::kBfloat16) return infer();
  const std::string dtype = word(attrs, "dtype", "");
  if (of.is(kCasts) || dtype == "bfloat16" || dtype == "float16") return infer();
  return infer_instead(mshadow::kBfloat16, mshadow::kFloat16, in, out, infer);
}

// Shape inference of the identity with a loss scale: its second input has one element, while MXNet requires
// the shape of the first.
bool infer_identity(const NodeAttrs& attrs, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  const auto& theirs = dispatched.at(attrs.op)->shapes;
  if (!settings_of(attrs).loss_scale) return call_theirs(theirs, attrs, in, out);
  mxnet::ShapeVector alike(2, in->front());
  const bool known = call_theirs(theirs, attrs, &alike, out);
  *in = {alike.front(), mxnet::TShape(1, 1)};
  return known;
}

void dispatch(nnvm::Op& op) {
  const auto* of = new Operator(describe(&op));  // never deleted
  dispatched[&op] = of;
  undo.push_back([&op] { dispatched.erase(&op); });
  replace_functions(*of, op);
  if (of->types) set<nnvm::FInferType>(op, "FInferType", by_value(&infer_types));
  if (op.name == "_identity_with_attr_like_rhs")
    set<mxnet::FInferShape>(op, "FInferShape", by_value(&infer_identity));
  if (get<nnvm::FInplaceIdentity>(&op, "FInplaceIdentity")) wrap_identity(*of, op);
  else wrap_places(*of, op);
  wrap_resources(*of, op);
  if (const auto* g = get<nnvm::FGradient>(&op, "FGradient"))
    set<nnvm::FGradient>(op, "FGradient", [of_theirs = op.name == "_backward_FullyConnected"
                                               ? nnvm::FGradient(gradient_of_dense_gradient)
                                               : nnvm::FGradient(*g)](const auto&... node) {
      return gradient(of_theirs, node...);
    });
}

// ---- which operators -----------------------------------------------------------------------

bool is_dispatched(const nnvm::Op* x) {
  const std::string& name = x->name;
  if (name.rfind(kPrefix, 0) == 0 || traits_of(name) & kMxnets || dispatched.count(x)) return false;
  if (contains(name, "quantize")) return false;
  // of the oneDNN subgraphs of executors, only those of attention accept float16
  if (name.rfind("_sg_mkldnn", 0) == 0 && !contains(name, "selfatt")) return false;
  return get<mxnet::FCompute>(x, "FCompute<cpu>") || get<mxnet::FComputeEx>(x, "FComputeEx<cpu>") ||
         get<mxnet::FStatefulCompute>(x, "FStatefulCompute<cpu>") ||
         get<mxnet::FStatefulComputeEx>(x, "FStatefulComputeEx<cpu>");
}

}  // namespace

bool is_dispatched_here(const nnvm::Op* x) { return dispatched.count(x) > 0; }

bool is_taken(const NodeAttrs& attrs, int half) {
  const auto found = dispatched.find(attrs.op);
  return found != dispatched.end() && taken(*found->second, settings_of(attrs), half);
}

std::string operator_rows() {
  std::ostringstream made;
  for (const auto& pair : dispatched) {
    const Operator& of = *pair.second;
    const std::string& name = pair.first->name;
    const int supports = of.own ? of.own->supports : 0;
    made << name;
    if (of.own) made << " own_code";
    if (of.product || name == "RNN") made << " accumulate";
    if (traits_of(name) & kMoves) made << " moves";
    if (of.is(kHighPrecision)) made << " high_precision";
    if (supports & kAnyOrder) made << " any_order";
    if (supports & kBlocks) made << ((supports & kAlike) == kAlike ? " alike" : " blocks");
    made << "\n";
  }
  return made.str();
}

void dispatch_operators(int count, const char** names) {
  for (int i = 0; i < count; ++i) {
    const nnvm::Op* x = nnvm::Op::Get(names[i]);
    if (is_dispatched(x)) dispatch(const_cast<nnvm::Op&>(*x));
  }
}

}  // namespace gluon_amp
