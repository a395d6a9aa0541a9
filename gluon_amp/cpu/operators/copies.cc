// Hand-written kernels that copy values: copies, casts, splits, concatenations.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "operators/table.h"

namespace gluon_amp {
namespace {

// Copies the input to each output: the gradient of an addition.
bool copies(const Call& call) {
  if (!all_16bit(call)) return false;
  const void* from = call.in[0].dptr_;
  // an output that shares memory with the input is written last
  for (bool in_place : {false, true})
    for (size_t i = 0; i < call.out.size(); ++i)
      if ((call.out[i].dptr_ == from) == in_place) put(from, call.out[i], call.write(i));
  return true;
}

bool cast(const Call& call) {
  const TBlob &from = call.in[0], &to = call.out[0];
  if (is_16bit(from) && is_float(to) && call.write(0) == kStore)
    widen(from, floats(to));
  else if (is_float(from) && is_16bit(to) && call.write(0) != kNothing)
    narrow(floats(from), to, call.write(0));
  else
    return call.write(0) == kNothing;
  return true;
}

// The index of the input with indices, whose values MXNet's code reads.
size_t place_of_indices(const Operator& op) {
  const std::string& name = op.name();
  return name == "Embedding" ? 0 : name == "take" || name == "gather_nd" ? 1 : size_t(-1);
}

// Runs MXNet's code on 16-bit numbers, for operators that only copy values. Some of that code is wrong for bfloat16,
// so bfloat16 arrays are passed as float16.
bool as_it_is(const Call& call) {
  std::vector<OpReqType> req = call.req;
  for (size_t i = 0; i < call.out.size(); ++i) {
    if (req[i] == mxnet::kWriteInplace) req[i] = mxnet::kWriteTo;
    if (!is_16bit(call.out[i]) || req[i] == mxnet::kAddTo) return false;  // not all of it supports kAddTo
    for (auto& from : call.in)
      if (from.dptr_ == call.out[i].dptr_) return false;
  }
  const auto moved = [](TBlob array) {
    if (is_16bit(array)) array.type_flag_ = mshadow::kFloat16;
    return array;
  };
  Scratch scratch;
  std::vector<TBlob> in, out;
  for (const TBlob& from : call.in) {
    in.push_back(moved(from));
    if (in.size() - 1 != place_of_indices(call.op) || from.type_flag_ != mshadow::kBfloat16) continue;
    in.back() = scratch.array(from.shape_).data();
    widen(from, floats(in.back()));
  }
  for (const TBlob& to : call.out) out.push_back(moved(to));
  call.op.compute(call.attrs, call.context, in, req, out);
  return true;
}

// An axis of the result of a transpose: source_memory size, and source_memory strides before and after.
struct Axis {
  int64_t size, from, to;
};

// The axes of a transpose; axes that stay adjacent are merged.
std::vector<Axis> transposed_axes(const mxnet::TShape& shape, const std::vector<int64_t>& order) {
  std::vector<int64_t> step(shape.ndim(), 1);
  for (int i = shape.ndim() - 1; i-- > 0;) step[i] = step[i + 1] * shape[i + 1];
  std::vector<Axis> axes;
  for (int64_t i : order) {
    const int64_t size = shape[i];
    if (!axes.empty() && axes.back().from == step[i] * size)
      axes.back() = {axes.back().size * size, step[i], 0};
    else if (size != 1)
      axes.push_back({size, step[i], 0});
  }
  if (axes.empty()) axes.push_back({1, 1, 0});
  for (size_t i = axes.size(); i-- > 0;)
    axes[i].to = i + 1 < axes.size() ? axes[i + 1].to * axes[i + 1].size : 1;
  return axes;
}

constexpr int64_t kSquare = 32;

// Transposes the indices from `begin` to `end` of one axis: row by row, or in square tiles that stay in the
// cache.
template <class T>
void copy_transposed(const T* from, T* to, const Axis& axis, int64_t begin, int64_t end,
                     const Axis& row) {
  if (row.from == 1) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(to + i * axis.to, from + i * axis.from, row.size * sizeof(T));
    return;
  }
  for (int64_t at = 0; at < row.size; at += kSquare)
    for (int64_t i = begin; i < end; ++i)
      for (int64_t k = at; k < std::min(at + kSquare, row.size); ++k)
        to[i * axis.to + k] = from[i * axis.from + k * row.from];
}

// Transposes an array of this shape to this order of axes.
template <class T>
void copy_transposed(const T* all, T* result, const mxnet::TShape& shape,
                     const std::vector<int64_t>& order) {
  const auto n = static_cast<int64_t>(shape.Size());
  if (n == 0) return;
  std::vector<Axis> axes = transposed_axes(shape, order);
  const Axis row = axes.back();
  axes.pop_back();
  Axis square{1, 0, 0};  // the other axis of tiles: the previous one, or that of the input's rows
  if (!axes.empty()) {
    auto axis = std::prev(axes.end());
    while (row.from != 1 && axis->from != 1) --axis;
    square = *axis;
    axes.erase(axis);
  }
  const int64_t squares = (square.size + kSquare - 1) / kSquare;
  const int64_t count = n / row.size / square.size * squares;
  for_all(count, n, [&](int64_t which) {
    const T* from = all;
    T* to = result;
    int64_t rest = which / squares;
    for (size_t i = axes.size(); i-- > 0; rest /= axes[i].size) {
      from += rest % axes[i].size * axes[i].from;
      to += rest % axes[i].size * axes[i].to;
    }
    const int64_t begin = which % squares * kSquare;
    copy_transposed(from, to, square, begin, std::min(begin + kSquare, square.size), row);
  });
}

// MXNet's code is up to nine times slower.
bool transpose(const Call& call) {
  const TBlob& in = call.in[0];
  if (!all_16bit(call) || call.write(0) != kStore || in.dptr_ == call.out[0].dptr_)
    return as_it_is(call);
  std::vector<int64_t> order = numbers(call.attrs, "axes");
  for (int i = order.empty() ? in.ndim() : 0; i-- > 0;) order.push_back(i);
  copy_transposed(numbers16(in), numbers16(call.out[0]), in.shape_, order);
  return true;
}

// Copies elements of an array, or adds them to those of another.
void copy_row(const TBlob& from, int64_t source, const TBlob& to, int64_t target, int64_t width, Write write) {
  const void* const source_memory = at(from, source);
  void* const target_memory = at(to, target);
  if (write == kNothing || source_memory == target_memory || width == 0) return;
  if (write == kStore) std::memcpy(target_memory, source_memory, width * bytes_of(to.type_flag_));
  else kernels_of(to)->sum(&source_memory, 1, target_memory, width, kAdd);
}

// The number of rows of a concatenation: the product of the sizes before source_memory axis.
int64_t rows_of(const Call& call, const char* key, const mxnet::TShape& whole) {
  return whole.ProdShape(0, axis_of(call.attrs, key, 1, whole.ndim()));
}

// A slice of an axis, and source_memory gradient, which is padded with zeros.
bool slice_axis(const Call& call, const TBlob& all, const TBlob& some, bool backward) {
  if (!all_16bit(call) || size(some) == 0 || call.in[0].dptr_ == call.out[0].dptr_) return false;
  const int64_t rows = rows_of(call, "axis", all.shape_), step = size(all) / rows;
  const int64_t width = size(some) / rows, begin = whole(call.attrs, "begin", 0);
  const int64_t long_axis = all.shape_[axis_of(call.attrs, "axis", 0, all.ndim())];
  const int64_t first = (begin < 0 ? begin + long_axis : begin) * (step / long_axis);
  const TBlob& to = call.out[0];
  if (backward && call.write(0) == kStore)
    for (int64_t i = 0; i < rows; ++i) {
      std::fill_n(numbers16(to) + i * step, first, Number16(0));
      std::fill_n(numbers16(to) + i * step + first + width, step - first - width, Number16(0));
    }
  for_all(rows, rows * width, [&](int64_t i) {
    const int64_t at_some = i * width, at_whole = i * step + first;
    copy_row(call.in[0], backward ? at_some : at_whole, to, backward ? at_whole : at_some, width, call.write(0));
  });
  return true;
}
bool slice_axis(const Call& call) {
  return slice_axis(call, call.in[0], call.out[0], false) || as_it_is(call);
}
bool slice_axis_gradient(const Call& call) {
  return slice_axis(call, call.out[0], call.in[0], true) || as_it_is(call);
}

// Concatenates all inputs, or splits the input into the outputs.
bool regroup(const Call& call, const TBlob& whole, const std::vector<TBlob>& parts, const char* axis, bool split) {
  if (!is_16bit(whole) && !is_float(whole)) return false;
  const int64_t rows = size(whole) > 0 ? rows_of(call, axis, whole.shape_) : 0;
  for_all(rows, size(whole), [&](int64_t row) {
    int64_t column = row * (size(whole) / rows);
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t width = size(parts[i]) / rows;
      if (split) copy_row(whole, column, call.out[i], row * width, width, call.write(i));
      else copy_row(parts[i], row * width, call.out[0], column, width, call.write(0));
      column += width;
    }
  });
  return true;
}

