// Counts of numbers by exponent, and of the effects of rounding, tile by tile.
#pragma once
#include "vector.h"

namespace gluon_amp::ISA {
namespace {

constexpr int64_t kTile = 1024;  // numbers that fit in the L1 cache
constexpr int64_t kVectors = kTile / W;

// Four tables take turns: adjacent numbers often have the same exponent, and a load of a just stored number
// stalls.
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

inline uint32_t exponent_of(float f) { return plain_bits(f) >> 23 & 0xff; }

// ---- exponents, 32 of them at a time -----------------------------------------------------------

#if defined(__AVX512F__) || defined(__F16C__)

// The exponents of a vector, one by one.
inline void count_exponents(V v, Tables* tables) {
  float numbers[W];
  store(numbers, v, Whole());
  for (int64_t i = 0; i < W; ++i) ++tables->bins[i & 3][exponent_of(numbers[i])];
}

// In each lane, the bit with the number of the exponent modulo 32.
#if defined(__AVX512F__)
inline U exponent_bits(V v) {
  return (U)_mm512_rolv_epi32(_mm512_set1_epi32(1), (__m512i)(bits_of(v) >> 23));
}
inline U parity(U a, U b, U c) {
  return (U)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
}
inline U majority(U a, U b, U c) {
  return (U)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0xe8);
}
#else
inline U exponent_bits(V v) { return (U{} + 1) << (bits_of(v) >> 23 & 31); }
inline U parity(U a, U b, U c) { return a ^ b ^ c; }
inline U majority(U a, U b, U c) { return (a & b) | (c & (a ^ b)); }
#endif

// Bit-sliced counters of each of a word's 32 bits: bit b of level k counts 2^k words of its lane with bit b. So
// a few bitwise operations count a whole vector.
struct Slices {
  static constexpr int kLevels = 14, kOfTile = W == 8 ? 7 : 6;  // the level of a tile's last carry
  static constexpr int64_t kTiles = (1 << kLevels) / kVectors - 1;  // the capacity in tiles
  static_assert(kVectors == 1 << kOfTile, "one carry for each tile");
  U level[kLevels] = {};

  // Adds the words word(first) to word(first + 2^k - 1) to levels; returns the carry for level k.
  template <int k, typename F> static inline U carry(const F& word, int64_t first, U* to) {
    if constexpr (k == 0) {
      return word(first);
    } else {
      const U a = carry<k - 1>(word, first, to), b = carry<k - 1>(word, first + (1 << (k - 1)), to);
      const U both = majority(to[k - 1], a, b);
      to[k - 1] = parity(to[k - 1], a, b);
      return both;
    }
  }

  template <typename F> void add_tile(const F& word) {
    U low[kOfTile];  // in registers: `word` may read any memory
    for (int k = 0; k < kOfTile; ++k) low[k] = level[k];
    U more = carry<kOfTile>(word, 0, low);
    for (int k = 0; k < kOfTile; ++k) level[k] = low[k];
    for (int k = kOfTile; k < kLevels; ++k) {
      const U both = level[k] & more;
      level[k] ^= more;
      more = both;
    }
  }

  uint32_t of_bit(int bit) const {
    U sums = {};
    for (int k = 0; k < kLevels; ++k) sums += (level[k] >> bit & 1) << k;
    uint32_t total = 0;
    for (int64_t lane = 0; lane < W; ++lane) total += sums[lane];
    return total;
  }
};

// Tiles of which all exponents, except of zeros, are within a range of 32.
struct Run {
  Tables* tables;
  uint32_t lowest = 255, highest = 0;
  int64_t zero = 0, tiles = 0;
  Slices slices;

  explicit Run(Tables* to) : tables(to) {}

  // Adds a tile, with its smallest number except zeros, its largest number, and its count of zeros.
  template <typename T> void add_tile(const T* tile, float small, float large, int64_t zeros) {
    const uint32_t low = exponent_of(small), high = exponent_of(large);
    if (high - low >= 32) {
      for (int64_t i = 0; i < kTile; i += W) count_exponents(load(tile + i, Whole()), tables);
      return;
    }
    if (most(high, highest) - least(low, lowest) >= 32 || tiles == Slices::kTiles) finish();
    lowest = static_cast<uint32_t>(least(low, lowest));
    highest = static_cast<uint32_t>(most(high, highest));
    slices.add_tile([=](int64_t i) { return exponent_bits(load(tile + i * W, Whole())); });
    zero += zeros;
    ++tiles;
  }

