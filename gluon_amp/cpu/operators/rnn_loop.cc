// RNN, LSTM and GRU as a loop over time, forward and backward, for cases that MXNet's code does not support:
// products with another format than other tensors, or that emulate a GPU's Tensor Cores.
//
// Inputs of products are rounded to their format: data, the output of each step, weights, and the gradients of
// the gates. The output of each step, and gradients between layers, have the policy's format `between`. Gates,
// cells and gradients that are carried from step to step are float32. Products sum over a layer's inputs or
// units; for gradients of data over the gates; for gradients of weights over time, then batch.
#include "dispatch/watch.h"
#include "operators/rnn.h"

namespace gluon_amp {
namespace {

using Floats = std::vector<float>;

const Grid kHalves = {10, 0x1p-14f, 65504, __builtin_inff(), __builtin_inff(), kNearestEven, 0};

using Matrix = RowsOrColumns;

// The attributes of MXNet's `linalg_gemm2`, parsed by MXNet; never deleted.
const NodeAttrs& product_attributes(bool a_transposed, bool b_transposed) {
  static const auto make = [](bool a, bool b) {
    const char* keys[] = {"transpose_a", "transpose_b"};
    const char* values[] = {a ? "True" : "False", b ? "True" : "False"};
    SymbolHandle symbol;
    if (MXSymbolCreateAtomicSymbol(const_cast<nnvm::Op*>(nnvm::Op::Get("_linalg_gemm2")), 2, keys,
                                   values, &symbol))
      throw dmlc::Error(MXGetLastError());
    return &(*static_cast<std::vector<nnvm::NodeEntry>*>(symbol))[0].node->attrs;
  };
  static const NodeAttrs* made[] = {make(false, false), make(false, true), make(true, false),
                                    make(true, true)};
  return *made[2 * a_transposed + b_transposed];
}

struct StepSizes {
  int64_t time, batch, units, gates;  // gates: for each unit
  int64_t steps() const { return time * batch; }
  int64_t all() const { return gates * units; }
};

// Data of the forward pass of one direction of a layer for the backward pass.
struct Kept {
  Floats gates;   // (time, batch, gates, units), after their activations
  Floats inside;  // (time, batch, units): gru: h * Wh + bh of n
  Floats before;  // (time, batch, units) before the step: lstm: the cell; else the hidden state
  Floats after;   // (time, batch, units): lstm: the cell after the step
  Floats read;    // (time, batch, units): the hidden state before the step, rounded for products
  Floats wx, wh;  // weights, rounded for products
};

RnnMode mode_of(const std::string& name) {
  return name == "lstm" ? kLstm : name == "gru" ? kGru : name == "rnn_relu" ? kRnnRelu : kRnnTanh;
}

}  // namespace

RnnShape::RnnShape(const NodeAttrs& attrs)
    : mode(mode_of(word(attrs, "mode", ""))), units(static_cast<int64_t>(number(attrs, "state_size", 0))),
      layers(static_cast<int64_t>(number(attrs, "num_layers", 1))),
      directions(flag(attrs, "bidirectional", false) ? 2 : 1),
      gates(gates_of(mode)) {}

RnnShape::Places RnnShape::places(int64_t layer, int64_t direction, int64_t data) const {
  const int64_t all = gates * units;
  int64_t at = 0, count = layers * directions;
  Places made{};
  for (int64_t k = 0; k < count; ++k) {
    const int64_t in = k < directions ? data : directions * units;
    if (k == layer * directions + direction) made = {in, at, at + all * in, 0, 0};
    at += all * (in + units);
  }
  made.bx = at + (layer * directions + direction) * 2 * all;
  made.bh = made.bx + all;
  return made;
}

// y = a * b by MXNet's float32 code
void float_product(const OpContext& context, int64_t rows, int64_t columns, int64_t depth,
                   const RowsOrColumns& a, const RowsOrColumns& b, float* y) {
  static const auto& compute = *get<mxnet::FCompute>(nnvm::Op::Get("_linalg_gemm2"),
                                                     "FCompute<cpu>");
  auto blob = [](const float* data, int64_t first, int64_t second) {
    return TBlob(const_cast<float*>(data), mxnet::TShape({first, second}), mshadow::cpu::kDevMask);
  };
  compute(product_attributes(a.transposed, b.transposed), context,
          {a.transposed ? blob(a.data, depth, rows) : blob(a.data, rows, depth),
           b.transposed ? blob(b.data, columns, depth) : blob(b.data, depth, columns)},
          {mxnet::kWriteTo}, {blob(y, rows, columns)});
}

struct RnnLoop::Layers : RnnShape {
  using RnnShape::RnnShape;
  bool emulates;  // whether products emulate a GPU's; all formats are then float16
  Grid product, gradient;      // of products' inputs: data and weights; gradients of gates
  std::vector<Kept> kept;      // for each direction of each layer
  std::vector<Floats> inputs;  // of each layer, rounded for products

