// Operators that move values and have code of their own: copies, casts, splits, concatenations.
#include <cstring>

#include "own.h"

namespace gluon_amp {
namespace {

// The input to each of the outputs: the gradient of an addition.
bool copies(const Call& call) {
  if (!all_half(call)) return false;
  const Half* from = halves(call.in[0]);
  // an output in the input's place is written last
  for (bool in_place : {false, true})
    for (size_t i = 0; i < call.out.size(); ++i) {
      Half* to = halves(call.out[i]);
      if ((to == from) != in_place) continue;
      if (call.write(i) == kStore && !in_place)
        kernels->copy(from, to, size(call.out[i]) * sizeof(Half));
      if (call.write(i) == kAdd) kernels->sum(&from, 1, to, size(call.out[i]), kAdd);
    }
  return true;
}

bool cast(const Call& call) {
  const TBlob &from = call.in[0], &to = call.out[0];
  if (call.rounding.grid != kFloat16Grid) return false;
  if (is_half(from) && is_float(to) && call.write(0) == kStore)
    kernels->widen(halves(from), floats(to), size(to));
  else if (is_float(from) && is_half(to))
    kernels->narrow(floats(from), halves(to), size(to), call.write(0));
  else
    return call.write(0) == kNothing;
  return true;
}

// MXNet's own code only moves values; it does so with halves, too.
bool as_it_is(const Call& call) {
  std::vector<OpReqType> req = call.req;
  for (size_t i = 0; i < call.out.size(); ++i) {
    if (req[i] == mxnet::kWriteInplace) req[i] = mxnet::kWriteTo;
    if (!is_half(call.out[i])) return false;
    for (auto& from : call.in)
      if (from.dptr_ == call.out[i].dptr_) return false;
  }
  call.of.compute(call.attrs, call.context, call.in, req, call.out);
  return true;
}

// Rows from one place to another; steps: from one row to the next.
template <class T>
void copy_rows(const T* from, int64_t from_step, T* to, int64_t to_step, int64_t rows,
               int64_t width, Write write) {
  if (write == kNothing || from == to) return;
#pragma omp parallel for schedule(static) if (rows * width >= 32768)
  for (int64_t i = 0; i < rows; ++i) {
    const T* x = from + i * from_step;
    T* y = to + i * to_step;
    if (write == kStore) std::memcpy(y, x, width * sizeof(T));
    else if constexpr (sizeof(T) == sizeof(Half)) kernels->sum(&x, 1, y, width, kAdd);
    else for (int64_t k = 0; k < width; ++k) y[k] += x[k];
  }
}

// How many rows a concatenation consists of: the product of the sizes before its axis.
int64_t rows_of(const Call& call, const char* key, const mxnet::TShape& whole) {
  int axis = static_cast<int>(number(call.attrs, key, 1));
  if (axis < 0) axis += whole.ndim();
  int64_t rows = 1;
  for (int i = 0; i < axis; ++i) rows *= whole[i];
  return rows;
}

// All inputs side by side in the one output: a concatenation, or the gradient of a split.
template <class T>
void join(const Call& call, int64_t rows) {
  const int64_t step = size(call.out[0]) / rows;
  T* to = static_cast<T*>(call.out[0].dptr_);
  for (auto& part : call.in) {
    const int64_t width = size(part) / rows;
    copy_rows(static_cast<const T*>(part.dptr_), width, to, step, rows, width, call.write(0));
    to += width;
  }
}

// The first input in pieces, one for each output: a split, or the gradient of a concatenation.
template <class T>
void part(const Call& call, int64_t rows) {
  const int64_t step = size(call.in[0]) / rows;
  const T* from = static_cast<const T*>(call.in[0].dptr_);
  for (size_t i = 0; i < call.out.size(); ++i) {
    const int64_t width = size(call.out[i]) / rows;
    copy_rows(from, step, static_cast<T*>(call.out[i].dptr_), width, rows, width, call.write(i));
    from += width;
  }
}

// Arrays are of halves or, on another grid, of floats, all of them.
bool in_rows(const Call& call, const TBlob& whole, const char* axis, void (*halves_code)(const Call&, int64_t),
             void (*floats_code)(const Call&, int64_t)) {
  if (size(whole) == 0) return true;
  (is_half(whole) ? halves_code : floats_code)(call, rows_of(call, axis, whole.shape_));
  for (size_t i = 0; i < call.out.size(); ++i)
    if (call.rounding.rounds_output(i, call.out[i]) && call.write(i) != kNothing)
      kernels->round(call.rounding.grid, floats(call.out[i]), floats(call.out[i]),
                     size(call.out[i]), kStore);
  return true;
}

bool joins(const Call& call, const char* axis) {
  return in_rows(call, call.out[0], axis, join<Half>, join<float>);
}
bool parts(const Call& call, const char* axis) {
  return in_rows(call, call.in[0], axis, part<Half>, part<float>);
}

bool concat(const Call& call) { return all_half(call) && joins(call, "dim"); }
bool concat_gradient(const Call& call) {  // the gradient, and the inputs, which are not read
  return is_half(call.in[0]) && parts(call, "dim");
}
bool split(const Call& call) { return parts(call, "axis"); }
bool split_gradient(const Call& call) { return joins(call, "axis"); }

}  // namespace

void add_copies(Rows& rows) {
  rows.insert({
      {"_backward_add", {copies, 1}}, {"_copy", {copies, 1}}, {"_backward_copy", {copies, 1}},
      {"_backward_reshape", {copies, 1}}, {"Cast", {cast, 0}}, {"_backward_cast", {cast, 0}},
      {"amp_cast", {cast, 0}}, {"_backward_amp_cast", {cast, 0}}, {"Embedding", {as_it_is, 0}},
      {"take", {as_it_is, 0}}, {"transpose", {as_it_is, 0}}, {"slice", {as_it_is, 0}},
      {"slice_axis", {as_it_is, 0}}, {"stack", {as_it_is, 0}}, {"tile", {as_it_is, 0}},
      {"SliceChannel", {split, 0}}, {"_backward_SliceChannel", {split_gradient, 0}},
      {"Concat", {concat, 0}}, {"_backward_Concat", {concat_gradient, 0}}});
}

}  // namespace gluon_amp
