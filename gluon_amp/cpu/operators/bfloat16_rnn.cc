// RNN, LSTM and GRU of bfloat16 arrays, forward and backward.
//
// Products read bfloat16: data, weights, the state before each step, and the gradients of the gates' sums.
// Their results, the gates, an LSTM's cells and a GRU's carried state are float32, and so are gradients until
// they are written. Products over all steps run before or after the loop over time.
//
// States and cells of a direction are slots in the order of time, one more than steps: forward in time, step t
// reads slot t and writes slot t + 1; backward in time, it reads slot t + 1 and writes slot t.
#include <algorithm>

#include "onednn/onednn.h"
#include "operators/rnn.h"

namespace gluon_amp {
namespace {

Half* lease_halves(Lease* lease, int64_t n) { return reinterpret_cast<Half*>(lease->memory((n + 1) / 2)); }

// The float32 products of a weight, (outputs, inputs), for one call: by oneDNN, or by MXNet on widened numbers.
class Weight {
 public:
  Weight(const OpContext& context, const Half* numbers, int64_t outputs, int64_t inputs)
      : context_(context), numbers_(numbers), outputs_(outputs), inputs_(inputs) {}

  void forward(int64_t rows, const Half* x, float* y) {  // y = x * w^T
    if (onednn_rows(DensePass::kForward, rows, outputs_, inputs_, x, numbers_, y, &inside_)) return;
    Lease lease;
    float_product(context_, rows, outputs_, inputs_, {widened(&lease, x, rows * inputs_), false},
                  {wide(), true}, y);
  }
  void backward(int64_t rows, const Half* dy, float* dx) {  // dx = dy * w
    if (onednn_rows(DensePass::kData, rows, outputs_, inputs_, dy, numbers_, dx, &inside_)) return;
    Lease lease;
    float_product(context_, rows, inputs_, outputs_, {widened(&lease, dy, rows * outputs_), false},
                  {wide(), false}, dx);
  }
  void gradient(int64_t rows, const Half* dy, const Half* x, float* dw) {  // dw = dy^T * x
    Product::Inside read;
    if (onednn_rows(DensePass::kWeight, rows, outputs_, inputs_, dy, x, dw, &read)) return;
    Lease lease;
    float_product(context_, outputs_, inputs_, rows, {widened(&lease, dy, rows * outputs_), true},
                  {widened(&lease, x, rows * inputs_), false}, dw);
  }

 private:
  static const float* widened(Lease* lease, const Half* from, int64_t n) {
    float* const made = lease->memory(n);
    bfloat16_kernels->widen(from, made, n);
    return made;
  }
  const float* wide() {
    if (!wide_) wide_ = widened(&lease_, numbers_, outputs_ * inputs_);
    return wide_;
  }

  const OpContext& context_;
  const Half* const numbers_;
  const int64_t outputs_, inputs_;
  Product::Inside inside_;
  Lease lease_;
  const float* wide_ = nullptr;
};

struct Kept {  // data of one direction of a layer for its backward pass
  float *gates, *cells, *inside;
  Half* states;
};

}  // namespace

struct Bfloat16Rnn::Layers : RnnShape {
  explicit Layers(const NodeAttrs& attrs)
      : RnnShape(attrs), drops(layers > 1 && number(attrs, "p", 0) > 0) {}

  const bool drops;
  std::unique_ptr<Lease> lease;      // of the data for the backward pass
  std::vector<Kept> kept;            // for each direction of each layer
  std::vector<const Half*> inputs;   // of each layer but the first

  bool has_cells() const { return gates > 1; }
  void forward(const Call& call);
  void backward(const Call& call);