  void multiply(const Call& call, int64_t rows, int64_t columns, int64_t depth, Matrix a, Matrix b,
                float* y) const {
    if (emulates) emulation.multiply(call, rows, columns, depth, a, b, y);
    else float_product(call.context, rows, columns, depth, a, b, y);
  }

  // ---- rounding

  static Floats taken(const TBlob& from) {
    Floats made(size(from));
    widen(from, made.data());
    return made;
  }

  // Rounds to the format `between`, forward or backward.
  static void settle(const Call& call, Floats* numbers) {
    const Grid& grid = call.rounding.any ? *call.rounding.output : kHalves;
    kernels->round(call.rounding.keyed_anew(grid), numbers->data(), numbers->data(),
                   numbers->size(), kStore);
  }

  // Rounds an input of products; `place` is the name of its history.
  void read(const Call& call, bool backward, const std::string& place, const float* from,
            float* to, int64_t n) const {
    const Grid grid = scaled(call.rounding.keyed_anew(backward ? gradient : product), call, place, backward,
                             from, n);
    if (grid.rounds() || from != to) kernels->round(grid, from, to, n, kStore);
  }

  static void give(const Call& call, size_t i, Floats made) {
    const TBlob& to = call.out[i];
    if (call.write(i) == kNothing) return;
    const Grid* written = call.rounding.written(i);
    const Grid grid = written ? *written : Grid();
    show(made.data(), size(to), 0, to.dptr_, written, to.type_flag_);
    if (is_float(to)) return kernels->round(grid, made.data(), floats(to), size(to), call.write(i));
    kernels->round(grid, made.data(), made.data(), size(to), kStore);
    kernels_of(to)->narrow(made.data(), to.dptr_, size(to), call.write(i));
  }

  // One step of one row: computes the gates and the new state from both sums.
  void step(const float* x, const float* h, int64_t row, Kept* k, float* state) const {
    const int64_t n = units;
    with_mode(mode, [&](auto constant) {
      constexpr RnnMode kMode = decltype(constant)::value;
      constexpr int kGates = gates_of(kMode);
      for (int64_t j = 0; j < n; ++j) {
        float its_x[kGates], its_h[kGates];
        for (int g = 0; g < kGates; ++g) its_x[g] = x[g * n + j], its_h[g] = h[g * n + j];
        const auto made = rnn_forward<kMode, RnnFloats>(its_x, its_h, k->before[row * n + j]);
        for (int g = 0; g < kGates; ++g) k->gates[(row * kGates + g) * n + j] = made.gate[g];
        k->inside[row * n + j] = made.inside;
        k->after[row * n + j] = made.after;
        state[j] = made.state;
      }
    });
  }

  // Computes the gradients of both sums of a row from that of its new state. `dh` and `dc` become those of the
  // previous state, without the part through h * Wh.
  void step_back(const Kept& k, int64_t row, const float* dy, float* dh, float* dc, float* dx,
                 float* ds) const {
    const int64_t n = units;
    with_mode(mode, [&](auto constant) {
      constexpr RnnMode kMode = decltype(constant)::value;
      constexpr int kGates = gates_of(kMode);
      for (int64_t j = 0; j < n; ++j) {
        const int64_t at = row * n + j;
        RnnResult<RnnFloats> of{{}, k.inside[at], k.after[at], 0};
        for (int g = 0; g < kGates; ++g) of.gate[g] = k.gates[(row * kGates + g) * n + j];
        const auto made = rnn_backward<kMode, RnnFloats>(of, k.before[at], dh[j] + dy[j], dc[j]);
        for (int g = 0; g < kGates; ++g) dx[g * n + j] = made.x[g], ds[g * n + j] = made.h[g];
        dh[j] = made.state;
        dc[j] = made.cell;
      }
    });
  }

