// cuDNN's recurrent layers. The forward pass keeps its results for the backward pass, by its reserve space.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "cpu/kernels/rnn_cell.h"
#include "libraries.h"

namespace {

using namespace gluon_amp;
using Floats = std::vector<float>;

// The functions of floats.
struct RnnFloats {
  using T = float;
  static float one() { return 1; }
  static float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
  static float tanh(float x) { return std::tanh(x); }
  static float relu(float x) { return x > 0 || x != x ? x : 0; }
  static float relu_gradient(float g, float y) { return y > 0 ? g : 0; }
};

// One direction of one layer.
struct Way {
  ll in, gates;                  // width of the input; gates * hidden
  ll w, r, p, bw, br;            // offsets of weights, of the projection and of biases in the parameters
  bool backward;                 // in time
  Floats input, mask;            // (T, N, in); the dropout mask, if any
  Floats h, c, gate, inner;      // (T + 1, N, out or hidden) from the first state on; (T, N, gates); GRU: r's new gate
  Floats unprojected;            // (T, N, hidden)
  Floats dgate, dinner, dout;    // of gates; of their recurrent part; of projected states
  std::vector<bool> clipped;     // (T, N, hidden): cells
};

struct Kept {
  RnnMode mode;
  ll steps, batch, width, hidden, out, ways;  // out: width of a state, projected or not
  bool projects;
  Clip clip;
  std::vector<int> lengths;                   // of sequences
  std::vector<std::vector<Way>> layers;

