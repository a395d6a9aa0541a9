// Synchronization of master weights, and sums of squares for the overflow check and clipping.
#include "vector.h"

namespace gluon_amp::ISA {
namespace {

void follow(float* master, const void* weight, int64_t n) {
  vectors(n, [=](int64_t i, auto lanes) {
    store(master + i, followed(load(master + i, lanes), load(weight, i, lanes)), lanes);
  });
}

// ---- sums of squares -----------------------------------------------------------
//
// In float64, so that a sum is finite if all numbers are; in 16 sums for any width of V (with as many zeros where V is
// one float). The square of a float is exact in float64, so all instruction sets have the same bits.
double squares_of(const Number* p, int64_t n) {
  constexpr int kVectors = 16 / W;
  Doubles parts[2 * kVectors] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int k = 0; k < kVectors; ++k) {
      const V v = load(p + i + k * W, Whole());
      parts[2 * k] += low(v) * low(v);
      parts[2 * k + 1] += high(v) * high(v);
    }
  double sums[2 * kVectors * (sizeof(Doubles) / sizeof(double))];
  std::memcpy(sums, parts, sizeof parts);
  for (; i < n; ++i) {
    const Number first[W] = {p[i]};
    float lanes[W];
    store(lanes, load(first, Whole()), Whole());
    sums[0] += double(lanes[0]) * lanes[0];
  }
  double sum = 0;
  for (double lane : sums) sum += lane;
  return sum;
}

// Threads sum chunks, and the chunks' sums are added in order, so that the result does not depend on the number
// of threads.
double sum_squares(const Number* p, int64_t n) {
  if (n <= kChunk) return squares_of(p, n);
  constexpr int64_t kAtATime = 1024;  // chunks
  double sum = 0;
  for (int64_t start = 0; start < n; start += kAtATime * kChunk) {
    double sums[kAtATime];
    const int64_t here = least(n - start, kAtATime * kChunk), count = parts_of(here, kChunk);
    auto work = [=](int64_t k, double* to) {
      *to = squares_of(p + start + k * kChunk, least(kChunk, here - k * kChunk));
    };
#pragma omp parallel for schedule(static) if (n >= kWorthThreads)
    for (int64_t k = 0; k < count; ++k) run(work, k, sums + k);
    for (int64_t k = 0; k < count; ++k) sum += sums[k];
  }
  return sum;
}

double squares_of_array(const Numbers& array) {
  return sum_squares(numbers(array.data), array.n);
}

// Large arrays one after the other, each with all threads; then small arrays, each in one thread.
void squares(const Numbers* arrays, int count, double* sums) {
  int64_t in_small = 0;
  for (int i = 0; i < count; ++i) {
    if (arrays[i].n >= kWorthThreads) sums[i] = squares_of_array(arrays[i]);
    else in_small += arrays[i].n;
  }
  auto work = [=](int i) {
    if (arrays[i].n < kWorthThreads) sums[i] = squares_of_array(arrays[i]);
  };
#pragma omp parallel for schedule(dynamic, 8) if (in_small >= kWorthThreads)
  for (int i = 0; i < count; ++i) run(work, i);
}

}  // namespace

void add_training(Kernels* table) noexcept {
  table->follow = follow;
  table->squares = squares;
}

}  // namespace gluon_amp::ISA
