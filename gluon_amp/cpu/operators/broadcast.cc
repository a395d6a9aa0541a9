// Broadcasting arithmetic, as in the product of a squeeze-excitation block, and its gradients, which are sums.
// MXNet's code computes the index of each number from scratch.
#include "operators/table.h"

namespace gluon_amp {
namespace {

// Adjacent axes of an array, merged: their size, and the strides in the two arrays that are read; 0 for a
// broadcast number.
struct Run {
  int64_t size, steps[2];
};

// The axes of `whole`, from the last to the first, for two arrays that broadcast to it.
std::vector<Run> runs_of(const TBlob& x, const TBlob& y, const TBlob& whole) {
  std::vector<Run> runs;
  const TBlob* const arrays[] = {&x, &y};
  int64_t steps[2] = {1, 1};
  for (int i = 1; i <= whole.ndim(); ++i) {
    Run run{whole.shape_[whole.ndim() - i], {0, 0}};
    if (run.size == 1) continue;
    for (int k : {0, 1}) {
      const mxnet::TShape& shape = arrays[k]->shape_;
      if (i > shape.ndim() || shape[shape.ndim() - i] == 1) continue;
      run.steps[k] = steps[k];
      steps[k] *= run.size;
    }
    if (!runs.empty() && !runs.back().steps[0] == !run.steps[0] &&
        !runs.back().steps[1] == !run.steps[1])
      runs.back().size *= run.size;
    else
      runs.push_back(run);
  }
  if (runs.empty()) runs.push_back({1, {1, 1}});
  return runs;
}

// The offset of number `i` in array k.
int64_t place(const std::vector<Run>& runs, int64_t i, int k) {
  int64_t at = 0;
  for (const Run& run : runs) {
    at += i % run.size * run.steps[k];
    i /= run.size;
  }
  return at;
}

// Whether rows are long enough for one kernel call each.
bool pays(const std::vector<Run>& runs) { return runs.size() == 1 || runs.front().size >= 8; }

// One row; x or y may be a single number.
void map_row(const Kernels* of, Binary f, bool one_x, const void* x, const void* y, void* to, int64_t n,
             Write write) {
  float a;
  of->widen(one_x ? x : y, &a, 1);
  const Unary with_number = f == kProduct             ? kTimes
                            : f == kQuotient          ? kOverOf
                            : f == kDifference && one_x ? kFromOf
                                                        : kPlus;
  if (f == kDifference && !one_x) a = -a;
  of->unary(with_number, one_x ? y : x, to, n, a, 0, write);
}

bool map_rows(Binary f, const TBlob& x, const TBlob& y, const TBlob& to, Write write) {
  if (size(to) == 0 || write == kNothing) return true;
  std::vector<Run> runs = runs_of(x, y, to);
  if (!pays(runs)) return false;
  const Run row = runs.front();
  runs.erase(runs.begin());
  const int64_t rows = size(to) / row.size;
  const bool one_x = row.steps[0] == 0, one_y = row.steps[1] == 0;
  if (f == kQuotient && one_x) return false;
  for_all(rows, size(to), [&](int64_t i) {
    const void *from_x = at(x, place(runs, i, 0)), *from_y = at(y, place(runs, i, 1));
    void* const row_to = at(to, i * row.size);
    if (one_x || one_y) map_row(kernels_of(to), f, one_x, from_x, from_y, row_to, row.size, write);
    else kernels_of(to)->binary(f, from_x, from_y, row_to, row.size, write);
  });
  return true;
}

template <Binary f>
bool broadcast(const Call& call) {
  const TBlob &x = call.in[0], &y = call.in[1], &to = call.out[0];
  // products with one number, a loss scale, must have the bits of MXNet's code
  const bool scales = f == kProduct && size(y) == 1 && is_float(x) && is_float(y) && is_float(to);
  return (scales || has_kernels(call)) && map_rows(f, x, y, to, call.write(0));
}

// The sums of g, or of g * x if there is an x of the same size, over the axes that `to` lacks.
class Sums {
 public:
  Sums(const TBlob& g, const TBlob* x, const TBlob& to)
      : of_(kernels_of(g)), g_(numbers16(g)), x_(x ? numbers16(*x) : nullptr), n_(size(to)) {
    const std::vector<Run> runs = runs_of(to, g, g);
    row_ = runs.front();
    for (size_t i = 1; i < runs.size(); ++i)
      (runs[i].steps[0] ? kept_ : gone_).push_back(runs[i]);
    for (const Run& run : gone_) repeats_ *= run.size;
  }

