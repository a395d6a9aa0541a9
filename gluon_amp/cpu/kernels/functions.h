// exp, sigmoid, tanh and the normal distribution on vectors of floats.
//
// They use only +, -, * and / in a fixed order, without fused multiply-add, so that all instruction sets have the
// same bits. The errors are a few ulp of float32, so that the result rounded to 16 bits is nearly always correctly
// rounded. NaN stays NaN.
#pragma once
#include "vector.h"

namespace gluon_amp::ISA {
namespace {

// The polynomial with these coefficients, the highest power first, at x. Even and odd powers have separate sums
// for instruction-level parallelism.
template <int n> inline V polynomial(const float (&coefficients)[n], V x) {
  const V square = x * x;
  V sum = splat(coefficients[0]), other = splat(coefficients[1]);
  for (int i = 2; i < n; i += 2) sum = sum * square + splat(coefficients[i]);
  for (int i = 3; i < n; i += 2) other = other * square + splat(coefficients[i]);
  return n % 2 ? sum + other * x : sum * x + other;
}

// exp(x): 0 below -87.3 (where float32 has only subnormals), infinity above 88.37.
// With n = round(x / ln 2) and r = x - n * ln 2, it is 2^n * exp(r). ln 2 has two parts, of which n times the
// first is exact.
inline V exp_of(V x) {
  static const float kExp[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                               4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  const V shift = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer, in the low bits
  const V bounded = smaller(splat(88.8f), larger(splat(-87.3f), x));
  const V shifted = bounded * splat(1.44269504f) + shift;
  const V n = shifted - shift;
  const V r = (bounded - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  const V power = float_of((bits_of(shifted) + 127u) << 23);  // 2^n, from its bits
  const V result = (polynomial(kExp, r) * (r * r) + r + splat(1)) * power;
  return if_less(x, splat(-87.3f), splat(0), result);
}

inline V sigmoid(V x) { return splat(1) / (splat(1) + exp_of(-x)); }

// tanh(x): a polynomial near 0, else 1 - 2 / (exp(2 * |x|) + 1), with the sign of x
inline V tanh_of(V x) {
  static const float kTanh[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f,
                                1.33314422036e-1f, -3.33332819422e-1f};
  const V a = magnitude(x), square = a * a;
  const V near = a + a * square * polynomial(kTanh, square);
  const V far = splat(1) - splat(2) / (splat(1) + exp_of(a + a));
  const V result = if_less(a, splat(0.625f), near, far);
  return float_of(bits_of(result) | (bits_of(x) & 0x80000000u));
}

// The standard normal distribution at x: its cumulative probability and its density.
struct Normal {
  V below, density;
};

// With t = |x|, the tail probability is exp(-t * t / 2) * R(t). R is smooth, and is approximated by a polynomial
// in (t - 3) / (t + 3), fitted for 0 <= t <= 13.5. If x is a 16-bit number, t * t is exact.
inline Normal normal(V x) {
  static const float kBeyond[] = {5.4134573e-05f,  1.1603009e-04f, -3.398816e-04f, -9.841713e-04f,
                                  2.9046861e-03f,  6.132179e-03f,  -4.621331e-02f, 1.2322502e-01f,
                                  -2.0640261e-01f, 1.2151395e-01f};
  const V t = smaller(splat(14), magnitude(x));  // from 13.3 on exp returns 0
  const V e = exp_of(t * t * splat(-0.5f));
  const V beyond = e * polynomial(kBeyond, (t - splat(3)) / (t + splat(3)));
  return {if_less(x, splat(0), beyond, splat(1) - beyond), e * splat(0.39894228f)};
}

}  // namespace
}  // namespace gluon_amp::ISA
