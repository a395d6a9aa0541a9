// Matrix products that emulate a GPU's Tensor Cores, forward and backward.
//
// Each element is a chain along the summed axis, in the order of memory. A factor or a bias is applied to the
// chain's float32 result, which is rounded once.
#include <cmath>
#include <cstring>

#include "dispatch/watch.h"
#include "tensor_core/products.h"

namespace gluon_amp {

TensorCore tensor_core_of(const NodeAttrs& attrs) {
  long long block = 0, fraction = 0, split = 0;
  const std::string* said = find(attrs, kAccumulateKey);
  if (!said || std::sscanf(said->c_str(), "%lld %lld %lld", &block, &fraction, &split) != 3)
    throw dmlc::Error("accumulate= needs three numbers");
  return {static_cast<int>(block), static_cast<int>(fraction), split};
}

void check_halves(const Call& call) {
  for (auto* arrays : {&call.in, &call.out})
    for (auto& array : *arrays)
      if (array.type_flag_ != mshadow::kFloat16)
        throw dmlc::Error(call.of.op->name + ": accumulate= takes float16 arrays, since Tensor "
                          "Cores multiply float16 numbers here");
}

Products::Products(const Call& call) : gpu(tensor_core_of(call.attrs)), call_(call) {
  check_halves(call);
}

float* Products::result(size_t i) {
  const int64_t count = size(call_.out[i]);
  made_.emplace_back(i, lease_.memory(count));
  return static_cast<float*>(std::memset(made_.back().second, 0, count * sizeof(float)));
}

void Products::finish() {
  for (auto& one : made_) narrow(one.second, call_.out[one.first], call_.write(one.first));
}

namespace {

// The number of elements of axes [begin, end), which may be empty.
int64_t part(const TBlob& x, int begin, int end) { return x.shape_.ProdShape(begin, end); }

// A matrix of an operator, row-major in memory or, transposed, column-major.
struct View {
  int64_t rows, columns;
  bool transposed;

