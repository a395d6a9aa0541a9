// The gates and states of one step of an RNN, an LSTM or a GRU, for all rows of a batch of bfloat16 arrays.
#include "functions.h"
#include "vector.h"

namespace gluon_amp {
namespace ISA {
namespace {

// Calls f(row, j, lanes) for the units j of all rows, over all threads if it is worth it: a number takes about as
// long as 16 of other loops.
template <typename F> void all_units(int64_t rows, int64_t units, F f) {
  const auto of_row = [=](int64_t row) {
    each(0, units, [=](int64_t j, auto lanes) { f(row, j, lanes); });
  };
  if (rows < 2 || 16 * rows * units < kWorthThreads) {
    for (int64_t row = 0; row < rows; ++row) of_row(row);
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) run(of_row, row);
}

// ---- forward: x and h are the results of both products, with biases, for each gate

struct Relu {
  static V of(V x) { return larger(splat(0), x); }
  static V gradient(V g, V y) { return if_less(splat(0), y, g, y - y); }  // NaN where y is
};
struct Tanh {
  static V of(V x) { return tanh_of(x); }
  static V gradient(V g, V y) { return g * (splat(1) - y * y); }
};

template <typename L> void put_state(const RnnStep& s, int64_t row, int64_t j, V state, L lanes) {
  store(s.h + row * s.units + j, state, lanes);
  store(s.y + row * s.y_row + j, state, lanes);
}

template <typename F> void simple_step(const RnnStep& s) {
  all_units(s.rows, s.units, [&](int64_t row, int64_t j, auto lanes) {
    float* const gate = s.gates + row * s.units + j;
    const V sum = load(gate, lanes) + load(s.bias + j, lanes) + load(s.hidden + row * s.units + j, lanes);
    const V made = F::of(sum);
    store(gate, made, lanes);
    put_state(s, row, j, made, lanes);
  });
}

void lstm_step(const RnnStep& s) {
  all_units(s.rows, s.units, [&](int64_t row, int64_t j, auto lanes) {
    const int64_t n = s.units, at = row * n + j;
    float* const gates = s.gates + row * 4 * n + j;
    const float* const hidden = s.hidden + row * 4 * n + j;
    const auto sum = [&](int k) {
      return load(gates + k * n, lanes) + load(s.bias + k * n + j, lanes) + load(hidden + k * n, lanes);
    };
    const V i = sigmoid(sum(0)), f = sigmoid(sum(1)), g = tanh_of(sum(2)), o = sigmoid(sum(3));
    const V cell = f * load(s.before + at, lanes) + i * g;
    store(gates, i, lanes);
    store(gates + n, f, lanes);
    store(gates + 2 * n, g, lanes);
    store(gates + 3 * n, o, lanes);
    store(s.after + at, cell, lanes);
    put_state(s, row, j, o * tanh_of(cell), lanes);
  });
}

void gru_step(const RnnStep& s) {
  all_units(s.rows, s.units, [&](int64_t row, int64_t j, auto lanes) {
    const int64_t n = s.units, at = row * n + j;
    float* const gates = s.gates + row * 3 * n + j;
    const float* const hidden = s.hidden + row * 3 * n + j;
    const auto sum = [&](int k) {
      return load(gates + k * n, lanes) + load(s.bias + k * n + j, lanes) + load(hidden + k * n, lanes);
    };
    const V r = sigmoid(sum(0)), z = sigmoid(sum(1));
    const V inside = load(hidden + 2 * n, lanes) + load(s.bias_inside + j, lanes);
    const V made = tanh_of(load(gates + 2 * n, lanes) + load(s.bias + 2 * n + j, lanes) + r * inside);
    const V state = (splat(1) - z) * made + z * load(s.before + at, lanes);
    store(gates, r, lanes);
    store(gates + n, z, lanes);
    store(gates + 2 * n, made, lanes);
    store(s.inside + at, inside, lanes);
    store(s.after + at, state, lanes);
    put_state(s, row, j, state, lanes);
  });
}

void rnn_step(RnnMode mode, const RnnStep& step) {
  switch (mode) {
    case kRnnRelu: return simple_step<Relu>(step);
    case kRnnTanh: return simple_step<Tanh>(step);
    case kLstm: return lstm_step(step);
    case kGru: return gru_step(step);
  }
}

// ---- backward

// The gradient of the state after the step.
template <typename L> V gradient_of(const RnnStepBack& s, int64_t row, int64_t j, L lanes) {
  V g = load(s.dy + row * s.dy_row + j, lanes) + load(s.dh + row * s.units + j, lanes);
  return s.back ? g + load(s.back + row * s.units + j, lanes) : g;
}

template <typename F> void simple_step_back(const RnnStepBack& s) {
  all_units(s.rows, s.units, [&](int64_t row, int64_t j, auto lanes) {
    const int64_t at = row * s.units + j;
    store(s.dx + at, F::gradient(gradient_of(s, row, j, lanes), load(s.gates + at, lanes)), lanes);
    store(s.dh + at, splat(0), lanes);
  });
}

void lstm_step_back(const RnnStepBack& s) {
  all_units(s.rows, s.units, [&](int64_t row, int64_t j, auto lanes) {
    const int64_t n = s.units, at = row * n + j;
    const float* const gates = s.gates + row * 4 * n + j;
    const V i = load(gates, lanes), f = load(gates + n, lanes), g = load(gates + 2 * n, lanes),
            o = load(gates + 3 * n, lanes), one = splat(1);
    const V dh = gradient_of(s, row, j, lanes), tanh = tanh_of(load(s.after + at, lanes));
    const V dc = load(s.dc + at, lanes) + dh * o * (one - tanh * tanh);
    Half* const dx = s.dx + row * 4 * n + j;
    store(dx, dc * g * i * (one - i), lanes);
    store(dx + n, dc * load(s.before + at, lanes) * f * (one - f), lanes);
    store(dx + 2 * n, dc * i * (one - g * g), lanes);
    store(dx + 3 * n, dh * tanh * o * (one - o), lanes);
    store(s.dc + at, dc * f, lanes);
    store(s.dh + at, splat(0), lanes);
  });
}

void gru_step_back(const RnnStepBack& s) {
  all_units(s.rows, s.units, [&](int64_t row, int64_t j, auto lanes) {
    const int64_t n = s.units, at = row * n + j;
    const float* const gates = s.gates + row * 3 * n + j;
    const V r = load(gates, lanes), z = load(gates + n, lanes), made = load(gates + 2 * n, lanes),
            one = splat(1);
    const V dh = gradient_of(s, row, j, lanes), d = dh * (one - z) * (one - made * made);
    const V dr = d * load(s.inside + at, lanes) * r * (one - r);
    const V dz = dh * (load(s.before + at, lanes) - made) * z * (one - z);
    Half *const dx = s.dx + row * 3 * n + j, *const ds = s.ds + row * 3 * n + j;
    const auto put = [&](Half* to, V last) {
      store(to, dr, lanes);
      store(to + n, dz, lanes);
      store(to + 2 * n, last, lanes);
    };
    put(dx, d);
    put(ds, d * r);
    store(s.dh + at, dh * z, lanes);
  });
}

void rnn_step_back(RnnMode mode, const RnnStepBack& step) {
  switch (mode) {
    case kRnnRelu: return simple_step_back<Relu>(step);
    case kRnnTanh: return simple_step_back<Tanh>(step);
    case kLstm: return lstm_step_back(step);
    case kGru: return gru_step_back(step);
  }
}

}  // namespace

void add_rnn(Kernels* table) noexcept {
  table->rnn_step = rnn_step;
  table->rnn_step_back = rnn_step_back;
}

}  // namespace ISA
}  // namespace gluon_amp
