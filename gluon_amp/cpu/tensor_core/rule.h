// How a GPU's Tensor Cores sum, on single numbers (docs/tensor_cores.md).
//
// One instruction adds `block` products to a number c:
//   - a product is exact; its exponent is the sum of its factors' exponents, where that of a subnormal factor is
//     the format's smallest. Zeros have none;
//   - products and c are truncated toward zero to multiples of 2^(largest exponent - fraction);
//   - their sum is exact, and is truncated toward zero to float32, or rounded to float16. A zero is +0.
// A row of a times a column of b is a chain of instructions: the result of each is the c of the next.
// Infinities and NaNs behave as in any sum; a NaN is NVIDIA's, 0x7fffffff.
//
// kernels.cc computes the same for float16 products with float32 sums, in vectors.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace gluon_amp {

// The parameters for one format of factors and sums (gpus.py).
struct TensorCore {
  int block, fraction;
  int64_t split = 0;       // the most products of a chain; the sums of chains are added. 0: one chain
  int result = 23;         // the fraction bits of a float32 result
  bool halves = false;     // whether it sums even and odd products apart, and c last
  int smallest = -14;      // the exponent of the factors' smallest normal number
  bool half_sums = false;  // whether c and results are float16
};

namespace tensor_core {

inline int exponent_of(double x, int smallest) { return x == 0 ? -400 : std::max(std::ilogb(x), smallest); }

inline float rounded(const TensorCore& gpu, double x) {
  if (x == 0 || !std::isfinite(x)) return static_cast<float>(x) + 0.0f;
  const int smallest = gpu.half_sums ? -24 : -149;
  const double step = std::ldexp(1.0, std::max(std::ilogb(x) - (gpu.half_sums ? 10 : gpu.result), smallest));
  const double made = (gpu.half_sums ? std::nearbyint(x / step) : std::trunc(x / step)) * step;
  if (gpu.half_sums && std::fabs(made) > 65504) return std::copysign(INFINITY, static_cast<float>(x));
  return static_cast<float>(made) + (gpu.half_sums ? -0.0f : 0.0f);  // rounding keeps a sign
}

// The sum of c and n products of two strided arrays.
inline float aligned_sum(const TensorCore& gpu, int64_t n, const float* a, int64_t a_step, const float* b,
                         int64_t b_step, float c) {
  int largest = exponent_of(c, gpu.half_sums ? -14 : -126);
  double sum = c;
  for (int64_t i = 0; i < n; ++i) {
    const float x = a[i * a_step], y = b[i * b_step];
    largest = std::max(largest, exponent_of(x, gpu.smallest) + exponent_of(y, gpu.smallest));
    sum += static_cast<double>(x) * y;
  }
  if (!std::isfinite(sum)) return static_cast<float>(sum);
  const double unit = std::ldexp(1.0, largest - gpu.fraction);
  double total = std::trunc(c / unit);
  for (int64_t i = 0; i < n; ++i) total += std::trunc(static_cast<double>(a[i * a_step]) * b[i * b_step] / unit);
  return rounded(gpu, total * unit);
}

inline float instruction(const TensorCore& gpu, int64_t n, const float* a, int64_t a_step, const float* b,
                         int64_t b_step, float c) {
  if (!gpu.halves) return aligned_sum(gpu, n, a, a_step, b, b_step, c);
  const float even = aligned_sum(gpu, (n + 1) / 2, a, 2 * a_step, b, 2 * b_step, 0);
  return aligned_sum(gpu, n / 2, a + a_step, 2 * a_step, b + b_step, 2 * b_step, even) + c;
}

inline float chain(const TensorCore& gpu, int64_t depth, const float* a, int64_t a_step, const float* b,
                   int64_t b_step, float c) {
  const int64_t split = gpu.split > 0 ? gpu.split : std::max<int64_t>(depth, 1);
  float total = 0;
  for (int64_t first = 0; first == 0 || first < depth; first += split) {
    const int64_t last = std::min(first + split, depth);
    float sum = first ? 0 : c;
    for (int64_t k = first; k < last; k += gpu.block)
      sum = instruction(gpu, std::min<int64_t>(gpu.block, last - k), a + k * a_step, a_step, b + k * b_step,
                        b_step, sum);
    total = first == 0 ? sum : gpu.half_sums ? rounded(gpu, total + sum) : total + sum;
  }
  const uint32_t nan = 0x7fffffff;
  if (total != total) std::memcpy(&total, &nan, sizeof total);
  return total;
}

}  // namespace tensor_core
}  // namespace gluon_amp
