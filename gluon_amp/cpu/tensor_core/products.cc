// Matrix products that emulate a GPU's Tensor Cores, forward and backward.
//
// Each element is a chain along the summed axis, in the order of memory. A factor or a bias is applied to the
// chain's float32 result, which is rounded once.
#include <cmath>
#include <cstring>

#include "dispatch/watch.h"
#include "tensor_core/emulation.h"

namespace gluon_amp {
namespace {

TensorCore tensor_core_of(const Call& call) {
  const ProductSettings& of = call.settings.products;
  return {of.block, of.fraction, of.split};
}

}  // namespace

TensorCoreProduct& tensor_core_product() {
  const std::string name = kernels->name;
  return name == "avx512" ? avx512_float16::tensor_core_product
         : name == "avx2" ? avx2_float16::tensor_core_product
                          : portable_float16::tensor_core_product;
}

Products::Products(const Call& call) : gpu_(tensor_core_of(call)), call_(call) {
  for (auto* arrays : {&call.in, &call.out})
    for (auto& array : *arrays)
      if (array.type_flag_ != mshadow::kFloat16)
        throw dmlc::Error(call.op.name() + ": accumulate= takes float16 arrays, since Tensor "
                          "Cores multiply float16 numbers here");
}

float* Products::result(size_t i) {
  float*& made = made_[i];
  const int64_t count = size(call_.out[i]);
  if (!made) made = static_cast<float*>(std::memset(scratch_.memory(count), 0, count * sizeof(float)));
  return made;
}

void Products::finish() {
  for (auto& one : made_) narrow(one.second, call_.out[one.first], call_.write(one.first));
}

namespace {

// A stack of matrices in an array: element (i, j) of matrix k is at first + k * step + i * row + j * column.
struct Stack {
  int64_t first, step, row, column;

  Stack transposed() const { return {first, step, column, row}; }
};

// y = factor * a * b for stacks of matrices: (rows, depth) times (depth, columns).
struct Contraction {
  int64_t stack, rows, depth, columns;
  Stack a, b, y;
  float factor = 1;

  // The gradients of a and b: dy * b^T and a^T * dy.
  Contraction gradient_of_a() const { return {stack, rows, columns, depth, y, b.transposed(), a, factor}; }
  Contraction gradient_of_b() const { return {stack, depth, rows, columns, a.transposed(), y, b, factor}; }

  void run(const Products& work, const Number16* x, const Number16* w, float* to) const {
    for_all(stack, kWorthThreads, [&](int64_t k) {
      work.product(rows, columns, depth, {x + a.first + k * a.step, a.row, a.column},
                   {w + b.first + k * b.step, b.row, b.column}, {to + y.first + k * y.step, y.row, y.column});
    });
  }
};

void scale(float* x, int64_t n, float factor) {
  for (int64_t i = 0; factor != 1 && i < n; ++i) x[i] *= factor;
}

// ---- contractions of operators: from their attributes and two factors -----------------------------

// The number of elements of axes [begin, end), which may be empty.
int64_t part(const TBlob& x, int begin, int end) { return x.shape_.ProdShape(begin, end); }

// Stacks of contiguous matrices; whether they are transposed in memory.
Contraction contiguous(int64_t stack, int64_t rows, int64_t depth, int64_t columns, bool a_transposed = false,
                       bool b_transposed = false, float factor = 1) {
  const Stack a{0, rows * depth, a_transposed ? 1 : depth, a_transposed ? rows : 1};
  const Stack b{0, depth * columns, b_transposed ? 1 : columns, b_transposed ? depth : 1};
  return {stack, rows, depth, columns, a, b, {0, rows * columns, columns, 1}, factor};
}

Contraction dense(const NodeAttrs& attrs, const TBlob& x, const TBlob& w) {
  const int64_t rows = part(x, 0, flag(attrs, "flatten", true) ? 1 : x.ndim() - 1);
  return contiguous(1, rows, w.shape_[1], w.shape_[0], false, true);
}

// The last two axes of a stack, or for `dot` the summed axis and all others.
Contraction dot(const NodeAttrs& attrs, const TBlob& a, const TBlob& b) {
  const bool ta = flag(attrs, "transpose_a", false), tb = flag(attrs, "transpose_b", false);
  const int na = a.ndim(), nb = b.ndim();
  if (na == 1 && nb == 1) return contiguous(1, 1, a.shape_[0], 1);
  const int end_a = ta ? 1 : na - 1, end_b = tb ? nb - 1 : 1;
  return contiguous(1, ta ? part(a, end_a, na) : part(a, 0, end_a), ta ? part(a, 0, end_a) : part(a, end_a, na),
                    tb ? part(b, 0, end_b) : part(b, end_b, nb), ta, tb);
}

Contraction stacks(const NodeAttrs& attrs, const TBlob& a, const TBlob& b) {
  const bool ta = flag(attrs, "transpose_a", false), tb = flag(attrs, "transpose_b", false);
  const int n = a.ndim();
  return contiguous(part(a, 0, n - 2), a.shape_[ta ? n - 1 : n - 2], a.shape_[ta ? n - 2 : n - 1],
                    b.shape_[tb ? n - 2 : n - 1], ta, tb, number(attrs, "alpha", 1));
}

// Sums over the first `axes` axes of b and the last ones of a.
Contraction tensors(const TBlob& a, const TBlob& b, int axes) {
  return contiguous(1, part(a, 0, a.ndim() - axes), part(b, 0, axes), part(b, axes, b.ndim()));
}
Contraction tensordot(const NodeAttrs& attrs, const TBlob& a, const TBlob& b) {
  return tensors(a, b, static_cast<int>(number(attrs, "axes", 2)));
}
Contraction np_dot(const NodeAttrs&, const TBlob& a, const TBlob& b) { return tensors(a, b, 1); }
Contraction matmul(const NodeAttrs& attrs, const TBlob& a, const TBlob& b) {
  return b.ndim() <= 2 ? tensors(a, b, 1) : stacks(attrs, a, b);
}

// Attention: queries, keys and values are in arrays of (time, batch, heads, parts, width); weights are in
// (batch * heads, time of the queries, time of the keys).
struct Heads {
  int64_t stack, width;

