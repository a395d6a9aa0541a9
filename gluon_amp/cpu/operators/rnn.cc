// RNN, LSTM and GRU of bfloat16 arrays as a loop over time, forward and backward.
//
// Products read bfloat16: data, weights, the state before each step, and the gradients of the gates' sums. Their
// results, the gates, an LSTM's cells and a GRU's carried state are float32, and so are gradients until they are
// written.
//
// Products sum over a layer's inputs or units; for gradients of data over the gates; for gradients of weights over
// time, then batch. Those over all steps run before or after the loop over time.
//
// States and cells of a direction are slots in the order of time, one more than steps: forward in time, step t
// reads slot t and writes slot t + 1; backward in time, it reads slot t + 1 and writes slot t.
#include <algorithm>

#include "onednn/onednn.h"

namespace gluon_amp {
namespace {

const float* widened(const Number16* numbers, int64_t n, Scratch* scratch) {
  float* const wide = scratch->memory(n);
  bfloat16_kernels->widen(numbers, wide, n);
  return wide;
}

// The float32 products of a weight, (outputs, inputs), for one call: of bfloat16 numbers where the processor has
// instructions for them.
class Weight {
 public:
  Weight(const Number16* numbers, int64_t outputs, int64_t inputs)
      : numbers_(numbers), outputs_(outputs), inputs_(inputs) {}

  void forward(int64_t rows, const Number16* x, float* y) {  // y = x * w^T
    if (onednn_rows(kForward, rows, outputs_, inputs_, x, numbers_, y, &inside_)) return;
    Scratch scratch;
    onednn_product(rows, outputs_, inputs_, {widened(x, rows * inputs_, &scratch), false}, {wide(), true}, y);
  }
  void backward(int64_t rows, const Number16* dy, float* dx) {  // dx = dy * w
    if (onednn_rows(kBackwardData, rows, outputs_, inputs_, dy, numbers_, dx, &inside_)) return;
    Scratch scratch;
    onednn_product(rows, inputs_, outputs_, {widened(dy, rows * outputs_, &scratch), false}, {wide(), false}, dx);
  }
  void gradient(int64_t rows, const Number16* dy, const Number16* x, float* dw) {  // dw = dy^T * x
    Product::Inside read;
    if (onednn_rows(kBackwardWeights, rows, outputs_, inputs_, dy, x, dw, &read)) return;
    Scratch scratch;
    onednn_product(outputs_, inputs_, rows, {widened(dy, rows * outputs_, &scratch), true},
                   {widened(x, rows * inputs_, &scratch), false}, dw);
  }

 private:
  const float* wide() {
    if (!wide_) wide_ = widened(numbers_, outputs_ * inputs_, &scratch_);
    return wide_;
  }

  const Number16* const numbers_;
  const int64_t outputs_, inputs_;
  Product::Inside inside_;
  Scratch scratch_;
  const float* wide_ = nullptr;
};

// Both biases, (2, gates, units): their sum, except in a GRU's last gate, and that of h.
const float* biases_of(RnnMode mode, const Number16* from, int64_t all, Scratch* scratch) {
  float* const sums = scratch->memory(2 * all);
  bfloat16_kernels->widen(from, sums, 2 * all);
  const int64_t summed = mode == kGru ? all / 3 * 2 : all;
  for (int64_t i = 0; i < summed; ++i) sums[i] += sums[all + i];
  return sums;
}

// ---- the loop --------------------------------------------------------------------------------------

RnnMode mode_of(const std::string& name) {
  return name == "lstm" ? kLstm : name == "gru" ? kGru : name == "rnn_relu" ? kRnnRelu : kRnnTanh;
}

class RnnLoop : public Rnn {
 public:
  explicit RnnLoop(const NodeAttrs& attrs)
      : mode_(mode_of(word(attrs, "mode", ""))), units_(static_cast<int64_t>(number(attrs, "state_size", 0))),
        layers_(static_cast<int64_t>(number(attrs, "num_layers", 1))),
        directions_(flag(attrs, "bidirectional", false) ? 2 : 1), all_(gates_of(mode_) * units_),
        drops_(layers_ > 1 && number(attrs, "p", 0) > 0) {}

  bool serves(const Call& call) const override {
    return all_16bit(call) && size(call.in[0]) > 0 && !generic_only && !watching() &&
           !(drops_ && call.context.is_train);
  }
  void forward(const Call& call) override;
  void backward(const Call& call) override;

