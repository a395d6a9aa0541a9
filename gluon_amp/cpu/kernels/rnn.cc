// The gates and states of one step of an RNN, an LSTM or a GRU, for all rows of a batch of bfloat16 arrays.
#include "functions.h"
#include "rnn_cell.h"
#include "vector.h"

namespace gluon_amp::ISA {
namespace {

struct Vectors {
  using T = V;
  static V one() { return splat(1); }
  static V sigmoid(V x) { return ISA::sigmoid(x); }
  static V tanh(V x) { return tanh_of(x); }
  static V relu(V x) { return larger(splat(0), x); }
  static V relu_gradient(V g, V y) { return if_less(splat(0), y, g, y - y); }  // NaN where y is
};

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

void rnn_step(RnnMode mode, const RnnStep& s) {
  with_mode(mode, [&](auto constant) {
    constexpr RnnMode kMode = decltype(constant)::value;
    constexpr int kGates = gates_of(kMode);
    all_units(s.rows, s.units, [&](int64_t row, int64_t j, auto lanes) {
      const int64_t n = s.units, at = row * n + j;
      float* const gates = s.gates + row * kGates * n + j;
      V x[kGates], h[kGates], before = splat(0);
      for (int k = 0; k < kGates; ++k) {
        x[k] = load(gates + k * n, lanes) + load(s.bias + k * n + j, lanes);
        h[k] = load(s.hidden + (row * kGates + k) * n + j, lanes);
      }
      if constexpr (kMode == kGru) h[2] = h[2] + load(s.bias_inside + j, lanes);
      if constexpr (kGates > 1) before = load(s.before + at, lanes);
      const auto step = rnn_forward<kMode, Vectors>(x, h, before);
      for (int k = 0; k < kGates; ++k) store(gates + k * n, step.gate[k], lanes);
      if constexpr (kMode == kGru) store(s.inside + at, step.inside, lanes);
      if constexpr (kGates > 1) store(s.after + at, step.after, lanes);
      store(numbers(s.h) + at, step.state, lanes);
      store(numbers(s.y) + row * s.y_row + j, step.state, lanes);
    });
  });
}

void rnn_step_back(RnnMode mode, const RnnStepBack& s) {
  with_mode(mode, [&](auto constant) {
    constexpr RnnMode kMode = decltype(constant)::value;
    constexpr int kGates = gates_of(kMode);
    all_units(s.rows, s.units, [&](int64_t row, int64_t j, auto lanes) {
      const int64_t n = s.units, at = row * n + j, first = row * kGates * n + j;
      RnnResult<Vectors> of{};
      V before = splat(0), cell = splat(0);
      for (int k = 0; k < kGates; ++k) of.gate[k] = load(s.gates + first + k * n, lanes);
      if constexpr (kGates > 1) before = load(s.before + at, lanes);
      if constexpr (kMode == kGru) of.inside = load(s.inside + at, lanes);
      if constexpr (kMode == kLstm) {
        of.after = load(s.after + at, lanes);
        cell = load(s.dc + at, lanes);
      }
      V state = load(s.dy, row * s.dy_row + j, lanes) + load(s.dh + at, lanes);
      if (s.back) state = state + load(s.back + at, lanes);
      const auto step = rnn_backward<kMode, Vectors>(of, before, state, cell);
      for (int k = 0; k < kGates; ++k) store(numbers(s.dx) + first + k * n, step.x[k], lanes);
      for (int k = 0; k < kGates && kMode == kGru; ++k) store(numbers(s.ds) + first + k * n, step.h[k], lanes);
      if constexpr (kMode == kLstm) store(s.dc + at, step.cell, lanes);
      store(s.dh + at, step.state, lanes);
    });
  });
}

}  // namespace

void add_rnn(Kernels* table) noexcept {
  table->rnn_step = rnn_step;
  table->rnn_step_back = rnn_step_back;
}

}  // namespace gluon_amp::ISA
