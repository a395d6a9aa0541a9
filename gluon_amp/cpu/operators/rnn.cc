// RNN, LSTM and GRU as a loop over time, forward and backward.
//
// A format has the numbers that products read, their rounding, and the equations of a step:
//
// - Bfloat16, of bfloat16 arrays. Products read bfloat16: data, weights, the state before each step, and the gradients
//   of the gates' sums. Their results, the gates, an LSTM's cells and a GRU's carried state are float32, and so are
//   gradients until they are written.
// - Grids, for cases that MXNet's code does not support: products with another format than other tensors, or that
//   emulate a GPU's Tensor Cores. What products read is rounded to their format. The output of each step, and gradients
//   between layers, have the policy's format of activations. Gates, cells and gradients that are carried from step to
//   step are float32.
//
// Products sum over a layer's inputs or units; for gradients of data over the gates; for gradients of weights over time,
// then batch. Those over all steps run before or after the loop over time.
//
// States and cells of a direction are slots in the order of time, one more than steps: forward in time, step t
// reads slot t and writes slot t + 1; backward in time, it reads slot t + 1 and writes slot t.
#include <algorithm>

#include "dispatch/attributes.h"
#include "onednn/onednn.h"

namespace gluon_amp {
namespace {

// y = a * b. MXNet's own code is OpenBLAS's, which is 4 times slower on processors that are newer than it.
void float_product(const OpContext& context, int64_t rows, int64_t columns, int64_t depth,
                   const RowsOrColumns& a, const RowsOrColumns& b, float* y) {
  if (onednn_product(rows, columns, depth, a, b, y)) return;
  static const nnvm::Op* const gemm = nnvm::Op::Get("_linalg_gemm2");
  static const auto& compute = *get<mxnet::FCompute>(gemm, "FCompute<cpu>");
  static const auto node = [](const char* of_a, const char* of_b) {
    return make_node(gemm, {{"transpose_a", of_a}, {"transpose_b", of_b}});
  };
  static const auto& nodes = *new std::vector<nnvm::ObjectPtr>{node("False", "False"), node("False", "True"),
                                                               node("True", "False"), node("True", "True")};
  const auto blob = [](const RowsOrColumns& of, int64_t high, int64_t wide) {
    if (of.transposed) std::swap(high, wide);
    return TBlob(const_cast<float*>(of.data), mxnet::TShape({high, wide}), mshadow::cpu::kDevMask);
  };
  compute(nodes[2 * a.transposed + b.transposed]->attrs, context, {blob(a, rows, depth), blob(b, depth, columns)},
          {mxnet::kWriteTo}, {blob({y, false}, rows, columns)});
}

const float* widened(const float* numbers, int64_t, Scratch*) { return numbers; }
const float* widened(const Number16* numbers, int64_t n, Scratch* scratch) {
  float* const made = scratch->memory(n);
  bfloat16_kernels->widen(numbers, made, n);
  return made;
}

// The float32 products of a weight, (outputs, inputs), for one call. Those of 16-bit numbers run in oneDNN, if it can.
template <class Number>
class Weight {
 public:
  Weight(const Call& call, bool emulates, const Number* numbers, int64_t outputs, int64_t inputs)
      : call_(call), emulates_(emulates), numbers_(numbers), outputs_(outputs), inputs_(inputs) {}

  void forward(int64_t rows, const Number* x, float* y) {  // y = x * w^T
    if (run_onednn(kForward, rows, x, numbers_, y, &inside_)) return;
    Scratch scratch;
    multiply(rows, outputs_, inputs_, {widened(x, rows * inputs_, &scratch), false}, {wide(), true}, y);
  }
  void backward(int64_t rows, const Number* dy, float* dx) {  // dx = dy * w
    if (run_onednn(kBackwardData, rows, dy, numbers_, dx, &inside_)) return;
    Scratch scratch;
    multiply(rows, inputs_, outputs_, {widened(dy, rows * outputs_, &scratch), false}, {wide(), false}, dx);
  }
  void gradient(int64_t rows, const Number* dy, const Number* x, float* dw) {  // dw = dy^T * x
    Product::Inside read;
    if (run_onednn(kBackwardWeights, rows, dy, x, dw, &read)) return;
    Scratch scratch;
    multiply(outputs_, inputs_, rows, {widened(dy, rows * outputs_, &scratch), true},
             {widened(x, rows * inputs_, &scratch), false}, dw);
  }

