// float16 arithmetic for the CPU graphs that lowering.py writes.
//
// A float16 tensor inside such a graph is a float32 array whose values all lie
// on the float16 grid. Each operator here rounds what it computes to that grid
// once, ties to even, and rounds the gradients that it passes on the same way.
// The operators:
//
//   _gluon_amp_widen       float16 array -> grid          (gradient: narrow)
//   _gluon_amp_narrow      float32 array -> float16 array (gradient: widen)
//   _gluon_amp_round       act(round(x))
//   _gluon_amp_add         act(round(round(a) + round(b)))
//   _gluon_amp_batch_norm  act(round(norm(round(x)) [+ residual]))
//   _gluon_amp_follow      float32 masters take over what was written into float16 weights
//   _gluon_amp_sgd         the optimizer's update of float16 weights with float32 masters
//   _gluon_amp_squares     the sum of squares of each array, float16 or float32
//
// The grid is float16's; with grid="bfloat16" bfloat16's; with grid="float32" nothing is
// rounded, and a graph must give MXNet's own float32 results, as tests check. act is "relu", "clip"
// (between lo and hi), "gelu", or none. MXNet hands operators of a library the plain
// layout and reorders oneDNN's blocked arrays on both sides, so what costs time and
// memory is the number of passes, not the arithmetic in them: an activation is made
// in the pass before it, and batch norm takes in the addition behind it.
//
// The file is compiled once for each instruction set (setup.py), and Python
// loads the best one that the processor has. V is that set's vector of floats.

#include <locale.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <unordered_map>
#include <vector>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "mxnet/lib_api.h"

using mxnet::ext::MXReturnValue;
using mxnet::ext::MXTensor;
using mxnet::ext::OpResource;
using mxnet::ext::kFloat16;
using mxnet::ext::kFloat32;
using mxnet::ext::kFloat64;
using mxnet::ext::MX_FAIL;
using mxnet::ext::MX_SUCCESS;

using Attrs = std::unordered_map<std::string, std::string>;
using Tensors = std::vector<MXTensor>;
using Half = uint16_t;
using Shapes = std::vector<std::vector<unsigned int>>;

namespace {

// ---- vectors ---------------------------------------------------------------

#if defined(__AVX512F__)

using V = __m512;
constexpr int64_t W = 16;
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline V load(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline __m256i halves(V v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline void store(Half* p, V v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves(v)); }
inline V half_grid(V v) { return _mm512_cvtph_ps(halves(v)); }
inline V splat(float s) { return _mm512_set1_ps(s); }
inline V larger(V a, V b) { return _mm512_max_ps(a, b); }   // b if either is NaN
inline V smaller(V a, V b) { return _mm512_min_ps(a, b); }  // b if either is NaN
// g where lo <= z <= hi or z is NaN, else 0
inline V between(V g, V z, V lo, V hi) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(z, lo, _CMP_NLT_UQ) &
                             _mm512_cmp_ps_mask(z, hi, _CMP_NGT_UQ), g);
}
// g where z > 0 or z is NaN, else 0
inline V positive(V g, V z) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_NLE_UQ), g);
}
inline float total(V v) { return _mm512_reduce_add_ps(v); }

#elif defined(__AVX2__) && defined(__F16C__)