bool concat(const Call& call) { return all_16bit(call) && regroup(call, call.out[0], call.in, "dim", false); }
bool concat_gradient(const Call& call) {  // of the first input
  return is_16bit(call.in[0]) && regroup(call, call.in[0], call.out, "dim", true);
}
// MXNet's code for these is stateful, so the generic operator cannot replace it.
bool split(const Call& call) { return regroup(call, call.in[0], call.out, "axis", true); }
bool split_gradient(const Call& call) { return regroup(call, call.out[0], call.in, "axis", false); }

// MXNet's code is stateful here too.
bool swap_axes(const Call& call) {
  const TBlob &x = call.in[0], &y = call.out[0];
  if (call.write(0) == kNothing) return true;
  std::vector<int64_t> order(x.ndim());
  std::iota(order.begin(), order.end(), 0);
  const auto axis = [&](const char* key) { return axis_of(call.attrs, key, 0, x.ndim()); };
  std::swap(order[axis("dim1")], order[axis("dim2")]);
  const auto move = [&](void* to) {
    const auto copy = [&](auto* numbers) {
      copy_transposed(static_cast<decltype(numbers)>(x.dptr_), numbers, x.shape_, order);
    };
    switch (bytes_of(x.type_flag_)) {
      case 1: return copy(static_cast<uint8_t*>(to));
      case 2: return copy(static_cast<uint16_t*>(to));
      case 4: return copy(static_cast<uint32_t*>(to));
      default: return copy(static_cast<uint64_t*>(to));
    }
  };
  if (is_16bit(x)) {
    make_numbers<Number16>(call, move);
  } else if (is_float(x)) {
    make_numbers<float>(call, move);
  } else if (call.write(0) == kAdd) {  // float64, in an X-ray
    std::vector<double> moved(size(y));
    move(moved.data());
    for (size_t i = 0; i < moved.size(); ++i) static_cast<double*>(y.dptr_)[i] += moved[i];
  } else {
    move(y.dptr_);
  }
  return true;
}

}  // namespace