 private:
  bool run_onednn(int pass, int64_t rows, const Number* a, const Number* b, float* to, Product::Inside* read) {
    if constexpr (std::is_same<Number, Number16>::value)
      return onednn_rows(pass, rows, outputs_, inputs_, a, b, to, read);
    return false;
  }
  void multiply(int64_t rows, int64_t columns, int64_t depth, RowsOrColumns a, RowsOrColumns b, float* y) {
    if (emulates_) emulation.multiply(call_, rows, columns, depth, a, b, y);
    else float_product(call_.context, rows, columns, depth, a, b, y);
  }
  const float* wide() {
    if (!wide_) wide_ = widened(numbers_, outputs_ * inputs_, &scratch_);
    return wide_;
  }

  const Call& call_;
  const bool emulates_;
  const Number* const numbers_;
  const int64_t outputs_, inputs_;
  Product::Inside inside_;
  Scratch scratch_;
  const float* wide_ = nullptr;
};

// A tensor that products read: x, wx, wh and h of the forward pass; gx and gh, gradients of sums. `which`: the layer of x,
// or the direction among those of all layers.
struct Place {
  const char* kind;
  int64_t which, step = -1;

  bool is_gradient() const { return kind[0] == 'g'; }
  std::string name() const {  // of its history
    return kind + std::to_string(which) + (step < 0 ? "" : "." + std::to_string(step));
  }
};

// ---- formats ---------------------------------------------------------------------------------------

struct Bfloat16 {
  using Number = Number16;  // that products read
  static constexpr bool kCopies = false;  // whether these are rounded copies
  static constexpr bool emulates = false;

  explicit Bfloat16(const Settings&) {}
  bool serves(const Call& call, bool drops) const {
    return all_16bit(call) && size(call.in[0]) > 0 && !generic_only && !watching() && !drops;
  }

  static const Kernels* kernels() { return bfloat16_kernels; }
  static Number16* memory(Scratch* scratch, int64_t n) { return scratch->numbers16(n); }
  static Number16* numbers(const TBlob& array, Scratch*) { return numbers16(array); }
  void read(const Call&, const Place&, const Number16*, Number16*, int64_t) const {}  // rounds what a product reads
  static void round_between(const Call&, float*, int64_t) {}  // gradients of outputs
  static void narrow(const Call&, const float* from, Number16* to, int64_t n) {  // between layers
    bfloat16_kernels->narrow(from, to, n, kStore);
  }

  // Both biases, (2, gates, units): their sum, except in a GRU's last gate, and that of h.
  static const float* biases(RnnMode mode, const Number16* from, int64_t all, Scratch* scratch) {
    float* const made = scratch->memory(2 * all);
    bfloat16_kernels->widen(from, made, 2 * all);
    const int64_t summed = mode == kGru ? all / 3 * 2 : all;
    for (int64_t i = 0; i < summed; ++i) made[i] += made[all + i];
    return made;
  }
  static void step(const Call&, RnnMode mode, const RnnStep& s) { bfloat16_kernels->rnn_step(mode, s); }
  static void step_back(RnnMode mode, const RnnStepBack& s) { bfloat16_kernels->rnn_step_back(mode, s); }
};

const Grid kFloat16Grid = {10, 0x1p-14f, 65504, __builtin_inff(), __builtin_inff(), kNearestEven, 0};

struct Grids {
  using Number = float;
  static constexpr bool kCopies = true;
  const bool emulates;           // whether products emulate a GPU's; all formats are then float16
  const Grid product, gradient;  // of products' inputs: data and weights; gradients of gates

  explicit Grids(const Settings& settings)
      : emulates(settings.products.emulates()), product(emulates ? kFloat16Grid : settings.product_grid),
        gradient(emulates ? kFloat16Grid : settings.head_gradient_grid) {}
  bool serves(const Call&, bool drops) const {
    if (drops)
      throw dmlc::Error(std::string(emulates ? "accumulate=" : "a policy of several formats") +
                        ": RNN with dropout between its layers has no code: keep it in float32 (keep=)");
    return true;
  }

