// Reductions, softmax, layer norms, biases, embeddings, sorting and transposes.
#include <string.h>

#include <algorithm>
#include <numeric>

#include "compute.h"

namespace {

// ---- sums over axes (broadcast::reduce_kernel)

using Shape = const int*;

ll ravel(const std::vector<ll>& at, Shape shape) {  // axes of length 1 are broadcast
  ll made = 0;
  for (size_t d = 0; d < at.size(); d++) made = made * shape[d] + (at[d] < shape[d] ? at[d] : 0);
  return made;
}
std::vector<ll> unravel(ll i, Shape shape, int dims) {
  std::vector<ll> at(dims);
  for (int d = dims - 1; d >= 0; d--) {
    at[d] = i % shape[d];
    i /= shape[d];
  }
  return at;
}
ll unravel_dot(ll i, Shape shape, Shape stride, int dims) {
  ll made = 0;
  for (int d = dims - 1; d >= 0; d--) {
    made += i % shape[d] * stride[d];
    i /= shape[d];
  }
  return made;
}

struct Reducer {  // red::sum with Kahan summation, as in MXNet; maximum, minimum, product
  std::string id;
  Type type;  // of the accumulator
  double total, rest = 0;
  Reducer(const std::string& name, Type t) : id(name), type(t) {
    total = id == "product" ? 1 : id == "maximum" ? -INFINITY : id == "minimum" ? INFINITY : 0;
    static const std::string known[] = {"sum", "product", "maximum", "minimum", "nansum", "nrm2"};
    if (std::find(std::begin(known), std::end(known), id) == std::end(known)) unknown("reducer " + id);
  }
  double result() const { return id == "nrm2" ? sqrt(total) : total; }
  void add(double value) {
    const Array in{type, nullptr};
    if (id == "maximum") total = std::max(total, value);
    else if (id == "minimum") total = std::min(total, value);
    else if (id == "product") total = in.rounded(total * value);
    else if (id == "nrm2") total += value * value;
    else if (id != "nansum" || value == value) {
      const double y = in.rounded(value - rest), t = in.rounded(total + y);
      rest = std::isinf(t) ? 0 : in.rounded(in.rounded(t - total) - y);
      total = t;
    }
  }
};

// reduce_kernel<REDUCER, dims, ADDED, IN, OUT, OP, unroll>, or <REDUCER, dims, TYPE, OP1, OP2, unroll> of big, lhs
// and rhs; the same with _M1, without a reduction
void reduce(const Launch& launch) {
  const bool single = launch.kernel.id == "reduce_kernel_M1";
  const auto& t = launch.kernel.args;
  const int dims = std::stoi(t.at(1).id);
  const bool three = !is_type(t.at(3));
  const Type sums = type_of(t.at(2));
  size_t p = 0;
  const ll n = launch.integer(p++), m = single ? 1 : launch.integer(p++);
  const bool add = launch.value<bool>(p++);
  const Array big = launch.array(p++);
  const Array left = three ? launch.array(p++) : big, right = three ? launch.array(p++) : big;
  const Array out = launch.array(p++);
  const auto shape = [&](size_t i) { return &launch.value<int>(i); };
  const UnaryFunction one = three ? nullptr : unary_function(t.at(5).id);
  const BinaryFunction outer = three ? binary_function(t.at(3).id) : nullptr, inner = three ? binary_function(t.at(4).id) : nullptr;
  const Shape big0 = shape(p++), left0 = three ? shape(p++) : nullptr, right0 = three ? shape(p++) : nullptr;
  const Shape small = shape(p++);
  Shape shapes[3] = {}, strides[3] = {};
  for (int k = 0; !single && k < (three ? 3 : 1); k++) shapes[k] = shape(p++);
  for (int k = 0; !single && k < (three ? 3 : 1); k++) strides[k] = shape(p++);
  const ll pieces = single ? 1 : launch.integer(p);
  for (ll piece = 0; piece < pieces; piece++)
    for (ll i = 0; i < n; i++) {
      const auto at = unravel(i, small, dims);
      Reducer total(t.at(0).id, sums);
      for (ll k = m * piece / pieces; k < m * (piece + 1) / pieces; k++) {
        const auto place = [&](int which, Shape first) {
          return ravel(at, first) + (single ? 0 : unravel_dot(k, shapes[which], strides[which], dims));
        };
        const double value = big[place(0, big0)];
        total.add(three ? big.rounded(outer(value, big.rounded(inner(left[place(1, left0)], right[place(2, right0)]))))
                        : big.rounded(one(value)));
      }
      const ll to = i + piece * n;
      out.set(to, add ? out[to] + out.rounded(total.result()) : total.result());
    }
}
// ---- softmax. Elements of a row start at `base`, `step` apart; those beyond `length` are 0.

struct Row { ll base, step, length, m; double temperature; };

// Kernels of the last axis: (..., length, m, temperature, rows of a block, rows); of others: (..., length, m, axis,
// shape, strides, temperature) with a block for each row, whose shape has 1 at the axis.
template <class F> void each_row(const Launch& launch, size_t first, int dims, F f) {
  const ll m = launch.integer(first);
  const bool given = *(void**)launch.args[first - 1];
  const auto length = [&](ll row) { return given ? (ll)launch.array(first - 1)[row] : m; };
  if (!dims) {
    for (ll row = 0; row < launch.integer(first + 3); row++) f({row * m, 1, length(row), m, launch.number(first + 1)});
    return;
  }
  const Shape shape = &launch.value<int>(first + 2), stride = &launch.value<int>(first + 3);
  const ll step = stride[launch.integer(first + 1)];
  for (ll row = 0; row < launch.grid[0]; row++)
    f({unravel_dot(row, shape, stride, dims), step, length(row), m, launch.number(first + 4)});
}

int dims_of(const Launch& launch, size_t shape) {  // dimensions of the shape parameter, 0 without one
  return launch.types.size() > shape && launch.types[shape].id == "Shape" ? std::stoi(launch.types[shape].args.at(0).id) : 0;
}

void softmax_rows(const Launch& launch, const Name& op, const Name& negate) {  // (in, out, ...)
  const Array in = launch.array(0), out = launch.array(1);
  const bool log = op.id == "log_softmax_fwd";
  const double sign = negate.id == "true" ? -1 : 1;
  each_row(launch, 3, dims_of(launch, 5), [&](const Row& row) {
    const auto place = [&](ll i) { return row.base + i * row.step; };
    soft_max(row.length, log, [&](ll i) { return sign * in[place(i)] / row.temperature; },
             [&](ll i, double value) { out.set(place(i), value); });
    for (ll i = row.length; i < row.m; i++) out.set(place(i), 0);
  });
}
void softmax_rows_grad(const Launch& launch, const Name& op, const Name& request, const Name& negate) {
  const Array out = launch.array(0), gradient = launch.array(1), to = launch.array(2);
  const bool log = op.id == "log_softmax_bwd";
  const double sign = negate.id == "true" ? -1 : 1;
  each_row(launch, 4, dims_of(launch, 6), [&](const Row& row) {
    const auto place = [&](ll i) { return row.base + i * row.step; };
    const auto put = [&](ll i, double value) {
      to.assign(place(i), std::stoi(request.id), sign * value / row.temperature);
    };
    soft_max_gradient(row.length, log, [&](ll i) { return out[place(i)]; },
                      [&](ll i) { return gradient[place(i)]; }, put);
    for (ll i = row.length; i < row.m; i++) put(i, 0);
  });
}
void softmax(const Launch& launch) { softmax_rows(launch, launch.kernel.args.at(0), launch.kernel.args.at(1)); }
void softmax_axis(const Launch& launch) { softmax_rows(launch, launch.kernel.args.at(1), launch.kernel.args.at(2)); }
void softmax_grad(const Launch& launch) {
  const auto& t = launch.kernel.args;
  softmax_rows_grad(launch, t.at(1), t.at(2), t.at(3));
}
void softmax_axis_grad(const Launch& launch) {
  const auto& t = launch.kernel.args;
  softmax_rows_grad(launch, t.at(2), t.at(3), t.at(4));
}

// ---- layer norms

void layer_norm(const Launch& launch) {
  const ll rows = launch.integer(0), m = launch.integer(1);
  const Array in = launch.array(3), gamma = launch.array(4), beta = launch.array(5), out = launch.array(6);
  for (ll row = 0; row < rows; row++) {
    double mean = 0, variance = 0;
    for (ll i = 0; i < m; i++) mean += in[row * m + i] / m;
    for (ll i = 0; i < m; i++) variance += (in[row * m + i] - mean) * (in[row * m + i] - mean) / m;
    const double deviation = sqrt(variance + launch.number(2));
    for (ll i = 0; i < m; i++) {
      double value = out.rounded((in[row * m + i] - mean) / deviation);
      if (gamma.data) value = out.rounded(value * gamma[i]);
      out.set(row * m + i, beta.data ? value + beta[i] : value);
    }
    launch.array(7).set(row, mean);
    launch.array(8).set(row, deviation);
  }
}
void layer_norm_parts(const Launch& launch) {  // sums of gamma's and beta's gradients, by parts of the rows
  const ll rows = launch.integer(0), m = launch.integer(1), parts = launch.grid[1];
  const Array in = launch.array(2), gradient = launch.array(3), mean = launch.array(4), deviation = launch.array(5);
  const ll some = (rows + parts - 1) / parts;
  for (ll part = 0; part < parts; part++)
    for (ll i = 0; i < m; i++) {
      double gamma = 0, beta = 0;
      for (ll row = part * some; row < std::min(rows, (part + 1) * some); row++) {
        gamma += (in[row * m + i] - mean[row]) / deviation[row] * gradient[row * m + i];
        beta += gradient[row * m + i];
      }
      launch.array(6).set(part * m + i, gamma);
      launch.array(7).set(part * m + i, beta);
    }
}
void layer_norm_gamma(const Launch& launch) {  // <add to gamma, add to beta, ...>
  const ll m = launch.integer(1), parts = launch.integer(2);
  for (int k = 0; k < 2; k++) {
    const Array from = launch.array(3 + k), to = launch.array(5 + k);
    const bool add = launch.kernel.args.at(k).id == "true";
    for (ll i = 0; to.data && i < m; i++) {
      double total = 0;
      for (ll part = 0; part < parts; part++) total += from[part * m + i];
      to.set(i, add ? to[i] + to.rounded(total) : total);
    }
  }
}
void layer_norm_data(const Launch& launch) {  // <unroll, add, ...>
  const ll rows = launch.integer(0), m = launch.integer(1);
  const Array in = launch.array(2), gradient = launch.array(3), mean = launch.array(4), deviation = launch.array(5),
              gamma = launch.array(6), to = launch.array(7);
  const int request = launch.kernel.args.at(1).id == "true" ? 3 : 1;
  for (ll row = 0; row < rows; row++) {
    const auto scaled = [&](ll i) { return gradient[row * m + i] * (gamma.data ? gamma[i] : 1) / deviation[row]; };
    const auto normal = [&](ll i) { return (in[row * m + i] - mean[row]) / deviation[row]; };
    double first = 0, second = 0;
    for (ll i = 0; i < m; i++) {
      first += scaled(i) / m;
      second += scaled(i) * normal(i) / m;
    }
    for (ll i = 0; i < m; i++) to.assign(row * m + i, request, scaled(i) - first - normal(i) * second);
  }
}

// ---- biases of dense layers

void add_bias(const Launch& launch) {
  const Array y = launch.array(0), bias = launch.array(1);
  const ll n = launch.integer(3);
  for (ll i = 0; i < launch.integer(2) * n; i++) y.set(i, y[i] + bias[i % n]);
}
void bias_phase1(const Launch& launch) {  // partial sums: a line for each block of rows
  const Array to = launch.array(0), gradient = launch.array(1);
  const ll n = launch.integer(2), rows = launch.integer(3), blocks = launch.grid[1];
  const ll some = (rows + blocks - 1) / blocks;
  for (ll block = 0; block < blocks; block++)
    for (ll i = 0; i < n; i++) {
      double total = 0;
      for (ll row = block * some; row < std::min(rows, (block + 1) * some); row++) total += gradient[row * n + i];
      to.set(block * n + i, total);
    }
}
void bias_phase2(const Launch& launch) {
  const Array from = launch.array(0), to = launch.array(1);
  const ll n = launch.integer(2);
  for (ll i = 0; i < n; i++) {
    double total = 0;
    for (ll block = 0; block < launch.integer(3); block++) total += from[block * n + i];
    to.assign(i, launch.value<int>(4), total);
  }
}

// ---- embeddings

void sort_pairs(const Launch& launch) {  // <policy, descending, ...>(keys, to, values, to, n, first bit, last bit)
  const Array keys = launch.array(0), values = launch.array(2);
  const bool descending = launch.kernel.args.at(1).id == "true";
  std::vector<ll> order(launch.integer(4));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](ll a, ll b) { return descending ? keys[a] > keys[b] : keys[a] < keys[b]; });
  std::vector<double> sorted_keys, sorted_values;  // the outputs may be the inputs
  for (ll i : order) {
    sorted_keys.push_back(keys[i]);
    sorted_values.push_back(values[i]);
  }
  for (size_t i = 0; i < order.size(); i++) {
    launch.array(1).set(i, sorted_keys[i]);
    launch.array(3).set(i, sorted_values[i]);
  }
}
// PartialSortSmallK(k, n, values, indices, ascending): the first k of each row become its largest, or smallest
void partial_sort(const Launch& launch) {
  const ll k = launch.integer(0), n = launch.integer(1);
  const Array values = launch.array(2), indices = launch.array(3);
  const bool ascending = launch.value<bool>(4);
  for (ll row = 0; row < launch.grid[0]; row++) {
    std::vector<std::pair<double, double>> all;
    for (ll i = row * n; i < (row + 1) * n; i++) all.push_back({values[i], indices[i]});
    std::stable_sort(all.begin(), all.end(),
                     [&](auto& a, auto& b) { return ascending ? a.first < b.first : a.first > b.first; });
    for (ll i = 0; i < k; i++) {
      values.set(row * n + i, all[i].first);
      indices.set(row * n + i, all[i].second);
    }
  }
}
void find_bounds(const Launch& launch) {
  const Array sorted = launch.array(0), bounds = launch.array(1);
  const ll n = launch.integer(2), rows = launch.integer(3);
  for (ll row = 0; row < rows; row++) {
    ll first = -1, last = -2;
    for (ll i = 0; i < n; i++)
      if (sorted[i] == row) {
        first = first < 0 ? i : first;
        last = i;
      }
    bounds.set(row, first);
    bounds.set(rows + row, last);
  }
}
void embedding_grad(const Launch& launch) {
  const Array to = launch.array(0), order = launch.array(1), bounds = launch.array(2), gradient = launch.array(3);
  const ll width = launch.integer(4), rows = launch.integer(5);
  for (ll row = 0; row < rows; row++)
    for (ll i = 0; i < width; i++) {
      double total = launch.integer(6) == 3 ? to[row * width + i] : 0;
      for (ll k = (ll)bounds[row]; k <= (ll)bounds[rows + row]; k++)
        total = to.rounded(total + gradient[(ll)order[k] * width + i]);
      to.set(row * width + i, total);
    }
}

