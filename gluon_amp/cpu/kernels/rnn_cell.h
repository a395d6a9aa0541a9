// The equations of one unit of a recurrent layer in one step, forward and backward.
//
// With x = x * Wx + bx and h = h * Wh + bh for each gate:
//   rnn    h' = relu(x + h) or tanh(x + h)
//   lstm   i, f, g, o of x + h;  c' = f * c + i * g;  h' = o * tanh(c')
//   gru    r, z of x + h;  n = tanh(x + r * h);  h' = (1 - z) * n + z * h
//
// F has the type of numbers T, floats or vectors of floats, and its functions: one, sigmoid, tanh, relu and
// relu_gradient.
#pragma once
#include <type_traits>

namespace gluon_amp {

enum RnnMode { kRnnRelu, kRnnTanh, kLstm, kGru };

constexpr int gates_of(RnnMode mode) { return mode == kLstm ? 4 : mode == kGru ? 3 : 1; }

// Calls f(mode) with the mode as a constant.
template <class F>
void with_mode(RnnMode mode, const F& f) {
  switch (mode) {
    case kRnnRelu: return f(std::integral_constant<RnnMode, kRnnRelu>());
    case kRnnTanh: return f(std::integral_constant<RnnMode, kRnnTanh>());
    case kLstm: return f(std::integral_constant<RnnMode, kLstm>());
    case kGru: return f(std::integral_constant<RnnMode, kGru>());
  }
}

template <class F>
struct RnnResult {
  typename F::T gate[4];  // after their activations
  typename F::T inside;   // gru: h of the last gate
  typename F::T after;    // lstm: the new cell; gru: the new state
  typename F::T state;    // the new state
};

struct Unlimited {
  template <class T>
  T operator()(T cell) const { return cell; }
};

// `before`: an LSTM's cell or a GRU's state before the step; `limit`: what an LSTM's new cell becomes.
template <RnnMode mode, class F, class T = typename F::T, class Limit = Unlimited>
RnnResult<F> rnn_forward(const T* x, const T* h, T before, Limit limit = {}) {
  RnnResult<F> to{};
  T* const gate = to.gate;
  if constexpr (mode == kLstm) {
    for (int k = 0; k < 4; ++k) gate[k] = k == 2 ? F::tanh(x[k] + h[k]) : F::sigmoid(x[k] + h[k]);
    to.after = limit(gate[1] * before + gate[0] * gate[2]);
    to.state = gate[3] * F::tanh(to.after);
  } else if constexpr (mode == kGru) {
    gate[0] = F::sigmoid(x[0] + h[0]);
    gate[1] = F::sigmoid(x[1] + h[1]);
    to.inside = h[2];
    gate[2] = F::tanh(x[2] + gate[0] * h[2]);
    to.after = to.state = (F::one() - gate[1]) * gate[2] + gate[1] * before;
  } else {
    to.state = gate[0] = mode == kRnnRelu ? F::relu(x[0] + h[0]) : F::tanh(x[0] + h[0]);
  }
  return to;
}

template <class F>
struct RnnGradient {
  typename F::T x[4], h[4];  // of x and of h for each gate
  typename F::T state;       // of the state before the step, without the part through h
  typename F::T cell;        // lstm: of the cell before the step
};

// From the results of the step, and the gradients of the new state and of the new cell.
template <RnnMode mode, class F, class T = typename F::T>
RnnGradient<F> rnn_backward(const RnnResult<F>& of, T before, T state, T cell) {
  RnnGradient<F> to{};
  const T* const gate = of.gate;
  const T one = F::one();
  if constexpr (mode == kLstm) {
    const T i = gate[0], f = gate[1], g = gate[2], o = gate[3], tanh = F::tanh(of.after);
    const T dc = cell + state * o * (one - tanh * tanh);
    to.x[0] = dc * g * i * (one - i);
    to.x[1] = dc * before * f * (one - f);
    to.x[2] = dc * i * (one - g * g);
    to.x[3] = state * tanh * o * (one - o);
    to.cell = dc * f;
  } else if constexpr (mode == kGru) {
    const T r = gate[0], z = gate[1], n = gate[2];
    to.x[2] = state * (one - z) * (one - n * n);
    to.x[0] = to.x[2] * of.inside * r * (one - r);
    to.x[1] = state * (before - n) * z * (one - z);
    to.state = state * z;
  } else {
    to.x[0] = mode == kRnnRelu ? F::relu_gradient(state, gate[0]) : state * (one - gate[0] * gate[0]);
  }
  for (int k = 0; k < gates_of(mode); ++k) to.h[k] = mode == kGru && k == 2 ? to.x[2] * gate[0] : to.x[k];
  return to;
}

}  // namespace gluon_amp