  static const Kernels* kernels() { return gluon_amp::kernels; }
  static float* memory(Scratch* scratch, int64_t n) { return scratch->memory(n); }
  static float* numbers(const TBlob& array, Scratch* scratch) {
    float* const made = scratch->memory(size(array));
    widen(array, made);
    return made;
  }
  void read(const Call& call, const Place& place, const float* from, float* to, int64_t n) const {
    const Grid grid = scaled(call.rounding.keyed_anew(place.is_gradient() ? gradient : product), call, place.name(),
                             place.is_gradient(), from, n);
    if (grid.rounds() || from != to) kernels()->round(grid, from, to, n, kStore);
  }
  static void round_between(const Call& call, float* numbers, int64_t n) { narrow(call, numbers, numbers, n); }
  static void narrow(const Call& call, const float* from, float* to, int64_t n) {
    const Grid& grid = call.rounding.any ? *call.rounding.output : kFloat16Grid;
    kernels()->round(call.rounding.keyed_anew(grid), from, to, n, kStore);
  }

  static const float* biases(RnnMode, const float* from, int64_t, Scratch*) { return from; }
  static void step(const Call& call, RnnMode mode, const RnnStep& s) {
    auto* const states = static_cast<float*>(s.h);
    with_mode(mode, [&](auto constant) {
      constexpr RnnMode kMode = decltype(constant)::value;
      constexpr int kGates = gates_of(kMode);
      const int64_t n = s.units;
      for (int64_t at = 0; at < s.rows * n; ++at) {
        const int64_t j = at % n, first = at / n * kGates * n + j;
        float x[kGates], h[kGates];
        for (int g = 0; g < kGates; ++g) {
          x[g] = s.gates[first + g * n] + s.bias[g * n + j];
          h[g] = s.hidden[first + g * n] + s.bias[(kGates + g) * n + j];
        }
        const auto made = rnn_forward<kMode, RnnFloats>(x, h, kGates > 1 ? s.before[at] : 0);
        for (int g = 0; g < kGates; ++g) s.gates[first + g * n] = made.gate[g];
        if (kMode == kGru) s.inside[at] = made.inside;
        if (kMode == kLstm) s.after[at] = made.after;
        states[at] = made.state;
      }
    });
    const int64_t n = s.rows * s.units;
    round_between(call, states, n);
    if (mode == kGru) std::copy_n(states, n, s.after);
    for (int64_t row = 0; row < s.rows; ++row)
      std::copy_n(states + row * s.units, s.units, static_cast<float*>(s.y) + row * s.y_row);
  }
  static void step_back(RnnMode mode, const RnnStepBack& s) {
    const auto* const dy = static_cast<const float*>(s.dy);
    auto *const dx = static_cast<float*>(s.dx), *const ds = static_cast<float*>(s.ds);
    with_mode(mode, [&](auto constant) {
      constexpr RnnMode kMode = decltype(constant)::value;
      constexpr int kGates = gates_of(kMode);
      const int64_t n = s.units;
      for (int64_t at = 0; at < s.rows * n; ++at) {
        const int64_t row = at / n, j = at % n, first = row * kGates * n + j;
        RnnResult<RnnFloats> of{{}, kMode == kGru ? s.inside[at] : 0, kMode == kLstm ? s.after[at] : 0, 0};
        for (int g = 0; g < kGates; ++g) of.gate[g] = s.gates[first + g * n];
        const float dh = s.back ? s.dh[at] + s.back[at] : s.dh[at];
        const auto made = rnn_backward<kMode, RnnFloats>(of, kGates > 1 ? s.before[at] : 0,
                                                         dh + dy[row * s.dy_row + j], kMode == kLstm ? s.dc[at] : 0);
        for (int g = 0; g < kGates; ++g) dx[first + g * n] = made.x[g];
        for (int g = 0; g < kGates && kMode == kGru; ++g) ds[first + g * n] = made.h[g];
        s.dh[at] = made.state;
        if (kMode == kLstm) s.dc[at] = made.cell;
      }
    });
  }
};

// ---- the loop --------------------------------------------------------------------------------------

RnnMode mode_of(const std::string& name) {
  return name == "lstm" ? kLstm : name == "gru" ? kGru : name == "rnn_relu" ? kRnnRelu : kRnnTanh;
}

template <class Format>
class RnnOf : public Rnn {
 public:
  RnnOf(const NodeAttrs& attrs, const Settings& settings)
      : mode_(mode_of(word(attrs, "mode", ""))), units_(static_cast<int64_t>(number(attrs, "state_size", 0))),
        layers_(static_cast<int64_t>(number(attrs, "num_layers", 1))),
        directions_(flag(attrs, "bidirectional", false) ? 2 : 1), all_(gates_of(mode_) * units_),
        drops_(layers_ > 1 && number(attrs, "p", 0) > 0), format_(settings) {}

