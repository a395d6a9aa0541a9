// Fused updates of optimizers: weights and gradients of 16-bit types with float32 master weights and states, or all
// float32.
//
// Each rule has the operations of MXNet's float32 update on the (widened) gradient, in the same order, so that
// master weights and states have the same bits.
#include "vector.h"

namespace gluon_amp::ISA {
namespace {

// mean / (root(var) + epsilon) + decay in float64, as MXNet's LAMB computes it, rounded once.
inline V direction(V mean, V var, double epsilon, V decay) {
  return joined(low(mean) / (root(low(var)) + epsilon) + low(decay),
                high(mean) / (root(high(var)) + epsilon) + high(decay));
}

// ---- rules -----------------------------------------------------------------------
//
// A rule is created for one weight. Its call with elements w, their gradient g and their states s updates the
// states and returns the new w.

struct Clip {
  V most, least;
  bool on;
  explicit Clip(float bound) : most(splat(bound)), least(splat(-bound)), on(bound >= 0) {}
  V operator()(V v) const { return on ? smaller(most, larger(least, v)) : v; }
};

// The settings of a weight that rules read.
struct Factors {
  V rate, decay, scale, momentum, keep1, take1, keep2, take2, epsilon;
  Clip clip;
  Factors(const Update& u, const UpdateSettings& all)
      : rate(splat(u.lr)), decay(splat(u.wd)), scale(splat(all.rescale)), momentum(splat(all.momentum)),
        keep1(splat(all.beta1)), take1(splat(1 - all.beta1)), keep2(splat(all.beta2)), take2(splat(1 - all.beta2)),
        epsilon(splat(all.epsilon)), clip(all.clip) {}
};

template <int momenta> struct Sgd : Factors {
  static constexpr int states = momenta;
  V rate_of_decay, scaled_rate;
  Sgd(const Update& u, const UpdateSettings& all)
      : Factors(u, all), rate_of_decay(splat(u.lr * u.wd)), scaled_rate(splat(u.lr * all.rescale)) {}
  V operator()(V w, V g, V* s) const {
    const V push = clip.on ? rate * clip(scale * g) : scaled_rate * g;
    s[0] = momentum * (momenta ? s[0] : splat(0)) - rate_of_decay * w - push;
    return w + s[0];
  }
};

// NAG without momentum: MXNet's sgd_update, with a separate factor for weight decay.
struct Descent : Factors {
  static constexpr int states = 0;
  V keep, scaled_rate;
  Descent(const Update& u, const UpdateSettings& all)
      : Factors(u, all), keep(splat(1 - u.lr * u.wd)), scaled_rate(splat(u.lr * all.rescale)) {}
  V operator()(V w, V g, V*) const {
    return keep * w - (clip.on ? rate * clip(scale * g) : scaled_rate * g);
  }
};

struct Nag : Factors {
  static constexpr int states = 1;
  V ahead;
  Nag(const Update& u, const UpdateSettings& all) : Factors(u, all), ahead(splat(all.momentum + 1)) {}
  V operator()(V w, V g, V* s) const {
    const V kept = momentum * s[0], push = clip(scale * g);
    const V updated = w - kept + ahead * (kept - rate * (push + decay * w));
    s[0] = kept - rate * (push + decay * updated);  // MXNet decays the updated weight
    return updated;
  }
};

struct Adam : Factors {
  static constexpr int states = 2;
  using Factors::Factors;
  V operator()(V w, V g, V* s) const {
    g = clip(g * scale + w * decay);
    s[0] = keep1 * s[0] + take1 * g;
    s[1] = keep2 * s[1] + take2 * g * g;
    return w - rate * s[0] / (root(s[1]) + epsilon);
  }
};

struct AdamW : Factors {
  static constexpr int states = 2;
  using Factors::Factors;
  V operator()(V w, V g, V* s) const {
    g = clip(scale * g);
    const V square = g * g;
    s[0] = keep1 * (s[0] - g) + g;
    s[1] = keep2 * (s[1] - square) + square;
    return w - (rate * s[0] / (root(s[1]) + epsilon) + decay * w);
  }
};

struct RmsProp : Factors {
  static constexpr int states = 1;
  Clip clip_weights;
  RmsProp(const Update& u, const UpdateSettings& all) : Factors(u, all), clip_weights(all.clip_weights) {}
  V operator()(V w, V g, V* s) const {
    g = clip(scale * g + decay * w);
    s[0] = take1 * (g * g) + keep1 * s[0];
    return clip_weights(w - rate * (g / root(s[0] + epsilon)));
  }
};

struct CenteredRmsProp : RmsProp {
  static constexpr int states = 3;
  using RmsProp::RmsProp;
  V operator()(V w, V g, V* s) const {
    g = clip(scale * g + decay * w);
    s[0] = take1 * g * g + keep1 * s[0];
    s[1] = take1 * g + keep1 * s[1];
    s[2] = momentum * s[2] - rate * g / root(s[0] - s[1] * s[1] + epsilon);
    return clip_weights(w + s[2]);
  }
};

// ---- one pass ----------------------------------------------------------------------

// Some elements of a weight before and after an update, and of its gradient.
template <typename L> inline V before(const Update& u, int64_t i, L lanes) {
  const V master = load(u.master + i, lanes);
  return k16Bit && u.follows ? followed(master, load(u.weight, i, lanes)) : master;
}
template <typename L> inline void after(const Update& u, int64_t i, V v, L lanes) {
  store(u.master + i, v, lanes);
  if (k16Bit) store(numbers(u.weight) + i, v, lanes);
}

template <typename R> void update_weight(const Update& u, const UpdateSettings& settings) {
  const R rule(u, settings);
  vectors(u.n, [=](int64_t i, auto lanes) {
    V states[R::states + 1];
    for (int k = 0; k < R::states; ++k) states[k] = load(u.states[k] + i, lanes);
    const V updated = rule(before(u, i, lanes), load(u.gradient, i, lanes), states);
    for (int k = 0; k < R::states; ++k) store(u.states[k] + i, states[k], lanes);
    after(u, i, updated, lanes);
  });
}

// ---- LAMB: two passes ---------------------------------------------------------------
//
// The first updates the states, and computes the norms of the weight and of the update direction. The second
// updates the weight, with a rate in proportion to the norms. It recomputes the direction from the states, which
// saves memory.

struct Lamb : Factors {
  V mean_part, var_part;
  double wide_epsilon;
  bool corrects;
  Lamb(const Update& u, const UpdateSettings& all)
      : Factors(u, all), mean_part(splat(1 - powf(all.beta1, static_cast<float>(u.step)))),
        var_part(splat(1 - powf(all.beta2, static_cast<float>(u.step)))), wide_epsilon(all.epsilon),
        corrects(all.bias_correction) {}
  void move(V g, V* mean, V* var) const {
    g = clip(g * scale);
    *mean = keep1 * *mean + take1 * g;
    *var = keep2 * *var + take2 * g * g;
  }
  V where(V w, V mean, V var) const {
    if (corrects) mean = mean / mean_part, var = var / var_part;
    return direction(mean, var, wide_epsilon, decay * w);
  }
};

// MXNet sums squares sequentially in float32, which is limited by latency: two sums take the time of one.
void lamb_norms(const Update& u, const UpdateSettings& settings, float* norms) {
  const Lamb rule(u, settings);
  float weights = 0, directions = 0;
  for (int64_t start = 0; start < u.n; start += kChunk) {
    const int64_t here = least(kChunk, u.n - start);
    float squares[2][kChunk];
    each(0, here, [&](int64_t i, auto lanes) {
      const int64_t at = start + i;
      V mean = load(u.states[0] + at, lanes), var = load(u.states[1] + at, lanes);
      const V w = before(u, at, lanes);
      rule.move(load(u.gradient, at, lanes), &mean, &var);
      store(u.states[0] + at, mean, lanes);
      store(u.states[1] + at, var, lanes);
      const V to = rule.where(w, mean, var);
      store(squares[0] + i, w * w, lanes);
      store(squares[1] + i, to * to, lanes);
    });
    for (int64_t i = 0; i < here; ++i) {
      weights += squares[0][i];
      directions += squares[1][i];
    }
  }
  norms[0] = sqrtf(weights);
  norms[1] = sqrtf(directions);
}

void lamb_go(const Update& u, const UpdateSettings& settings, const float* norms) {
  const Lamb rule(u, settings);
  float norm = norms[0];
  if (settings.lower >= 0 && norm < settings.lower) norm = settings.lower;
  if (settings.upper >= 0 && norm > settings.upper) norm = settings.upper;
  const V rate = splat(u.lr * (norm == 0 || norms[1] == 0 ? 1 : norm / norms[1]));
  vectors(u.n, [=](int64_t i, auto lanes) {
    const V w = before(u, i, lanes);
    const V to = rule.where(w, load(u.states[0] + i, lanes), load(u.states[1] + i, lanes));
    after(u, i, w - rate * to, lanes);
  });
}

void lamb(const Update* updates, int count, const UpdateSettings& settings) {
  Scratch<float> norms(2 * count);
  float* const of = norms.data;
  int64_t all = 0;
  for (int i = 0; i < count; ++i) all += updates[i].n;
  auto work = [=, &settings](int i) { lamb_norms(updates[i], settings, of + 2 * i); };
#pragma omp parallel for schedule(dynamic) if (all >= kWorthThreads)
  for (int i = 0; i < count; ++i) run(work, i);
  for (int i = 0; i < count; ++i) lamb_go(updates[i], settings, of + 2 * i);
}

void update(Rule rule, const Update* updates, int count, const UpdateSettings& settings) {
  if (rule == kLamb) return lamb(updates, count, settings);
  const auto by_rule = rule == kDescent           ? update_weight<Descent>
                       : rule == kNag             ? update_weight<Nag>
                       : rule == kAdam            ? update_weight<Adam>
                       : rule == kAdamW           ? update_weight<AdamW>
                       : rule == kRmsProp         ? update_weight<RmsProp>
                       : rule == kCenteredRmsProp ? update_weight<CenteredRmsProp>
                       : settings.has_momentum    ? update_weight<Sgd<1>>
                                                  : update_weight<Sgd<0>>;
  for (int i = 0; i < count; ++i) by_rule(updates[i], settings);
}

}  // namespace

void add_updates(Kernels* table) noexcept { table->update = update; }

}  // namespace gluon_amp::ISA