  void write(float sign, const TBlob& to, Write write) const {
    Scratch scratch;
    float* const sums = scratch.memory(n_);
    const bool along = row_.steps[0] == 0;  // one sum for a row, or else one for each column
    const int64_t tasks = along ? n_ : n_ / row_.size * strips();
    for_all(tasks, repeats_ * n_ * (along ? row_.size : 1),
            [&](int64_t i) { along ? sum_rows(i, sums) : sum_columns(i, sums); });
    if (sign < 0)
      for (int64_t i = 0; i < n_; ++i) sums[i] = 0 - sums[i];
    narrow(sums, to, write);
  }

 private:
  static constexpr int64_t kStrip = 1024;  // columns
  static constexpr int64_t kRows = 256;    // whose sum is in float32

  int64_t strips() const { return (row_.size + kStrip - 1) / kStrip; }

  void sum_rows(int64_t i, float* sums) const {
    const int64_t first = place(kept_, i, 1);
    double sum = 0;
    for (int64_t k = 0; k < repeats_; ++k) {
      const int64_t at = first + place(gone_, k, 1);
      sum += of_->dot(g_ + at, x_ ? x_ + at : nullptr, row_.size);
    }
    sums[place(kept_, i, 0)] = static_cast<float>(sum);
  }

  void sum_columns(int64_t i, float* sums) const {
    const int64_t column = i % strips() * kStrip, width = std::min(kStrip, row_.size - column);
    const int64_t first = place(kept_, i / strips(), 1) + column;
    float* const to = sums + place(kept_, i / strips(), 0) + column;
    double total[kStrip] = {};
    float part[kStrip] = {};
    for (int64_t k = 0; k < repeats_; ++k) {
      const int64_t at = first + place(gone_, k, 1);
      of_->add_products(g_ + at, x_ ? x_ + at : nullptr, part, width);
      if ((k + 1) % kRows != 0 && k + 1 < repeats_) continue;
      for (int64_t j = 0; j < width; ++j) {
        total[j] += part[j];
        part[j] = 0;
      }
    }
    for (int64_t j = 0; j < width; ++j) to[j] = static_cast<float>(total[j]);
  }

  const Kernels* const of_;
  const Number16 *g_, *x_;
  const int64_t n_;
  Run row_;
  std::vector<Run> kept_, gone_;
  int64_t repeats_ = 1;
};

// The gradients of x and y. Sums are first and x's gradient is last, because it may share memory with the
// head gradient.
template <Binary f>
bool gradient(const Call& call) {  // gradient; of a product x and y, too
  const TBlob& g = call.in[0];
  if (!all_16bit(call) || size(g) == 0) return false;
  const auto whole = [&](int i) { return size(call.out[i]) == size(g); };
  if ((!whole(0) && !whole(1)) || !pays(runs_of(call.out[whole(0) ? 1 : 0], g, g))) return false;
  const auto sign = [](int i) { return f == kDifference && i == 1 ? -1.0f : 1.0f; };
  const auto factor = [&](int i) { return f == kProduct ? &call.in[2 - i] : nullptr; };
  for (int i : {1, 0})
    if (!whole(i) && call.write(i) != kNothing)
      Sums(g, factor(i), call.out[i]).write(sign(i), call.out[i], call.write(i));
  for (int i : {1, 0}) {
    if (!whole(i)) continue;
    const TBlob& to = call.out[i];
    if (factor(i)) map_rows(kProduct, g, *factor(i), to, call.write(i));
    else kernels_of(g)->unary(kTimes, g.dptr_, to.dptr_, size(g), sign(i), 0, call.write(i));
  }
  return true;
}

}  // namespace

const AddRows rows{{
    {"broadcast_add", {broadcast<kSum>, 2, kFloats}},
    {"_backward_broadcast_add", {gradient<kSum>, 1}},
    {"broadcast_sub", {broadcast<kDifference>, 2, kFloats}},
    {"_backward_broadcast_sub", {gradient<kDifference>, 1}},
    {"broadcast_mul", {broadcast<kProduct>, 2, kFloats}},
    {"_backward_broadcast_mul", {gradient<kProduct>, 1}},
    {"broadcast_div", {broadcast<kQuotient>, 2, kFloats}},
    {"_npi_add", {broadcast<kSum>, 2, kFloats}}, {"_backward_npi_broadcast_add", {gradient<kSum>, 1}},
    {"_npi_subtract", {broadcast<kDifference>, 2, kFloats}},
    {"_backward_npi_broadcast_sub", {gradient<kDifference>, 1}},
    {"_npi_multiply", {broadcast<kProduct>, 2, kFloats}},
    {"_backward_npi_broadcast_mul", {gradient<kProduct>, 1}},
    {"_npi_true_divide", {broadcast<kQuotient>, 2, kFloats}}}};

}  // namespace gluon_amp