using V = __m256;
constexpr int64_t W = 8;
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline V load(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
inline __m128i halves(V v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline void store(Half* p, V v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves(v)); }
inline V half_grid(V v) { return _mm256_cvtph_ps(halves(v)); }
inline V splat(float s) { return _mm256_set1_ps(s); }
inline V larger(V a, V b) { return _mm256_max_ps(a, b); }
inline V smaller(V a, V b) { return _mm256_min_ps(a, b); }
inline V between(V g, V z, V lo, V hi) {
  return _mm256_and_ps(g, _mm256_and_ps(_mm256_cmp_ps(z, lo, _CMP_NLT_UQ),
                                        _mm256_cmp_ps(z, hi, _CMP_NGT_UQ)));
}
inline V positive(V g, V z) {
  return _mm256_and_ps(g, _mm256_cmp_ps(z, _mm256_setzero_ps(), _CMP_NLE_UQ));
}
inline float total(V v) {
  float lanes[W], sum = 0;
  store(lanes, v);
  for (float lane : lanes) sum += lane;
  return sum;
}

#else

using V = float;
constexpr int64_t W = 1;

inline uint32_t bits_of(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
inline float float_of(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }

inline Half half_of(float f) {
  const uint32_t sign = bits_of(f) >> 16 & 0x8000u;
  uint32_t u = bits_of(f) & 0x7fffffffu;
  if (u > 0x7f800000u) return sign | 0x7e00u;             // NaN
  if (u >= 0x47800000u) return sign | 0x7c00u;            // 2^16 and up: infinity
  if (u < 0x38800000u)                                    // below 2^-14: subnormal.
    return sign | (bits_of(float_of(u) + 0.5f) - bits_of(0.5f));  // adding rounds at 2^-24
  u += 0xfffu + (u >> 13 & 1);                            // ties to even; may carry to infinity
  return sign | (u - 0x38000000u) >> 13;
}
inline V load(const float* p) { return *p; }
inline V load(const Half* p) {
  const uint32_t u = (*p & 0x7fffu) << 13, sign = (*p & 0x8000u) << 16;
  if (u >= 0x0f800000u) return float_of(sign | u | 0x7f800000u);  // infinity, NaN
  return float_of(sign | bits_of(float_of(u) * 0x1p112f));        // rebias the exponent
}
inline void store(float* p, V v) { *p = v; }
inline void store(Half* p, V v) { *p = half_of(v); }
inline V half_grid(V v) { const Half h = half_of(v); return load(&h); }
inline V splat(float s) { return s; }
inline V larger(V a, V b) { return a > b ? a : b; }
inline V smaller(V a, V b) { return a < b ? a : b; }
inline V between(V g, V z, V lo, V hi) { return z < lo || z > hi ? 0 : g; }
inline V positive(V g, V z) { return z <= 0 ? 0 : g; }
inline float total(V v) { return v; }

#endif

#if defined(__AVX512F__) || defined(__F16C__)
using U = uint32_t __attribute__((vector_size(4 * W)));
inline U bits_of(V v) { return reinterpret_cast<U>(v); }
inline V float_of(U u) { return reinterpret_cast<V>(u); }
#endif

// The upper half of a float's bits is a bfloat16: round it there, ties to even.
inline V bfloat_grid(V v) {
  auto u = bits_of(v);
  auto rounded = (u + 0x7fffu + (u >> 16 & 1u)) & 0xffff0000u;
  return v == v ? float_of(rounded) : v;
}

struct HalfGrid { V operator()(V v) const { return half_grid(v); } };
struct BfloatGrid { V operator()(V v) const { return bfloat_grid(v); } };
struct NoGrid { V operator()(V v) const { return v; } };

// ---- loops -----------------------------------------------------------------

constexpr int64_t kChunk = 4096;         // elements that a thread takes at a time
constexpr int64_t kWorthThreads = 32768;  // below this a parallel region costs more than it gives

// Calls f(i) for i = 0, W, 2W, ... < n with pointers that may be read and
// written W wide: the last, partial vector goes through a buffer.
template <typename T> struct Tail {
  T buffer[W];
  T* whole;
  int64_t count;
  Tail(T* p, int64_t n) : buffer(), whole(p), count(n) {
    std::memcpy(buffer, p, n * sizeof(T));
  }
  void put() { std::memcpy(whole, buffer, count * sizeof(T)); }
};

template <typename T> Tail<T> tail(T* p, int64_t n) { return Tail<T>(p, n); }
template <typename T> Tail<T> tail(const T* p, int64_t n) { return Tail<T>(const_cast<T*>(p), n); }

// out[i] = f(in[i]...), one vector at a time
template <typename F, typename O, typename... I>
inline void apply(int64_t n, F f, O* out, const I*... in) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, f(load(in + i)...));
  if (i < n) {
    O buffer[W];
    store(buffer, f(load(tail(in + i, n - i).buffer)...));
    std::memcpy(out + i, buffer, (n - i) * sizeof(O));
  }
}

