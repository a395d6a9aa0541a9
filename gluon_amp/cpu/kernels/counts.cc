// Counts of numbers by exponent, and of what rounding makes of them.
#include "vector.h"

namespace gluon_amp {
namespace ISA {
namespace {

constexpr int64_t kTile = 512;    // numbers that stay in the first cache
constexpr int64_t kPart = 65536;  // numbers that a thread takes at a time

// Four tables take turns: numbers beside each other often have one exponent, and a processor waits
// for a number in memory that it has just written.
struct Tables {
  uint32_t bins[4][256] = {};
  int64_t zero = 0, infinite = 0, overflowed = 0, flushed = 0;
  double squares = 0, error_squares = 0;
};

inline uint32_t plain_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

void count_tile(const float* exact, const float* rounded, int64_t n, Tables* made) {
  uint32_t bits[kTile];
  std::memcpy(bits, exact, n * sizeof(float));
  for (int64_t i = 0; i + 4 <= n; i += 4)
    for (int k = 0; k < 4; ++k) ++made->bins[k][bits[i + k] >> 23 & 0xff];
  for (int64_t i = n / 4 * 4; i < n; ++i) ++made->bins[0][bits[i] >> 23 & 0xff];
  int32_t zero = 0, infinite = 0, overflowed = 0, flushed = 0;
  double squares = 0, errors = 0;
#pragma omp simd reduction(+ : zero, infinite, overflowed, flushed, squares, errors)
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t size = bits[i] & 0x7fffffffu;
    const uint32_t after = plain_bits(rounded[i]) & 0x7fffffffu;
    const bool finite = size < 0x7f800000u, stays = after < 0x7f800000u;
    zero += size == 0;
    infinite += size == 0x7f800000u;
    overflowed += finite & !stays;
    flushed += (size != 0) & (after == 0);
    const double v = finite ? exact[i] : 0;
    const double e = finite & stays ? static_cast<double>(exact[i]) - rounded[i] : 0;
    squares += v * v;
    errors += e * e;
  }
  made->zero += zero;
  made->infinite += infinite;
  made->overflowed += overflowed;
  made->flushed += flushed;
  made->squares += squares;
  made->error_squares += errors;
}

// Numbers exact[begin, end), rounded to halves or to a grid.
void count_part(const float* exact, const Grid* grid, bool half, int64_t begin, int64_t end,
                Tables* made) {
  float rounded[kTile];
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t n = least(kTile, end - at);
    const float* after = exact + at;
    if (half) {
      each(0, n, [&](int64_t i, auto lanes) {
        store(rounded + i, half_grid(load(exact + at + i, lanes)), lanes);
      });
      after = rounded;
    }
    if (grid) {
      round_some(*grid, after, rounded, n);
      after = rounded;
    }
    count_tile(exact + at, after, n, made);
  }
}

void add(const Tables& from, Counts* to) {
  for (int i = 0; i < 256; ++i)
    for (auto& bins : from.bins) to->bins[i] += bins[i];
  to->zero += from.zero;
  to->infinite += from.infinite;
  to->overflowed += from.overflowed;
  to->flushed += from.flushed;
  to->squares += from.squares;
  to->error_squares += from.error_squares;
}

void count(const float* exact, int64_t n, const Grid* grid, bool half, Counts* counts) {
#pragma omp parallel for schedule(static) if (n >= 2 * kPart)
  for (int64_t begin = 0; begin < n; begin += kPart) {
    Tables made;
    run([&] { count_part(exact, grid, half, begin, least(begin + kPart, n), &made); });
#pragma omp critical(gluon_amp_counts)
    add(made, counts);
  }
}

}  // namespace

void add_counts(Kernels* table) noexcept { table->count = count; }

}  // namespace ISA
}  // namespace gluon_amp
