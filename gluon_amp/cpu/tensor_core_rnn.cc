// RNN, LSTM and GRU with products as a GPU's Tensor Cores make them, forward and backward.
//
// What a product reads is float16: inputs, the output of each step, weights, and the gradients of
// the gates. Gates, cells and what is carried back from step to step are float32. Sums run over a
// layer's inputs or units; in gradients of data over the gates, of weights over time, then batch.
//
// For all steps: x * Wx, so many gates for each unit. In each step: h * Wh; then with
// s = x * Wx + bx + h * Wh + bh:
//   rnn    h' = relu(s) or tanh(s)
//   lstm   i, f, g, o of s;  c' = f * c + i * g;  h' = o * tanh(c')
//   gru    r, z of s;  n = tanh(x * Wx + bx + r * (h * Wh + bh));  h' = (1 - z) * n + z * h
#include "tensor_core.h"

#include <cmath>
#include <cstring>

namespace gluon_amp {
namespace {

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

float wide(Half h) {
  float made;
  kernels->widen(&h, &made, 1);
  return made;
}

using Floats = std::vector<float>;
using Halves = std::vector<Half>;

Floats widened(const Half* x, int64_t n) {
  Floats made(n);
  kernels->widen(x, made.data(), n);
  return made;
}

Halves narrowed(const Floats& x) {
  Halves made(x.size());
  kernels->narrow(x.data(), made.data(), x.size(), kStore);
  return made;
}

struct Sizes {
  int64_t time, batch, units, gates;  // gates: for each unit
  int64_t steps() const { return time * batch; }
  int64_t all() const { return gates * units; }
};

// What the forward pass of one direction of a layer leaves for the backward pass.
struct Kept {
  Floats gates;   // (time, batch, gates, units), after their functions
  Floats inside;  // (time, batch, units): lstm: the cell before the step; gru: h * Wh + bh of n
  Floats after;   // (time, batch, units): lstm: the cell after the step
  Halves before;  // (time, batch, units): the hidden state before the step
};

// Where the parameters of one direction of a layer begin in the array of all parameters.
struct Places {
  int64_t inputs, wx, wh, bx, bh;
};

}  // namespace

struct TensorCoreRnn::Layers {
  TensorCore gpu;
  std::string mode;
  int64_t units, layers, directions, gates;
  std::vector<Kept> kept;       // for each direction of each layer
  std::vector<Halves> inputs;   // of each layer