// the same over all threads
template <typename F, typename O, typename... I>
void map(int64_t n, F f, O* out, const I*... in) {
  if (out == nullptr) return;  // MXNet asks for no such gradient
#pragma omp parallel for schedule(static) if (n >= kWorthThreads)
  for (int64_t i = 0; i < n; i += kChunk)
    apply(std::min(kChunk, n - i), f, out + i, (in + i)...);
}

// ---- activations -----------------------------------------------------------

struct None {
  V operator()(V z) const { return z; }
  V gradient(V g, V) const { return g; }
};
struct Relu {
  V operator()(V z) const { return larger(splat(0), z); }
  V gradient(V g, V z) const { return positive(g, z); }
};
struct Clip {
  V lo, hi;
  V operator()(V z) const { return smaller(hi, larger(lo, z)); }
  V gradient(V g, V z) const { return between(g, z, lo, hi); }
};
template <typename G> struct Gelu {  // the one whose results have to be rounded
  G grid;
  template <typename F> static V each(V z, F f) {
    float lanes[W];
    store(lanes, z);
    for (float& x : lanes) x = f(x);
    return load(lanes);
  }
  static float cdf(float x) { return 0.5f * (1 + std::erf(x * 0.70710678f)); }
  V operator()(V z) const { return grid(each(z, [](float x) { return x * cdf(x); })); }
  V gradient(V g, V z) const {
    return grid(g * each(z, [](float x) {
      return cdf(x) + x * 0.39894228f * std::exp(-0.5f * x * x);
    }));
  }
};

float number(const Attrs& attrs, const char* key, float otherwise) {
  static const locale_t c = newlocale(LC_ALL_MASK, "C", nullptr);  // a point, whatever the user's
  auto found = attrs.find(key);
  return found == attrs.end() ? otherwise : strtof_l(found->second.c_str(), nullptr, c);
}

template <typename G, typename F> void with_act(const Attrs& attrs, G grid, F f) {
  auto found = attrs.find("act");
  if (found == attrs.end()) f(grid, None());
  else if (found->second == "relu") f(grid, Relu());
  else if (found->second == "gelu") f(grid, Gelu<G>{grid});
  else f(grid, Clip{splat(number(attrs, "lo", 0)), splat(number(attrs, "hi", 0))});
}

// Calls f with the grid and the activation that the attributes name.
template <typename F> MXReturnValue with(const Attrs& attrs, F f) {
  auto found = attrs.find("grid");
  if (found == attrs.end()) with_act(attrs, HalfGrid(), f);
  else if (found->second == "bfloat16") with_act(attrs, BfloatGrid(), f);
  else with_act(attrs, NoGrid(), f);
  return MX_SUCCESS;
}

float* floats(Tensors* tensors, size_t i) { return (*tensors)[i].data<float>(); }
Half* half_data(Tensors* tensors, size_t i) { return (*tensors)[i].data<Half>(); }

// ---- widen, narrow, round, add ---------------------------------------------

MXReturnValue widen(const Attrs&, Tensors* in, Tensors* out, const OpResource&) {
  map((*in)[0].size(), [](V x) { return x; }, floats(out, 0), half_data(in, 0));
  return MX_SUCCESS;
}

MXReturnValue narrow(const Attrs&, Tensors* in, Tensors* out, const OpResource&) {
  map((*in)[0].size(), [](V x) { return x; }, half_data(out, 0), floats(in, 0));
  return MX_SUCCESS;
}

