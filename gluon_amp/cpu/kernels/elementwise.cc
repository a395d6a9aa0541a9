// Elementwise functions, computed in float32 and rounded once.
#include "functions.h"
#include "vector.h"

namespace gluon_amp::ISA {
namespace {

// ---- one input -----------------------------------------------------------------
//
// Each function of Unary is a type with `of`, the function, and `gradient`, its backward function of the head
// gradient g. kernels.h lists whether `read` is x or y.

struct ReluFunction {
  V of(V x) const { return larger(splat(0), x); }
  V gradient(V g, V y) const { return if_less(splat(0), y, g, y - y); }  // NaN where y is
};
struct ClipFunction {
  V lo, hi;
  V of(V x) const { return if_less(hi, x, hi, larger(lo, x)); }  // as MXNet, if lo > hi
  V gradient(V g, V x) const { return between(g, x, lo, hi); }
};
struct SigmoidFunction {
  V of(V x) const { return sigmoid(x); }
  V gradient(V g, V y) const { return g * (y * (splat(1) - y)); }
};
struct TanhFunction {
  V of(V x) const { return tanh_of(x); }
  V gradient(V g, V y) const { return g * (splat(1) - y * y); }
};
struct GeluFunction {
  V of(V x) const { return x * normal(x).below; }
  V gradient(V g, V x) const {
    const Normal at = normal(x);
    return g * (at.below + x * at.density);
  }
};
struct LeakyFunction {
  V a;
  V of(V x) const { return if_less(splat(0), x, x, a * x); }
  V gradient(V g, V y) const { return if_less(splat(0), y, g, a * g); }
};
struct TimesFunction {
  V a;
  V of(V x) const { return x * a; }
  V gradient(V g, V) const { return g * a; }
};
struct PlusFunction {
  V a;
  V of(V x) const { return x + a; }
  V gradient(V g, V) const { return g; }
};
struct FromFunction {
  V a;
  V of(V x) const { return a - x; }
  V gradient(V g, V) const { return -g; }
};
struct OverFunction {
  V a;
  V of(V x) const { return x / a; }
  V gradient(V g, V) const { return g / a; }
};

// Whether the result may be infinite in float16 where x is finite.
template <typename F> constexpr bool kMayOverflow = true;
template <> constexpr bool kMayOverflow<ReluFunction> = false;
template <> constexpr bool kMayOverflow<ClipFunction> = false;
template <> constexpr bool kMayOverflow<SigmoidFunction> = false;
template <> constexpr bool kMayOverflow<TanhFunction> = false;
template <> constexpr bool kMayOverflow<GeluFunction> = false;

template <typename F> void with_function(Unary f, float a, float b, F run) {
  switch (f) {
    case kReluOf: return run(ReluFunction{});
    case kClipOf: return run(ClipFunction{splat(a), splat(b)});
    case kSigmoidOf: return run(SigmoidFunction{});
    case kTanhOf: return run(TanhFunction{});
    case kGeluOf: return run(GeluFunction{});
    case kLeakyOf: return run(LeakyFunction{splat(a)});
    case kTimes: return run(TimesFunction{splat(a)});
    case kPlus: return run(PlusFunction{splat(a)});
    case kFromOf: return run(FromFunction{splat(a)});
    case kOverOf: return run(OverFunction{splat(a)});
  }
}

void unary(Unary f, const void* x, void* y, int64_t n, float a, float b, Write write) {
  with_function(f, a, b, [=](auto function) {
    with_add(write, [=](auto add) {
      vectors(n, [=](int64_t i, auto lanes) {
        const V v = put(y, i, function.of(load(x, i, lanes)), add, lanes);
        if constexpr (kMayOverflow<decltype(function)>) return v;
      });
    });
  });
}

void unary_gradient(Unary f, const void* g, const void* read, void* d, int64_t n, float a, float b,
                    Write write) {
  with_function(f, a, b, [=](auto function) {
    with_add(write, [=](auto add) {
      vectors(n, [=](int64_t i, auto lanes) {
        const V v = function.gradient(load(g, i, lanes), load(read, i, lanes));
        put(d, i, v, add, lanes);
      });
    });
  });
}

// ---- more inputs ---------------------------------------------------------------

template <typename F>
void map_two(const void* x, const void* y, void* out, int64_t n, Write write, F f) {
  with_add(write, [=](auto add) {
    vectors(n, [=](int64_t i, auto lanes) {
      return put(out, i, f(load(x, i, lanes), load(y, i, lanes)), add, lanes);
    });
  });
}

void binary(Binary f, const void* x, const void* y, void* out, int64_t n, Write write) {
  switch (f) {
    case kSum: return map_two(x, y, out, n, write, [](V a, V b) { return a + b; });
    case kDifference: return map_two(x, y, out, n, write, [](V a, V b) { return a - b; });
    case kProduct: return map_two(x, y, out, n, write, [](V a, V b) { return a * b; });
    case kQuotient: return map_two(x, y, out, n, write, [](V a, V b) { return a / b; });
  }
}

void product_gradient(const void* g, const void* x, const void* y, void* dx, Write write_dx, void* dy,
                      Write write_dy, int64_t n) {
  vectors(n, [=](int64_t i, auto lanes) {
    const V d = load(g, i, lanes), a = load(x, i, lanes), b = load(y, i, lanes);
    if (write_dx != kNothing) put(dx, i, d * b, write_dx == kAdd, lanes);
    if (write_dy != kNothing) put(dy, i, d * a, write_dy == kAdd, lanes);
  });
}

void sum(const void* const* in, int count, void* out, int64_t n, Write write) {
  if (write == kNothing) return;
  if (count == 2) return binary(kSum, in[0], in[1], out, n, write);
  const bool add = write == kAdd;
  vectors(n, [=](int64_t i, auto lanes) {
    V v = count > 0 ? load(in[0], i, lanes) : splat(0);
    for (int k = 1; k < count; ++k) v = v + load(in[k], i, lanes);
    return put(out, i, v, add, lanes);
  });
}

void dropout_gradient(const void* g, const void* mask, void* d, int64_t n, float scale,
                      Write write) {
  const V factor = splat(scale);
  map_two(g, mask, d, n, write, [=](V v, V m) {
    return if_equal(m, splat(0), splat(0), if_equal(m, splat(1), v, v * factor));
  });
}

}  // namespace

void add_elementwise(Kernels* table) noexcept {
  table->unary = unary;
  table->unary_gradient = unary_gradient;
  table->binary = binary;
  table->product_gradient = product_gradient;
  table->sum = sum;
  table->dropout_gradient = dropout_gradient;
}

}  // namespace gluon_amp::ISA