  bool serves(const Call& call) const override { return format_.serves(call, drops_ && call.context.is_train); }
  void forward(const Call& call) override;
  void backward(const Call& call) override;

 private:
  using Number = typename Format::Number;

  // The offsets of the parameters of one direction of a layer in the array of all parameters, and its input size.
  struct Parameters {
    int64_t inputs, wx, wh, bx, bh;
  };
  Parameters parameters(int64_t which, int64_t data) const {  // data: the input size of the first layer
    const int64_t count = layers_ * directions_;
    Parameters made{};
    int64_t at = 0;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t in = k < directions_ ? data : directions_ * units_;
      if (k == which) made = {in, at, at + all_ * in, 0, 0};
      at += all_ * (in + units_);
    }
    made.bx = at + which * 2 * all_;
    made.bh = made.bx + all_;
    return made;
  }

  // Data of one direction of a layer for its backward pass.
  struct Kept {
    float *gates, *cells, *inside;  // cells: of an LSTM, or a GRU's states
    Number *states, *read;          // read: the states as products read them
    const Number *wx, *wh;
  };

  const RnnMode mode_;
  const int64_t units_, layers_, directions_, all_;  // all: the sums of a step, gates for each unit
  const bool drops_;
  const Format format_;
  std::unique_ptr<Scratch> scratch_;  // of the data for the backward pass
  std::vector<Kept> kept_;        // for each direction of each layer
  std::vector<const Number*> inputs_;  // of each layer