// transpose_pseudo2D<TYPE, LOADED, add>(out, in, m, n, ...): (k, m, n) to (k, n, m); k is from the grid
void transpose(const Launch& launch) {
  const Array out = launch.array(0), in = launch.array(1);
  const ll m = launch.integer(2), n = launch.integer(3), k = launch.grid[2] * launch.integer(5);
  const int request = launch.kernel.args.at(2).id == "true" ? 3 : 1;
  for (ll b = 0; b < k; b++)
    for (ll i = 0; i < m; i++)
      for (ll j = 0; j < n; j++) out.assign((b * n + j) * m + i, request, in[(b * m + i) * n + j]);
}

// slice_assign_scalar<DIMS>(rows, out, value, request, shape, shape of the slice, begin, step)
void slice_assign_scalar(const Launch& launch) {
  const int dims = std::stoi(launch.kernel.args.at(0).args.at(0).id);
  const Array out = launch.array(1);
  const Shape shape = &launch.value<int>(4), slice = &launch.value<int>(5), begin = &launch.value<int>(6),
              step = &launch.value<int>(7);
  for (ll i = 0; i < launch.integer(0) * slice[dims - 1]; i++) {
    const auto at = unravel(i, slice, dims);
    ll to = 0;
    for (int d = 0; d < dims; d++) to = to * shape[d] + at[d] * step[d] + begin[d];
    out.assign(to, launch.value<int>(3), launch.number(2));
  }
}

