// MXNet's generic elementwise kernels.
#include <math.h>

#include "compute.h"

namespace {

double sigmoid(double a) { return 1 / (1 + exp(-a)); }
double softrelu(double a) { return a > 20 ? a : log1p(exp(a)); }
double sign(double a) { return a > 0 ? 1 : a < 0 ? -1 : 0; }
double gelu(double a) { return 0.5 * a * (1 + erf(a / sqrt(2.0))); }
double gelu_slope(double a) { return 0.5 * (1 + erf(a / sqrt(2.0))) + a * exp(-0.5 * a * a) / sqrt(2 * M_PI); }
double softsign_grad(double a) { return 1 / ((1 + fabs(a)) * (1 + fabs(a))); }
double smooth_l1_loss(double a, double b) {
  const double turn = 1 / (b * b);
  return a > turn ? a - 0.5 * turn : a < -turn ? -a - 0.5 * turn : 0.5 * a * a * b * b;
}
double smooth_l1_gradient(double a, double b) { return a > 1 / (b * b) ? 1 : a < -1 / (b * b) ? -1 : a * b * b; }
double modulo(double a, double b) {
  if (b == 0) return 0;
  const double rest = fmod(a, b);
  return rest && (rest < 0) != (b < 0) ? rest + b : rest;
}

#define ONE(name, value) {#name, [](double a) -> double { return value; }}
#define TWO(name, value) {#name, [](double a, double b) -> double { return value; }}

const std::map<std::string, UnaryFunction>& unary() {
  static const auto& all = *new std::map<std::string, UnaryFunction>{
      ONE(identity, a), ONE(identity_grad, 1), ONE(negation, -a), ONE(reciprocal, 1 / a),
      ONE(reciprocal_grad, -1 / (a * a)), ONE(abs, fabs(a)), ONE(sign, sign(a)), ONE(sign_grad, 0),
      ONE(square, a * a), ONE(square_grad, 2 * a), ONE(square_root, sqrt(a)), ONE(square_root_grad, 0.5 / a),
      ONE(reciprocal_square_root, 1 / sqrt(a)), ONE(reciprocal_square_root_grad, -0.5 / (a * sqrt(a))),
      ONE(cube_root, cbrt(a)), ONE(exp, exp(a)), ONE(expm1, expm1(a)), ONE(log, log(a)), ONE(log_grad, 1 / a),
      ONE(log2, log2(a)), ONE(log10, log10(a)), ONE(log1p, log1p(a)), ONE(log1p_grad, 1 / (1 + a)), ONE(sin, sin(a)),
      ONE(cos, cos(a)), ONE(tan, tan(a)), ONE(erf, erf(a)), ONE(sin_grad, cos(a)), ONE(cos_grad, -sin(a)),
      ONE(tanh, tanh(a)), ONE(tanh_grad, 1 - a * a), ONE(sigmoid, sigmoid(a)), ONE(sigmoid_grad, a * (1 - a)),
      ONE(relu, a > 0 || a != a ? a : 0), ONE(relu_grad, a > 0 ? 1.0 : a != a ? a : 0), ONE(softrelu, softrelu(a)),
      ONE(softrelu_grad, -expm1(-a)), ONE(softsign, a / (1 + fabs(a))), ONE(softsign_grad, softsign_grad(a)),
      ONE(log_sigmoid, -softrelu(-a)), ONE(mish, a * tanh(softrelu(a))), ONE(tan_grad, a * a + 1),
      ONE(erf_grad, 2 / sqrt(M_PI) * exp(-a * a)), ONE(sinh, sinh(a)), ONE(sinh_grad, cosh(a)), ONE(cosh, cosh(a)),
      ONE(cosh_grad, sinh(a)), ONE(arcsin, asin(a)), ONE(arcsin_grad, 1 / sqrt(1 - a * a)), ONE(arccos, acos(a)),
      ONE(arccos_grad, -1 / sqrt(1 - a * a)), ONE(arctan, atan(a)), ONE(arctan_grad, 1 / (a * a + 1)),
      ONE(arcsinh, asinh(a)), ONE(arcsinh_grad, 1 / sqrt(a * a + 1)), ONE(arccosh, acosh(a)),
      ONE(arccosh_grad, 1 / sqrt(a * a - 1)), ONE(arctanh, atanh(a)), ONE(arctanh_grad, 1 / (1 - a * a)),
      ONE(degrees, a * 180 / M_PI), ONE(degrees_grad, 180 / M_PI), ONE(radians, a * M_PI / 180),
      ONE(radians_grad, M_PI / 180), ONE(log2_grad, 1 / (a * log(2.0))), ONE(log10_grad, 1 / (a * log(10.0))),
      ONE(cube_root_grad, 1 / (3 * a * a)), ONE(reciprocal_cube_root, 1 / cbrt(a)),
      ONE(reciprocal_cube_root_grad, -1 / (3 * a * cbrt(a))), ONE(gamma, tgamma(a)), ONE(gammaln, lgamma(a)),
      ONE(gelu, gelu(a)), ONE(log_sigmoid_grad, -expm1(a)), ONE(isfinite, std::isfinite(a)),
      ONE(isposinf, a == INFINITY),
      ONE(isneginf, a == -INFINITY), ONE(np_logical_not, !a), ONE(floor, floor(a)), ONE(ceil, ceil(a)),
      ONE(trunc, trunc(a)), ONE(rint, nearbyint(a)), ONE(round, round(a)), ONE(fix, trunc(a)), ONE(nt, !a),
      ONE(isnan, a != a), ONE(isinf, std::isinf(a)), ONE(threshold, a)};
  return all;
}

const std::map<std::string, BinaryFunction>& binary() {
  static const auto& all = *new std::map<std::string, BinaryFunction>{
      TWO(plus, a + b), TWO(minus, a - b), TWO(rminus, b - a), TWO(mul, a * b), TWO(div, a / b), TWO(rdiv, b / a),
      TWO(true_divide, a / b), TWO(rtrue_divide, b / a), TWO(left, a), TWO(right, b), TWO(div_grad, 1 / b),
      TWO(div_rgrad, -a / (b * b)), TWO(rdiv_grad, -b / (a * a)), TWO(power, pow(a, b)), TWO(rpower, pow(b, a)),
      TWO(power_grad, b * pow(a, b - 1)), TWO(power_rgrad, pow(a, b) * log(a)), TWO(mod, modulo(a, b)),
      TWO(rmod, modulo(b, a)), TWO(maximum, a != a || a > b ? a : b), TWO(minimum, a != a || a < b ? a : b),
      TWO(hypot, hypot(a, b)), TWO(eq, a == b), TWO(ne, a != b), TWO(lt, a < b), TWO(le, a <= b), TWO(gt, a > b),
      TWO(ge, a >= b), TWO(np_equal, a == b), TWO(np_not_equal, a != b), TWO(np_less, a < b),
      TWO(np_less_equal, a <= b), TWO(np_greater, a > b), TWO(np_greater_equal, a >= b), TWO(logical_and, a && b),
      TWO(logical_or, a || b), TWO(logical_xor, !a != !b), TWO(mod_grad, 1), TWO(mod_rgrad, -floor(a / b)),
      TWO(rmod_grad, -floor(b / a)), TWO(rpower_grad, a * log(b)), TWO(hypot_grad_left, a / hypot(a, b)),
      TWO(hypot_grad_right, b / hypot(a, b)), TWO(arctan2, atan2(a, b)), TWO(rarctan2, atan2(b, a)),
      TWO(arctan2_grad, b / (a * a + b * b)), TWO(arctan2_rgrad, -a / (a * a + b * b)), TWO(ldexp, a * exp2(b)),
      TWO(rldexp, b * exp2(a)), TWO(ldexp_grad, exp2(b)), TWO(ldexp_rgrad, a * exp2(b) * log(2.0)),
      TWO(rldexp_grad, b * exp2(a) * log(2.0)), TWO(copysign, copysign(a, b)), TWO(threshold, a < b),
      TWO(clip, a > b ? b : a < -b ? -b : a), TWO(gelu, gelu(a)), TWO(elu, a > 0 ? a : b * expm1(a)),
      TWO(elu_grad, a > 0 ? 1 : b + a), TWO(xelu, a > 0 ? a : b * a), TWO(xelu_grad, a > 0 ? 1 : b),
      TWO(gelu_grad, gelu_slope(a)), TWO(smooth_l1_loss, smooth_l1_loss(a, b)),
      TWO(smooth_l1_gradient, smooth_l1_gradient(a, b))};
  return all;
}

}  // namespace