MXReturnValue round_forward(const Attrs& attrs, Tensors* in, Tensors* out, const OpResource&) {
  return with(attrs, [&](auto grid, auto act) {
    map((*in)[0].size(), [=](V x) { return act(grid(x)); }, floats(out, 0), floats(in, 0));
  });
}

MXReturnValue round_backward(const Attrs& attrs, Tensors* in, Tensors* out, const OpResource&) {
  return with(attrs, [&](auto grid, auto act) {
    map((*in)[0].size(), [=](V g, V x) { return act.gradient(grid(g), grid(x)); },
        floats(out, 0), floats(in, 0), floats(in, 1));
  });
}

template <typename G> V grid_sum(G grid, V a, V b) { return grid(grid(a) + grid(b)); }

MXReturnValue add_forward(const Attrs& attrs, Tensors* in, Tensors* out, const OpResource&) {
  return with(attrs, [&](auto grid, auto act) {
    map((*in)[0].size(), [=](V a, V b) { return act(grid_sum(grid, a, b)); },
        floats(out, 0), floats(in, 0), floats(in, 1));
  });
}

MXReturnValue add_backward(const Attrs& attrs, Tensors* in, Tensors* out, const OpResource&) {
  const int64_t n = (*in)[0].size();
  return with(attrs, [&](auto grid, auto act) {
    for (size_t side = 0; side < 2; ++side)
      map(n, [=](V g, V a, V b) { return act.gradient(grid(g), grid_sum(grid, a, b)); },
          floats(out, side), floats(in, 0), floats(in, 1), floats(in, 2));
  });
}

// ---- batch norm ------------------------------------------------------------
//
//   z = round((round(x) - mean) * scale + beta),  scale = gamma / sqrt(var + eps)
//   y = act(z)  or  act(round(z + residual))
//
// x is (n, channels, plane). mean and var are the batch's in training, else the
// moving ones. A channel's planes fit a core's cache, so a channel is read from
// memory once for its statistics and its output together.

struct Norm {
  int64_t batch, channels, plane;
  bool training, fix_gamma, residual;
  float eps, momentum;

  Norm(const Attrs& attrs, const MXTensor& x)
      : batch(x.shape[0]), channels(x.shape[1]), plane(1),
        training(number(attrs, "training", 0) != 0), fix_gamma(number(attrs, "fix_gamma", 1) != 0),
        residual(number(attrs, "residual", 0) != 0), eps(number(attrs, "eps", 1e-3f)),
        momentum(number(attrs, "momentum", 0.9f)) {
    for (size_t i = 2; i < x.shape.size(); ++i) plane *= x.shape[i];
  }
  int64_t at(int64_t n, int64_t c) const { return (n * channels + c) * plane; }
  double count() const { return static_cast<double>(batch) * plane; }
};

// sum of f(in...) over the planes of channel c, in double across vectors' sums
template <typename F, typename... I>
double channel_sum(const Norm& p, int64_t c, F f, const I*... in) {
  double sum = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    const int64_t at = p.at(n, c);
    V a = splat(0), b = splat(0);
    int64_t i = 0;
    for (; i + 2 * W <= p.plane; i += 2 * W) {
      a = a + f(load(in + at + i)...);
      b = b + f(load(in + at + i + W)...);
    }
    for (; i + W <= p.plane; i += W) a = a + f(load(in + at + i)...);
    sum += total(a + b);
    if (i < p.plane) {
      float lanes[W];
      store(lanes, f(load(tail(in + at + i, p.plane - i).buffer)...));
      for (int64_t j = 0; j < p.plane - i; ++j) sum += lanes[j];
    }
  }
  return sum;
}

template <typename F, typename... I>
void channel_map(const Norm& p, int64_t c, F f, float* out, const I*... in) {
  if (out == nullptr) return;
  for (int64_t n = 0; n < p.batch; ++n)
    apply(p.plane, f, out + p.at(n, c), (in + p.at(n, c))...);
}