  // Memory for what products read of an array: the array itself, if they read it as it is.
  static Number* as_read(Number* array, int64_t n, Scratch* scratch) {
    return Format::kCopies ? Format::memory(scratch, n) : array;
  }
  static void give_numbers(const Call& call, size_t i, float* made) { round_to_output(call, i, made); }
  static void give_numbers(const Call& call, size_t i, Number16* made) { put(made, call.out[i], call.write(i)); }
};

template <class Format>
void RnnOf<Format>::forward(const Call& call) {
  const std::lock_guard<std::mutex> mine(scratch_lock());
  const TBlob& data = call.in[0];
  const bool trains = call.context.is_train;
  const int64_t time = data.shape_[0], rows = data.shape_[1], n = rows * units_, wide = directions_ * units_;
  const int64_t of_states = layers_ * directions_ * n, slots = trains ? time + 1 : 1;
  Scratch brief;
  scratch_.reset(trains ? new Scratch : nullptr);
  Scratch* const keeps = trains ? scratch_.get() : &brief;
  kept_.clear();
  inputs_.clear();
  Number* const params = Format::numbers(call.in[1], &brief);
  Number* const first_states = Format::numbers(call.in[2], &brief);
  Number* const last_states = Format::memory(&brief, of_states);
  float* const last_cells = mode_ == kLstm ? brief.memory(of_states) : nullptr;
  Number* x = Format::numbers(data, keeps);
  for (int64_t layer = 0; layer < layers_; ++layer) {
    const int64_t width = layer > 0 ? wide : data.shape_[2];
    format_.read(call, {"x", layer}, x, x, time * rows * width);
    inputs_.push_back(x);
    Number* const y = Format::memory(layer + 1 < layers_ ? keeps : &brief, time * rows * wide);
    for (int64_t d = 0; d < directions_; ++d) {
      const int64_t which = layer * directions_ + d;
      const Parameters at = parameters(which, data.shape_[2]);
      Scratch own;
      Scratch* const of_steps = trains ? keeps : &own;
      Kept k{};
      Number* const wx = as_read(params + at.wx, all_ * width, keeps);
      Number* const wh = as_read(params + at.wh, all_ * units_, keeps);
      k.wx = wx, k.wh = wh;
      format_.read(call, {"wx", which}, params + at.wx, wx, all_ * width);
      format_.read(call, {"wh", which}, params + at.wh, wh, all_ * units_);
      k.gates = of_steps->memory(time * rows * all_);
      if (all_ > units_) k.cells = keeps->memory(slots * n);
      if (mode_ == kGru) k.inside = of_steps->memory(trains ? time * n : n);
      k.states = Format::memory(keeps, slots * n);
      k.read = as_read(k.states, slots * n, keeps);
      const float* const biases = Format::biases(mode_, params + at.bx, all_, &own);
      const auto slot = [&](int64_t i) { return trains ? i * n : 0; };
      const int64_t first = slot(d ? time : 0), last = slot(d ? 0 : time);
      std::copy_n(first_states + which * n, n, k.states + first);
      if (k.cells) {
        const TBlob& from = call.in[mode_ == kLstm ? 3 : 2];
        kernels_of(from)->widen(gluon_amp::at(from, which * n), k.cells + first, n);
      }
      Weight<Number>(call, format_.emulates, wx, all_, width).forward(time * rows, x, k.gates);
      Weight<Number> of_state(call, format_.emulates, wh, all_, units_);
      float* const hidden = own.memory(rows * all_);
      for (int64_t s = 0; s < time; ++s) {
        const int64_t t = d ? time - 1 - s : s, before = slot(d ? t + 1 : t), after = slot(d ? t : t + 1);
        format_.read(call, {"h", which, s}, k.states + before, k.read + before, n);
        of_state.forward(rows, k.read + before, hidden);
        Format::step(call, mode_, {rows, units_, k.gates + t * rows * all_, hidden, biases,
                                   biases + 2 * all_ - units_, k.cells + before, k.cells + after,
                                   k.inside + (trains ? t * n : 0), k.states + after,
                                   y + t * rows * wide + d * units_, wide});
      }
      std::copy_n(k.states + last, n, last_states + which * n);
      if (mode_ == kLstm) std::copy_n(k.cells + last, n, last_cells + which * n);
      kept_.push_back(k);
    }
    x = y;
  }
  give_numbers(call, 0, x);
  if (call.out.size() > 1) give_numbers(call, 1, last_states);
  if (call.out.size() > 2) round_to_output(call, 2, last_cells);
}

// Reads data, parameters, state, output, its gradient; [state's output, its gradient]; for an LSTM the cell,
// [its output, its gradient].
template <class Format>
void RnnOf<Format>::backward(const Call& call) {
  const std::lock_guard<std::mutex> mine(scratch_lock());
  const TBlob& data = call.in[0];
  const auto* const params = static_cast<const Number*>(call.in[1].dptr_);
  const bool with_states = call.in.size() > (mode_ == kLstm ? 6 : 5);
  const int64_t time = data.shape_[0], rows = data.shape_[1], n = rows * units_;
  const int64_t steps = time * rows, wide = directions_ * units_, of_states = layers_ * directions_ * n;
  Scratch scratch;
  const auto state_gradient = [&](size_t input, int64_t count) {
    float* const made = scratch.memory(count);
    if (with_states && count > 0) widen(call.in[input], made);
    else std::fill_n(made, count, 0.0f);
    return made;
  };
  Number* dy = Format::numbers(call.in[4], &scratch);
  if constexpr (Format::kCopies) Format::round_between(call, dy, steps * wide);
  const int64_t of_cells = mode_ == kLstm ? of_states : 0;
  float *const dstates = state_gradient(6, of_states), *const dcells = state_gradient(9, of_cells);
  Format::round_between(call, dstates, of_states);
  Format::round_between(call, dcells, of_cells);
  // Outputs may share memory with inputs, so they are written after all reads.
  float* const dparams = call.write(1) != kNothing ? scratch.memory(size(call.in[1])) : nullptr;
  for (int64_t layer = layers_ - 1; layer >= 0; --layer) {
    const Number* const x = Format::kCopies || layer > 0 ? inputs_[layer] : static_cast<const Number*>(data.dptr_);
    const bool wants_x = layer > 0 || call.write(0) != kNothing;
    const int64_t width = layer > 0 ? wide : data.shape_[2];
    Scratch of_layer;
    float* const dx = wants_x ? of_layer.memory(steps * width) : nullptr;
    for (int64_t d = 0; d < directions_; ++d) {
      const int64_t which = layer * directions_ + d;
      const Parameters at = parameters(which, data.shape_[2]);
      const Kept& k = kept_[which];
      Scratch own;
      Number* const sums = Format::memory(&own, steps * all_);
      Number* const sums_h = mode_ == kGru ? Format::memory(&own, steps * all_) : sums;
      float *const back = own.memory(n), *const dh = dstates + which * n, *const dc = dcells + which * n;
      Weight<Number> wx(call, format_.emulates, Format::kCopies ? k.wx : params + at.wx, all_, width);
      Weight<Number> wh(call, format_.emulates, Format::kCopies ? k.wh : params + at.wh, all_, units_);
      for (int64_t s = time - 1; s >= 0; --s) {
        const int64_t t = d ? time - 1 - s : s, before = (d ? t + 1 : t) * n, after = (d ? t : t + 1) * n;
        Number *const to_x = sums + t * rows * all_, *const to_h = sums_h + t * rows * all_;
        Format::step_back(mode_, {rows, units_, k.gates + t * rows * all_, k.cells + before, k.cells + after,
                                  k.inside + t * n, dy + t * rows * wide + d * units_, wide,
                                  s == time - 1 ? nullptr : back, dh, dc, to_x, to_h});
        format_.read(call, {"gx", which, s}, to_x, to_x, rows * all_);
        if (mode_ == kGru) format_.read(call, {"gh", which, s}, to_h, to_h, rows * all_);
        if (s > 0 || call.write(2) != kNothing) wh.backward(rows, to_h, back);
      }
      for (int64_t i = 0; i < n && time > 0; ++i) dh[i] += back[i];
      if (wants_x) {
        float* const made = d ? own.memory(steps * width) : dx;
        wx.backward(steps, sums, made);
        if (d) kernels->binary(kSum, dx, made, dx, steps * width, kStore);
      }
      if (!dparams) continue;
      wx.gradient(steps, sums, x, dparams + at.wx);
      wh.gradient(steps, sums_h, k.read + (d ? n : 0), dparams + at.wh);
      std::fill_n(dparams + at.bx, 2 * all_, 0.0f);
      for (int64_t i = 0; i < steps; ++i) {
        Format::kernels()->add_products(sums + i * all_, nullptr, dparams + at.bx, all_);
        if (mode_ == kGru) Format::kernels()->add_products(sums_h + i * all_, nullptr, dparams + at.bh, all_);
      }
      if (mode_ != kGru) std::copy_n(dparams + at.bx, all_, dparams + at.bh);
    }
    if (layer == 0) {
      if (wants_x) round_to_output(call, 0, dx);
      break;
    }
    dy = Format::memory(&scratch, steps * width);
    Format::narrow(call, dx, dy, steps * width);
  }
  if (dparams) round_to_output(call, 1, dparams);
  round_to_output(call, 2, dstates);
  if (mode_ == kLstm) round_to_output(call, 3, dcells);
}

}  // namespace

std::unique_ptr<Rnn> Rnn::make(const NodeAttrs& attrs, const Settings& settings, int type16) {
  const auto given = [&](const char* key) { return word(attrs, key, "None") != "None"; };
  if (settings.products.emulates() || settings.rnn_loop) return std::make_unique<RnnOf<Grids>>(attrs, settings);
  if (type16 != mshadow::kBfloat16 || settings.rounds() || given("projection_size") || given("lstm_state_clip_min") ||
      given("lstm_state_clip_max") || flag(attrs, "use_sequence_length", false))
    return nullptr;
  return std::make_unique<RnnOf<Bfloat16>>(attrs, settings);
}

}  // namespace gluon_amp
