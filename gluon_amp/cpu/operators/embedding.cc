// The gradient of an Embedding's or take's weight, of which few rows are not zero.
#include <algorithm>
#include <numeric>
#include <tuple>

#include "operators/table.h"

namespace gluon_amp {
namespace {

// The rows that were looked up; indices beyond the ends select the first or last row. Empty for types of
// indices that are not supported.
std::vector<int64_t> looked_up(const TBlob& data, int64_t rows) {
  std::vector<int64_t> indices(size(data));
  const auto read = [&](auto* from) {
    std::transform(from, from + indices.size(), indices.begin(), [=](auto index) {
      return std::clamp<int64_t>(static_cast<int64_t>(index), 0, rows - 1);
    });
  };
  if (is_float(data)) read(floats(data));
  else if (data.type_flag_ == mshadow::kInt32) read(static_cast<int32_t*>(data.dptr_));
  else if (data.type_flag_ == mshadow::kInt64) read(static_cast<int64_t*>(data.dptr_));
  else indices.clear();
  return indices;
}

// The generic operator widens and rounds all rows. This one sums only rows that were looked up, in float32 and
// in the order of the data, and rounds them.
bool add_rows(const Call& call, size_t of_weight) {  // gradient, data
  const TBlob &g = call.in[0], &weight = call.out[of_weight];
  if (!is_16bit(g) || !is_16bit(weight) || call.write(1 - of_weight) != kNothing || size(g) == 0)
    return false;
  const int64_t width = size(weight) / weight.shape_[0];
  const std::vector<int64_t> row = looked_up(call.in[1], weight.shape_[0]);
  if (row.empty()) return false;
  std::vector<int64_t> order(row.size()), first;
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](auto a, auto b) { return std::tie(row[a], a) < std::tie(row[b], b); });
  for (size_t i = 0; i < order.size(); ++i)
    if (i == 0 || row[order[i]] != row[order[i - 1]]) first.push_back(i);
  first.push_back(order.size());
  Scratch scratch;
  float* const sums = scratch.memory((first.size() - 1) * width);
  float* const added = scratch.memory(row.size() * width);
  widen(g, added);
  if (call.write(of_weight) == kStore) std::fill_n(numbers16(weight), size(weight), Number16(0));
  for_all(first.size() - 1, size(g), [&](int64_t i) {
    float* const sum = sums + i * width;
    std::fill_n(sum, width, 0.0f);
    for (int64_t k = first[i]; k < first[i + 1]; ++k)
      for (int64_t j = 0; j < width; ++j) sum[j] += added[order[k] * width + j];
  });
  for (size_t i = 0; i < first.size() - 1; ++i)
    kernels_of(weight)->narrow(sums + i * width, numbers16(weight) + row[order[first[i]]] * width, width,
                    call.write(of_weight));
  return true;
}

// The generic operator counts values before rounding, and has the same bits.
bool embedding_gradient(const Call& call) { return !watching() && add_rows(call, 1); }

bool take_gradient(const Call& call) {
  return number(call.attrs, "axis", 0) == 0 && word(call.attrs, "mode", "clip") == "clip" &&
         add_rows(call, 0);
}

}  // namespace

const AddRows rows{{{"_backward_Embedding", {embedding_gradient, 0}}, {"_backward_take", {take_gradient, 0}}}};

}  // namespace gluon_amp
