// Conversions between types and layouts.
#include <emmintrin.h>

#include "transpose.h"
#include "vector.h"

namespace gluon_amp::ISA {
namespace {

void widen(const void* from, float* to, int64_t n) {
  vectors(n, [=](int64_t i, auto lanes) { store(to + i, load(from, i, lanes), lanes); });
}

void narrow(const float* from, void* to, int64_t n, Write write) {
  with_add(write, [=](auto add) {
    vectors(n, [=](int64_t i, auto lanes) { return put(to, i, load(from + i, lanes), add, lanes); });
  });
}

void copy(const void* from, void* to, int64_t bytes) {
  if (from == to) return;
  const char* source = static_cast<const char*>(from);
  char* target = static_cast<char*>(to);
  chunks(parts_of(bytes, 4), [=](int64_t begin, int64_t end) {  // counted in floats
    std::memcpy(target + 4 * begin, source + 4 * begin, least(4 * end, bytes) - 4 * begin);
  });
}

// ---- transposed matrices -------------------------------------------------------

// Transposes 8 rows of 8 numbers with a stride of `from_step` to a stride of `to_step`. SSE2 is part of x86-64.
inline void transpose_square(const Number16* from, int64_t from_step, Number16* to, int64_t to_step) {
  __m128i a[8], b[8];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_step));
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = 0; k < 2; ++k) {
      a[i + 2 * k] = _mm_unpacklo_epi32(b[i + k], b[i + k + 2]);
      a[i + 2 * k + 1] = _mm_unpackhi_epi32(b[i + k], b[i + k + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi64(a[i], a[i + 4]);
    b[2 * i + 1] = _mm_unpackhi_epi64(a[i], a[i + 4]);
  }
  for (int i = 0; i < 8; ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_step), b[i]);
}

// Tiles of 8 x 8; the last tile of a row or column overlaps the previous one.
constexpr int64_t kSquare = 8, kBand = 32;  // kBand 16-bit numbers are a cache line

void transpose_band(const Number16* from, Number16* to, int64_t rows, int64_t columns, int64_t begin,
                    int64_t end) {
  if (rows < kSquare || columns < kSquare) {
    for (int64_t c = begin; c < end; ++c)
      for (int64_t r = 0; r < rows; ++r) to[c * rows + r] = from[r * columns + c];
    return;
  }
  for (int64_t row = 0; row < rows; row += kBand)
    for (int64_t c = begin; c < end; c += kSquare)
      for (int64_t r = row; r < least(row + kBand, rows); r += kSquare) {
        const int64_t at_c = least(c, columns - kSquare), at_r = least(r, rows - kSquare);
        transpose_square(from + at_r * columns + at_c, columns, to + at_c * rows + at_r, rows);
      }
}

void transpose_all(const Number16* from, Number16* to, int64_t count, int64_t rows, int64_t columns) {
  const int64_t bands = parts_of(columns, kBand), n = rows * columns;
#pragma omp parallel for schedule(static) if (count * n >= kWorthThreads)
  for (int64_t task = 0; task < count * bands; ++task) {
    const int64_t begin = task % bands * kBand, at = task / bands * n;
    transpose_band(from + at, to + at, rows, columns, begin, least(begin + kBand, columns));
  }
}

// ---- oneDNN's layout -----------------------------------------------------------
//
// In both directions by tiles: reads W positions of W channels, transposes them in registers, and writes them.
// The last tile may be partial.

struct Layout {
  int64_t batch, channels, plane, together;
  int64_t tile() const { return least(W, together); }  // channels of a tile
};

// `count` channels of x with a stride of `plane` to `places` rows of y with a stride of `together`
template <typename L, typename K>
inline void widen_tile(const Number* x, float* y, const Layout& b, int64_t count, L lanes,
                       int64_t places, K channel_lanes) {
  V rows[W];
  for (int64_t c = 0; c < W; ++c) rows[c] = c < count ? load(x + c * b.plane, lanes) : splat(0);
  transpose(rows);
  for (int64_t s = 0; s < W; ++s)
    if (s < places) store(y + s * b.together, rows[s], channel_lanes);
}

