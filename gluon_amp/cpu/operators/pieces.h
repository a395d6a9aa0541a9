// Runs operators on pieces of arrays, and layers on pieces of the batch.
#pragma once
#include <functional>

#include "operators/table.h"

namespace gluon_amp {

// The part of an array from element `first` on, with this shape.
TBlob part(const TBlob& whole, int64_t first, const mxnet::TShape& shape);

// Up to `most` images of an array, from image `first` on.
TBlob images(const TBlob& all, int64_t first, int64_t most);

// Calls f(call) for pieces of all arrays while it returns true. Returns false if f does, if the arrays
// differ in size, or if there is only one piece.
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
    if (!f(call.on(in, call.req, out))) return false;
  }
  return true;
}

// Runs the generic operator for `some` of the first axis of all arrays at a time. Returns false if their
// first axes differ or have at most that length.
bool run_some_images(const Call& call, int64_t some);

// ---- channels-first images

bool has_channels_first(const Call& call);

// Whether oneDNN uses its layout for this number of channels.
bool uses_layout(int64_t channels, int64_t groups);

// The number of floats of a piece, in oneDNN's layout too.
int64_t room(const mxnet::TShape& shape);

// Widens a piece into the memory of `holder`, in oneDNN's layout if it uses that.
NDArray widened_images(int64_t groups, const NDArray& holder, const TBlob& piece);

// ---- a piece at a time

// Whether data, weight and result of a layer's call have one 16-bit type. The bias and the gradients of
// parameters may be float32.
inline bool data_is_16bit(const Call& call, bool backward) {
  const std::vector<TBlob> in(call.in.begin(), call.in.begin() + (backward ? 3 : 2)),
      out(call.out.begin(), call.out.begin() + 1);
  return all_16bit(call.on(in, call.req, out));
}

// Calls f(call) with a weight, input `at`, of the data's type, a rounded copy if it is float32. If f returns
// false, the generic operator runs.
template <class F>
bool with_rounded_weight(const Call& call, size_t at, F f) {
  if (!is_16bit(call.in[0]) || !is_float(call.in[at])) return f(call);
  Scratch scratch;
  std::vector<TBlob> in(call.in);
  const TBlob& from = call.in[at];
  in[at] = TBlob(scratch.numbers16(size(from)), from.shape_, mshadow::cpu::kDevMask, call.in[0].type_flag_, 0);
  kernels_of(in[at])->narrow(floats(from), in[at].dptr_, size(from), kStore);
  const Call rounded = call.on(in, call.req, call.out);
  if (!f(rounded)) run(rounded);
  return true;
}

// Widens a piece of 16-bit numbers or floats into the memory of `holder`.
using Widen = std::function<NDArray(const NDArray& holder, const TBlob& piece)>;

// Runs a layer's float32 code, forward or backward, on `some` of the first axis at a time. Weights are
// widened once; their gradients accumulate in float32 over the pieces and are rounded once. x and y: shapes
// of the layer's data and of its result; x_room and y_room: the numbers of floats of their pieces.
void run_in_pieces(const Call& call, bool backward, mxnet::TShape x, mxnet::TShape y, int64_t some,
                   int64_t x_room, int64_t y_room, const Widen& widen);

}  // namespace gluon_amp