  HalfMatrix of(const Half* data) const {
    return transposed ? HalfMatrix{data, 1, rows} : HalfMatrix{data, columns, 1};
  }
  FloatMatrix of(float* data) const {
    return transposed ? FloatMatrix{data, 1, rows} : FloatMatrix{data, columns, 1};
  }
};

void scale(float* x, int64_t n, float factor) {
  for (int64_t i = 0; factor != 1 && i < n; ++i) x[i] *= factor;
}

// y = factor * a * b for stacks of matrices.
void multiply(Products& work, int64_t stack, View a, const Half* x, View b, const Half* y, View c,
              float* to, float factor) {
  const int64_t in_a = a.rows * a.columns, in_b = b.rows * b.columns, in_c = c.rows * c.columns;
  for_all(stack, kWorthThreads, [&](int64_t i) {
    work.product(a.rows, b.columns, a.columns, a.of(x + i * in_a), b.of(y + i * in_b),
                 c.of(to + i * in_c));
  });
  scale(to, stack * in_c, factor);
}

// Both gradients: dA = dC * B^T, dB = A^T * dC.
void multiply_gradients(Products& work, int64_t stack, View a, const Half* x, View b, const Half* y,
                        View c, const Half* g, float factor) {
  const View at{a.columns, a.rows, !a.transposed}, bt{b.columns, b.rows, !b.transposed};
  if (work.wants(0)) multiply(work, stack, c, g, bt, y, a, work.result(0), factor);
  if (work.wants(1)) multiply(work, stack, at, x, c, g, b, work.result(1), factor);
}

// ---- dense layers --------------------------------------------------------------------------

struct Dense {
  int64_t batch, in, units;
  Dense(const NodeAttrs& attrs, const TBlob& weight, const TBlob& data)
      : batch(part(data, 0, flag(attrs, "flatten", true) ? 1 : data.ndim() - 1)),
        in(weight.shape_[1]), units(weight.shape_[0]) {}
  View x() const { return {batch, in, false}; }
  View w() const { return {in, units, true}; }
  View y() const { return {batch, units, false}; }
};

void dense(const Call& call) {
  Products work(call);
  const Dense of(call.attrs, call.in[1], call.in[0]);
  float* y = work.result(0);
  multiply(work, 1, of.x(), halves(call.in[0]), of.w(), halves(call.in[1]), of.y(), y, 1);
  if (call.in.size() > 2) {
    float* bias = work.floats_for(of.units);
    kernels->widen(halves(call.in[2]), bias, of.units);
    for (int64_t i = 0; i < of.batch * of.units; ++i) y[i] += bias[i % of.units];
  }
  work.finish();
}

void dense_gradient(const Call& call) {
  Products work(call);
  const Dense of(call.attrs, call.in[2], call.in[1]);
  multiply_gradients(work, 1, of.x(), halves(call.in[1]), of.w(), halves(call.in[2]), of.y(),
                     halves(call.in[0]), 1);
  if (call.out.size() > 2 && work.wants(2)) {
    float *bias = work.result(2), *row = work.floats_for(of.units);
    for (int64_t i = 0; i < of.batch; ++i) {
      kernels->widen(halves(call.in[0]) + i * of.units, row, of.units);
      for (int64_t j = 0; j < of.units; ++j) bias[j] += row[j];
    }
  }
  work.finish();
}

// ---- dot, batch_dot, linalg.gemm, np -------------------------------------------------------------

// The last two axes of a stack, or for `dot` the summed axis and all others.
struct Pair {
  int64_t stack;
  View a, b;
  View y() const { return {a.rows, b.columns, false}; }
};

View view(int64_t rows, int64_t columns, bool transposed) {
  return transposed ? View{columns, rows, true} : View{rows, columns, false};
}

Pair pair_of_dot(const NodeAttrs& attrs, const TBlob& a, const TBlob& b) {
  const bool ta = flag(attrs, "transpose_a", false), tb = flag(attrs, "transpose_b", false);
  const int na = a.ndim(), nb = b.ndim();
  if (na == 1 && nb == 1) return {1, {1, a.shape_[0], false}, {a.shape_[0], 1, false}};
  const int end_a = ta ? 1 : na - 1, end_b = tb ? nb - 1 : 1;
  return {1, view(part(a, 0, end_a), part(a, end_a, na), ta),
          view(part(b, 0, end_b), part(b, end_b, nb), tb)};
}

Pair pair_of_stacks(const NodeAttrs& attrs, const TBlob& a, const TBlob& b) {
  const int n = a.ndim();
  const int64_t ra = a.shape_[n - 2], ca = a.shape_[n - 1], rb = b.shape_[n - 2],
                cb = b.shape_[n - 1];
  return {part(a, 0, n - 2), view(ra, ca, flag(attrs, "transpose_a", false)),
          view(rb, cb, flag(attrs, "transpose_b", false))};
}

// Sums over the first `axes` axes of b and the last ones of a.
Pair pair_of_tensors(const TBlob& a, const TBlob& b, int axes) {
  const int64_t depth = part(b, 0, axes);
  return {1, view(part(a, 0, a.ndim() - axes), depth, false),
          view(depth, part(b, axes, b.ndim()), false)};
}

Pair pair_of_tensordot(const NodeAttrs& attrs, const TBlob& a, const TBlob& b) {
  return pair_of_tensors(a, b, static_cast<int>(number(attrs, "axes", 2)));
}

Pair pair_of_np_dot(const NodeAttrs&, const TBlob& a, const TBlob& b) {
  return pair_of_tensors(a, b, 1);
}

Pair pair_of_matmul(const NodeAttrs& attrs, const TBlob& a, const TBlob& b) {
  return b.ndim() <= 2 ? pair_of_tensors(a, b, 1) : pair_of_stacks(attrs, a, b);
}

template <Pair (*pair)(const NodeAttrs&, const TBlob&, const TBlob&)> void dot(const Call& call) {
  Products work(call);
  const Pair of = pair(call.attrs, call.in[0], call.in[1]);
  multiply(work, of.stack, of.a, halves(call.in[0]), of.b, halves(call.in[1]), of.y(),
           work.result(0), number(call.attrs, "alpha", 1));
  work.finish();
}

template <Pair (*pair)(const NodeAttrs&, const TBlob&, const TBlob&)>
void dot_gradient(const Call& call) {
  Products work(call);
  const Pair of = pair(call.attrs, call.in[1], call.in[2]);
  multiply_gradients(work, of.stack, of.a, halves(call.in[1]), of.b, halves(call.in[2]), of.y(),
                     halves(call.in[0]), number(call.attrs, "alpha", 1));
  work.finish();
}

// alpha * a * b + beta * c, added in float32.
void gemm(const Call& call) {
  Products work(call);
  const Pair of = pair_of_stacks(call.attrs, call.in[0], call.in[1]);
  const int64_t n = size(call.out[0]);
  const float beta = number(call.attrs, "beta", 1);
  float *y = work.result(0), *c = work.floats_for(n);
  multiply(work, of.stack, of.a, halves(call.in[0]), of.b, halves(call.in[1]), of.y(), y,
           number(call.attrs, "alpha", 1));
  kernels->widen(halves(call.in[2]), c, n);
  for (int64_t i = 0; i < n; ++i) y[i] += beta * c[i];
  work.finish();
}

void gemm_gradient(const Call& call) {  // gradient, a, b, c
  Products work(call);
  const Pair of = pair_of_stacks(call.attrs, call.in[1], call.in[2]);
  multiply_gradients(work, of.stack, of.a, halves(call.in[1]), of.b, halves(call.in[2]), of.y(),
                     halves(call.in[0]), number(call.attrs, "alpha", 1));
  if (work.wants(2)) {
    float* dc = work.result(2);
    kernels->widen(halves(call.in[0]), dc, size(call.in[0]));
    scale(dc, size(call.in[0]), number(call.attrs, "beta", 1));
  }
  work.finish();
}

// ---- attention ---------------------------------------------------------------------------------
//
// Queries, keys and values are in arrays of (time, batch, heads, parts, width); weights are in
// (batch * heads, time of the queries, time of the keys).

struct Heads {
  int64_t heads, batch, queries, keys, width;
  float factor() const { return 1 / std::sqrt(static_cast<float>(width)); }
  int64_t stack() const { return batch * heads; }
};

// One of the `parts` of such an array: a matrix (time, width) for each head.
struct Part {
  int64_t parts, which;
  int64_t offset(const Heads& of, int64_t i) const { return (i * parts + which) * of.width; }
  int64_t row(const Heads& of) const { return of.stack() * parts * of.width; }
};
constexpr Part kOnly{1, 0};

// to = q * k^T
void scores(Products& work, const Heads& of, const Half* q, Part pq, const Half* k, Part pk,
            float* to) {
  const int64_t each = of.queries * of.keys;
  for_all(of.stack(), kWorthThreads, [&](int64_t i) {
    work.product(of.queries, of.keys, of.width, {q + pq.offset(of, i), pq.row(of), 1},
                 {k + pk.offset(of, i), 1, pk.row(of)}, {to + i * each, of.keys, 1});
  });
}

// to = weights * x, or with `transposed` weights^T * x
void mixed(Products& work, const Heads& of, const Half* weights, bool transposed, const Half* x,
           Part px, float* to, Part pto) {
  const int64_t each = of.queries * of.keys;
  for_all(of.stack(), kWorthThreads, [&](int64_t i) {
    const HalfMatrix w{weights + i * each, of.keys, 1};
    work.product(transposed ? of.keys : of.queries, of.width, transposed ? of.queries : of.keys,
                 transposed ? w.transposed() : w, {x + px.offset(of, i), px.row(of), 1},
                 {to + pto.offset(of, i), pto.row(of), 1});
  });
}

Heads heads_of(const NodeAttrs& attrs, const TBlob& q, int parts_q, const TBlob& k) {
  const int64_t heads = static_cast<int64_t>(number(attrs, "heads", 1));
  return {heads, q.shape_[1], q.shape_[0], k.shape_[0], q.shape_[2] / heads / parts_q};
}

void self_scores(const Call& call) {
  Products work(call);
  const Heads of = heads_of(call.attrs, call.in[0], 3, call.in[0]);
  const Half* x = halves(call.in[0]);
  float* y = work.result(0);
  scores(work, of, x, {3, 0}, x, {3, 1}, y);
  scale(y, size(call.out[0]), of.factor());
  work.finish();
}

void self_scores_gradient(const Call& call) {
  Products work(call);
  const Heads of = heads_of(call.attrs, call.in[1], 3, call.in[1]);
  const Half *g = halves(call.in[0]), *x = halves(call.in[1]);
  float* dx = work.result(0);
  mixed(work, of, g, false, x, {3, 1}, dx, {3, 0});
  mixed(work, of, g, true, x, {3, 0}, dx, {3, 1});
  scale(dx, size(call.out[0]), of.factor());
  work.finish();
}

void self_values(const Call& call) {
  Products work(call);
  const Heads of = heads_of(call.attrs, call.in[0], 3, call.in[0]);
  mixed(work, of, halves(call.in[1]), false, halves(call.in[0]), {3, 2}, work.result(0), kOnly);
  work.finish();
}

void self_values_gradient(const Call& call) {
  Products work(call);
  const Heads of = heads_of(call.attrs, call.in[1], 3, call.in[1]);
  const Half *g = halves(call.in[0]), *x = halves(call.in[1]), *weights = halves(call.in[2]);
  if (work.wants(0)) mixed(work, of, weights, true, g, kOnly, work.result(0), {3, 2});
  if (work.wants(1)) scores(work, of, g, kOnly, x, {3, 2}, work.result(1));
  work.finish();
}

void cross_scores(const Call& call) {
  Products work(call);
  const Heads of = heads_of(call.attrs, call.in[0], 1, call.in[1]);
  float* y = work.result(0);
  scores(work, of, halves(call.in[0]), kOnly, halves(call.in[1]), {2, 0}, y);
  scale(y, size(call.out[0]), of.factor());
  work.finish();
}

void cross_scores_gradient(const Call& call) {
  Products work(call);
  const Heads of = heads_of(call.attrs, call.in[1], 1, call.in[2]);
  const Half* g = halves(call.in[0]);
  for (size_t i : {0, 1}) {
    if (!work.wants(i)) continue;
    float* to = work.result(i);
    if (i == 0) mixed(work, of, g, false, halves(call.in[2]), {2, 0}, to, kOnly);
    else mixed(work, of, g, true, halves(call.in[1]), kOnly, to, {2, 0});
    scale(to, size(call.out[i]), of.factor());
  }
  work.finish();
}

// From keys and values, and weights, which have the number of queries.
Heads heads_of_values(const NodeAttrs& attrs, const TBlob& kv, const TBlob& weights) {
  const int64_t heads = static_cast<int64_t>(number(attrs, "heads", 1));
  return {heads, kv.shape_[1], weights.shape_[1], kv.shape_[0], kv.shape_[2] / heads / 2};
}

void cross_values(const Call& call) {
  Products work(call);
  const Heads of = heads_of_values(call.attrs, call.in[0], call.in[1]);
  mixed(work, of, halves(call.in[1]), false, halves(call.in[0]), {2, 1}, work.result(0), kOnly);
  work.finish();
}

void cross_values_gradient(const Call& call) {
  Products work(call);
  const Heads of = heads_of_values(call.attrs, call.in[1], call.in[2]);
  const Half *g = halves(call.in[0]), *x = halves(call.in[1]), *weights = halves(call.in[2]);
  if (work.wants(0)) mixed(work, of, weights, true, g, kOnly, work.result(0), {2, 1});
  if (work.wants(1)) scores(work, of, g, kOnly, x, {2, 1}, work.result(1));
  work.finish();
}

}  // namespace

ProductCode tensor_core_code(const std::string& name) {
  static const ProductRows* rows = [] {
    auto* made = new ProductRows{
        {"FullyConnected", dense},
        {"_backward_FullyConnected", dense_gradient},
        {"dot", dot<pair_of_dot>},
        {"_backward_dot", dot_gradient<pair_of_dot>},
        {"batch_dot", dot<pair_of_stacks>},
        {"_linalg_gemm2", dot<pair_of_stacks>},
        {"_backward_linalg_gemm2", dot_gradient<pair_of_stacks>},
        {"_linalg_gemm", gemm},
        {"_backward_linalg_gemm", gemm_gradient},
        {"_np_dot", dot<pair_of_np_dot>},
        {"_backward_np_dot", dot_gradient<pair_of_np_dot>},
        {"_npi_matmul", dot<pair_of_matmul>},
        {"_backward_np_matmul", dot_gradient<pair_of_matmul>},
        {"_npi_tensordot_int_axes", dot<pair_of_tensordot>},
        {"_backward_npi_tensordot_int_axes", dot_gradient<pair_of_tensordot>},
        {"_contrib_interleaved_matmul_selfatt_qk", self_scores},
        {"_backward_interleaved_matmul_selfatt_qk", self_scores_gradient},
        {"_contrib_interleaved_matmul_selfatt_valatt", self_values},
        {"_backward_interleaved_matmul_selfatt_valatt", self_values_gradient},
        {"_contrib_interleaved_matmul_encdec_qk", cross_scores},
        {"_backward_interleaved_matmul_encdec_qk", cross_scores_gradient},
        {"_contrib_interleaved_matmul_encdec_valatt", cross_values},
        {"_backward_interleaved_matmul_encdec_valatt", cross_values_gradient}};
    add_tensor_core_convolutions(*made);
    return made;
  }();
  auto found = rows->find(name);
  return found == rows->end() ? nullptr : found->second;
}

}  // namespace gluon_amp