const AddRows rows{{
    {"_backward_add", {copies, 1}}, {"_copy", {copies, 1}}, {"_backward_copy", {copies, 1}},
    {"_backward_reshape", {copies, 1}}, {"Reshape", {copies, 1}}, {"Flatten", {copies, 1}},
    {"expand_dims", {copies, 1}}, {"squeeze", {copies, 1}}, {"BlockGrad", {copies, 1}},
    {"_npx_reshape", {copies, 1}}, {"_np_reshape", {copies, 1}}, {"_np_squeeze", {copies, 1}},
    {"Cast", {cast, 0}}, {"_backward_cast", {cast, 0}},
    {"amp_cast", {cast, 0}}, {"_backward_amp_cast", {cast, 0}},
    {"Embedding", {as_it_is, 0}}, {"take", {as_it_is, 0}}, {"transpose", {transpose, 0}},
    {"slice", {as_it_is, 0}}, {"slice_axis", {slice_axis, 0}}, {"stack", {as_it_is, 0}},
    {"tile", {as_it_is, 0}}, {"_backward_slice", {as_it_is, 0}},
    {"_backward_slice_axis", {slice_axis_gradient, 0}}, {"_backward_stack", {as_it_is, 0}},
    {"reverse", {as_it_is, 0}}, {"_backward_reverse", {as_it_is, 0}}, {"repeat", {as_it_is, 0}},
    {"broadcast_to", {as_it_is, 0}}, {"broadcast_axis", {as_it_is, 0}},
    {"broadcast_like", {as_it_is, 0}}, {"depth_to_space", {as_it_is, 0}},
    {"space_to_depth", {as_it_is, 0}}, {"gather_nd", {as_it_is, 0}},
    {"reset_arrays", {as_it_is, 0}},
    {"SwapAxis", {swap_axes, 0}}, {"_backward_SwapAxis", {swap_axes, 0}},
    {"SliceChannel", {split, 0}}, {"_backward_SliceChannel", {split_gradient, 0}},
    {"Concat", {concat, 0, kAnyOrder}}, {"_rnn_param_concat", {concat, 0}},
    {"_backward_Concat", {concat_gradient, 0, kAnyOrder}}}};

}  // namespace gluon_amp