  // `time`: an array (time, batch, heads * parts * width).
  Heads(const NodeAttrs& attrs, const TBlob& time, int64_t parts) {
    const auto heads = static_cast<int64_t>(number(attrs, "heads", 1));
    stack = time.shape_[1] * heads;
    width = time.shape_[2] / heads / parts;
  }
  Stack part(int64_t parts, int64_t which) const {
    return {which * width, parts * width, stack * parts * width, 1};
  }
  // weights = q * k^T / sqrt(width)
  Contraction scores(int64_t queries, int64_t keys, Stack q, Stack k) const {
    return {stack, queries, width, keys, q, k.transposed(), {0, queries * keys, keys, 1},
            1 / std::sqrt(static_cast<float>(width))};
  }
  // y = weights * v
  Contraction values(int64_t queries, int64_t keys, Stack v) const {
    return {stack, queries, keys, width, {0, queries * keys, keys, 1}, v, part(1, 0)};
  }
};

Contraction self_scores(const NodeAttrs& attrs, const TBlob& x, const TBlob&) {
  const Heads of(attrs, x, 3);
  return of.scores(x.shape_[0], x.shape_[0], of.part(3, 0), of.part(3, 1));
}
Contraction self_values(const NodeAttrs& attrs, const TBlob&, const TBlob& x) {
  const Heads of(attrs, x, 3);
  return of.values(x.shape_[0], x.shape_[0], of.part(3, 2));
}
Contraction cross_scores(const NodeAttrs& attrs, const TBlob& q, const TBlob& kv) {
  const Heads of(attrs, q, 1);
  return of.scores(q.shape_[0], kv.shape_[0], of.part(1, 0), of.part(2, 0));
}
Contraction cross_values(const NodeAttrs& attrs, const TBlob& weights, const TBlob& kv) {
  const Heads of(attrs, kv, 2);
  return of.values(weights.shape_[1], kv.shape_[0], of.part(2, 1));
}

// ---- operators ---------------------------------------------------------------------------------
//
// `a` and `b`: the inputs that are the factors.

using Of = Contraction (*)(const NodeAttrs&, const TBlob& a, const TBlob& b);

template <Of of, size_t a = 0, size_t b = 1>
void multiply(Products& work, const Call& call) {
  const Contraction made = of(call.attrs, call.in[a], call.in[b]);
  made.run(work, numbers16(call.in[a]), numbers16(call.in[b]), work.result(0));
  scale(work.result(0), size(call.out[0]), made.factor);
}

// Reads the gradient of y, then the inputs.
template <Of of, size_t a = 0, size_t b = 1>
void multiply_back(Products& work, const Call& call) {
  const TBlob &x = call.in[1 + a], &w = call.in[1 + b];
  const Contraction made = of(call.attrs, x, w);
  const Number16* const g = numbers16(call.in[0]);
  if (work.wants(a)) made.gradient_of_a().run(work, g, numbers16(w), work.result(a));
  if (work.wants(b)) made.gradient_of_b().run(work, numbers16(x), g, work.result(b));
  if (work.wants(a)) scale(work.result(a), size(call.out[a]), made.factor);
  if (work.wants(b) && a != b) scale(work.result(b), size(call.out[b]), made.factor);
}

template <Of of, size_t a = 0, size_t b = 1>
void forward(const Call& call) {
  Products work(call);
  multiply<of, a, b>(work, call);
  work.finish();
}
template <Of of, size_t a = 0, size_t b = 1>
void backward(const Call& call) {
  Products work(call);
  multiply_back<of, a, b>(work, call);
  work.finish();
}

void dense_with_bias(const Call& call) {
  Products work(call);
  multiply<dense>(work, call);
  if (call.in.size() > 2) {
    const int64_t units = size(call.in[2]);
    float *bias = work.floats_for(units), *y = work.result(0);
    float16_kernels->widen(numbers16(call.in[2]), bias, units);
    for (int64_t i = 0; i < size(call.out[0]); ++i) y[i] += bias[i % units];
  }
  work.finish();
}

void dense_with_bias_back(const Call& call) {
  Products work(call);
  multiply_back<dense>(work, call);
  if (call.out.size() > 2 && work.wants(2)) {
    const int64_t units = size(call.out[2]);
    float *bias = work.result(2), *row = work.floats_for(units);
    for (int64_t first = 0; first < size(call.in[0]); first += units) {
      float16_kernels->widen(numbers16(call.in[0]) + first, row, units);
      for (int64_t j = 0; j < units; ++j) bias[j] += row[j];
    }
  }
  work.finish();
}

// alpha * a * b + beta * c, added in float32.
void gemm(const Call& call) {
  Products work(call);
  multiply<stacks>(work, call);
  const int64_t n = size(call.out[0]);
  const float beta = number(call.attrs, "beta", 1);
  float *y = work.result(0), *c = work.floats_for(n);
  float16_kernels->widen(numbers16(call.in[2]), c, n);
  for (int64_t i = 0; i < n; ++i) y[i] += beta * c[i];
  work.finish();
}

void gemm_back(const Call& call) {
  Products work(call);
  multiply_back<stacks>(work, call);
  if (work.wants(2)) {
    float16_kernels->widen(numbers16(call.in[0]), work.result(2), size(call.in[0]));
    scale(work.result(2), size(call.in[0]), number(call.attrs, "beta", 1));
  }
  work.finish();
}

// Float16 numbers are exact in the factors, which an RNN has rounded.
void multiply_float16(const Call& call, int64_t rows, int64_t columns, int64_t depth, const RowsOrColumns& a,
                     const RowsOrColumns& b, float* y) {
  Products work(call);
  const auto narrowed = [&](const RowsOrColumns& from, int64_t high, int64_t wide) {
    Number16* const made = work.numbers16(high * wide);
    float16_kernels->narrow(from.data, made, high * wide, kStore);
    return from.transposed ? Matrix16{made, 1, high} : Matrix16{made, wide, 1};
  };
  work.product(rows, columns, depth, narrowed(a, rows, depth), narrowed(b, depth, columns), {y, columns, 1});
}

}  // namespace

void add_tensor_core_products(Emulation& to) {
  to.multiply = multiply_float16;
  to.products.insert({
      {"FullyConnected", dense_with_bias}, {"_backward_FullyConnected", dense_with_bias_back},
      {"dot", forward<dot>}, {"_backward_dot", backward<dot>},
      {"batch_dot", forward<stacks>},
      {"_linalg_gemm2", forward<stacks>}, {"_backward_linalg_gemm2", backward<stacks>},
      {"_linalg_gemm", gemm}, {"_backward_linalg_gemm", gemm_back},
      {"_np_dot", forward<np_dot>}, {"_backward_np_dot", backward<np_dot>},
      {"_npi_matmul", forward<matmul>}, {"_backward_np_matmul", backward<matmul>},
      {"_npi_tensordot_int_axes", forward<tensordot>}, {"_backward_npi_tensordot_int_axes", backward<tensordot>},
      {"_contrib_interleaved_matmul_selfatt_qk", forward<self_scores, 0, 0>},
      {"_backward_interleaved_matmul_selfatt_qk", backward<self_scores, 0, 0>},
      {"_contrib_interleaved_matmul_selfatt_valatt", forward<self_values, 1, 0>},
      {"_backward_interleaved_matmul_selfatt_valatt", backward<self_values, 1, 0>},
      {"_contrib_interleaved_matmul_encdec_qk", forward<cross_scores>},
      {"_backward_interleaved_matmul_encdec_qk", backward<cross_scores>},
      {"_contrib_interleaved_matmul_encdec_valatt", forward<cross_values, 1, 0>},
      {"_backward_interleaved_matmul_encdec_valatt", backward<cross_values, 1, 0>}});
}

}  // namespace gluon_amp
