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

// Most tiles have few exponents: each is looked for in all bytes of the tile at once.
constexpr int kFew = 40;

void count_exponents(const float* exact, int64_t n, Tables* made) {
  uint32_t bits[kTile];
  std::memcpy(bits, exact, n * sizeof(float));
  if (n == kTile) {
    uint8_t exponents[kTile], least_one = 255, most_one = 0;
    for (int64_t i = 0; i < kTile; ++i) exponents[i] = static_cast<uint8_t>(bits[i] >> 23);
    for (int64_t i = 0; i < kTile; ++i) {
      const uint8_t above_zero = exponents[i] - 1;  // 255 for 0, which is counted apart
      least_one = above_zero < least_one ? above_zero : least_one;
      most_one = exponents[i] > most_one ? exponents[i] : most_one;
    }
    auto count = [&](uint8_t exponent) {
      constexpr int64_t kLanes = 64;
      uint8_t lanes[kLanes] = {};
      for (int64_t i = 0; i < kTile; i += kLanes)
        for (int64_t k = 0; k < kLanes; ++k) lanes[k] = static_cast<uint8_t>(lanes[k] + (exponents[i + k] == exponent));
      uint32_t all = 0;
      for (uint8_t lane : lanes) all += lane;
      made->bins[0][exponent] += all;
    };
    if (most_one - least_one <= kFew) {
      count(0);
      for (int exponent = least_one + 1; exponent <= most_one; ++exponent)
        count(static_cast<uint8_t>(exponent));
      return;
    }
  }
  for (int64_t i = 0; i < n; ++i) ++made->bins[i & 3][bits[i] >> 23 & 0xff];
}

// Any numbers, one by one.
void count_carefully(const float* exact, const float* rounded, int64_t n, Tables* made) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t size = plain_bits(exact[i]) & 0x7fffffffu;
    const uint32_t after = plain_bits(rounded[i]) & 0x7fffffffu;
    const bool finite = size < 0x7f800000u, stays = after < 0x7f800000u;
    made->zero += size == 0;
    made->infinite += size == 0x7f800000u;
    made->overflowed += finite && !stays;
    made->flushed += size != 0 && after == 0;
    const double v = finite ? exact[i] : 0;
    const double e = finite && stays ? static_cast<double>(exact[i]) - rounded[i] : 0;
    made->squares += v * v;
    made->error_squares += e * e;
  }
}

// A tile whose squares float32 holds: all are finite then, before and after rounding. False where
// it does not: nothing is counted then.
bool count_quickly(const float* exact, const float* rounded, int64_t n, Tables* made) {
  Sums<4> sums = {};
  const V none = splat(0), one = splat(1);
  int turn = 0;
  each(0, n, [&](int64_t i, auto lanes) {
    const V v = load(exact + i, lanes), r = load(rounded + i, lanes), e = v - r;
    auto& part = sums.part[turn ^= 1];
    part[0] = plus_product(part[0], v, v);
    part[1] = plus_product(part[1], e, e);
    part[2] = part[2] + only(if_equal(v, none, one, none), lanes);
    part[3] = part[3] + only(if_equal(r, none, one, none), lanes);
  });
  const double squares = sums.pair(0, 0), errors = sums.pair(0, 1);
  const int64_t zero = static_cast<int64_t>(sums.pair(0, 2));
  const bool held = squares > 1e-25 && squares < 1e37 && errors < 1e37;
  if (!held && zero < n) return false;
  made->zero += zero;
  made->flushed += static_cast<int64_t>(sums.pair(0, 3)) - zero;
  made->squares += squares;
  made->error_squares += errors;
  return true;
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
      round_some(*grid, after, rounded, n, at);
      after = rounded;
    }
    count_exponents(exact + at, n, made);
    if (!count_quickly(exact + at, after, n, made)) count_carefully(exact + at, after, n, made);
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
