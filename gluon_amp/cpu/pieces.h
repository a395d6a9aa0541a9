// Arrays a piece at a time; layers with weights, a piece of the batch at a time.
#pragma once
#include <functional>

#include "own.h"

namespace gluon_amp {

// The numbers of an array from place `first` on, in this shape.
TBlob part(const TBlob& whole, int64_t first, const mxnet::TShape& shape);

// At most so many images of an array, from image `first` on.
TBlob images(const TBlob& all, int64_t first, int64_t most);

// f(call) for so many numbers of all arrays at a time, as long as it returns true. False where it does
// not, where the arrays are not of one size, or where there are no more numbers than that.
template <class F>
bool some_numbers_at_a_time(const Call& call, int64_t some, F f) {
  const int64_t n = size(call.out[0]);
  const auto differs = [n](const TBlob& array) { return size(array) != n; };
  if (n <= some || std::any_of(call.in.begin(), call.in.end(), differs) ||
      std::any_of(call.out.begin(), call.out.end(), differs))
    return false;
  for (int64_t first = 0; first < n; first += some) {
    const mxnet::TShape shape(1, std::min(some, n - first));
    std::vector<TBlob> in, out;
    for (auto& array : call.in) in.push_back(part(array, first, shape));
    for (auto& array : call.out) out.push_back(part(array, first, shape));
    if (!f({call.of, call.attrs, call.context, in, call.req, out, {}})) return false;
  }
  return true;
}

// Runs the generic code for so many of the first axis of all arrays at a time. False where their first
// axes differ, or are no longer than that.
bool run_some_images(const Call& call, int64_t some);

// ---- images, whose second axis has the channels

bool has_channels_first(const Call& call);

// Whether oneDNN keeps so many channels in blocks.
bool in_blocks_of(int64_t channels, int64_t groups);

// As many floats as a piece takes, in oneDNN's blocks, too.
int64_t room(const mxnet::TShape& shape);

// Float32 of a piece in the memory of `holder`, in blocks where oneDNN keeps its channels so.
NDArray widened_images(int64_t groups, const NDArray& holder, const TBlob& piece);

// ---- a piece at a time

// Of a layer's call: whether data, weight and result are of one 16-bit type. The bias and the gradients of
// parameters may be float32.
inline bool data_half(const Call& call, bool backward) {
  const std::vector<TBlob> in(call.in.begin(), call.in.begin() + (backward ? 3 : 2)),
      out(call.out.begin(), call.out.begin() + 1);
  return all_half({call.of, call.attrs, call.context, in, call.req, out, {}});
}

// f(call) with a weight, input `at`, of the data's type: where it is float32, a rounded copy. Where it returns
// false, the generic code runs.
template <class F>
bool with_rounded_weight(const Call& call, size_t at, F f) {
  if (!is_half(call.in[0]) || !is_float(call.in[at])) return f(call);
  Lease lease;
  std::vector<TBlob> in(call.in);
  const TBlob& from = call.in[at];
  in[at] = TBlob(lease.memory((size(from) + 1) / 2), from.shape_, mshadow::cpu::kDevMask,
                 call.in[0].type_flag_, 0);
  kernels_of(in[at])->narrow(floats(from), halves(in[at]), size(from), kStore);
  const Call rounded{call.of, call.attrs, call.context, in, call.req, call.out, call.rounding, call.state};
  if (!f(rounded)) run(rounded);
  return true;
}

// Makes float32 of a piece, halves or floats, in the memory of `holder`.
using Widen = std::function<NDArray(const NDArray& holder, const TBlob& piece)>;

// Runs a layer's float32 code, forward or backward, on `some` of the first axis at a time. Weights
// are widened once; their gradients are added up in float32 over the pieces and rounded once.
// x and y: shapes of the layer's data and of its result; x_room and y_room: floats that a piece of
// them takes.
void run_in_pieces(const Call& call, bool backward, mxnet::TShape x, mxnet::TShape y, int64_t some,
                   int64_t x_room, int64_t y_room, const Widen& widen);

}  // namespace gluon_amp