 private:
  // The offsets of the parameters of one direction of a layer in the array of all parameters, and its input size.
  struct Parameters {
    int64_t inputs, wx, wh, bx, bh;
  };
  Parameters parameters(int64_t which, int64_t data) const {  // data: the input size of the first layer
    const int64_t count = layers_ * directions_;
    Parameters parameters{};
    int64_t at = 0;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t in = k < directions_ ? data : directions_ * units_;
      if (k == which) parameters = {in, at, at + all_ * in, 0, 0};
      at += all_ * (in + units_);
    }
    parameters.bx = at + which * 2 * all_;
    parameters.bh = parameters.bx + all_;
    return parameters;
  }

  // Data of one direction of a layer for its backward pass.
  struct Kept {
    float *gates, *cells, *inside;  // cells: of an LSTM, or a GRU's states
    Number16* states;
  };

  const RnnMode mode_;
  const int64_t units_, layers_, directions_, all_;  // all: the sums of a step, gates for each unit
  const bool drops_;
  std::unique_ptr<Scratch> scratch_;  // of the data for the backward pass
  std::vector<Kept> kept_;        // for each direction of each layer
  std::vector<const Number16*> inputs_;  // of each layer
};

void RnnLoop::forward(const Call& call) {
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
  const Number16* const params = numbers16(call.in[1]);
  const Number16* const first_states = numbers16(call.in[2]);
  Number16* const last_states = brief.numbers16(of_states);
  float* const last_cells = mode_ == kLstm ? brief.memory(of_states) : nullptr;
  const Number16* x = numbers16(data);
  for (int64_t layer = 0; layer < layers_; ++layer) {
    const int64_t width = layer > 0 ? wide : data.shape_[2];
    inputs_.push_back(x);
    Number16* const y = (layer + 1 < layers_ ? keeps : &brief)->numbers16(time * rows * wide);
    for (int64_t d = 0; d < directions_; ++d) {
      const int64_t which = layer * directions_ + d;
      const Parameters at = parameters(which, data.shape_[2]);
      Scratch of_direction;
      Scratch* const of_steps = trains ? keeps : &of_direction;
      Kept k{};
      k.gates = of_steps->memory(time * rows * all_);
      if (all_ > units_) k.cells = keeps->memory(slots * n);
      if (mode_ == kGru) k.inside = of_steps->memory(trains ? time * n : n);
      k.states = keeps->numbers16(slots * n);
      const float* const biases = biases_of(mode_, params + at.bx, all_, &of_direction);
      const auto slot = [&](int64_t i) { return trains ? i * n : 0; };
      const int64_t first = slot(d ? time : 0), last = slot(d ? 0 : time);
      std::copy_n(first_states + which * n, n, k.states + first);
      if (k.cells) {
        const TBlob& from = call.in[mode_ == kLstm ? 3 : 2];
        kernels_of(from)->widen(gluon_amp::at(from, which * n), k.cells + first, n);
      }
      Weight(params + at.wx, all_, width).forward(time * rows, x, k.gates);
      Weight of_state(params + at.wh, all_, units_);
      float* const hidden = of_direction.memory(rows * all_);
      for (int64_t s = 0; s < time; ++s) {
        const int64_t t = d ? time - 1 - s : s, before = slot(d ? t + 1 : t), after = slot(d ? t : t + 1);
        of_state.forward(rows, k.states + before, hidden);
        bfloat16_kernels->rnn_step(mode_, {rows, units_, k.gates + t * rows * all_, hidden, biases,
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
  put(x, call.out[0], call.write(0));
  if (call.out.size() > 1) put(last_states, call.out[1], call.write(1));
  if (call.out.size() > 2) narrow(last_cells, call.out[2], call.write(2));
}

// Reads data, parameters, state, output, its gradient; [state's output, its gradient]; for an LSTM the cell,
// [its output, its gradient].
void RnnLoop::backward(const Call& call) {
  const std::lock_guard<std::mutex> mine(scratch_lock());
  const TBlob& data = call.in[0];
  const Number16* const params = numbers16(call.in[1]);
  const bool with_states = call.in.size() > (mode_ == kLstm ? 6 : 5);
  const int64_t time = data.shape_[0], rows = data.shape_[1], n = rows * units_;
  const int64_t steps = time * rows, wide = directions_ * units_, of_states = layers_ * directions_ * n;
  Scratch scratch;
  const auto state_gradient = [&](size_t input, int64_t count) {
    float* const state = scratch.memory(count);
    if (with_states && count > 0) widen(call.in[input], state);
    else std::fill_n(state, count, 0.0f);
    return state;
  };
  const Number16* dy = numbers16(call.in[4]);
  const int64_t of_cells = mode_ == kLstm ? of_states : 0;
  float *const dstates = state_gradient(6, of_states), *const dcells = state_gradient(9, of_cells);
  // Outputs may share memory with inputs, so they are written after all reads.
  float* const dparams = call.write(1) != kNothing ? scratch.memory(size(call.in[1])) : nullptr;
  for (int64_t layer = layers_ - 1; layer >= 0; --layer) {
    const Number16* const x = layer > 0 ? inputs_[layer] : numbers16(data);
    const bool wants_x = layer > 0 || call.write(0) != kNothing;
    const int64_t width = layer > 0 ? wide : data.shape_[2];
    Scratch of_layer;
    float* const dx = wants_x ? of_layer.memory(steps * width) : nullptr;
    for (int64_t d = 0; d < directions_; ++d) {
      const int64_t which = layer * directions_ + d;
      const Parameters at = parameters(which, data.shape_[2]);
      const Kept& k = kept_[which];
      Scratch of_direction;
      Number16* const sums = of_direction.numbers16(steps * all_);
      Number16* const sums_h = mode_ == kGru ? of_direction.numbers16(steps * all_) : sums;
      float *const back = of_direction.memory(n), *const dh = dstates + which * n, *const dc = dcells + which * n;
      Weight wx(params + at.wx, all_, width), wh(params + at.wh, all_, units_);
      for (int64_t s = time - 1; s >= 0; --s) {
        const int64_t t = d ? time - 1 - s : s, before = (d ? t + 1 : t) * n, after = (d ? t : t + 1) * n;
        Number16 *const to_x = sums + t * rows * all_, *const to_h = sums_h + t * rows * all_;
        bfloat16_kernels->rnn_step_back(mode_, {rows, units_, k.gates + t * rows * all_, k.cells + before,
                                        k.cells + after, k.inside + t * n, dy + t * rows * wide + d * units_,
                                        wide, s == time - 1 ? nullptr : back, dh, dc, to_x, to_h});
        if (s > 0 || call.write(2) != kNothing) wh.backward(rows, to_h, back);
      }
      for (int64_t i = 0; i < n && time > 0; ++i) dh[i] += back[i];
      if (wants_x) {
        float* const gradient = d ? of_direction.memory(steps * width) : dx;
        wx.backward(steps, sums, gradient);
        if (d) kernels->binary(kSum, dx, gradient, dx, steps * width, kStore);
      }
      if (!dparams) continue;
      wx.gradient(steps, sums, x, dparams + at.wx);
      wh.gradient(steps, sums_h, k.states + (d ? n : 0), dparams + at.wh);
      std::fill_n(dparams + at.bx, 2 * all_, 0.0f);
      for (int64_t i = 0; i < steps; ++i) {
        bfloat16_kernels->add_products(sums + i * all_, nullptr, dparams + at.bx, all_);
        if (mode_ == kGru) bfloat16_kernels->add_products(sums_h + i * all_, nullptr, dparams + at.bh, all_);
      }
      if (mode_ != kGru) std::copy_n(dparams + at.bx, all_, dparams + at.bh);
    }
    if (layer == 0) {
      if (wants_x) narrow(dx, call.out[0], call.write(0));
      break;
    }
    Number16* const below = scratch.numbers16(steps * width);
    bfloat16_kernels->narrow(dx, below, steps * width, kStore);
    dy = below;
  }
  if (dparams) narrow(dparams, call.out[1], call.write(1));
  narrow(dstates, call.out[2], call.write(2));
  if (mode_ == kLstm) narrow(dcells, call.out[3], call.write(3));
}

}  // namespace

std::unique_ptr<Rnn> Rnn::make(const NodeAttrs& attrs, int type16) {
  const auto has = [&](const char* key) { return word(attrs, key, "None") != "None"; };
  if (type16 != mshadow::kBfloat16 || !onednn::can_call_onednn() || has("projection_size") ||
      has("lstm_state_clip_min") || has("lstm_state_clip_max") || flag(attrs, "use_sequence_length", false))
    return nullptr;
  return std::make_unique<RnnLoop>(attrs);
}

}  // namespace gluon_amp