// the value before the activation
template <typename G> struct Affine {
  G grid;
  V mean, scale, beta;
  Affine(G g, float m, float s, float b)
      : grid(g), mean(splat(m)), scale(splat(s)), beta(splat(b)) {}
  V operator()(V x) const { return grid((grid(x) - mean) * scale + beta); }
  V operator()(V x, V residual) const { return grid((*this)(x) + residual); }
};

enum { kData, kGamma, kBeta, kMovingMean, kMovingVar, kResidual };
enum { kOut, kMean, kInvStd, kNormOutputs };

MXReturnValue norm_forward(const Attrs& attrs, Tensors* in, Tensors* out, const OpResource&) {
  const Norm p(attrs, (*in)[kData]);
  const float *x = floats(in, kData), *gamma = floats(in, kGamma), *beta = floats(in, kBeta);
  float *moving_mean = floats(in, kMovingMean), *moving_var = floats(in, kMovingVar);
  const float* residual = p.residual ? floats(in, kResidual) : nullptr;
  float *y = floats(out, kOut), *saved_mean = floats(out, kMean), *inv_std = floats(out, kInvStd);
  if ((*in)[kData].size() == 0) return MX_SUCCESS;
  return with(attrs, [&](auto grid, auto act) {
#pragma omp parallel for schedule(static) if ((*in)[kData].size() >= kWorthThreads)
    for (int64_t c = 0; c < p.channels; ++c) {
      float mean = moving_mean[c], var = moving_var[c];
      if (p.training) {
        mean = channel_sum(p, c, grid, x) / p.count();
        const V center = splat(mean);
        var = channel_sum(p, c, [=](V a) { V d = grid(a) - center; return d * d; }, x) / p.count();
        moving_mean[c] = p.momentum * moving_mean[c] + (1 - p.momentum) * mean;
        moving_var[c] = p.momentum * moving_var[c] + (1 - p.momentum) * var;
      }
      const float inv = 1 / std::sqrt(var + p.eps);
      if (saved_mean) saved_mean[c] = mean;
      if (inv_std) inv_std[c] = inv;
      const Affine<decltype(grid)> z(grid, mean, p.fix_gamma ? inv : gamma[c] * inv, beta[c]);
      if (residual)
        channel_map(p, c, [=](V a, V r) { return act(z(a, r)); }, y, x, residual);
      else
        channel_map(p, c, [=](V a) { return act(z(a)); }, y, x);
    }
  });
}

