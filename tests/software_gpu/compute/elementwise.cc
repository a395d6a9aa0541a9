// MXNet's generic elementwise kernels.
#include <math.h>

#include "compute.h"

namespace {

double sigmoid(double a) { return 1 / (1 + exp(-a)); }
double softrelu(double a) { return a > 20 ? a : log1p(exp(a)); }
double sign(double a) { return a > 0 ? 1 : a < 0 ? -1 : 0; }
double gelu(double a) { return 0.5 * a * (1 + erf(a / sqrt(2.0))); }
double gelu_slope(double a) {
  return 0.5 * (1 + erf(a / sqrt(2.0))) + a * exp(-0.5 * a * a) / sqrt(2 * M_PI);
}
double modulo(double a, double b) {
  if (b == 0) return 0;
  const double rest = fmod(a, b);
  return rest && (rest < 0) != (b < 0) ? rest + b : rest;
}

const std::map<std::string, UnaryFunction>& unary() {
  static const auto& all = *new std::map<std::string, UnaryFunction>{
      {"identity", [](double a) { return a; }}, {"identity_grad", [](double) { return 1.0; }},
      {"negation", [](double a) { return -a; }}, {"reciprocal", [](double a) { return 1 / a; }},
      {"reciprocal_grad", [](double a) { return -1 / (a * a); }},
      {"abs", [](double a) { return fabs(a); }}, {"sign", sign}, {"sign_grad", [](double) { return 0.0; }},
      {"square", [](double a) { return a * a; }}, {"square_grad", [](double a) { return 2 * a; }},
      {"square_root", [](double a) { return sqrt(a); }}, {"square_root_grad", [](double a) { return 0.5 / a; }},
      {"reciprocal_square_root", [](double a) { return 1 / sqrt(a); }},
      {"reciprocal_square_root_grad", [](double a) { return -0.5 / (a * sqrt(a)); }},
      {"cube_root", [](double a) { return cbrt(a); }},
      {"exp", [](double a) { return exp(a); }}, {"expm1", [](double a) { return expm1(a); }},
      {"log", [](double a) { return log(a); }}, {"log_grad", [](double a) { return 1 / a; }},
      {"log2", [](double a) { return log2(a); }}, {"log10", [](double a) { return log10(a); }},
      {"log1p", [](double a) { return log1p(a); }}, {"log1p_grad", [](double a) { return 1 / (1 + a); }},
      {"sin", [](double a) { return sin(a); }}, {"cos", [](double a) { return cos(a); }},
      {"tan", [](double a) { return tan(a); }}, {"erf", [](double a) { return erf(a); }},
      {"sin_grad", [](double a) { return cos(a); }}, {"cos_grad", [](double a) { return -sin(a); }},
      {"tanh", [](double a) { return tanh(a); }}, {"tanh_grad", [](double a) { return 1 - a * a; }},
      {"sigmoid", sigmoid}, {"sigmoid_grad", [](double a) { return a * (1 - a); }},
      {"relu", [](double a) { return a > 0 || a != a ? a : 0; }}, {"relu_grad", [](double a) { return a > 0 ? 1.0 : a != a ? a : 0; }},
      {"softrelu", softrelu}, {"softrelu_grad", [](double a) { return -expm1(-a); }},
      {"softsign", [](double a) { return a / (1 + fabs(a)); }},
      {"softsign_grad", [](double a) { const double b = 1 + fabs(a); return 1 / (b * b); }},
      {"log_sigmoid", [](double a) { return -softrelu(-a); }}, {"mish", [](double a) { return a * tanh(softrelu(a)); }},
      {"tan_grad", [](double a) { return a * a + 1; }}, {"erf_grad", [](double a) { return 2 / sqrt(M_PI) * exp(-a * a); }},
      {"sinh", [](double a) { return sinh(a); }}, {"sinh_grad", [](double a) { return cosh(a); }},
      {"cosh", [](double a) { return cosh(a); }}, {"cosh_grad", [](double a) { return sinh(a); }},
      {"arcsin", [](double a) { return asin(a); }}, {"arcsin_grad", [](double a) { return 1 / sqrt(1 - a * a); }},
      {"arccos", [](double a) { return acos(a); }}, {"arccos_grad", [](double a) { return -1 / sqrt(1 - a * a); }},
      {"arctan", [](double a) { return atan(a); }}, {"arctan_grad", [](double a) { return 1 / (a * a + 1); }},
      {"arcsinh", [](double a) { return asinh(a); }}, {"arcsinh_grad", [](double a) { return 1 / sqrt(a * a + 1); }},
      {"arccosh", [](double a) { return acosh(a); }}, {"arccosh_grad", [](double a) { return 1 / sqrt(a * a - 1); }},
      {"arctanh", [](double a) { return atanh(a); }}, {"arctanh_grad", [](double a) { return 1 / (1 - a * a); }},
      {"degrees", [](double a) { return a * 180 / M_PI; }}, {"degrees_grad", [](double) { return 180 / M_PI; }},
      {"radians", [](double a) { return a * M_PI / 180; }}, {"radians_grad", [](double) { return M_PI / 180; }},
      {"log2_grad", [](double a) { return 1 / (a * log(2.0)); }}, {"log10_grad", [](double a) { return 1 / (a * log(10.0)); }},
      {"cube_root_grad", [](double a) { return 1 / (3 * a * a); }},
      {"reciprocal_cube_root", [](double a) { return 1 / cbrt(a); }},
      {"reciprocal_cube_root_grad", [](double a) { return -1 / (3 * a * cbrt(a)); }},
      {"gamma", [](double a) { return tgamma(a); }}, {"gammaln", [](double a) { return lgamma(a); }},
      {"log_sigmoid_grad", [](double a) { return -expm1(a); }},
      {"isfinite", [](double a) { return double(std::isfinite(a)); }},
      {"isposinf", [](double a) { return double(a == INFINITY); }}, {"isneginf", [](double a) { return double(a == -INFINITY); }},
      {"np_logical_not", [](double a) { return double(!a); }},
      {"floor", [](double a) { return floor(a); }}, {"ceil", [](double a) { return ceil(a); }},
      {"trunc", [](double a) { return trunc(a); }}, {"rint", [](double a) { return nearbyint(a); }},
      {"round", [](double a) { return round(a); }}, {"fix", [](double a) { return trunc(a); }},
      {"nt", [](double a) { return double(!a); }}, {"isnan", [](double a) { return double(a != a); }},
      {"isinf", [](double a) { return double(std::isinf(a)); }},
      {"threshold", [](double a) { return a; }}};
  return all;
}

const std::map<std::string, BinaryFunction>& binary() {
  static const auto& all = *new std::map<std::string, BinaryFunction>{
      {"plus", [](double a, double b) { return a + b; }}, {"minus", [](double a, double b) { return a - b; }},
      {"rminus", [](double a, double b) { return b - a; }}, {"mul", [](double a, double b) { return a * b; }},
      {"div", [](double a, double b) { return a / b; }}, {"rdiv", [](double a, double b) { return b / a; }},
      {"true_divide", [](double a, double b) { return a / b; }}, {"rtrue_divide", [](double a, double b) { return b / a; }},
      {"left", [](double a, double) { return a; }}, {"right", [](double, double b) { return b; }},
      {"div_grad", [](double, double b) { return 1 / b; }}, {"div_rgrad", [](double a, double b) { return -a / (b * b); }},
      {"rdiv_grad", [](double a, double b) { return -b / (a * a); }},
      {"power", [](double a, double b) { return pow(a, b); }}, {"rpower", [](double a, double b) { return pow(b, a); }},
      {"power_grad", [](double a, double b) { return b * pow(a, b - 1); }},
      {"power_rgrad", [](double a, double b) { return pow(a, b) * log(a); }},
      {"mod", modulo}, {"rmod", [](double a, double b) { return modulo(b, a); }},
      {"maximum", [](double a, double b) { return a != a || a > b ? a : b; }},
      {"minimum", [](double a, double b) { return a != a || a < b ? a : b; }},
      {"hypot", [](double a, double b) { return hypot(a, b); }},
      {"eq", [](double a, double b) { return double(a == b); }}, {"ne", [](double a, double b) { return double(a != b); }},
      {"lt", [](double a, double b) { return double(a < b); }}, {"le", [](double a, double b) { return double(a <= b); }},
      {"gt", [](double a, double b) { return double(a > b); }}, {"ge", [](double a, double b) { return double(a >= b); }},
      {"np_equal", [](double a, double b) { return double(a == b); }},
      {"np_not_equal", [](double a, double b) { return double(a != b); }},
      {"np_less", [](double a, double b) { return double(a < b); }},
      {"np_less_equal", [](double a, double b) { return double(a <= b); }},
      {"np_greater", [](double a, double b) { return double(a > b); }},
      {"np_greater_equal", [](double a, double b) { return double(a >= b); }},
      {"logical_and", [](double a, double b) { return double(a && b); }},
      {"logical_or", [](double a, double b) { return double(a || b); }},
      {"logical_xor", [](double a, double b) { return double(!a != !b); }},
      {"mod_grad", [](double, double) { return 1.0; }}, {"mod_rgrad", [](double a, double b) { return -floor(a / b); }},
      {"rmod_grad", [](double a, double b) { return -floor(b / a); }},
      {"rpower_grad", [](double a, double b) { return a * log(b); }},
      {"hypot_grad_left", [](double a, double b) { return a / hypot(a, b); }},
      {"hypot_grad_right", [](double a, double b) { return b / hypot(a, b); }},
      {"arctan2", [](double a, double b) { return atan2(a, b); }}, {"rarctan2", [](double a, double b) { return atan2(b, a); }},
      {"arctan2_grad", [](double a, double b) { return b / (a * a + b * b); }},
      {"arctan2_rgrad", [](double a, double b) { return -a / (a * a + b * b); }},
      {"ldexp", [](double a, double b) { return a * exp2(b); }}, {"rldexp", [](double a, double b) { return b * exp2(a); }},
      {"ldexp_grad", [](double, double b) { return exp2(b); }},
      {"ldexp_rgrad", [](double a, double b) { return a * exp2(b) * log(2.0); }},
      {"rldexp_grad", [](double a, double b) { return b * exp2(a) * log(2.0); }},
      {"copysign", [](double a, double b) { return copysign(a, b); }},
      {"threshold", [](double a, double b) { return double(a < b); }},
      {"clip", [](double a, double b) { return a > b ? b : a < -b ? -b : a; }},
      {"gelu", [](double a, double) { return gelu(a); }},
      {"elu", [](double x, double a) { return x > 0 ? x : a * expm1(x); }},
      {"elu_grad", [](double y, double a) { return y > 0 ? 1 : a + y; }},
      {"xelu", [](double x, double a) { return x > 0 ? x : a * x; }},
      {"xelu_grad", [](double x, double a) { return x > 0 ? 1 : a; }},
      {"gelu_grad", [](double x, double) { return gelu_slope(x); }},
      {"smooth_l1_loss", [](double a, double b) {
         const double turn = 1 / (b * b);
         return a > turn ? a - 0.5 * turn : a < -turn ? -a - 0.5 * turn : 0.5 * a * a * b * b;
       }},
      {"smooth_l1_gradient", [](double a, double b) {
         const double turn = 1 / (b * b);
         return a > turn ? 1.0 : a < -turn ? -1.0 : a * b * b;
       }}};
  return all;
}

}  // namespace