 private:
  static void give(const Half* made, const TBlob& to, int64_t first, int64_t n, Write write) {
    if (write == kStore) bfloat16_kernels->copy(made, halves(to) + first, n * sizeof(Half));
    const void* const added = made;
    if (write == kAdd) bfloat16_kernels->sum(&added, 1, halves(to) + first, n, kAdd);
  }
  static void give(const float* made, const TBlob& to, int64_t first, int64_t n, Write write) {
    if (write != kNothing) bfloat16_kernels->narrow(made, halves(to) + first, n, write);
  }
};

void Bfloat16Rnn::Layers::forward(const Call& call) {
  const TBlob& data = call.in[0];
  const Half* const params = halves(call.in[1]);
  const bool trains = call.context.is_train;
  const int64_t time = data.shape_[0], rows = data.shape_[1], all = gates * units, n = rows * units;
  const int64_t wide = directions * units;
  Lease brief;
  lease.reset(trains ? new Lease : nullptr);
  kept.clear();
  inputs.clear();
  Lease& keeps = trains ? *lease : brief;
  const int64_t slots = trains ? time + 1 : 1;
  std::vector<const Half*> last_states;
  std::vector<const float*> last_cells;
  const Half* x = halves(data);
  for (int64_t layer = 0; layer < layers; ++layer) {
    if (layer > 0) inputs.push_back(x);
    Half* const y = lease_halves(layer + 1 < layers ? &keeps : &brief, time * rows * wide);
    for (int64_t d = 0; d < directions; ++d) {
      const int64_t which = layer * directions + d;
      const Places at = places(layer, d, data.shape_[2]);
      Lease own;
      Kept k{(trains ? keeps : own).memory(time * rows * all),
             has_cells() ? keeps.memory(slots * n) : nullptr,
             mode == kGru ? (trains ? keeps : own).memory(trains ? time * n : n) : nullptr,
             lease_halves(&keeps, slots * n)};
      float *const biases = own.memory(2 * all), *const hidden = own.memory(rows * all);
      bfloat16_kernels->widen(params + at.bx, biases, 2 * all);
      const float* const inside_bias = biases + all + (gates - 1) * units;
      for (int64_t i = 0; i < (mode == kGru ? all - units : all); ++i) biases[i] += biases[all + i];
      const auto slot = [&](int64_t i) { return trains ? i * n : 0; };
      const int64_t first = slot(d ? time : 0), last = slot(d ? 0 : time);
      bfloat16_kernels->copy(halves(call.in[2]) + which * n, k.states + first, n * sizeof(Half));
      if (has_cells())
        bfloat16_kernels->widen(halves(call.in[mode == kLstm ? 3 : 2]) + which * n, k.cells + first, n);
      Weight(call.context, params + at.wx, all, at.inputs).forward(time * rows, x, k.gates);
      Weight wh(call.context, params + at.wh, all, units);
      for (int64_t s = 0; s < time; ++s) {
        const int64_t t = d ? time - 1 - s : s, before = slot(d ? t + 1 : t), after = slot(d ? t : t + 1);
        wh.forward(rows, k.states + before, hidden);
        bfloat16_kernels->rnn_step(mode, {rows, units, k.gates + t * rows * all, hidden, biases, inside_bias,
                                          k.cells + before, k.cells + after,
                                          k.inside + (trains ? t * n : 0), k.states + after,
                                          y + t * rows * wide + d * units, wide});
      }
      last_states.push_back(k.states + last);
      last_cells.push_back(k.cells + last);
      kept.push_back(k);
    }
    x = y;
  }
  give(x, call.out[0], 0, time * rows * wide, call.write(0));
  for (size_t which = 0; which < kept.size(); ++which) {
    if (call.out.size() > 1) give(last_states[which], call.out[1], which * n, n, call.write(1));
    if (call.out.size() > 2) give(last_cells[which], call.out[2], which * n, n, call.write(2));
  }
}

// Reads data, parameters, state, output, its gradient; [state's output, its gradient]; for an LSTM the cell,
// [its output, its gradient].
void Bfloat16Rnn::Layers::backward(const Call& call) {
  const TBlob& data = call.in[0];
  const Half* const params = halves(call.in[1]);
  const bool with_states = call.in.size() > (mode == kLstm ? 6 : 5);
  const int64_t time = data.shape_[0], rows = data.shape_[1], all = gates * units, n = rows * units;
  const int64_t steps = time * rows, wide = directions * units, of_states = layers * directions * n;
  Lease lease;
  const auto state_gradient = [&](bool given, size_t input) {
    float* const made = lease.memory(of_states);
    if (given) bfloat16_kernels->widen(halves(call.in[input]), made, of_states);
    else std::fill_n(made, of_states, 0.0f);
    return made;
  };
  float* const dstates = state_gradient(with_states, 6);
  float* const dcells = mode == kLstm ? state_gradient(with_states, 9) : nullptr;
  // Outputs may share memory with inputs, so they are written after all reads.
  const bool wants_params = call.write(1) != kNothing;
  Half* const dparams = wants_params ? lease_halves(&lease, size(call.in[1])) : nullptr;
  const Half* dy = halves(call.in[4]);
  for (int64_t layer = layers - 1; layer >= 0; --layer) {
    const Half* const x = layer > 0 ? inputs[layer - 1] : halves(data);
    const bool wants_x = layer > 0 || call.write(0) != kNothing;
    const int64_t width = places(layer, 0, data.shape_[2]).inputs;
    Lease of_layer;
    float *const dx = wants_x ? of_layer.memory(steps * width) : nullptr;
    for (int64_t d = 0; d < directions; ++d) {
      const int64_t which = layer * directions + d;
      const Places at = places(layer, d, data.shape_[2]);
      const Kept& k = kept[which];
      Lease own;
      Half* const sums = lease_halves(&own, steps * all);
      Half* const sums_h = mode == kGru ? lease_halves(&own, steps * all) : sums;
      float *const back = own.memory(n), *const dh = dstates + which * n;
      Weight wx(call.context, params + at.wx, all, width), wh(call.context, params + at.wh, all, units);
      for (int64_t s = time - 1; s >= 0; --s) {
        const int64_t t = d ? time - 1 - s : s, before = (d ? t + 1 : t) * n, after = (d ? t : t + 1) * n;
        bfloat16_kernels->rnn_step_back(mode, {rows, units, k.gates + t * rows * all, k.cells + before,
                                               k.cells + after, k.inside + t * n,
                                               dy + t * rows * wide + d * units, wide,
                                               s == time - 1 ? nullptr : back, dh, dcells + which * n,
                                               sums + t * rows * all, sums_h + t * rows * all});
        if (s > 0 || call.write(2) != kNothing) wh.backward(rows, sums_h + t * rows * all, back);
      }
      for (int64_t i = 0; i < n; ++i) dh[i] += back[i];
      if (wants_x) {
        float* const made = d ? own.memory(steps * width) : dx;
        wx.backward(steps, sums, made);
        if (d) kernels->binary(kSum, dx, made, dx, steps * width, kStore);
      }
      if (!wants_params) continue;
      Lease of_weights;
      float* const dw = of_weights.memory(std::max({all * width, all * units, all}));
      wx.gradient(steps, sums, x, dw);
      bfloat16_kernels->narrow(dw, dparams + at.wx, all * width, kStore);
      wh.gradient(steps, sums_h, k.states + (d ? n : 0), dw);
      bfloat16_kernels->narrow(dw, dparams + at.wh, all * units, kStore);
      for (Half* const of : {sums, sums_h}) {
        std::fill_n(dw, all, 0.0f);
        for (int64_t i = 0; i < steps; ++i) bfloat16_kernels->add_products(of + i * all, nullptr, dw, all);
        bfloat16_kernels->narrow(dw, dparams + (of == sums ? at.bx : at.bh), all, kStore);
        if (sums == sums_h) bfloat16_kernels->narrow(dw, dparams + at.bh, all, kStore);
      }
    }
    if (!wants_x) continue;
    Half* const rounded = lease_halves(&lease, steps * width);
    bfloat16_kernels->narrow(dx, rounded, steps * width, kStore);
    dy = rounded;
  }
  give(dy, call.out[0], 0, size(data), call.write(0));
  if (wants_params) give(dparams, call.out[1], 0, size(call.in[1]), call.write(1));
  give(dstates, call.out[2], 0, of_states, call.write(2));
  if (mode == kLstm) give(dcells, call.out[3], 0, of_states, call.write(3));
}

bool Bfloat16Rnn::runs(const NodeAttrs& attrs, const Settings& settings, int half) {
  const auto given = [&](const char* key) { return word(attrs, key, "None") != "None"; };
  return half == mshadow::kBfloat16 && !settings.rounds() && !RnnLoop::runs(settings) &&
         !given("projection_size") && !given("lstm_state_clip_min") && !given("lstm_state_clip_max") &&
         !flag(attrs, "use_sequence_length", false);
}

Bfloat16Rnn::Bfloat16Rnn(const NodeAttrs& attrs) : layers_(new Layers(attrs)) {}
Bfloat16Rnn::~Bfloat16Rnn() = default;

bool Bfloat16Rnn::serves(const Call& call) const {
  return all_half(call) && size(call.in[0]) > 0 && !generic_only && !watching() &&
         !(layers_->drops && call.context.is_train);
}

void Bfloat16Rnn::run(const Call& call, bool forward) {
  const std::lock_guard<std::mutex> mine(turn());
  if (forward) layers_->forward(call);
  else layers_->backward(call);
}

}  // namespace gluon_amp