  Places places(int64_t layer, int64_t direction, int64_t data) const {
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

  void multiply(int64_t rows, int64_t columns, int64_t depth, HalfMatrix a, HalfMatrix b,
                float* y) const {
    kernels->tensor_core_product(gpu, rows, columns, depth, a, b, nullptr, {y, columns, 1});
  }

  // One step of one row: from both sums to the gates and the new state.
  void step(const float* x, const float* h, const Half* before, const Sizes& of, float* gate,
            float* inside, float* cell, float* made) const {
    const int64_t n = of.units;
    for (int64_t j = 0; j < n; ++j) {
      if (mode == "lstm") {
        const float i = sigmoid(x[j] + h[j]), f = sigmoid(x[n + j] + h[n + j]),
                    g = std::tanh(x[2 * n + j] + h[2 * n + j]),
                    o = sigmoid(x[3 * n + j] + h[3 * n + j]);
        gate[j] = i, gate[n + j] = f, gate[2 * n + j] = g, gate[3 * n + j] = o;
        inside[j] = cell[j];
        cell[j] = f * cell[j] + i * g;
        made[j] = o * std::tanh(cell[j]);
      } else if (mode == "gru") {
        const float r = sigmoid(x[j] + h[j]), z = sigmoid(x[n + j] + h[n + j]),
                    c = std::tanh(x[2 * n + j] + r * h[2 * n + j]);
        gate[j] = r, gate[n + j] = z, gate[2 * n + j] = c;
        inside[j] = h[2 * n + j];
        made[j] = (1 - z) * c + z * wide(before[j]);
      } else {
        const float sum = x[j] + h[j];
        made[j] = gate[j] = mode == "rnn_relu" ? (sum > 0 || sum != sum ? sum : 0) : std::tanh(sum);
      }
    }
  }

  // The gradients of both sums of a row, from that of its new state; `dh` and `dc` become those of
  // the state before, but for what comes back through h * Wh.
  void step_back(const Kept& k, int64_t row, const Sizes& of, float* dh, float* dc, float* dx,
                 float* ds) const {
    const int64_t n = of.units;
    const float *gate = &k.gates[row * of.all()], *inside = &k.inside[row * n],
                *after = &k.after[row * n];
    const Half* before = &k.before[row * n];
    for (int64_t j = 0; j < n; ++j) {
      if (mode == "lstm") {
        const float i = gate[j], f = gate[n + j], g = gate[2 * n + j], o = gate[3 * n + j],
                    tanh = std::tanh(after[j]);
        const float d = dc[j] + dh[j] * o * (1 - tanh * tanh);
        dx[j] = d * g * i * (1 - i);
        dx[n + j] = d * inside[j] * f * (1 - f);
        dx[2 * n + j] = d * i * (1 - g * g);
        dx[3 * n + j] = dh[j] * tanh * o * (1 - o);
        dc[j] = d * f;
        dh[j] = 0;
      } else if (mode == "gru") {
        const float r = gate[j], z = gate[n + j], c = gate[2 * n + j];
        const float d = dh[j] * (1 - z) * (1 - c * c);
        dx[j] = d * inside[j] * r * (1 - r);
        dx[n + j] = dh[j] * (wide(before[j]) - c) * z * (1 - z);
        dx[2 * n + j] = d;
        ds[2 * n + j] = d * r;
        dh[j] *= z;
      } else {
        const float h = gate[j];
        dx[j] = mode == "rnn_relu" ? (h > 0 ? dh[j] : 0) : dh[j] * (1 - h * h);
        dh[j] = 0;
      }
    }
    std::memcpy(ds, dx, (mode == "gru" ? 2 : gates) * n * sizeof(float));
  }

  void forward(const Call& call);
  void backward(const Call& call);
};

void TensorCoreRnn::Layers::forward(const Call& call) {
  const TBlob& data = call.in[0];
  const Half *params = halves(call.in[1]), *states = halves(call.in[2]);
  const bool lstm = mode == "lstm";
  const Sizes of{data.shape_[0], data.shape_[1], units, gates};
  const int64_t all = of.all(), wide_row = directions * units, rows = of.batch;
  const int64_t size_h = rows * units;
  Halves x(halves(data), halves(data) + size(data));
  Halves last_h(layers * directions * size_h);
  Floats last_c(lstm ? last_h.size() : 0);
  kept.assign(layers * directions, Kept());
  inputs.clear();
  for (int64_t layer = 0; layer < layers; ++layer) {
    Halves y(of.steps() * wide_row);
    for (int64_t d = 0; d < directions; ++d) {
      const int64_t which = layer * directions + d;
      const Places at = places(layer, d, data.shape_[2]);
      const Floats bx = widened(params + at.bx, all), bh = widened(params + at.bh, all);
      Floats sum_x(of.steps() * all), sum_h(rows * all), made(size_h);
      multiply(of.steps(), all, at.inputs, {x.data(), at.inputs, 1}, {params + at.wx, 1, at.inputs},
               sum_x.data());
      for (int64_t i = 0; i < of.steps() * all; ++i) sum_x[i] += bx[i % all];
      Kept& k = kept[which];
      k.gates.resize(of.steps() * all);
      k.inside.resize(of.steps() * units);
      k.after.resize(of.steps() * units);
      k.before.resize(of.steps() * units);
      Halves h(states + which * size_h, states + (which + 1) * size_h);
      Floats c = lstm ? widened(halves(call.in[3]) + which * size_h, size_h) : Floats(size_h);
      for (int64_t s = 0; s < of.time; ++s) {
        const int64_t t = d ? of.time - 1 - s : s, row = t * rows;
        std::copy(h.begin(), h.end(), k.before.begin() + row * units);
        multiply(rows, all, units, {h.data(), units, 1}, {params + at.wh, 1, units}, sum_h.data());
        for (int64_t i = 0; i < rows * all; ++i) sum_h[i] += bh[i % all];
        for (int64_t i = 0; i < rows; ++i)
          step(&sum_x[(row + i) * all], &sum_h[i * all], &h[i * units], of,
               &k.gates[(row + i) * all], &k.inside[(row + i) * units], &c[i * units],
               &made[i * units]);
        std::copy(c.begin(), c.end(), k.after.begin() + row * units);
        h = narrowed(made);
        for (int64_t i = 0; i < rows; ++i)
          std::copy_n(&h[i * units], units, &y[(row + i) * wide_row + d * units]);
      }
      std::copy(h.begin(), h.end(), last_h.begin() + which * size_h);
      if (lstm) std::copy(c.begin(), c.end(), last_c.begin() + which * size_h);
    }
    inputs.push_back(std::move(x));
    x = std::move(y);
  }
  const Floats out = widened(x.data(), x.size()), state = widened(last_h.data(), last_h.size());
  kernels->narrow(out.data(), halves(call.out[0]), out.size(), call.write(0));
  if (call.out.size() > 1)
    kernels->narrow(state.data(), halves(call.out[1]), state.size(), call.write(1));
  if (call.out.size() > 2)
    kernels->narrow(last_c.data(), halves(call.out[2]), last_c.size(), call.write(2));
  if (!call.context.is_train && !call.context.need_grad) kept.clear(), inputs.clear();
}

// Data, parameters, state, output, its gradient; [state's output, its gradient]; of an lstm the
// cell, [its output, its gradient].
void TensorCoreRnn::Layers::backward(const Call& call) {
  if (kept.empty()) throw dmlc::Error("RNN's gradients need a forward pass that is recorded");
  const TBlob& data = call.in[0];
  const Half* params = halves(call.in[1]);
  const bool lstm = mode == "lstm", with_states = call.in.size() > (lstm ? 6 : 5);
  const Sizes of{data.shape_[0], data.shape_[1], units, gates};
  const int64_t all = of.all(), wide_row = directions * units, rows = of.batch;
  const int64_t size_h = rows * units, steps = of.steps();
  Halves dy(halves(call.in[4]), halves(call.in[4]) + size(call.in[4]));
  Floats dparams(size(call.in[1])), dstate(layers * directions * size_h), dcell(dstate.size()), dx;
  if (with_states) {
    dstate = widened(halves(call.in[6]), dstate.size());
    if (lstm) dcell = widened(halves(call.in[9]), dcell.size());
  }
  for (int64_t layer = layers - 1; layer >= 0; --layer) {
    const Halves& x = inputs[layer];
    const Floats above = widened(dy.data(), dy.size());
    dx.assign(x.size(), 0);
    for (int64_t d = 0; d < directions; ++d) {
      const int64_t which = layer * directions + d;
      const Places at = places(layer, d, data.shape_[2]);
      const Kept& k = kept[which];
      float *dh = &dstate[which * size_h], *dc = &dcell[which * size_h];
      Floats to_x(rows * all), to_h(rows * all), back(size_h), product(x.size());
      Halves gates_x(steps * all), gates_h(steps * all);
      for (int64_t s = of.time - 1; s >= 0; --s) {
        const int64_t t = d ? of.time - 1 - s : s, row = t * rows;
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < units; ++j)
            dh[i * units + j] += above[(row + i) * wide_row + d * units + j];
          step_back(k, row + i, of, dh + i * units, dc + i * units, &to_x[i * all], &to_h[i * all]);
        }
        kernels->narrow(to_x.data(), &gates_x[row * all], rows * all, kStore);
        kernels->narrow(to_h.data(), &gates_h[row * all], rows * all, kStore);
        multiply(rows, units, all, {&gates_h[row * all], all, 1}, {params + at.wh, units, 1},
                 back.data());
        for (int64_t i = 0; i < size_h; ++i) dh[i] += back[i];
      }
      multiply(steps, at.inputs, all, {gates_x.data(), all, 1}, {params + at.wx, at.inputs, 1},
               product.data());
      for (size_t i = 0; i < dx.size(); ++i) dx[i] += product[i];
      multiply(all, at.inputs, steps, {gates_x.data(), 1, all}, {x.data(), at.inputs, 1},
               &dparams[at.wx]);
      multiply(all, units, steps, {gates_h.data(), 1, all}, {k.before.data(), units, 1},
               &dparams[at.wh]);
      const Floats sums_x = widened(gates_x.data(), gates_x.size()),
                   sums_h = widened(gates_h.data(), gates_h.size());
      for (int64_t i = 0; i < steps * all; ++i) {
        dparams[at.bx + i % all] += sums_x[i];
        dparams[at.bh + i % all] += sums_h[i];
      }
    }
    dy = narrowed(dx);
  }
  const Floats* made[] = {&dx, &dparams, &dstate, &dcell};
  for (size_t i = 0; i < call.out.size(); ++i)
    kernels->narrow(made[i]->data(), halves(call.out[i]), size(call.out[i]), call.write(i));
}