// inputs: one gradient for each output, then the forward inputs, then the forward outputs
MXReturnValue norm_backward(const Attrs& attrs, Tensors* in, Tensors* out, const OpResource&) {
  const size_t inputs = kNormOutputs, outputs = in->size() - kNormOutputs;
  const Norm p(attrs, (*in)[inputs + kData]);
  const float *dy = floats(in, 0), *x = floats(in, inputs + kData);
  const float *gamma = floats(in, inputs + kGamma), *beta = floats(in, inputs + kBeta);
  const float* residual = p.residual ? floats(in, inputs + kResidual) : nullptr;
  const float *mean = floats(in, outputs + kMean), *inv_std = floats(in, outputs + kInvStd);
  float *dx = floats(out, kData), *dgamma = floats(out, kGamma), *dbeta = floats(out, kBeta);
  float* dresidual = p.residual ? floats(out, kResidual) : nullptr;
  for (size_t aux : {kMovingMean, kMovingVar})
    if (floats(out, aux)) std::memset(floats(out, aux), 0, p.channels * sizeof(float));

  // one body for both forms: with a residual, `more` is the one pointer r, else nothing
  auto channel = [&](auto grid, auto act, int64_t c, const auto*... more) {
    const float inv = inv_std[c], scale = p.fix_gamma ? inv : gamma[c] * inv;
    const Affine<decltype(grid)> z(grid, mean[c], scale, beta[c]);
    const V center = splat(mean[c]);
    auto gradient = [=](V g, V a, auto... r) { return act.gradient(grid(g), z(a, r...)); };
    const double sum_g = channel_sum(p, c, gradient, dy, x, more...);
    const double sum_gx = inv * channel_sum(
        p, c, [=](V g, V a, auto... r) { return gradient(g, a, r...) * (grid(a) - center); },
        dy, x, more...);
    if (dgamma) dgamma[c] = p.fix_gamma ? 0 : sum_gx;
    if (dbeta) dbeta[c] = sum_g;
    // without batch statistics, mean and var are constants
    const V mean_g = splat(p.training ? sum_g / p.count() : 0);
    const V slope = splat(p.training ? inv * sum_gx / p.count() : 0);
    const V s = splat(scale);
    channel_map(p, c, [=](V g, V a, auto... r) {
      return grid(s * (gradient(g, a, r...) - mean_g - (grid(a) - center) * slope));
    }, dx, dy, x, more...);
    channel_map(p, c, gradient, dresidual, dy, x, more...);
  };
  if ((*in)[0].size() == 0) {
    if (dgamma) std::memset(dgamma, 0, p.channels * sizeof(float));
    if (dbeta) std::memset(dbeta, 0, p.channels * sizeof(float));
    return MX_SUCCESS;
  }
  return with(attrs, [&](auto grid, auto act) {
#pragma omp parallel for schedule(static) if ((*in)[0].size() >= kWorthThreads)
    for (int64_t c = 0; c < p.channels; ++c) {
      if (residual) channel(grid, act, c, residual);
      else channel(grid, act, c);
    }
  });
}

// ---- masters and SGD -------------------------------------------------------
//
// A weight is its master, rounded. Where it is not, somebody has written the weight
// since, and the master follows.

V follow(V master, V weight) { return half_grid(master) == weight ? master : weight; }

MXReturnValue follow_forward(const Attrs&, Tensors* in, Tensors* out, const OpResource&) {
  map((*in)[0].size(), follow, floats(out, 0), floats(in, 0), half_data(in, 1));
  return MX_SUCCESS;
}

MXReturnValue follow_types(const Attrs&, std::vector<int>* in, std::vector<int>* out) {
  *in = {kFloat32, kFloat16};
  *out = {kFloat32};
  return MX_SUCCESS;
}

//   momentum' = momentum * m - lr * wd * master - lr * rescale * gradient
//   master'   = master + momentum'
//   weight'   = round(master')
//
// with the gradient clipped first, in the order of MXNet's mp_sgd_mom_update, whose results
// it equals bit by bit. inputs: weight and gradient (float16), master [, momentum].

MXReturnValue sgd(const Attrs& attrs, Tensors* in, Tensors* out, const OpResource&) {
  const float lr = number(attrs, "lr", 0), rescale = number(attrs, "rescale_grad", 1);
  const V rate = splat(lr), decay = splat(lr * number(attrs, "wd", 0));
  const V scaled_rate = splat(lr * rescale), scale = splat(rescale);
  const V keep = splat(number(attrs, "momentum", 0)), bound = splat(number(attrs, "clip", -1));
  const bool clips = number(attrs, "clip", -1) >= 0, has_momentum = in->size() > 3;
  const Half *weight = half_data(in, 0), *gradient = half_data(in, 1);
  Half* updated = half_data(out, 0);
  float *master = floats(in, 2), *momentum = has_momentum ? floats(in, 3) : nullptr;

  auto step = [=](V w, V m, V g) {
    const V push = clips ? rate * smaller(bound, larger(-bound, scale * g)) : scaled_rate * g;
    return keep * m - decay * w - push;
  };
  const int64_t n = (*in)[0].size();
#pragma omp parallel for schedule(static) if (n >= kWorthThreads)
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i);
    float *w = master + i, *m = momentum + i;
    apply(count, follow, w, w, weight + i);
    if (has_momentum) {
      apply(count, step, m, w, m, gradient + i);
      apply(count, [](V a, V b) { return a + b; }, w, w, m);
    } else {
      apply(count, [=](V a, V g) { return a + step(a, splat(0), g); }, w, w, gradient + i);
    }
    apply(count, [](V a) { return a; }, updated + i, w);
  }
  return MX_SUCCESS;
}