UnaryFunction unary_function(const std::string& name) {
  if (name == "gelu") return gelu;
  auto found = unary().find(name);
  return found == unary().end() ? nullptr : found->second;
}
BinaryFunction binary_function(const std::string& name) {
  auto found = binary().find(name);
  return found == binary().end() ? nullptr : found->second;
}

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

void clip(const Launch& launch) {
  const Array out = launch.array(1), in = launch.array(2);
  for (ll i = 0; i < launch.integer(0); i++) out.set(i, clipped(in[i], launch.number(3), launch.number(4)));
}
void clip_grad(const Launch& launch) {
  const Array out = launch.array(1), gradient = launch.array(2), in = launch.array(3);
  const double low = launch.number(4), high = launch.number(5);
  for (ll i = 0; i < launch.integer(0); i++) out.set(i, in[i] > high || in[i] < low ? 0 : gradient[i]);
}

void where(const Launch& launch) {
  const int request = std::stoi(launch.kernel.args.at(0).args.at(0).id);
  const Array out = launch.array(1), condition = launch.array(2);
  for (ll i = 0; i < launch.integer(0); i++)
    out.assign(i, request, launch.array(condition[i] != 0 ? 3 : 4)[i]);
}
void where_backward(const Launch& launch) {
  const Name& of = launch.kernel.args.at(0);
  const bool negate = of.args.at(1).id == "true";
  const Array out = launch.array(1), gradient = launch.array(2), condition = launch.array(3);
  for (ll i = 0; i < launch.integer(0); i++)
    out.assign(i, std::stoi(of.args[0].id), (condition[i] == 0) != negate ? gradient[i] : 0);
}