template <class F> static F found(const std::map<std::string, F>& all, const std::string& name) {
  auto at = all.find(name);
  if (at == all.end()) unknown("operation " + name);
  return at->second;
}
UnaryFunction unary_function(const std::string& name) { return found(unary(), name); }
BinaryFunction binary_function(const std::string& name) { return found(binary(), name); }

namespace {

// op_with_req<OPERATION, REQUEST>(n, output, inputs and scalars ...). half2_t holds two numbers.
void op_with_req(const Launch& launch) {
  const Name& with = launch.kernel.args.at(0);
  Name of = with.args.at(0);
  const int request = std::stoi(with.args.at(1).id);
  const bool backward = of.id.rfind("backward_grad", 0) == 0;
  if (backward) of = Name(of.args.at(0));
  const ll n = launch.integer(0) * (launch.types.at(1).id == "half2_t" ? 2 : 1);
  const Array out = launch.array(1);
  const size_t inputs = launch.types.size() - 2;
  if (of.id == "set_to_int") {
    const double value = std::stod(of.args.at(0).id);
    for (ll i = 0; i < n; i++) out.assign(i, request, value);
    return;
  }
  std::vector<Array> in;
  std::vector<double> scalar;
  for (size_t k = 0; k < inputs; k++) {
    const bool pointer = launch.types[k + 2].pointer;
    in.push_back(pointer ? launch.array(k + 2) : Array{Type::kFloat, nullptr});
    scalar.push_back(pointer ? 0 : launch.number(k + 2));
  }
  const auto read = [&](size_t k, ll i) { return in[k].data ? in[k][i] : scalar[k]; };
  const size_t first = backward;  // after the gradient of the output
  const UnaryFunction one = inputs - first == 1 ? unary_function(of.id) : nullptr;
  const BinaryFunction two = inputs - first == 2 ? binary_function(of.id) : nullptr;
  if (!one && !two) unknown("operation " + of.id);
  for (ll i = 0; i < n; i++) {
    double value = one ? one(read(first, i)) : two(read(first, i), read(first + 1, i));
    if (backward) value = out.rounded(value) * read(0, i);
    out.assign(i, request, value);
  }
}

// Sum(n, output, request, inputs ...): a + (b + (c + d)), each sum rounded
void sum(const Launch& launch) {
  const ll n = launch.integer(0) * (launch.types.at(1).id == "half2_t" ? 2 : 1);
  const Array out = launch.array(1);
  const int request = launch.value<int>(2);
  for (ll i = 0; i < n; i++) {
    double total = launch.array(launch.types.size() - 1)[i];
    for (size_t k = launch.types.size() - 2; k > 2; k--) total = out.rounded(launch.array(k)[i] + total);
    out.assign(i, request, total);
  }
}

double clipped(double value, double low, double high) { return value > high ? high : value < low ? low : value; }
int integer(const Name& name) { return std::stoi(name.id); }

// A kernel whose first argument is the count of the elements that it computes one by one.
template <class F> Run each(F f) {
  return [f](const Launch& l) {
    const Name& of = l.kernel.args.at(0);
    for (ll i = 0, n = l.integer(0); i < n; i++) f(l, of, i);
  };
}
using L = const Launch&;
using N = const Name&;

struct Broadcast { int in_stride[5], out_stride[5], input[5], output[5], axes[5], count; bool changed; };

void broadcast(const Launch& launch) {
  const UnaryFunction f = unary_function(launch.kernel.args.at(0).args.at(0).id);
  const Array in = launch.array(1), out = launch.array(2);
  const auto& shapes = launch.value<Broadcast>(3);
  const int dims = launch.value<int>(5);
  for (ll i = 0; i < launch.integer(0); i++) {
    ll rest = i, from = i;
    for (int d = dims - 1; d >= 0; d--) {
      const ll place = rest % shapes.output[d];
      from += place * ((shapes.input[d] != 1 ? shapes.in_stride[d] : 0) - shapes.out_stride[d]);
      rest /= shapes.output[d];
    }
    out.assign(i, launch.value<int>(4), f(in[from]));
  }
}

// binary_broadcast_kernel<DIMS, OPERATION>(n, request, lhs' strides, rhs' strides, shape, lhs, rhs, output)
void binary_broadcast(const Launch& launch) {
  const Name& of = launch.kernel.args.at(0);
  const int dims = std::stoi(of.args.at(0).id);
  const BinaryFunction f = binary_function(of.args.at(1).id);
  const int *left = &launch.value<int>(2), *right = &launch.value<int>(3), *shape = &launch.value<int>(4);
  const bool scalar = !launch.types.at(5).pointer;
  const Array a = launch.array(scalar ? 6 : 5), b = launch.array(6), out = launch.array(7);
  for (ll i = 0; i < launch.integer(0); i++) {
    ll rest = i, l = 0, r = 0;
    for (int d = dims - 1; d >= 0; d--) {
      l += rest % shape[d] * left[d];
      r += rest % shape[d] * right[d];
      rest /= shape[d];
    }
    out.assign(i, launch.value<int>(1), f(scalar ? launch.number(5) : a[l], b[r]));
  }
}

// TakeZeroAxisGPU<clip>(n, output, data, indices, row, rows)
void take(L l, N of, ll i) {
  const ll row = l.integer(4), rows = l.integer(5), index = (ll)l.array(3)[i / row];
  const ll j = of.args.at(0).id == "true" ? std::min(std::max(index, 0LL), rows - 1) : (index % rows + rows) % rows;
  l.array(1).set(i, l.array(2)[j * row + i % row]);
}
void clip_grad(L l, N, ll i) {  // (n, out, gradient, in, low, high)
  const double in = l.array(3)[i];
  l.array(1).set(i, in > l.number(5) || in < l.number(4) ? 0 : l.array(2)[i]);
}
void where(L l, N of, ll i) {
  l.array(1).assign(i, integer(of.args.at(0)), l.array(l.array(2)[i] != 0 ? 3 : 4)[i]);
}
void where_backward(L l, N of, ll i) {  // where_backward<REQUEST, negate>(n, out, gradient, condition)
  const bool negate = of.args.at(1).id == "true";
  l.array(1).assign(i, integer(of.args.at(0)), (l.array(3)[i] == 0) != negate ? l.array(2)[i] : 0);
}
void range(L l, N, ll i) {  // range_fwd(n, repeat, start, step, request, output)
  l.array(5).assign(i, l.value<int>(4), l.number(2) + double(i / l.integer(1)) * l.number(3));
}

const Family g_elementwise(generic_kernels(), {
    {"op_with_req", op_with_req}, {"Sum", sum}, {"broadcast_kernel_gpu", broadcast},
    {"binary_broadcast_kernel", binary_broadcast}, {"clip_grad", each(clip_grad)}, {"where", each(where)},
    {"where_backward", each(where_backward)}, {"TakeZeroAxisGPU", each(take)}, {"range_fwd", each(range)},
    {"clip", each([](L l, N, ll i) { l.array(1).set(i, clipped(l.array(2)[i], l.number(3), l.number(4))); })},
    {"tcast_clip", each([](L l, N, ll i) {
       l.array(1).set(i, clipped((double)(ll)l.array(2)[i], 0, l.number(3) - 1));
     })},
    // direct_copy<OPERATION>(n, in, out, request)
    {"direct_copy", each([](L l, N of, ll i) {
       l.array(2).assign(i, l.value<int>(3), unary_function(of.args.at(0).id)(l.array(1)[i]));
     })}});

}  // namespace
