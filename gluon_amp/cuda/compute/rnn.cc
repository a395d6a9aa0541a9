// cuDNN's recurrent layers. The forward pass keeps its results for the backward pass, by its reserve space.
#include <algorithm>
#include <memory>
#include <random>

#include "libraries.h"

namespace {

using Floats = std::vector<float>;
enum { kRelu, kTanh, kLstm, kGru };

float sigmoid(float a) { return 1 / (1 + std::exp(-a)); }

// One direction of one layer.
struct Way {
  ll in, gates;                  // width of the input; gates * hidden
  ll w, r, bw, br;               // offsets of weights and biases in the parameters
  bool backward;                 // in time
  Floats input, mask;            // (T, N, in); the dropout mask, if any
  Floats h, c, gate, inner;      // (T + 1, N, hidden) from the first state on; (T, N, gates); GRU: r's new gate
  Floats dgate, dinner;
};

struct Kept {
  int mode;
  ll steps, batch, width, hidden, ways;
  std::vector<std::vector<Way>> layers;
};

std::map<const void*, std::shared_ptr<Kept>>& kept() {
  static auto& all = *new std::map<const void*, std::shared_ptr<Kept>>();
  return all;
}

Floats read(V data, int type, ll n) {
  const Array from{of_cuda(type), (void*)data};
  Floats made(n);
  for (ll i = 0; data && i < n; i++) made[i] = from[i];
  return made;
}
void write(V data, int type, const Floats& from, bool add = false) {
  const Array to{of_cuda(type), (void*)data};
  for (size_t i = 0; data && i < from.size(); i++) to.set(i, from[i] + (add ? to[i] : 0));
}

std::shared_ptr<Kept> plan(D r, D xd) {
  if (r->projection) unknown("recurrent layers with projections");
  auto all = std::make_shared<Kept>();
  *all = {r->mode, xd->dims[0], xd->dims[1], xd->dims[2], r->hidden, r->direction ? 2 : 1, {}};
  const ll count = r->mode == kLstm ? 4 : r->mode == kGru ? 3 : 1, hidden = r->hidden;
  ll at = 0;
  for (int layer = 0; layer < r->layers; layer++) {
    all->layers.emplace_back();
    for (ll way = 0; way < all->ways; way++) {
      Way one{};
      one.in = layer ? hidden * all->ways : all->width;
      one.gates = count * hidden;
      one.backward = way;
      one.w = at;
      one.r = at + one.gates * one.in;
      at = one.r + one.gates * hidden;
      all->layers.back().push_back(one);
    }
  }
  for (auto& layer : all->layers)
    for (Way& one : layer) {  // biases follow all weights
      one.bw = at;
      one.br = at + one.gates;
      at += 2 * one.gates;
    }
  return all;
}

// The time of a direction's step: backward starts at the last time.
ll time_of(const Kept& all, const Way& one, ll step) { return one.backward ? all.steps - 1 - step : step; }

void forward(const Kept& all, Way* one, const Floats& w, const Array& rounding) {
  const ll n = all.batch, hidden = all.hidden, gates = one->gates;
  Floats x((size_t)all.steps * n * gates), r((size_t)n * gates);
  product(all.steps * n, gates, one->in, one->input.data(), transposed(&w[one->w], gates, one->in).data(), x.data(), Sums::kFloat);
  const Floats turned = transposed(&w[one->r], gates, hidden);
  one->gate.resize(x.size());
  one->inner.resize((size_t)all.steps * n * hidden);
  for (ll step = 0; step < all.steps; step++) {
    product(n, gates, hidden, &one->h[step * n * hidden], turned.data(), r.data(), Sums::kFloat);
    for (ll b = 0; b < n; b++)
      for (ll j = 0; j < hidden; j++) {
        const ll row = time_of(all, *one, step) * n + b, s = (step * n + b) * hidden + j;
        const auto in = [&](ll k) { return x[row * gates + k * hidden + j] + w[one->bw + k * hidden + j]; };
        const auto back = [&](ll k) { return r[b * gates + k * hidden + j] + w[one->br + k * hidden + j]; };
        float* gate = &one->gate[(step * n + b) * gates + j];
        float* next = &one->h[s + n * hidden];
        if (all.mode == kLstm) {
          for (ll k = 0; k < 4; k++)
            gate[k * hidden] = k == 2 ? std::tanh(in(k) + back(k)) : sigmoid(in(k) + back(k));
          const float c = gate[hidden] * one->c[s] + gate[0] * gate[2 * hidden];
          one->c[s + n * hidden] = c;
          *next = gate[3 * hidden] * std::tanh(c);
        } else if (all.mode == kGru) {
          gate[0] = sigmoid(in(0) + back(0));
          gate[hidden] = sigmoid(in(1) + back(1));
          one->inner[s] = back(2);
          gate[2 * hidden] = std::tanh(in(2) + gate[0] * back(2));
          *next = (1 - gate[hidden]) * gate[2 * hidden] + gate[hidden] * one->h[s];
        } else {
          const float sum = in(0) + back(0);
          *next = gate[0] = all.mode == kTanh ? std::tanh(sum) : std::max(sum, 0.0f);
        }
        *next = (float)rounding.rounded(*next);
      }
  }
}

// dh, dc: gradients of the last states, replaced by those of the first; returns the input's gradient.
Floats backward(const Kept& all, Way* one, const Floats& w, const Floats& dy, ll offset, float* dh, float* dc) {
  const ll n = all.batch, hidden = all.hidden, gates = one->gates, out = hidden * all.ways;
  one->dgate.assign(one->gate.size(), 0);
  one->dinner.assign(one->gate.size(), 0);
  Floats recurrent((size_t)n * hidden);
  for (ll step = all.steps - 1; step >= 0; step--) {
    for (ll b = 0; b < n; b++)
      for (ll j = 0; j < hidden; j++) {
        const ll s = (step * n + b) * hidden + j, g = (step * n + b) * gates + j;
        const float* gate = &one->gate[g];
        float *to = &one->dgate[g], *inner = &one->dinner[g], &state = dh[b * hidden + j];
        const float d = state + dy[(time_of(all, *one, step) * n + b) * out + offset + j];
        state = 0;
        if (all.mode == kLstm) {
          const float t = std::tanh(one->c[s + n * hidden]);
          float& cell = dc[b * hidden + j];
          cell += d * gate[3 * hidden] * (1 - t * t);
          to[0] = cell * gate[2 * hidden] * gate[0] * (1 - gate[0]);
          to[hidden] = cell * one->c[s] * gate[hidden] * (1 - gate[hidden]);
          to[2 * hidden] = cell * gate[0] * (1 - gate[2 * hidden] * gate[2 * hidden]);
          to[3 * hidden] = d * t * gate[3 * hidden] * (1 - gate[3 * hidden]);
          cell *= gate[hidden];
        } else if (all.mode == kGru) {
          const float z = gate[hidden], fresh = gate[2 * hidden];
          to[hidden] = d * (one->h[s] - fresh) * z * (1 - z);
          to[2 * hidden] = d * (1 - z) * (1 - fresh * fresh);
          to[0] = to[2 * hidden] * one->inner[s] * gate[0] * (1 - gate[0]);
          state = d * z;
        } else {
          to[0] = d * (all.mode == kTanh ? 1 - gate[0] * gate[0] : gate[0] > 0 ? 1.0f : 0.0f);
        }
        for (ll k = 0; k < gates; k += hidden) inner[k] = to[k] * (all.mode == kGru && k == 2 * hidden ? gate[0] : 1);
      }
    product(n, hidden, gates, &one->dinner[step * n * gates], &w[one->r], recurrent.data(), Sums::kFloat);
    for (ll i = 0; i < n * hidden; i++) dh[i] += recurrent[i];
  }
  Floats by_time(one->dgate.size()), dx((size_t)all.steps * n * one->in);
  for (ll step = 0; step < all.steps; step++)
    std::copy_n(&one->dgate[step * n * gates], n * gates, &by_time[time_of(all, *one, step) * n * gates]);
  product(all.steps * n, one->in, gates, by_time.data(), &w[one->w], dx.data(), Sums::kFloat);
  for (size_t i = 0; i < one->mask.size(); i++) dx[i] *= one->mask[i];
  return dx;
}

ll parameters(const Kept& all) { return all.layers.back().back().br + all.layers.back().back().gates; }

}  // namespace

