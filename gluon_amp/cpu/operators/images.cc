// Upsampling of 16-bit numbers.
#include "operators/table.h"

namespace gluon_amp {
namespace {

// Each number fills a square of `scale` x `scale` numbers in the last two axes.
struct Squares {
  int64_t rows, width, scale;  // of the smaller array
};

bool squares_of(const Call& call, const TBlob& small, Squares* squares) {
  if (!all_16bit(call) || call.in.size() != 1 || call.out.size() != 1 || small.ndim() != 4 ||
      size(small) == 0 || word(call.attrs, "sample_type", "") != "nearest" ||
      call.in[0].dptr_ == call.out[0].dptr_)
    return false;
  *squares = {size(small) / small.shape_[3], small.shape_[3],
           static_cast<int64_t>(number(call.attrs, "scale", 1))};
  return true;
}

bool upsample(const Call& call) {
  Squares s;
  if (!squares_of(call, call.in[0], &s)) return false;
  if (call.write(0) == kNothing) return true;
  const Number16* const x = numbers16(call.in[0]);
  const int64_t wide = s.width * s.scale;
  make_numbers<Number16>(call, [&](Number16* y) {
    for_all(s.rows, s.rows * wide, [&](int64_t i) {
      Number16* const to = y + i * s.scale * wide;
      for (int64_t k = 0; k < s.width; ++k) std::fill_n(to + k * s.scale, s.scale, x[i * s.width + k]);
      for (int64_t k = 1; k < s.scale; ++k) std::copy_n(to, wide, to + k * wide);
    });
  });
  return true;
}

// Sums the squares in float32, row by row.
bool upsample_gradient(const Call& call) {
  Squares s;
  const TBlob &g = call.in[0], &dx = call.out[0];
  if (!squares_of(call, dx, &s)) return false;
  const int64_t wide = s.width * s.scale;
  Scratch scratch;
  float* const sums = scratch.memory(size(dx));
  const int64_t parts = std::min<int64_t>(s.rows, 64);
  float* const memory = scratch.memory(parts * wide);
  for_all(parts, s.rows * wide, [&](int64_t p) {
    float* const row = memory + p * wide;
    for (int64_t i = s.rows * p / parts; i < s.rows * (p + 1) / parts; ++i) {
      float* const sum = sums + i * s.width;
      std::fill_n(sum, s.width, 0.0f);
      for (int64_t k = 0; k < s.scale; ++k) {
        kernels_of(g)->widen(numbers16(g) + (i * s.scale + k) * wide, row, wide);
        for (int64_t j = 0; j < s.width; ++j)
          for (int64_t q = 0; q < s.scale; ++q) sum[j] += row[j * s.scale + q];
      }
    }
  });
  narrow(sums, dx, call.write(0));
  return true;
}

}  // namespace

const AddRows rows{{{"UpSampling", {upsample, 0}}, {"_backward_UpSampling", {upsample_gradient, 0}}}};

}  // namespace gluon_amp