void direct_copy(const Launch& launch) {  // direct_copy<OPERATION>(n, in, out, request)
  const UnaryFunction f = unary_function(launch.kernel.args.at(0).args.at(0).id);
  const Array in = launch.array(1), out = launch.array(2);
  if (!f) unknown("operation");
  for (ll i = 0; i < launch.integer(0); i++) out.assign(i, launch.value<int>(3), f(in[i]));
}

struct Broadcast { int in_stride[5], out_stride[5], input[5], output[5], axes[5], count; bool changed; };

void broadcast(const Launch& launch) {
  const UnaryFunction f = unary_function(launch.kernel.args.at(0).args.at(0).id);
  const Array in = launch.array(1), out = launch.array(2);
  const auto& shapes = launch.value<Broadcast>(3);
  const int dims = launch.value<int>(5);
  if (!f) unknown("operation");
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
  if (!f) unknown("operation");
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

void take(const Launch& launch) {  // TakeZeroAxisGPU<clip>(n, output, data, indices, row, rows)
  const bool clip = launch.kernel.args.at(0).args.at(0).id == "true";
  const Array out = launch.array(1), in = launch.array(2), indices = launch.array(3);
  const ll row = launch.integer(4), rows = launch.integer(5);
  for (ll i = 0; i < launch.integer(0); i++) {
    ll j = (ll)indices[i / row];
    j = clip ? std::min(std::max(j, 0LL), rows - 1) : ((j % rows) + rows) % rows;
    out.set(i, in[j * row + i % row]);
  }
}

void tcast_clip(const Launch& launch) {
  const Array out = launch.array(1), in = launch.array(2);
  for (ll i = 0; i < launch.integer(0); i++) out.set(i, clipped((double)(ll)in[i], 0, launch.number(3) - 1));
}
void range(const Launch& launch) {  // range_fwd(n, repeat, start, step, request, output)
  const Array out = launch.array(5);
  for (ll i = 0; i < launch.integer(0); i++)
    out.assign(i, launch.value<int>(4), launch.number(2) + double(i / launch.integer(1)) * launch.number(3));
}

const Family g_elementwise(generic_kernels(), {
    {"op_with_req", op_with_req}, {"Sum", sum}, {"clip", clip}, {"clip_grad", clip_grad}, {"where", where},
    {"where_backward", where_backward}, {"direct_copy", direct_copy}, {"broadcast_kernel_gpu", broadcast},
    {"binary_broadcast_kernel", binary_broadcast}, {"TakeZeroAxisGPU", take}, {"tcast_clip", tcast_clip},
    {"range_fwd", range}});

}  // namespace
