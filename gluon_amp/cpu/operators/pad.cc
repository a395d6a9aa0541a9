// Padding, and cropping where a width is negative. MXNet's code is stateful, so the generic operator cannot replace it.
#include "dispatch/watch.h"
#include "operators/table.h"

namespace gluon_amp {
namespace {

// The padding of the axes after the second, the only ones that MXNet pads. Each plane is a matrix with rows
// along the last axis.
struct Padding {
  int64_t planes, rows, width;    // before padding
  int64_t first, count, begin;    // the columns that are copied in order, and where they begin in a padded row
  std::vector<int64_t> row_of;    // for each padded row, the row that it copies; -1: none
  std::vector<int64_t> place_of;  // for each column of a padded row, the column that it copies; -1: none
};

// For each index of a padded axis, the index that it copies; -1: none.
std::vector<int64_t> places_of(int64_t size, int64_t before, int64_t after, const std::string& mode) {
  std::vector<int64_t> places;
  for (int64_t at = -before; at < size + after; ++at) {
    if (mode == "edge") places.push_back(std::clamp<int64_t>(at, 0, size - 1));
    else if (at >= 0 && at < size) places.push_back(at);
    else if (mode == "reflect" && (before >= size || after >= size))
      throw dmlc::Error("Pad: reflect needs a padding below the size of the axis, " + std::to_string(size));
    else if (mode == "reflect") places.push_back(at < 0 ? -at : 2 * (size - 1) - at);
    else places.push_back(-1);
  }
  return places;
}

Padding padding_of(const Call& call, const mxnet::TShape& x) {
  const std::vector<int64_t> added = numbers(call.attrs, "pad_width");
  const std::string mode = word(call.attrs, "mode", "constant");
  const int last = x.ndim() - 1;
  const int64_t before = added[2 * last], after = added[2 * last + 1], width = x[last];
  const int64_t first = std::max<int64_t>(0, -before), end = std::min(width, width + after);
  Padding padding{x[0] * x[1], 1, width, first, std::max<int64_t>(0, end - first), 0, {0}, {}};
  for (int i = 2; i < last; ++i) {
    std::vector<int64_t> rows;
    for (int64_t row : padding.row_of)
      for (int64_t place : places_of(x[i], added[2 * i], added[2 * i + 1], mode))
        rows.push_back(row < 0 || place < 0 ? -1 : row * x[i] + place);
    padding.row_of = rows;
    padding.rows *= x[i];
  }
  padding.place_of = places_of(width, before, after, mode);
  padding.begin = std::clamp<int64_t>(before, 0, padding.place_of.size());
  return padding;
}

template <class T>
void pad(const Padding& p, const T* x, T* y, T constant) {
  const int64_t wide = p.place_of.size(), high = p.row_of.size();
  for_all(p.planes * high, p.planes * high * wide, [&](int64_t i) {
    const int64_t row = p.row_of[i % high];
    T* const to = y + i * wide;
    if (row < 0) {
      std::fill_n(to, wide, constant);
      return;
    }
    const T* const from = x + (i / high * p.rows + row) * p.width;
    const auto repeat = [&](int64_t at) { return p.place_of[at] < 0 ? constant : from[p.place_of[at]]; };
    for (int64_t at = 0; at < p.begin; ++at) to[at] = repeat(at);
    std::copy_n(from + p.first, p.count, to + p.begin);
    for (int64_t at = p.begin + p.count; at < wide; ++at) to[at] = repeat(at);
  });
}

// Sums for each number the gradients of its copies, in their order. `row(first, memory)` returns those of a
// padded row. `more`: whether to add to the output.
template <class T, class F>
void add_up(const Padding& p, bool more, T* sums, F row) {
  const int64_t wide = p.place_of.size(), high = p.row_of.size();
  for_all(p.planes, p.planes * high * wide, [&](int64_t plane) {
    std::vector<T> memory(wide);
    T* const in_plane = sums + plane * p.rows * p.width;
    if (!more) std::fill_n(in_plane, p.rows * p.width, T(0));
    for (int64_t i = 0; i < high; ++i) {
      if (p.row_of[i] < 0) continue;
      T* const to = in_plane + p.row_of[i] * p.width;
      const T* const from = row((plane * high + i) * wide, memory.data());
      const auto add = [&](int64_t at) { if (p.place_of[at] >= 0) to[p.place_of[at]] += from[at]; };
      for (int64_t at = 0; at < p.begin; ++at) add(at);
      for (int64_t at = 0; at < p.count; ++at) to[p.first + at] += from[p.begin + at];
      for (int64_t at = p.begin + p.count; at < wide; ++at) add(at);
    }
  });
}

bool forward(const Call& call) {
  const TBlob &x = call.in[0], &y = call.out[0];
  if (call.write(0) == kNothing || size(y) == 0) return true;
  const Padding p = padding_of(call, x.shape_);
  const float constant = number(call.attrs, "constant_value", 0);
  if (is_16bit(x)) {
    Number16 rounded;
    kernels_of(x)->narrow(&constant, &rounded, 1, kStore);
    make_numbers<Number16>(call, [&](Number16* to) { pad(p, numbers16(x), to, rounded); });
  } else if (is_float(x)) {
    make_numbers<float>(call, [&](float* to) { pad(p, floats(x), to, constant); });
  } else {
    pad(p, static_cast<double*>(x.dptr_), static_cast<double*>(y.dptr_), double(constant));
  }
  return true;
}

bool backward(const Call& call) {
  const TBlob &g = call.in[0], &dx = call.out[0];
  if (call.write(0) == kNothing || size(dx) == 0) return true;
  const Padding p = padding_of(call, dx.shape_);
  if (!is_16bit(g) && !is_float(g)) {
    const auto* const from = static_cast<double*>(g.dptr_);
    add_up(p, call.write(0) == kAdd, static_cast<double*>(dx.dptr_),
           [=](int64_t first, double*) { return from + first; });
    return true;
  }
  Scratch scratch;
  float* const sums = scratch.memory(size(dx));
  const int64_t wide = p.place_of.size();
  add_up(p, false, sums, [&](int64_t first, float* memory) -> const float* {
    if (is_16bit(g)) kernels_of(g)->widen(numbers16(g) + first, memory, wide);
    return is_16bit(g) ? memory : floats(g) + first;
  });
  narrow(sums, dx, call.write(0));
  return true;
}

}  // namespace

const AddRows rows{{{"Pad", {forward, 0}}, {"_backward_Pad", {backward, 0}}}};

}  // namespace gluon_amp