void rnn_forward(D r, D xd, V x, V h, V c, V w, V y, V hy, V cy, V reserve) {
  static auto& random = *new std::mt19937(number("RECORDING_GPU_SEED", 1));
  auto all = plan(r, xd);
  const ll n = all->batch, hidden = all->hidden, state = n * hidden;
  const Floats weights = read(w, xd->type, parameters(*all));
  const Floats first = read(h, xd->type, r->layers * all->ways * state), cells = read(c, xd->type, first.size());
  Floats data = read(x, xd->type, all->steps * n * all->width), last_h, last_c;
  for (size_t layer = 0; layer < all->layers.size(); layer++) {
    Floats mask;
    if (layer && r->dropout > 0 && reserve) {
      std::bernoulli_distribution stays(1 - r->dropout);
      std::lock_guard<std::mutex> lock(g_mutex);
      for (float& v : data) {
        mask.push_back(stays(random) ? 1 / (1 - r->dropout) : 0);
        v *= mask.back();
      }
    }
    Floats out((size_t)all->steps * state * all->ways);
    for (ll way = 0; way < all->ways; way++) {
      Way& one = all->layers[layer][way];
      one.input = data;
      one.mask = mask;
      one.h.resize((all->steps + 1) * state);
      one.c.resize(one.h.size());
      std::copy_n(&first[(layer * all->ways + way) * state], state, one.h.data());
      std::copy_n(&cells[(layer * all->ways + way) * state], state, one.c.data());
      forward(*all, &one, weights, {of_cuda(xd->type), nullptr});
      for (ll step = 0; step < all->steps; step++)
        for (ll b = 0; b < n; b++)
          std::copy_n(&one.h[(step + 1) * state + b * hidden], hidden,
                      &out[((time_of(*all, one, step) * n + b) * all->ways + way) * hidden]);
      last_h.insert(last_h.end(), one.h.end() - state, one.h.end());
      last_c.insert(last_c.end(), one.c.end() - state, one.c.end());
    }
    data.swap(out);
  }
  write(y, xd->type, data);
  write(hy, xd->type, last_h);
  write(cy, xd->type, last_c);
  if (!reserve) return;
  std::lock_guard<std::mutex> lock(g_mutex);
  kept()[reserve] = all;
}

