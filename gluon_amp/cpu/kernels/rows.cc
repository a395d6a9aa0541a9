// Layer norm and sums, computed in float32, each row by one thread.
#include "vector.h"

namespace gluon_amp::ISA {
namespace {

// Calls f(row) for all rows, over all threads if it is worth it.
template <typename F> void each_row(int64_t rows, int64_t width, F f) {
#pragma omp parallel for schedule(static) if (rows * width >= kWorthThreads)
  for (int64_t row = 0; row < rows; ++row) run(f, row);
}

// The totals of n sums over a row: f(i, lanes, turn, &sums) adds those of one vector. Pieces limit the
// accumulation of rounding errors of a wide row in float32.
template <int n> struct Totals {
  double of[n];
};
template <int n, typename F> inline Totals<n> row_sums(int64_t width, F f) {
  constexpr int64_t kPiece = 1024;
  Totals<n> totals = {};
  for (int64_t begin = 0; begin < width; begin += kPiece) {
    Sums<n> sums = {};
    const int64_t length = least(kPiece, width - begin);
    each_in_turn(begin, length, Part(length % W), [&](int64_t i, auto lanes, int turn) {
      f(i, lanes, turn, &sums);
    });
    for (int k = 0; k < n; ++k) totals.of[k] += sums.pair(0, k);
  }
  return totals;
}

// The sum of f(i, lanes) over a row; f must return 0 in lanes beyond the row.
template <typename F> inline double row_sum(int64_t width, F f) {
  return row_sums<1>(width, [&](int64_t i, auto lanes, int turn, Sums<1>* sums) {
    sums->add(turn, f(i, lanes));
  }).of[0];
}

// ---- layer norm ----------------------------------------------------------------

void layer_norm(const LayerNorm& p, const void* x, const float* gamma, const float* beta, void* y,
                Write write, float* mean, float* deviation) {
  if (p.width == 0) return;
  const double count = static_cast<double>(p.width);
  each_row(p.rows, p.width, [=](int64_t row) {
    const Number* from = numbers(x) + row * p.width;
    Number* to = numbers(y) + row * p.width;
    const bool add = write == kAdd;
    // Sums are around the mean of the row's first part, which is near the row's mean, so that float32 suffices
    // for any mean.
    const int64_t some = least(p.width, most(64, p.width / 8));
    const double near = row_sum(some, [=](int64_t i, auto lanes) {
      return load(from + i, lanes);
    }) / static_cast<double>(some);
    const V center = splat(static_cast<float>(near));
    const auto sums = row_sums<2>(p.width, [=](int64_t i, auto lanes, int turn, Sums<2>* to) {
      const V d = only(load(from + i, lanes) - center, lanes);
      to->add(turn, d);
      to->add_product(turn, 1, d, d);
    });
    const double move = sums.of[0] / count, variance = sums.of[1] / count - move * move;
    const float middle = static_cast<float>(static_cast<float>(near) + move);
    const float wide = static_cast<float>(std::sqrt((variance < 0 ? 0 : variance) + p.eps));
    if (mean) mean[row] = middle;
    if (deviation) deviation[row] = wide;
    if (write == kNothing) return;
    const V shift = splat(middle), inverse = splat(1 / wide);
    each(0, p.width, [=](int64_t i, auto lanes) {
      const V v = (load(from + i, lanes) - shift) * inverse;
      put(to, i, v * load(gamma + i, lanes) + load(beta + i, lanes), add, lanes);
    });
  });
}

// With n = (x - mean) / deviation and h = g * gamma:
//
//   dx = (h - average(h) - n * average(h * n)) / deviation
//   dgamma = the sum of g * n over rows, dbeta = that of g
//
// Each piece of rows has its own sums, which are added in the order of pieces.
void layer_norm_gradient(const LayerNorm& p, const void* g, const void* x, const float* gamma,
                         const float* mean, const float* deviation, void* dx, Write write_dx,
                         float* dgamma, Write write_dgamma, float* dbeta, Write write_dbeta) {
  const int64_t width = p.width;
  const bool sums = write_dgamma != kNothing || write_dbeta != kNothing;
  if (!sums && write_dx == kNothing) return;
  const int64_t rows = least(most(p.rows / 64, 16), 128);  // of a piece
  const int64_t pieces = parts_of(p.rows, rows);
  Scratch<float> memory(sums ? 2 * pieces * width : 0);
  float* const all = memory.data;
  auto work = [=](int64_t piece) {
    float *of_gamma = all + 2 * piece * width, *of_beta = of_gamma + width;
    if (sums) std::memset(of_gamma, 0, 2 * width * sizeof(float));
    const bool add = write_dx == kAdd;
    for (int64_t row = piece * rows; row < least((piece + 1) * rows, p.rows); ++row) {
      const Number *grow = numbers(g) + row * width, *xrow = numbers(x) + row * width;
      Number* to = numbers(dx) + row * width;
      const V shift = splat(mean[row]), inverse = splat(1 / deviation[row]);
      const auto totals = row_sums<2>(width, [=](int64_t i, auto lanes, int turn, Sums<2>* of) {
        const V d = load(grow + i, lanes), n = (load(xrow + i, lanes) - shift) * inverse;
        const V h = d * load(gamma + i, lanes);
        of->add(turn, h);
        of->add_product(turn, 1, h, n);
        if (!sums) return;
        store(of_gamma + i, load(of_gamma + i, lanes) + d * n, lanes);
        store(of_beta + i, load(of_beta + i, lanes) + d, lanes);
      });
      if (write_dx == kNothing) continue;
      const V h_mean = splat(static_cast<float>(totals.of[0] / width));
      const V hn_mean = splat(static_cast<float>(totals.of[1] / width));
      each(0, width, [=](int64_t i, auto lanes) {
        const V n = (load(xrow + i, lanes) - shift) * inverse;
        const V h = load(grow + i, lanes) * load(gamma + i, lanes);
        put(to, i, (h - h_mean - n * hn_mean) * inverse, add, lanes);
      });
    }
  };
  const bool threads = p.rows * width >= kWorthThreads;
#pragma omp parallel for schedule(static) if (threads)
  for (int64_t piece = 0; piece < pieces; ++piece) run(work, piece);
  if (!sums) return;
  auto add_up = [=](int64_t i) {
    double of_gamma = 0, of_beta = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      of_gamma += all[2 * piece * width + i];
      of_beta += all[2 * piece * width + width + i];
    }
    if (dgamma) put(dgamma + i, of_gamma, write_dgamma);
    if (dbeta) put(dbeta + i, of_beta, write_dbeta);
  };
#pragma omp parallel for schedule(static) if (threads)
  for (int64_t i = 0; i < width; ++i) run(add_up, i);
}

// ---- sums of products ------------------------------------------------------------

double dot(const void* g, const void* x, int64_t n) {
  return row_sum(n, [=](int64_t i, auto lanes) {
    const V v = load(g, i, lanes);
    return x == nullptr ? v : v * load(x, i, lanes);
  });
}

void add_products(const void* g, const void* x, float* sums, int64_t n) {
  each(0, n, [=](int64_t i, auto lanes) {
    const V v = load(g, i, lanes);
    store(sums + i, load(sums + i, lanes) + (x == nullptr ? v : v * load(x, i, lanes)), lanes);
  });
}

}  // namespace

void add_rows(Kernels* table) noexcept {
  table->layer_norm = layer_norm;
  table->layer_norm_gradient = layer_norm_gradient;
  table->dot = dot;
  table->add_products = add_products;
}

}  // namespace gluon_amp::ISA