// pick<DIMS, clip>(n, out, in, indices, length, stride, shape, shape of the indices), and its gradient
template <bool gradient> void pick(const Launch& launch) {
  const auto& t = launch.kernel.args.at(0).args;
  const Array out = launch.array(1), in = launch.array(2), indices = launch.array(3);
  const ll m = launch.integer(4);
  for (ll i = 0; i < launch.integer(0); i++) {
    ll j = (ll)indices[i];
    j = t.at(1).id == "true" ? std::min(std::max(j, 0LL), m - 1) : ((j % m) + m) % m;
    j = ravel(unravel(i, &launch.value<int>(7), std::stoi(t.at(0).id)), &launch.value<int>(6)) + j * launch.integer(5);
    if (gradient) out.set(j, out[j] + in[i]);
    else out.set(i, in[j]);
  }
}

const Family g_reductions(kernels(), {
    {"reduce_kernel", reduce}, {"reduce_kernel_M1", reduce}, {"softmax_stride1_compute_kernel", softmax},
    {"softmax_stride1_grad_kernel", softmax_grad}, {"softmax_compute_kernel", softmax_axis},
    {"softmax_grad_kernel", softmax_axis_grad},
    {"LayerNormFusedForwardKernelContig", layer_norm}, {"LayerNormFusedBackwardKernel_PartGammaBeta", layer_norm_parts},
    {"LayerNormFusedBackwardKernel_GammaBeta", layer_norm_gamma}, {"LayerNormFusedBackwardKernel_Data", layer_norm_data},
    {"add_bias_kernel", add_bias}, {"AddBiasGradKernelPhase1", bias_phase1}, {"AddBiasGradKernelPhase2", bias_phase2},
    {"DeviceRadixSortSingleTileKernel", sort_pairs}, {"PartialSortSmallK", partial_sort}, {"EmbeddingFindBounds", find_bounds},
    {"EmbeddingGradKernel", embedding_grad}, {"transpose_pseudo2D", transpose}});
const Family g_slices(generic_kernels(), {
    {"slice_assign_scalar", slice_assign_scalar}, {"pick", pick<false>}, {"pick_grad", pick<true>}});

}  // namespace
