// Batch norm, forward and backward, with an optional fused relu.
//
// This file computes vectors of elements; channels.h divides the tensor into vectors, pieces and threads.
#include "channels.h"
#include "vector.h"

namespace gluon_amp::ISA {
namespace {

// ---- forward -------------------------------------------------------------------

// The value before rounding and relu. Backward recomputes it with the same bits.
inline V affine(V x, const Wide& of) { return (x - of.mean) * of.scale + of.beta; }

// The sums of x and of its square in parts of a channel, each around its own center near the part's mean, so
// that float32 suffices for any mean.
struct Moments {
  double center = 0, count = 0, sum = 0, squares = 0;  // of all parts, around the center of the first

  void add(double n, double part_center, double part_sum, double part_squares) {
    if (count == 0) center = part_center;
    const double move = part_center - center;
    sum += part_sum + n * move;
    squares += part_squares + move * (2 * part_sum + n * move);
    count += n;
  }
  double mean() const { return center + sum / count; }
  double variance() const {  // the biased one
    const double v = (squares - sum * sum / count) / count;
    return v < 0 ? 0 : v;
  }
};

struct Forward {
  using Total = Moments;
  static constexpr bool kBegins = false;

  const BatchNorm& norm;
  const BatchNormForward& to;
  const Number* x;
  Number* y;
  bool add;
  V below;

  // A relu before rounding equals a relu after it, except for the sign of a 0 rounded from a small negative
  // number, for which `below` is the threshold.
  Forward(const BatchNorm& p, const BatchNormForward& f)
      : norm(p), to(f), x(numbers(f.x)), y(numbers(f.y)),
        add(f.write == kAdd), below(splat(-kTiny)) {}

  bool sums() const { return norm.batch_statistics; }
  bool maps() const { return to.write != kNothing; }

  // The center of a piece is the mean of its first part, at least an eighth of the piece. So it is within a few
  // standard deviations of the piece's mean.
  template <typename Walk> void sum_part(const Walk& walk, typename Walk::Out* out) const {
    const Number* const from = x;
    Sums<1, Walk::kTurns> first = {};
    const Walk some = walk.some();
    some([&](int64_t at, auto lanes, int turn) { first.add(turn, load(from + at, lanes)); });
    V center[Walk::kTurns];
    some.centers(first, center);
    Sums<2, Walk::kTurns> sums = {};
    walk([&](int64_t at, auto lanes, int turn) {
      const V d = only(load(from + at, lanes) - center[turn], lanes);
      sums.add(turn, d);
      sums.add_product(turn, 1, d, d);
    });
    walk.put(out, center, sums);
  }

  void begin(int64_t, Coefficients*) const {}  // the sums read none

  void finish(int64_t c, const Moments& m, Coefficients* out) const {
    float mean = to.moving_mean[c], var = to.moving_var[c];
    if (norm.batch_statistics) {
      mean = static_cast<float>(m.mean());
      var = static_cast<float>(m.variance());
      const float keep = norm.momentum;
      to.moving_mean[c] = keep * to.moving_mean[c] + (1 - keep) * mean;
      to.moving_var[c] = keep * to.moving_var[c] + (1 - keep) * var;
    }
    const float inverse = 1 / std::sqrt(var + norm.eps);
    if (to.mean) to.mean[c] = mean;
    if (to.inverse_deviation) to.inverse_deviation[c] = inverse;
    out->mean = mean;
    out->scale = norm.fix_gamma ? inverse : to.gamma[c] * inverse;
    out->beta = to.beta[c];
  }

