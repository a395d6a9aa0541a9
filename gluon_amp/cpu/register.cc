// Registers `_gluon_amp_X` for MXNet's operators.
#include <algorithm>
#include <cstring>
#include <set>

#include "gradients.h"
#include "watch.h"

namespace gluon_amp {
namespace {

// ---- which attributes an operator of ours has ------------------------------------------
//
// Every attribute that MXNet's operators have is in one of these lists (a test compares them with
// the registry).

const char* const kCopied[] = {
    "FInferShape", "FInferType", "FMutateInputs", "FListInputNames", "FListOutputNames",
    "FNumVisibleOutputs", "FIgnoreInputs",
    "TIsBackward", "TIsLayerOpBackward", "THasDeterministicOutput", "key_var_num_args"};

const char* const kReplaced[] = {
    "FCompute<cpu>", "FComputeEx<cpu>", "FStatefulCompute<cpu>", "FStatefulComputeEx<cpu>",
    "FCreateOpState",  // X's state, made for float32 arrays
    "FGradient",       // X's, with our operators in it
    "FResourceRequest", "FResourceRequestEx",  // and random numbers, for nodes that want them
    // any output in the place of any input, since inputs are read first; X's where in place means
    // that nothing is to be done
    "FInplaceOption", "FInplaceIdentity"};

const char* const kLeftOut[] = {
    // for other devices
    "FCompute<gpu>", "FComputeEx<gpu>", "FStatefulCompute<gpu>", "FStatefulComputeEx<gpu>",
    "FIsCUDAGraphsCompatible",
    // halves are dense and plain, so MXNet's defaults for storage are right
    "FInferStorageType", "TIsMKLDNN", "TExcludeMKLDNNDebug",
    "FExecType",         // only operators that are done when they return are replaced
    // about symbols while they are composed; ours are read from JSON
    "FSetInputVarAttrOnCompose", "FInputGraph",
    "FListOutputNAmes",  // so misspelled that nothing reads it
    // quantization, fusion on GPUs, functions without gradients
    "FQuantizedOp", "FNeedRequantize", "FQuantizable", "FAvoidQuantizeInput",
    "FNeedCalibrateInput", "FNeedCalibrateOutput", "FNeedAsymQuantizeInput",
    "FAvoidDequantizeOutput", "FNDArrayFunction", "TIsGhost", "TIsFusion", "TIsFusionHelper",
    "FAccessSubgraphType", "FAccessSubgraphShape", "FAccessSubgraphStorageType",
    "FProvideSubgraphType", "FProvideSubgraphShape", "FProvideSubgraphStorageType"};

// ---- operators with state ----------------------------------------------------------------

// X's state, and the scratch that it may point to until its backward pass is over: an RNN does.
// Stateful code is not told its node's attributes, so what matters of them is kept here, too.
struct State {
  const Operator& of;
  const size_t outputs_count;
  OpStatePtr inner;
  std::unique_ptr<Lease> kept;
  std::vector<uint32_t> mutated;
  bool onednn, any, lstm, lengths;
  bool trained = false;  // whether the last forward pass was one of training
  Grid output, back;
  std::string inputs, outputs, watched, watched_inputs;
  std::unique_ptr<RnnLoop> loop;  // of an RNN that MXNet's code does not serve
  Grid product, gradient;         // what its products read

  State(const Operator& x, const NodeAttrs& attrs, OpStatePtr its, size_t in, size_t out)
      : of(x), outputs_count(out), inner(std::move(its)),
        mutated(x.mutates ? x.mutates(attrs) : std::vector<uint32_t>()),
        onednn(prefers_onednn(x, attrs, in, out)), lstm(word(attrs, "mode", "") == "lstm"),
        lengths(flag(attrs, "use_sequence_length", false)) {
    const Rounding said(attrs);
    any = said.any;
    output = said.output;
    product = said.product;
    gradient = said.gradient;
    back = grid_of(word(attrs, kBackGridKey, "").c_str());
    inputs = said.inputs ? *said.inputs : "";
    outputs = said.outputs ? *said.outputs : "";
    watched = word(attrs, kWatchKey, "");
    for (int i = 0; i < 8; ++i) watched_inputs += std::to_string(i) + ",";
  }