TensorCoreRnn::TensorCoreRnn(const NodeAttrs& attrs) : layers_(new Layers()) {
  for (const char* key : {"projection_size", "lstm_state_clip_min", "lstm_state_clip_max"})
    if (word(attrs, key, "None") != "None")
      throw dmlc::Error(std::string("accumulate=: RNN with ") + key + " has no code");
  if (flag(attrs, "use_sequence_length", false))
    throw dmlc::Error("accumulate=: RNN with use_sequence_length has no code");
  const std::string mode = word(attrs, "mode", "");
  *layers_ = Layers{tensor_core_of(attrs), mode,
                    static_cast<int64_t>(number(attrs, "state_size", 0)),
                    static_cast<int64_t>(number(attrs, "num_layers", 1)),
                    flag(attrs, "bidirectional", false) ? 2 : 1,
                    mode == "lstm" ? 4 : mode == "gru" ? 3 : 1, {}, {}};
  dropout_ = layers_->layers > 1 && number(attrs, "p", 0) > 0;
}

TensorCoreRnn::~TensorCoreRnn() = default;

void TensorCoreRnn::run(const Call& call, bool forward) {
  check_halves(call);
  if (dropout_ && call.context.is_train)
    throw dmlc::Error("accumulate=: RNN with dropout between its layers has no code");
  if (forward) layers_->forward(call);
  else layers_->backward(call);
}

}  // namespace gluon_amp