  bool runs(ll step, ll sequence) const { return step < lengths[sequence]; }
  // The time of a direction's step: backward starts at the last time of a sequence.
  ll time(const Way& one, ll step, ll sequence) const { return one.backward ? lengths[sequence] - 1 - step : step; }
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

Kept plan(D r, ll width) {
  Kept all{};
  all.mode = (RnnMode)r->mode;
  all.width = width;
  all.hidden = r->hidden;
  all.out = r->projection;
  all.projects = r->projection != r->hidden;
  all.ways = r->direction ? 2 : 1;
  all.clip = r->clip;
  const ll count = gates_of(all.mode);
  ll at = 0;
  for (int layer = 0; layer < r->layers; layer++) {
    all.layers.emplace_back();
    for (ll way = 0; way < all.ways; way++) {
      Way one{};
      one.in = layer ? all.out * all.ways : width;
      one.gates = count * all.hidden;
      one.backward = way;
      one.w = at;
      one.r = at + one.gates * one.in;
      one.p = one.r + one.gates * all.out;
      at = one.p + (all.projects ? all.hidden * all.out : 0);
      all.layers.back().push_back(one);
    }
  }
  for (auto& layer : all.layers)
    for (Way& one : layer) {  // biases follow all weights
      one.bw = at;
      one.br = at + one.gates;
      at += 2 * one.gates;
    }
  return all;
}

float clipped(const Clip& clip, float cell) {
  if (cell != cell) return clip.keeps_nan ? cell : (float)clip.low;
  return std::min(std::max(cell, (float)clip.low), (float)clip.high);
}

void forward(const Kept& all, Way* one, const Floats& w, const Array& rounding) {
  const ll n = all.batch, hidden = all.hidden, out = all.out, gates = one->gates;
  Floats x((size_t)all.steps * n * gates), r((size_t)n * gates);
  product(all.steps * n, gates, one->in, one->input.data(), transposed(&w[one->w], gates, one->in).data(), x.data(), Sums::kFloat);
  const Floats turned = transposed(&w[one->r], gates, out);
  const Floats projection = all.projects ? transposed(&w[one->p], out, hidden) : Floats();
  one->gate.resize(x.size());
  one->inner.resize((size_t)all.steps * n * hidden);
  one->unprojected.resize(one->inner.size());
  one->clipped.resize(one->inner.size());
  for (ll step = 0; step < all.steps; step++) {
    product(n, gates, out, &one->h[step * n * out], turned.data(), r.data(), Sums::kFloat);
    for (ll b = 0; b < n; b++) {
      if (!all.runs(step, b)) {
        std::copy_n(&one->c[(step * n + b) * hidden], hidden, &one->c[((step + 1) * n + b) * hidden]);
        continue;
      }
      for (ll j = 0; j < hidden; j++) {
        const ll row = all.time(*one, step, b) * n + b, s = (step * n + b) * hidden + j;
        float in[4], back[4];
        for (ll k = 0; k < gates / hidden; k++) {
          in[k] = x[row * gates + k * hidden + j] + w[one->bw + k * hidden + j];
          back[k] = r[b * gates + k * hidden + j] + w[one->br + k * hidden + j];
        }
        float* gate = &one->gate[(step * n + b) * gates + j];
        const auto limit = [&](float cell) {
          const float c = all.clip.on ? clipped(all.clip, cell) : cell;
          one->clipped[s] = c != cell && cell == cell;
          return c;
        };
        with_mode(all.mode, [&](auto mode) {
          const float before = all.mode == kLstm ? one->c[s] : all.mode == kGru ? one->h[s] : 0;
          const auto made = rnn_forward<decltype(mode)::value, RnnFloats>(in, back, before, limit);
          for (ll k = 0; k < gates / hidden; k++) gate[k * hidden] = made.gate[k];
          if (all.mode == kLstm) one->c[s + n * hidden] = made.after;
          one->inner[s] = made.inside;
          one->unprojected[s] = made.state;
        });
      }
    }
    const float* made = &one->unprojected[step * n * hidden];
    float* next = &one->h[(step + 1) * n * out];
    if (all.projects) product(n, out, hidden, made, projection.data(), next, Sums::kFloat);
    else std::copy_n(made, n * out, next);
    for (ll i = 0; i < n * out; i++)
      next[i] = all.runs(step, i / out) ? (float)rounding.rounded(next[i]) : next[i - n * out];
  }
}

// Rows of steps, in the order of times; zero where a sequence has ended.
Floats by_time(const Kept& all, const Way& one, const Floats& steps, ll width) {
  Floats made(steps.size());
  for (ll step = 0; step < all.steps; step++)
    for (ll b = 0; b < all.batch; b++)
      if (all.runs(step, b))
        std::copy_n(&steps[(step * all.batch + b) * width], width, &made[(all.time(one, step, b) * all.batch + b) * width]);
  return made;
}

// dh, dc: gradients of the last states, replaced by those of the first; returns the input's gradient.
Floats backward(const Kept& all, Way* one, const Floats& w, const Floats& dy, ll offset, float* dh, float* dc) {
  const ll n = all.batch, hidden = all.hidden, out = all.out, gates = one->gates;
  one->dgate.assign(one->gate.size(), 0);
  one->dinner.assign(one->gate.size(), 0);
  one->dout.assign((size_t)all.steps * n * out, 0);
  Floats recurrent((size_t)n * out), made((size_t)n * hidden);
  for (ll step = all.steps - 1; step >= 0; step--) {
    float* dout = &one->dout[step * n * out];
    for (ll i = 0; i < n * out; i++) {
      const ll b = i / out;
      if (!all.runs(step, b)) continue;
      dout[i] = dh[i] + dy[(all.time(*one, step, b) * n + b) * out * all.ways + offset + i % out];
      dh[i] = 0;
    }
    if (all.projects) product(n, hidden, out, dout, &w[one->p], made.data(), Sums::kFloat);
    else std::copy_n(dout, n * out, made.data());
    for (ll b = 0; b < n; b++)
      for (ll j = 0; all.runs(step, b) && j < hidden; j++) {
        const ll s = (step * n + b) * hidden + j, g = (step * n + b) * gates + j;
        const float* gate = &one->gate[g];
        float *to = &one->dgate[g], *inner = &one->dinner[g];
        RnnResult<RnnFloats> of{{}, one->inner[s], one->c[s + n * hidden], 0};
        for (ll k = 0; k < gates / hidden; k++) of.gate[k] = gate[k * hidden];
        float& cell = dc[b * hidden + j];
        with_mode(all.mode, [&](auto mode) {
          const float before = all.mode == kLstm ? one->c[s] : all.mode == kGru ? one->h[s] : 0;
          auto its = rnn_backward<decltype(mode)::value, RnnFloats>(of, before, made[b * hidden + j], cell);
          if (one->clipped[s]) its.x[0] = its.x[1] = its.x[2] = its.h[0] = its.h[1] = its.h[2] = its.cell = 0;
          for (ll k = 0; k < gates / hidden; k++) {
            to[k * hidden] = its.x[k];
            inner[k * hidden] = its.h[k];
          }
          cell = its.cell;
          if (all.mode == kGru) dh[b * out + j] = its.state;
        });
      }
    product(n, out, gates, &one->dinner[step * n * gates], &w[one->r], recurrent.data(), Sums::kFloat);
    for (ll i = 0; i < n * out; i++) dh[i] += recurrent[i];
  }
  Floats dx((size_t)all.steps * n * one->in);
  product(all.steps * n, one->in, gates, by_time(all, *one, one->dgate, gates).data(), &w[one->w], dx.data(), Sums::kFloat);
  for (size_t i = 0; i < one->mask.size(); i++) dx[i] *= one->mask[i];
  return dx;
}

ll parameters(const Kept& all) { return all.layers.back().back().br + all.layers.back().back().gates; }

// At a place of a tensor of states (layers * ways, N, width).
struct States {
  ll size;  // of a layer's direction
  Floats values;
  float* at(ll place) { return &values[place * size]; }
};

}  // namespace

ll rnn_parameters(D r, ll width) { return parameters(plan(r, width)); }

RnnPart rnn_part(D r, int layer, int gate) {
  const Kept all = plan(r, r->input);
  const Way& one = all.layers[layer / all.ways][layer % all.ways];
  const ll hidden = all.hidden, count = one.gates / hidden;
  if (gate < count) return {one.w + gate * hidden * one.in, hidden, one.in, one.bw + gate * hidden};
  if (gate == 2 * count && all.projects) return {one.p, all.out, hidden, -1};
  if (gate < 2 * count) return {one.r + (gate - count) * hidden * all.out, hidden, all.out, one.br + (gate - count) * hidden};
  return {-1, 0, 0, -1};
}

void rnn_forward(D r, D xd, V x, V h, V c, V w, V y, V hy, V cy, V reserve) {
  static auto& random = *new std::mt19937(number("RECORDING_GPU_SEED", 1));
  auto all = std::make_shared<Kept>(plan(r, xd->dims[2]));
  all->steps = xd->dims[0];
  all->batch = xd->dims[1];
  all->lengths = xd->window;
  const ll n = all->batch, out = all->out, places = r->layers * all->ways;
  const Floats weights = read(w, xd->type, parameters(*all));
  States states{n * out, read(h, xd->type, places * n * out)}, cells{n * all->hidden, read(c, xd->type, places * n * all->hidden)};
  Floats data = read(x, xd->type, all->steps * n * all->width);
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
    Floats made((size_t)all->steps * n * out * all->ways);
    for (ll way = 0; way < all->ways; way++) {
      const ll place = layer * all->ways + way;
      Way& one = all->layers[layer][way];
      one.input = data;
      one.mask = mask;
      one.h.resize((all->steps + 1) * states.size);
      one.c.resize((all->steps + 1) * cells.size);
      std::copy_n(states.at(place), states.size, one.h.data());
      std::copy_n(cells.at(place), cells.size, one.c.data());
      forward(*all, &one, weights, {of_cuda(xd->type), nullptr});
      for (ll step = 0; step < all->steps; step++)
        for (ll b = 0; b < n; b++)
          if (all->runs(step, b))
            std::copy_n(&one.h[(step + 1) * states.size + b * out], out,
                        &made[((all->time(one, step, b) * n + b) * all->ways + way) * out]);
      std::copy_n(one.h.end() - states.size, states.size, states.at(place));
      std::copy_n(one.c.end() - cells.size, cells.size, cells.at(place));
    }
    data.swap(made);
  }
  write(y, xd->type, data);
  write(hy, xd->type, states.values);
  write(cy, xd->type, cells.values);
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
  const ll n = all->batch, places = r->layers * all->ways, type = yd->type;
  const Floats weights = read(w, type, parameters(*all));
  Floats gradient = read(dy, type, all->steps * n * all->out * all->ways);
  States states{n * all->out, read(dhy, type, places * n * all->out)}, cells{n * all->hidden, read(dcy, type, places * n * all->hidden)};
  for (int layer = r->layers - 1; layer >= 0; layer--) {
    Floats below;
    for (ll way = 0; way < all->ways; way++) {
      const ll place = layer * all->ways + way;
      const Floats one = backward(*all, &all->layers[layer][way], weights, gradient, way * all->out, states.at(place),
                                  cells.at(place));
      below.resize(one.size());
      for (size_t i = 0; i < one.size(); i++) below[i] += one[i];
    }
    gradient.swap(below);
  }
  write(dx, type, gradient);
  write(dh, type, states.values);
  write(dc, type, cells.values);
}

void rnn_weights(D xd, V dw, V reserve) {  // adds to the weights' gradients
  auto all = kept_for(reserve);
  Floats made(parameters(*all));
  for (auto& layer : all->layers)
    for (Way& one : layer) {
      const ll rows = all->steps * all->batch;
      // the gradient of a matrix: (rows, height) transposed, times (rows, width)
      const auto matrix = [&](ll at, const Floats& left, ll height, const float* right, ll width) {
        product(height, width, rows, transposed(left.data(), rows, height).data(), right, &made[at], Sums::kFloat);
      };
      matrix(one.w, by_time(*all, one, one.dgate, one.gates), one.gates, one.input.data(), one.in);
      matrix(one.r, one.dinner, one.gates, one.h.data(), all->out);
      if (all->projects) matrix(one.p, one.dout, all->out, one.unprojected.data(), all->hidden);
      for (ll i = 0; i < rows; i++)
        for (ll k = 0; k < one.gates; k++) {
          made[one.bw + k] += one.dgate[i * one.gates + k];
          made[one.br + k] += one.dinner[i * one.gates + k];
        }
    }
  write(dw, xd->type, made, true);
}