  void forward(const Call& call);
  void backward(const Call& call);
};

void RnnLoop::Layers::forward(const Call& call) {
  const TBlob& data = call.in[0];
  const bool lstm = mode == kLstm;
  const Floats params = taken(call.in[1]), states = taken(call.in[2]),
               cells = lstm ? taken(call.in[3]) : Floats();
  const StepSizes of{data.shape_[0], data.shape_[1], units, gates};
  const int64_t all = of.all(), wide_row = directions * units, rows = of.batch;
  const int64_t size_h = rows * units;
  Floats x = taken(data), last_h(layers * directions * size_h), last_c(lstm ? last_h.size() : 0);
  kept.assign(layers * directions, Kept());
  inputs.clear();
  for (int64_t layer = 0; layer < layers; ++layer) {
    Floats y(of.steps() * wide_row);
    read(call, false, "x" + std::to_string(layer), x.data(), x.data(), x.size());
    for (int64_t d = 0; d < directions; ++d) {
      const int64_t which = layer * directions + d;
      const std::string name = std::to_string(which);
      const Places at = places(layer, d, data.shape_[2]);
      const float *bx = &params[at.bx], *bh = &params[at.bh];
      Kept& k = kept[which];
      k.wx.resize(all * at.inputs);
      k.wh.resize(all * units);
      read(call, false, "wx" + name, &params[at.wx], k.wx.data(), k.wx.size());
      read(call, false, "wh" + name, &params[at.wh], k.wh.data(), k.wh.size());
      Floats sum_x(of.steps() * all), sum_h(rows * all), made(size_h);
      multiply(call, of.steps(), all, at.inputs, {x.data(), false}, {k.wx.data(), true},
               sum_x.data());
      for (int64_t i = 0; i < of.steps() * all; ++i) sum_x[i] += bx[i % all];
      k.gates.resize(of.steps() * all);
      for (Floats* each : {&k.inside, &k.after, &k.before, &k.read}) each->resize(of.steps() * units);
      Floats h(&states[which * size_h], &states[which * size_h] + size_h), c(size_h);
      if (lstm) std::copy_n(&cells[which * size_h], size_h, c.begin());
      for (int64_t s = 0; s < of.time; ++s) {
        const int64_t t = d ? of.time - 1 - s : s, row = t * rows;
        float* read_h = &k.read[row * units];
        std::copy_n((lstm ? c : h).begin(), size_h, k.before.begin() + row * units);
        read(call, false, "h" + name + "." + std::to_string(s), h.data(), read_h, size_h);
        multiply(call, rows, all, units, {read_h, false}, {k.wh.data(), true}, sum_h.data());
        for (int64_t i = 0; i < rows * all; ++i) sum_h[i] += bh[i % all];
        for (int64_t i = 0; i < rows; ++i)
          step(&sum_x[(row + i) * all], &sum_h[i * all], row + i, &k, &made[i * units]);
        std::copy_n(k.after.begin() + row * units, size_h, c.begin());
        h = made;
        settle(call, &h);
        for (int64_t i = 0; i < rows; ++i)
          std::copy_n(&h[i * units], units, &y[(row + i) * wide_row + d * units]);
      }
      std::copy(h.begin(), h.end(), last_h.begin() + which * size_h);
      if (lstm) std::copy(c.begin(), c.end(), last_c.begin() + which * size_h);
    }
    inputs.push_back(std::move(x));
    x = std::move(y);
  }
  Floats* made[] = {&x, &last_h, &last_c};
  for (size_t i = 0; i < call.out.size(); ++i) give(call, i, std::move(*made[i]));
  if (!call.context.is_train) kept.clear(), inputs.clear();
}

// Reads data, parameters, state, output, its gradient; [state's output, its gradient]; for an LSTM the cell,
// [its output, its gradient].
void RnnLoop::Layers::backward(const Call& call) {
  const TBlob& data = call.in[0];
  const bool lstm = mode == kLstm, with_states = call.in.size() > (lstm ? 6 : 5);
  const StepSizes of{data.shape_[0], data.shape_[1], units, gates};
  const int64_t all = of.all(), wide_row = directions * units, rows = of.batch;
  const int64_t size_h = rows * units, steps = of.steps();
  Floats dy = taken(call.in[4]), dx;
  Floats dparams(size(call.in[1])), dstate(layers * directions * size_h), dcell(dstate.size());
  if (with_states) dstate = taken(call.in[6]);
  if (with_states && lstm) dcell = taken(call.in[9]);
  for (Floats* head : {&dy, &dstate, &dcell}) settle(call, head);
  for (int64_t layer = layers - 1; layer >= 0; --layer) {
    const Floats& x = inputs[layer];
    dx.assign(x.size(), 0);
    for (int64_t d = 0; d < directions; ++d) {
      const int64_t which = layer * directions + d;
      const std::string name = std::to_string(which) + ".";
      const Places at = places(layer, d, data.shape_[2]);
      const Kept& k = kept[which];
      float *dh = &dstate[which * size_h], *dc = &dcell[which * size_h];
      Floats back(size_h), product_x(x.size()), gates_x(steps * all), gates_h(steps * all);
      for (int64_t s = of.time - 1; s >= 0; --s) {
        const int64_t t = d ? of.time - 1 - s : s, row = t * rows;
        float *to_x = &gates_x[row * all], *to_h = &gates_h[row * all];
        for (int64_t i = 0; i < rows; ++i)
          step_back(k, row + i, &dy[(row + i) * wide_row + d * units], dh + i * units, dc + i * units,
                    to_x + i * all, to_h + i * all);
        const std::string place = name + std::to_string(s);
        read(call, true, "gx" + place, to_x, to_x, rows * all);
        if (mode == kGru) read(call, true, "gh" + place, to_h, to_h, rows * all);
        else std::copy_n(to_x, rows * all, to_h);
        multiply(call, rows, units, all, {to_h, false}, {k.wh.data(), false}, back.data());
        for (int64_t i = 0; i < size_h; ++i) dh[i] += back[i];
      }
      multiply(call, steps, at.inputs, all, {gates_x.data(), false}, {k.wx.data(), false},
               product_x.data());
      for (size_t i = 0; i < dx.size(); ++i) dx[i] += product_x[i];
      multiply(call, all, at.inputs, steps, {gates_x.data(), true}, {x.data(), false},
               &dparams[at.wx]);
      multiply(call, all, units, steps, {gates_h.data(), true}, {k.read.data(), false},
               &dparams[at.wh]);
      for (int64_t i = 0; i < steps * all; ++i) {
        dparams[at.bx + i % all] += gates_x[i];
        dparams[at.bh + i % all] += gates_h[i];
      }
    }
    dy = dx;
    settle(call, &dy);
  }
  Floats* made[] = {&dx, &dparams, &dstate, &dcell};
  for (size_t i = 0; i < call.out.size(); ++i) give(call, i, std::move(*made[i]));
}

bool RnnLoop::runs(const Settings& settings) { return settings.products.emulates() || settings.loop; }

RnnLoop::RnnLoop(const NodeAttrs& attrs, const Settings& settings) : layers_(new Layers(attrs)) {
  Layers& made = *layers_;
  made.emulates = settings.products.emulates();
  made.product = made.emulates ? kHalves : settings.product;
  made.gradient = made.emulates ? kHalves : settings.gradient;
  drops_ = made.layers > 1 && number(attrs, "p", 0) > 0;
}

RnnLoop::~RnnLoop() = default;

void RnnLoop::run(const Call& call, bool forward) {
  if (drops_ && call.context.is_train)
    throw dmlc::Error(std::string(layers_->emulates ? "accumulate=" : "a policy of several formats") +
                      ": RNN with dropout between its layers has no code: keep it in float32 (keep=)");
  if (forward) layers_->forward(call);
  else layers_->backward(call);
}

}  // namespace gluon_amp