static std::shared_ptr<Kept> kept_for(V reserve) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto found = kept().find(reserve);
  if (found == kept().end()) unknown("reserve space");
  return found->second;
}

void rnn_data(D r, D yd, V dy, V dhy, V dcy, V w, V dx, V dh, V dc, V reserve) {
  auto all = kept_for(reserve);
  const ll state = all->batch * all->hidden, type = yd->type;
  const Floats weights = read(w, type, parameters(*all));
  Floats gradient = read(dy, type, all->steps * state * all->ways);
  Floats states = read(dhy, type, r->layers * all->ways * state), cells = read(dcy, type, states.size());
  for (int layer = r->layers - 1; layer >= 0; layer--) {
    Floats below;
    for (ll way = 0; way < all->ways; way++) {
      const ll place = (layer * all->ways + way) * state;
      const Floats one = backward(*all, &all->layers[layer][way], weights, gradient, way * all->hidden, &states[place],
                                  &cells[place]);
      below.resize(one.size());
      for (size_t i = 0; i < one.size(); i++) below[i] += one[i];
    }
    gradient.swap(below);
  }
  write(dx, type, gradient);
  write(dh, type, states);
  write(dc, type, cells);
}

void rnn_weights(D xd, V dw, V reserve) {  // adds to the weights' gradients
  auto all = kept_for(reserve);
  Floats made(parameters(*all));
  for (auto& layer : all->layers)
    for (Way& one : layer) {
      const ll n = all->batch, hidden = all->hidden, rows = all->steps * n;
      Floats by_time(one.dgate.size());
      for (ll step = 0; step < all->steps; step++)
        std::copy_n(&one.dgate[step * n * one.gates], n * one.gates, &by_time[time_of(*all, one, step) * n * one.gates]);
      product(one.gates, one.in, rows, transposed(by_time.data(), rows, one.gates).data(), one.input.data(), &made[one.w], Sums::kFloat);
      product(one.gates, hidden, rows, transposed(one.dinner.data(), rows, one.gates).data(), one.h.data(), &made[one.r], Sums::kFloat);
      for (ll i = 0; i < rows; i++)
        for (ll k = 0; k < one.gates; k++) {
          made[one.bw + k] += one.dgate[i * one.gates + k];
          made[one.br + k] += one.dinner[i * one.gates + k];
        }
    }
  write(dw, xd->type, made, true);
}