  // Adds all to the tables.
  void finish() {
    if (tiles == 0) return;
    tables->bins[0][0] += static_cast<uint32_t>(zero);
    tables->bins[0][(lowest + 31) & ~31u] -= static_cast<uint32_t>(zero);  // zeros have bit 0 too
    for (uint32_t e = lowest; e < lowest + 32; ++e) tables->bins[0][e] += slices.of_bit(e % 32);
    *this = Run(tables);
  }
};

#else

struct Run {
  Tables* tables;
  explicit Run(Tables* to) : tables(to) {}
  template <typename T> void add_tile(const T* tile, float, float, int64_t) {
    for (int64_t i = 0; i < kTile; ++i) ++tables->bins[i & 3][exponent_of(load(tile + i, Whole()))];
  }
  void finish() {}
};

#endif

// ---- tiles: `rounds` is whether they are counted before rounding to the type of tensors ------------

// Counts any numbers, one by one.
template <bool rounds, typename T>
void count_carefully(const T* numbers, int64_t n, Tables* tables) {
  float exact[kTile], stored[kTile];
  each(0, n, [&](int64_t i, auto lanes) {
    const V v = load(numbers + i, lanes);
    store(exact + i, v, lanes);
    store(stored + i, rounds ? rounded(v) : v, lanes);
  });
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t size = plain_bits(exact[i]) & 0x7fffffffu;
    const uint32_t after = plain_bits(stored[i]) & 0x7fffffffu;
    const bool finite = size < 0x7f800000u, stays = after < 0x7f800000u;
    ++tables->bins[i & 3][size >> 23];
    tables->zero += size == 0;
    tables->infinite += size == 0x7f800000u;
    tables->overflowed += finite && !stays;
    tables->flushed += size != 0 && after == 0;
    const double v = finite ? exact[i] : 0;
    const double e = finite && stays ? static_cast<double>(exact[i]) - stored[i] : 0;
    tables->squares += v * v;
    tables->error_squares += e * e;
  }
}

// Returns the count of zeros in a tile; `small` becomes the smallest magnitude of the others.
template <typename T> int64_t zeros_of(const T* tile, float* small) {
  const V none = splat(0), endless = splat(__builtin_inff());
  V least = endless;
  int64_t zero = 0;
  for (int64_t i = 0; i < kTile; i += W) {
    const V v = load(tile + i, Whole());
    zero += zeros_in(v);
    least = smaller(if_equal(v, none, endless, magnitude(v)), least);
  }
  *small = -highest(-least);
  return zero;
}

// Counts a tile whose squares float32 holds: all numbers are finite and below 2^62, before and after rounding.
// Returns false, without counting, for other tiles.
template <bool rounds, typename T> bool count_tile(const T* numbers, Run* run) {
  constexpr bool kChanges = rounds && k16Bit;
  Sums<2> sums = {};
  V largest = splat(0), smallest = splat(__builtin_inff());
  const auto look = [&](int64_t i, int turn) {
    const V v = load(numbers + i, Whole()), size = magnitude(v);
    sums.add_product(turn, 0, v, v);
    largest = larger(size, largest);
    smallest = smaller(size, smallest);
    if (!kChanges) return;
    const V e = v - rounded(v);
    sums.add_product(turn, 1, e, e);
  };
  for (int64_t i = 0; i < kTile; i += 2 * W) {
    look(i, 0);
    look(i + W, 1);
  }
  const double squares = sums.pair(0, 0), errors = sums.pair(0, 1);
  const float large = highest(largest);
  Tables* tables = run->tables;
  if (squares == 0 && large == 0) {
    tables->zero += kTile;
    tables->bins[0][0] += kTile;
    return true;
  }
  if (!(squares > 1e-25 && squares < 1e37 && errors < 1e37)) return false;
  float small = -highest(-smallest);
  const int64_t zero = small == 0 ? zeros_of(numbers, &small) : 0;
  if (kChanges && small <= kTiny) {
    int64_t zero_after = 0;
    for (int64_t i = 0; i < kTile; i += W) zero_after += zeros_in(rounded(load(numbers + i, Whole())));
    tables->flushed += zero_after - zero;
  }
  tables->zero += zero;
  tables->squares += squares;
  tables->error_squares += errors;
  run->add_tile(numbers, small, large, zero);
  return true;
}

void add(const Tables& from, Counts* to) {
  for (int i = 0; i < 256; ++i) {
    uint32_t numbers = 0;  // unsigned: one table may be negative, the sum is not
    for (auto& bins : from.bins) numbers += bins[i];
    to->bins[i] += numbers;
  }
  to->zero += from.zero;
  to->infinite += from.infinite;
  to->overflowed += from.overflowed;
  to->flushed += from.flushed;
  to->squares += from.squares;
  to->error_squares += from.error_squares;
}

}  // namespace
}  // namespace gluon_amp::ISA