  template <typename L> void map(int64_t at, L lanes, const Wide& of) const {
    V v = affine(load(x + at, lanes), of);
    if (norm.relu) v = if_less(v, below, splat(0), v);
    put(y, at, v, add, lanes);
  }
};

// ---- backward ------------------------------------------------------------------

// Conversion of floats to integers of the same order, and back.
inline float float_at(int64_t place) {
  const int32_t i = static_cast<int32_t>(place < 0 ? place ^ 0x7fffffff : place);
  float f;
  std::memcpy(&f, &i, 4);
  return f;
}
constexpr int64_t kInfinityPlace = 0x7f800000;

// The last float that is rounded to 0 or to a number below it.
float last_to_zero() {
  int64_t yes = -kInfinityPlace, no = kInfinityPlace;
  while (no - yes > 1) {
    const int64_t middle = (yes + no) >> 1;
    float lanes[W];
    store(lanes, rounded(splat(float_at(middle))), Whole());
    (lanes[0] <= 0 ? yes : no) = middle;
  }
  return float_at(yes);
}

struct TwoSums {
  double g = 0, gx = 0;  // of the gradient; of its product with x - mean
  void add(double, double, double part_g, double part_gx) {
    g += part_g;
    gx += part_gx;
  }
};

template <bool relu> struct Backward {
  using Total = TwoSums;
  static constexpr bool kBegins = true;

  const BatchNorm& norm;
  const BatchNormBackward& to;
  const Number *g, *x;
  Number* dx;
  bool add;
  V low;  // the relu passes a gradient if the value before rounding is above

  Backward(const BatchNorm& p, const BatchNormBackward& b)
      : norm(p), to(b), g(numbers(b.gradient)), x(numbers(b.x)),
        dx(b.write_dx == kNothing ? nullptr : numbers(b.dx)), add(b.write_dx == kAdd),
        low(splat(relu ? last_to_zero() : 0)) {}

  bool sums() const {
    return (dx && norm.batch_statistics) || to.write_dgamma != kNothing ||
           to.write_dbeta != kNothing;
  }
  bool maps() const { return dx != nullptr; }

  // the gradient before the relu
  template <typename L> V gradient(int64_t at, L lanes, V value, const Wide& of) const {
    const V v = load(g + at, lanes);
    return relu ? above(v, affine(value, of), low) : v;
  }

  template <typename Walk> void sum_part(const Walk& walk, typename Walk::Out* out) const {
    const Backward copy = *this;  // without aliasing
    Sums<2, Walk::kTurns> sums = {};
    walk([&](int64_t at, auto lanes, int turn) {
      const auto& of = walk.wide(turn);
      const V value = load(copy.x + at, lanes), d = copy.gradient(at, lanes, value, of);
      sums.add(turn, d);
      sums.add_product(turn, 1, d, value - of.mean);
    });
    V center[Walk::kTurns];
    for (V& zero : center) zero = splat(0);
    walk.put(out, center, sums);
  }

  void begin(int64_t c, Coefficients* out) const {
    const float inverse = to.inverse_deviation[c];
    *out = {to.mean[c], norm.fix_gamma ? inverse : to.gamma[c] * inverse, to.beta[c], 0, 0};
  }

  void finish(int64_t c, const TwoSums& total, Coefficients* out) const {
    const double inverse = to.inverse_deviation[c], gx = inverse * total.gx;
    if (to.dgamma) put(to.dgamma + c, norm.fix_gamma ? 0 : gx, to.write_dgamma);
    if (to.dbeta) put(to.dbeta + c, total.g, to.write_dbeta);
    if (!norm.batch_statistics) return;  // mean and deviation are constants
    const double count = static_cast<double>(norm.batch) * norm.plane;
    out->mean_g = static_cast<float>(total.g / count);
    out->slope = static_cast<float>(inverse * gx / count);
  }

  // Reads all inputs of an element before it writes, because dx may share memory with g.
  template <typename L> void map(int64_t at, L lanes, const Wide& of) const {
    const V value = load(x + at, lanes), d = gradient(at, lanes, value, of);
    put(dx, at, of.scale * (d - of.mean_g - (value - of.mean) * of.slope), add, lanes);
  }
};

// ---- functions of kernels.h ------------------------------------------------------

void batch_norm(const BatchNorm& p, const BatchNormForward& f) {
  if (p.batch * p.plane > 0) over_channels(p, Forward(p, f));
}

void batch_norm_gradient(const BatchNorm& p, const BatchNormBackward& b) {
  if (p.batch * p.plane == 0) {
    for (int64_t c = 0; c < p.channels; ++c) {
      if (b.dgamma) put(b.dgamma + c, 0, b.write_dgamma);
      if (b.dbeta) put(b.dbeta + c, 0, b.write_dbeta);
    }
    return;
  }
  if (p.relu) over_channels(p, Backward<true>(p, b));
  else over_channels(p, Backward<false>(p, b));
}

}  // namespace

void add_batch_norm(Kernels* table) noexcept {
  table->batch_norm = batch_norm;
  table->batch_norm_gradient = batch_norm_gradient;
}

}  // namespace gluon_amp::ISA