template <typename L, typename K>
inline void narrow_tile(const float* y, Number* x, bool add, const Layout& b, int64_t count,
                        L lanes, int64_t places, K channel_lanes) {
  V rows[W];
  for (int64_t s = 0; s < W; ++s)
    rows[s] = s < places ? load(y + s * b.together, channel_lanes) : splat(0);
  transpose(rows);
  V most = splat(0);
  for (int64_t c = 0; c < W; ++c)
    if (c < count) most = most_of(most, put(x, c * b.plane, rows[c], add, lanes), lanes);
  note_overflow(most);
}

// Calls tile(offset in the plain array, offset in oneDNN's, channels, lanes of positions, positions,
// lanes of channels) for every tile, over all threads. With `overlap`, the last tile of a plane is a whole one
// that repeats some positions.
template <typename F> void tiles(const Layout& b, bool overlap, F tile) {
  constexpr int64_t kPlaces = 512;  // positions per task
  const int64_t groups = parts_of(b.channels, b.together), parts = parts_of(b.plane, kPlaces);
  const int64_t tasks = b.batch * groups * parts;
  auto work = [=](int64_t task) {
    const int64_t part = task % parts, k = task / parts % groups, n = task / parts / groups;
    const int64_t begin = part * kPlaces, end = least(begin + kPlaces, b.plane);
    for (int64_t first = 0; first < b.together; first += b.tile()) {
      const int64_t channel = k * b.together + first;
      const int64_t count = most(0, least(b.tile(), b.channels - channel));
      const int64_t plain = (n * b.channels + channel) * b.plane;
      const int64_t inside = (n * groups + k) * b.plane * b.together + first;
      auto at = [=](int64_t s, int64_t channels, auto lanes, int64_t places, auto channel_lanes) {
        tile(plain + s, inside + s * b.together, channels, lanes, places, channel_lanes);
      };
      for (int64_t s = begin; s < end; s += W) {
        if (overlap && end - s < W && end - begin >= W) s = end - W;
        const int64_t left = end - s;
        if (b.tile() < W && left < W) at(s, count, Part(left), left, Part(b.tile()));
        else if (b.tile() < W) at(s, count, Whole(), W, Part(b.tile()));
        else if (left < W) at(s, count, Part(left), left, Whole());
        else if (count < W) at(s, count, Whole(), W, Whole());
        else at(s, W, Whole(), W, Whole());
      }
    }
  };
#pragma omp parallel for schedule(static) if (b.batch * b.channels * b.plane >= kWorthThreads)
  for (int64_t task = 0; task < tasks; ++task) run(work, task);
}

void widen_to_layout(const void* from, float* to, int64_t batch, int64_t channels, int64_t plane,
                   int together) {
  if (plane == 1 && channels % together == 0) return widen(from, to, batch * channels);
  const Layout b{batch, channels, plane, together};
  tiles(b, true, [=](int64_t x, int64_t y, int64_t count, auto lanes, int64_t places,
                     auto channel_lanes) {
    widen_tile(numbers(from) + x, to + y, b, count, lanes, places, channel_lanes);
  });
}

void narrow_from_layout(const float* from, void* to, int64_t batch, int64_t channels, int64_t plane,
                    int together, Write write) {
  if (write == kNothing) return;
  if (plane == 1 && channels % together == 0) return narrow(from, to, batch * channels, write);
  const Layout b{batch, channels, plane, together};
  const bool add = write == kAdd;
  tiles(b, !add, [=](int64_t x, int64_t y, int64_t count, auto lanes, int64_t places,
                     auto channel_lanes) {
    narrow_tile(from + y, numbers(to) + x, add, b, count, lanes, places, channel_lanes);
  });
}

}  // namespace

void add_passes(Kernels* table) noexcept {
  table->widen = widen;
  table->narrow = narrow;
  table->copy = copy;
  table->transpose = transpose_all;
  table->widen_to_layout = widen_to_layout;
  table->narrow_from_layout = narrow_from_layout;
}

}  // namespace gluon_amp::ISA
