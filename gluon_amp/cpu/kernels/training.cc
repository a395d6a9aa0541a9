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
// In float64, so that a sum is finite if all numbers are; in 16 sums for any width of V. The square of a float
// is exact in float64, so all instruction sets have the same bits.

#if defined(__AVX512F__)
struct Squares {
  __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  void add(const Number* p) {
    const V v = load(p, Whole());
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
    sums[0] = _mm512_fmadd_pd(low, low, sums[0]);
    sums[1] = _mm512_fmadd_pd(high, high, sums[1]);
  }
  void put(double* to) const {
    _mm512_storeu_pd(to, sums[0]);
    _mm512_storeu_pd(to + 8, sums[1]);
  }
};
#elif defined(__AVX2__) && defined(__F16C__)
struct Squares {
  __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                     _mm256_setzero_pd()};
  void add(const Number* p) {
    for (int k = 0; k < 2; ++k) {
      const V v = load(p + k * W, Whole());
      const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
      const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
      sums[2 * k] = _mm256_fmadd_pd(low, low, sums[2 * k]);
      sums[2 * k + 1] = _mm256_fmadd_pd(high, high, sums[2 * k + 1]);
    }
  }
  void put(double* to) const {
    for (int k = 0; k < 4; ++k) _mm256_storeu_pd(to + 4 * k, sums[k]);
  }
};
#else
struct Squares {
  double sums[16] = {};
  void add(const Number* p) {
    for (int k = 0; k < 16; ++k) {
      const double v = load(p + k, Whole());
      sums[k] += v * v;
    }
  }
  void put(double* to) const { std::memcpy(to, sums, sizeof sums); }
};
#endif

double squares_of(const Number* p, int64_t n) {
  Squares squares;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) squares.add(p + i);
  double sums[16];
  squares.put(sums);
  for (; i < n; ++i) {
    Number one[W] = {p[i]};
    float lanes[W];
    store(lanes, load(one, Whole()), Whole());
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