  // Of a backward pass: its first input is the gradient that is rounded (an RNN's stands among
  // others, which are on the same grid), and its outputs are the gradients of the forward pass's
  // inputs.
  Rounding rounding(bool forward) const {
    static const std::string all(64, 'g'), first(1, 'g');
    Rounding made;
    made.any = any;
    made.output = forward ? output : back;
    made.product = forward ? product : gradient;
    made.gradient = back;
    made.outputs = forward ? &outputs : &inputs;
    made.reads = forward ? nullptr : of.op->name == "RNN" ? &all : &first;
    return made;
  }

  void forward(const Call& call) {
    trained = call.context.is_train;
    if (loop) return loop->run(call, true);
    // oneDNN's RNN points to scratch after a forward pass of training only
    kept.reset();
    gluon_amp::run(call, onednn, mutated, &inner, onednn && !trained ? nullptr : &kept);
  }

  void backward(const Call& call) {
    if ((onednn || loop) && !trained) train_again(call);
    if (loop) return loop->run(call, false);
    gluon_amp::run(call, onednn, {}, &inner, nullptr);
  }

 private:
  // The forward pass of an RNN once more, since predictions keep nothing for a backward pass. What
  // that reads: x, weights, state, y, dy; if it has outputs of states: the state and its gradient;
  // an LSTM's cell, and the same of it; lengths of sequences, if it has them.
  void train_again(const Call& call) {
    const bool states = outputs_count > 1;
    std::vector<TBlob> in(call.in.begin(), call.in.begin() + 3), out{call.in[3]};
    if (lstm) in.push_back(call.in[states ? 7 : 5]);
    if (lengths) in.push_back(call.in.back());
    if (states) out.push_back(call.in[5]);
    if (states && lstm) out.push_back(call.in[8]);
    Lease results;
    for (TBlob& made : out)
      made = TBlob(results.memory(size(made)), made.shape_, mshadow::cpu::kDevMask, made.type_flag_, 0);
    OpContext training = call.context;
    training.is_train = true;
    const std::vector<OpReqType> req(out.size(), mxnet::kWriteTo);
    forward({of, call.attrs, training, in, req, out, rounding(true)});
  }
};

std::map<const nnvm::Op*, const Operator*> with_state;  // by our operator

OpStatePtr create_state(const NodeAttrs& attrs, mxnet::Context context,
                        const mxnet::ShapeVector& shapes, const std::vector<int>& types) {
  std::vector<int> wide(types);
  for (int& type : wide)
    if (type == mshadow::kFloat16) type = mshadow::kFloat32;
  const Operator& of = *with_state.at(attrs.op);
  OpStatePtr inner =
      call_theirs<OpStatePtr, const NodeAttrs&, mxnet::Context, const mxnet::ShapeVector&,
                  const std::vector<int>&>(of.create_state, attrs, context, shapes, wide);
  const uint32_t outputs = of.op->get_num_outputs ? of.op->get_num_outputs(attrs)
                                                  : of.op->num_outputs;
  auto made = std::make_unique<State>(of, attrs, inner, shapes.size(), outputs);
  if (RnnLoop::runs(attrs)) made->loop = std::make_unique<RnnLoop>(attrs);
  return make_state(made.release());
}

// ---- one operator ------------------------------------------------------------------------

template <class T>
T found(const nnvm::Op* op, const char* key) {
  const T* value = get<T>(op, key);
  return value ? *value : T();
}

// Backward passes that leave the gradients of labels and lengths as they are, or of numbers that no
// sum has read: MXNet's users find the zeros there that they began with.
const std::set<std::string> kLeaveOutputs = {
    "_backward_SoftmaxOutput", "_backward_SVMOutput", "_backward_linear_reg_out",
    "_backward_logistic_reg_out", "_backward_mae_reg_out", "_backward_ctc_loss",
    "_backward_SequenceMask", "_backward_SequenceLast", "_backward_SequenceReverse",
    "_backward_npi_einsum"};

Operator describe(const nnvm::Op* x) {
  Operator of;
  of.op = x;
  of.compute = found<mxnet::FCompute>(x, "FCompute<cpu>");
  of.compute_ex = found<mxnet::FComputeEx>(x, "FComputeEx<cpu>");
  of.stateful = found<mxnet::FStatefulCompute>(x, "FStatefulCompute<cpu>");
  of.stateful_ex = found<mxnet::FStatefulComputeEx>(x, "FStatefulComputeEx<cpu>");
  of.create_state = found<mxnet::FCreateOpState>(x, "FCreateOpState");
  of.storage = found<mxnet::FInferStorageType>(x, "FInferStorageType");
  of.mutates = found<nnvm::FMutateInputs>(x, "FMutateInputs");
  of.leaves_outputs = kLeaveOutputs.count(x->name) > 0;
  of.pushes_its_weight = x->name == "Convolution" || x->name == "Deconvolution" ||
                         x->name == "FullyConnected";
  of.forgets_bias = x->name == "_backward_FullyConnected";
  return of;
}

using Places = std::vector<std::pair<int, int>>;

// The generic code reads all inputs first, so any output may have the place of any input; code of
// its own says of which.
Places places(const nnvm::Op* x, const OwnCode* own, const NodeAttrs& attrs) {
  const uint32_t inputs = x->get_num_inputs ? x->get_num_inputs(attrs) : x->num_inputs;
  const uint32_t outputs = x->get_num_outputs ? x->get_num_outputs(attrs) : x->num_outputs;
  Places made;
  const bool any = !own || own->places == kAnyPlace;
  for (uint32_t in = 0; !any && in < own->places; ++in) made.emplace_back(in, 0);
  if (!any) return made;
  for (uint32_t out = 0; out < std::min(outputs, 8u); ++out)
    for (uint32_t in = 0; inputs != nnvm::kVarg && in < std::min(inputs, 16u); ++in)
      made.emplace_back(in, out);
  return made;
}

// X's resources; and MXNet's generator of random numbers, for nodes that run in order.
std::vector<mxnet::ResourceRequest> resources(const NodeAttrs& attrs, int device,
                                              mxnet::DispatchMode mode) {
  const auto& of_theirs = *get<mxnet::FResourceRequestEx>(theirs.at(attrs.op), "FResourceRequestEx");
  auto made = call_theirs<std::vector<mxnet::ResourceRequest>, const NodeAttrs&, int,
                          mxnet::DispatchMode>(of_theirs, attrs, device, mode);
  if (find(attrs, kOrderedKey)) made.push_back(mxnet::ResourceRequest::kRandom);
  return made;
}

void copy_all(const nnvm::Op* x, nnvm::Op& op) {
  op.num_inputs = x->num_inputs;
  op.num_outputs = x->num_outputs;
  op.get_num_inputs = x->get_num_inputs;
  op.get_num_outputs = x->get_num_outputs;
  op.attr_parser = x->attr_parser;
  op.arguments = x->arguments;
  copy<mxnet::FInferShape>(x, op, "FInferShape");
  copy<nnvm::FInferType>(x, op, "FInferType");
  copy<nnvm::FMutateInputs>(x, op, "FMutateInputs");
  copy<nnvm::FListInputNames>(x, op, "FListInputNames");
  copy<nnvm::FListOutputNames>(x, op, "FListOutputNames");
  copy<nnvm::FNumVisibleOutputs>(x, op, "FNumVisibleOutputs");
  copy<nnvm::FIgnoreInputs>(x, op, "FIgnoreInputs");
  set<mxnet::FResourceRequest>(op, "FResourceRequest", mxnet::FResourceRequest(
      [of_theirs = found<mxnet::FResourceRequest>(x, "FResourceRequest")](
          const NodeAttrs& attrs) {
        auto made = of_theirs ? of_theirs(attrs) : std::vector<mxnet::ResourceRequest>();
        if (find(attrs, kOrderedKey)) made.push_back(mxnet::ResourceRequest::kRandom);
        return made;
      }));
  if (get<mxnet::FResourceRequestEx>(x, "FResourceRequestEx"))
    set<mxnet::FResourceRequestEx>(
        op, "FResourceRequestEx",
        by_value<std::vector<mxnet::ResourceRequest>, const NodeAttrs&, int, mxnet::DispatchMode>(
            &resources));
  copy<nnvm::TIsBackward>(x, op, "TIsBackward");
  copy<mxnet::THasDeterministicOutput>(x, op, "THasDeterministicOutput");
  copy<std::string>(x, op, "key_var_num_args");
}

// A layer norm may have float16 data beside float32 parameters, as a batch norm has; MXNet's wants
// one type. graph/build.py then leaves out the casts around it.
bool layer_norm_types(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  int &data = (*in)[0], &result = (*out)[0];
  if (data == -1) data = result;
  if (data == -1) return false;
  result = data;
  for (size_t i : {1, 2})
    if ((*in)[i] == -1) (*in)[i] = data;
  (*out)[1] = (*out)[2] = (*in)[1];
  return true;
}

void register_operator(const nnvm::Op* x) {
  nnvm::Op& op = dmlc::Registry<nnvm::Op>::Get()->__REGISTER__(kPrefix + x->name);
  copy_all(x, op);
  if (x->name == "LayerNorm")
    set<nnvm::FInferType>(op, "FInferType",
                          by_value<bool, const NodeAttrs&, std::vector<int>*, std::vector<int>*>(
                              &layer_norm_types));
  const OwnCode* own = own_code(x->name);
  // MXNet says of hard_sigmoid's gradient that it is the one above it, unchanged, so that both share
  // memory even where others read that one.
  if (get<nnvm::FInplaceIdentity>(x, "FInplaceIdentity") && x->name != "_backward_hard_sigmoid") {
    copy<nnvm::FInplaceOption>(x, op, "FInplaceOption");
    // X leaves memory as it is, so others may read it, too; not so a node that rounds
    set<nnvm::FInplaceIdentity>(op, "FInplaceIdentity", nnvm::FInplaceIdentity(
        [of_theirs = *get<nnvm::FInplaceIdentity>(x, "FInplaceIdentity")](const NodeAttrs& attrs) {
          std::vector<bool> made = of_theirs(attrs);
          if (Rounding(attrs).any) made.assign(made.size(), false);
          return made;
        }));
  } else {
    set<nnvm::FInplaceOption>(op, "FInplaceOption", nnvm::FInplaceOption(
        [x, own](const NodeAttrs& attrs) { return places(x, own, attrs); }));
  }
  const auto* of = new Operator(describe(x));  // as long as the process
  if (!own && (of->create_state || get<bool>(x, "TIsLayerOpBackward"))) {
    copy<bool>(x, op, "TIsLayerOpBackward");
    if (of->create_state) {
      with_state[&op] = of;
      set<mxnet::FCreateOpState>(op, "FCreateOpState",
                                 by_value<OpStatePtr, const NodeAttrs&, mxnet::Context,
                                          const mxnet::ShapeVector&, const std::vector<int>&>(
                                     &create_state));
    }
    const bool forward = bool(of->create_state);
    set<mxnet::FStatefulCompute>(op, "FStatefulCompute<cpu>", mxnet::FStatefulCompute(
        [of, forward](const OpStatePtr& state, const OpContext& context,
                      const std::vector<TBlob>& in, const std::vector<OpReqType>& req,
                      const std::vector<TBlob>& out) {
          State& held = state.get_state<State>();
          static const NodeAttrs* none = new NodeAttrs();
          Call call{*of, *none, context, in, req, out, held.rounding(forward)};
          call.rounding.draw(context);
          const Watch watch(call, held.watched.empty() ? nullptr : &held.watched,
                            forward ? nullptr : &held.watched_inputs);
          forward ? held.forward(call) : held.backward(call);
        }));
  } else {
    const bool has_generic = of->compute || of->compute_ex;
    const ProductCode product = tensor_core_code(x->name);
    set<mxnet::FCompute>(op, "FCompute<cpu>", mxnet::FCompute(
        [of, own, has_generic, product](
            const NodeAttrs& attrs, const OpContext& context, const std::vector<TBlob>& in,
            const std::vector<OpReqType>& req, const std::vector<TBlob>& out) {
          Call call{*of, attrs, context, in, req, out, Rounding(attrs)};
          call.rounding.draw(context);
          const Watch watch(call);
          if (product && find(attrs, kAccumulateKey)) return product(call);
          const bool generic = !own || (generic_only && has_generic) ||
                               (call.rounding.any && !(own->knows & kGrids));
          if (!generic && watch && own->knows & kFloats && show_own_code(call, *own)) return;
          if (generic || !own->run(call)) run(call);
        }));
  }
  if (const auto* g = get<nnvm::FGradient>(x, "FGradient"))
    set<nnvm::FGradient>(op, "FGradient", nnvm::FGradient(
        [of_theirs = nnvm::FGradient(*g)](const nnvm::ObjectPtr& n, const Entries& above) {
          return gradient(of_theirs, n, above);
        }));
  ours[x] = &op;
  theirs[&op] = x;
}

// MXNet's sum of several gradients, which takes halves one by one: for halves it gets our code.
void replace_sum() {
  nnvm::Op& sum = dmlc::Registry<nnvm::Op>::Get()->__REGISTER_OR_GET__("add_n");
  static const auto plain = *get<mxnet::FCompute>(&sum, "FCompute<cpu>");
  static const auto ex = *get<mxnet::FComputeEx>(&sum, "FComputeEx<cpu>");
  static const auto halves_only = [](const std::vector<TBlob>& in, OpReqType req,
                                     const TBlob& out) {
    std::vector<const Half*> from;
    for (auto& array : in) from.push_back(halves(array));
    kernels->sum(from.data(), from.size(), halves(out), size(out),
                 req == mxnet::kNullOp ? kNothing : req == mxnet::kAddTo ? kAdd : kStore);
  };
  set<mxnet::FCompute>(sum, "FCompute<cpu>", mxnet::FCompute(
      [](const NodeAttrs& attrs, const OpContext& context, const std::vector<TBlob>& in,
         const std::vector<OpReqType>& req, const std::vector<TBlob>& out) {
        if (is_half(out[0])) halves_only(in, req[0], out[0]);
        else plain(attrs, context, in, req, out);
      }));
  set<mxnet::FComputeEx>(sum, "FComputeEx<cpu>", mxnet::FComputeEx(
      [](const NodeAttrs& attrs, const OpContext& context, const std::vector<NDArray>& in,
         const std::vector<OpReqType>& req, const std::vector<NDArray>& out) {
        bool dense = out[0].storage_type() == mxnet::kDefaultStorage;
        for (auto& array : in) dense &= array.storage_type() == mxnet::kDefaultStorage;
        if (!dense || out[0].dtype() != mshadow::kFloat16)
          return ex(attrs, context, in, req, out);
        std::vector<TBlob> blobs;
        for (auto& array : in) blobs.push_back(array.data());
        halves_only(blobs, req[0], out[0].data());
      }));
}

// MXNet runs these in ways of its own: they hold graphs, are not done when they return, copy
// between devices, or find their outputs' shapes while they run.
const char* const kNotReplaced[] = {
    "_foreach", "_while_loop", "_cond", "_CachedOp", "_CachedOpThreadSafe",
    "_backward_foreach", "_backward_while_loop", "_backward_cond", "_backward_CachedOp",
    "Custom", "_CustomFunction", "_NDArray", "_Native",
    "_backward_Custom", "_backward_CustomFunction", "_backward__NDArray", "_backward__Native",
    "_copyto", "_CrossDeviceCopy", "_backward__CrossDeviceCopy",
    "_contrib_boolean_mask", "_backward_contrib_boolean_mask", "_npi_delete", "_npi_unique",
    "_npx_nonzero"};

bool can_be_replaced(const nnvm::Op* x) {
  if (!std::strncmp(x->name.c_str(), kPrefix, sizeof kPrefix - 1) || ours.count(x)) return false;
  for (const char* name : kNotReplaced)
    if (x->name == name) return false;
  return get<mxnet::FCompute>(x, "FCompute<cpu>") || get<mxnet::FComputeEx>(x, "FComputeEx<cpu>") ||
         get<mxnet::FStatefulCompute>(x, "FStatefulCompute<cpu>") ||
         get<mxnet::FStatefulComputeEx>(x, "FStatefulComputeEx<cpu>");
}

}  // namespace

bool generic_only = false;

std::string treatments() {
  std::string made;
  for (const char* key : kCopied) made += std::string("copied ") + key + "\n";
  for (const char* key : kReplaced) made += std::string("replaced ") + key + "\n";
  for (const char* key : kLeftOut) made += std::string("left out ") + key + "\n";
  return made;
}

int register_operators(int count, const char** names) {
  for (int i = 0; i < count; ++i) {
    const nnvm::Op* x = nnvm::Op::Get(names[i]);
    if (can_be_replaced(x)) register_operator(x);
  }
  replace_sum();
  return static_cast<int>(ours.size());
}

}  // namespace gluon_amp