MXReturnValue sgd_arity(const Attrs& attrs, int* num_in, int* num_out) {
  *num_in = number(attrs, "momentum", 0) != 0 ? 4 : 3;
  *num_out = 1;
  return MX_SUCCESS;
}

MXReturnValue sgd_types(const Attrs&, std::vector<int>* in, std::vector<int>* out) {
  for (int& type : *in) type = kFloat32;
  (*in)[0] = (*in)[1] = (*out)[0] = kFloat16;
  return MX_SUCCESS;
}

MXReturnValue sgd_mutates(const Attrs& attrs, std::vector<int>* indices) {
  *indices = {2};
  if (number(attrs, "momentum", 0) != 0) indices->push_back(3);
  return MX_SUCCESS;
}

// ---- sums of squares -------------------------------------------------------
//
// In float64, so that a sum is finite where all numbers are. Chunks are added in their order:
// the sum does not depend on the number of threads.

template <typename T> double squares_of(const T* p, int64_t n) {
  double sums[16] = {};  // in parallel lanes, whatever V's width
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    float lanes[16];
    for (int64_t j = 0; j < 16; j += W) store(lanes + j, load(p + i + j));
    for (int j = 0; j < 16; ++j) sums[j] += double(lanes[j]) * lanes[j];
  }
  for (; i < n; ++i) {
    float lanes[W];
    store(lanes, load(tail(p + i, 1).buffer));
    sums[0] += double(lanes[0]) * lanes[0];
  }
  double sum = 0;
  for (double lane : sums) sum += lane;
  return sum;
}

template <typename T> double sum_squares(const T* p, int64_t n) {
  if (n <= kChunk) return squares_of(p, n);
  std::vector<double> sums((n + kChunk - 1) / kChunk);
#pragma omp parallel for schedule(static) if (n >= kWorthThreads)
  for (int64_t i = 0; i < n; i += kChunk)
    sums[i / kChunk] = squares_of(p + i, std::min(kChunk, n - i));
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

MXReturnValue squares(const Attrs&, Tensors* in, Tensors* out, const OpResource&) {
  double* sums = (*out)[0].data<double>();
  for (auto& tensor : *in)
    *sums++ = tensor.dtype == kFloat16 ? sum_squares(tensor.data<Half>(), tensor.size())
                                       : sum_squares(tensor.data<float>(), tensor.size());
  return MX_SUCCESS;
}

MXReturnValue squares_arity(const Attrs& attrs, int* num_in, int* num_out) {
  *num_in = number(attrs, "num_arrays", 1);
  *num_out = 1;
  return MX_SUCCESS;
}

MXReturnValue squares_types(const Attrs&, std::vector<int>* in, std::vector<int>* out) {
  for (int type : *in) {
    if (type != kFloat16 && type != kFloat32) {
      MX_ERROR_MSG << "squares takes float16 and float32 arrays";
      return MX_FAIL;
    }
  }
  (*out)[0] = kFloat64;
  return MX_SUCCESS;
}

MXReturnValue squares_shape(const Attrs&, Shapes* in, Shapes* out) {
  (*out)[0] = {static_cast<unsigned int>(in->size())};
  return MX_SUCCESS;
}

// ---- registration ----------------------------------------------------------

// Types: all inputs float32 but where the operator is a cast.
template <int from, int to>
MXReturnValue types(const Attrs&, std::vector<int>* in, std::vector<int>* out) {
  for (int& type : *in) type = from;
  for (int& type : *out) type = to;
  return MX_SUCCESS;
}

template <int inputs>
MXReturnValue one_out(const Attrs&, int* num_in, int* num_out) {
  *num_in = inputs;
  *num_out = 1;
  return MX_SUCCESS;
}

MXReturnValue same_shape(const Attrs&, Shapes* in, Shapes* out) {
  for (auto& shape : *in) {
    if (shape.empty()) shape = (*in)[0];
    if (shape != (*in)[0]) {
      MX_ERROR_MSG << "the inputs differ in shape";
      return MX_FAIL;
    }
  }
  (*out)[0] = (*in)[0];
  return MX_SUCCESS;
}

MXReturnValue norm_arity(const Attrs& attrs, int* num_in, int* num_out) {
  *num_in = number(attrs, "residual", 0) != 0 ? kResidual + 1 : kResidual;
  *num_out = kNormOutputs;
  return MX_SUCCESS;
}

MXReturnValue norm_shape(const Attrs&, Shapes* in, Shapes* out) {
  const auto x = (*in)[kData];
  if (x.size() < 2) {
    MX_ERROR_MSG << "batch norm needs (batch, channels, ...)";
    return MX_FAIL;
  }
  for (int i = kGamma; i <= kMovingVar; ++i) (*in)[i] = {x[1]};
  if (in->size() > kResidual) (*in)[kResidual] = x;
  (*out)[kOut] = x;
  (*out)[kMean] = (*out)[kInvStd] = {x[1]};
  return MX_SUCCESS;
}

MXReturnValue norm_mutates(const Attrs&, std::vector<int>* indices) {
  *indices = {kMovingMean, kMovingVar};
  return MX_SUCCESS;
}

}  // namespace

REGISTER_OP(_gluon_amp_widen)
.setForward(widen, "cpu").setBackward(narrow, "cpu")
.setParseAttrs(one_out<1>).setInferType(types<kFloat16, kFloat32>).setInferShape(same_shape);

REGISTER_OP(_gluon_amp_narrow)
.setForward(narrow, "cpu").setBackward(widen, "cpu")
.setParseAttrs(one_out<1>).setInferType(types<kFloat32, kFloat16>).setInferShape(same_shape);

REGISTER_OP(_gluon_amp_round)
.setForward(round_forward, "cpu").setBackward(round_backward, "cpu")
.setParseAttrs(one_out<1>).setInferType(types<kFloat32, kFloat32>).setInferShape(same_shape);

REGISTER_OP(_gluon_amp_add)
.setForward(add_forward, "cpu").setBackward(add_backward, "cpu")
.setParseAttrs(one_out<2>).setInferType(types<kFloat32, kFloat32>).setInferShape(same_shape);

REGISTER_OP(_gluon_amp_batch_norm)
.setForward(norm_forward, "cpu").setBackward(norm_backward, "cpu")
.setParseAttrs(norm_arity).setInferType(types<kFloat32, kFloat32>).setInferShape(norm_shape)
.setMutateInputs(norm_mutates);

REGISTER_OP(_gluon_amp_follow)
.setForward(follow_forward, "cpu")
.setParseAttrs(one_out<2>).setInferType(follow_types).setInferShape(same_shape);

REGISTER_OP(_gluon_amp_sgd)
.setForward(sgd, "cpu")
.setParseAttrs(sgd_arity).setInferType(sgd_types).setInferShape(same_shape)
.setMutateInputs(sgd_mutates);

REGISTER_OP(_gluon_amp_squares)
.setForward(squares, "cpu")
.setParseAttrs(squares_arity).setInferType(squares_types).setInferShape(squares_shape);

MXReturnValue initialize(int version) {
  if (version >= 10900 && version < 20000) return MX_SUCCESS;
  MX_ERROR_MSG << "gluon_amp's kernels need MXNet 1.9, this is " << version;
  return MX_FAIL;
}
