// Counts of numbers by exponent, and of what rounding makes of them.
#include "vector.h"

namespace gluon_amp {
namespace ISA {
namespace {

constexpr int64_t kPart = 65536;  // numbers that a thread takes at a time
#if defined(__AVX512F__) || defined(__F16C__)
constexpr int64_t kVectors = 32;  // of a tile
#else
constexpr int64_t kVectors = 512;
#endif
constexpr int64_t kTile = kVectors * W;  // numbers that stay in the first cache

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

inline uint32_t exponent_of(float f) { return plain_bits(f) >> 23 & 0xff; }

// The exponents of a vector, one by one.
inline void count_exponents(V v, Tables* made) {
  float numbers[W];
  store(numbers, v, Whole());
  for (int64_t i = 0; i < W; ++i) ++made->bins[i & 3][exponent_of(numbers[i])];
}

// ---- what numbers are rounded to -------------------------------------------------------------

struct Unchanged {
  static constexpr bool kChanges = false;
  template <typename L> V operator()(V v, int64_t, L) const { return v; }
};
struct ToHalf {
  static constexpr bool kChanges = true;
  template <typename L> V operator()(V v, int64_t, L) const { return half_grid(v); }
};
struct Rounded {  // these, in the order of the numbers
  static constexpr bool kChanges = true;
  const float* numbers;
  template <typename L> V operator()(V, int64_t i, L lanes) const {
    return load(numbers + i, lanes);
  }
};

// ---- exponents, 31 of them at a time -----------------------------------------------------------

#if defined(__AVX512F__) || defined(__F16C__)

#if defined(__AVX512F__)
inline U parity(U a, U b, U c) {
  return (U)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
}
inline U majority(U a, U b, U c) {
  return (U)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0xe8);
}
#else
inline U parity(U a, U b, U c) { return a ^ b ^ c; }
inline U majority(U a, U b, U c) { return (a & b) | (c & (a ^ b)); }
#endif

// How often each of a word's 32 bits was set, in binary, beside each other: bit b of level k counts
// 2^k words of its lane with bit b. So a few operations of logic count a whole vector.
struct Slices {
  static constexpr int kLevels = 14;  // 2^14 > kPart / W
  U level[kLevels] = {};

  // Adds the words one(first) to one(first + 2^k - 1); returns what level k has to add.
  template <int k, typename F> inline U carry(const F& one, int64_t first) {
    if constexpr (k == 0) {
      return one(first);
    } else {
      const U a = carry<k - 1>(one, first), b = carry<k - 1>(one, first + (1 << (k - 1)));
      const U both = majority(level[k - 1], a, b);
      level[k - 1] = parity(level[k - 1], a, b);
      return both;
    }
  }

  template <typename F> void add_tile(const F& one) {
    static_assert(kVectors == 1 << 5, "one carry for each tile");
    U more = carry<5>(one, 0);
    for (int k = 5; k < kLevels; ++k) {
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

// Tiles one behind the other whose largest numbers are alike: exponents from `lowest` on are counted
// at once, and those below, which are few, at the end.
template <typename T> struct Run {
  static constexpr uint32_t kOther = 31;  // the bit of exponents that are not counted at once
  Tables* made;
  const T *begin, *end;
  uint32_t lowest = 0;
  int64_t zero = 0;
  Slices slices;

  Run(Tables* to, const T* at) : made(to), begin(at), end(at) {}

  void add_tile(float largest, int64_t zeros) {
    const uint32_t high = exponent_of(largest);
    if (begin == end || high >= lowest + kOther || high + 10 < lowest + kOther) {
      finish();
      lowest = high > 29 ? high - 28 : 1;
    }
    const T* const from = end;
    const U low = U{} + lowest, other = U{} + kOther, one = U{} + 1;
    slices.add_tile([=](int64_t i) {
      const U above = (bits_of(load(from + i * W, Whole())) << 1 >> 24) - low;
      return one << (above < other ? above : other);
    });
    zero += zeros;
    end += kTile;
  }

  // Adds all to the tables; a new run begins at `next`.
  void finish(const T* next) {
    finish();
    begin = end = next;
  }

 private:
  void finish() {
    if (begin == end) return;
    // A short run is not worth a look at all bits, and slices know nothing of exponents below.
    if (end - begin < 4 * kTile || slices.of_bit(kOther) != zero) {
      for (const T* at = begin; at < end; at += W) count_exponents(load(at, Whole()), made);
    } else {
      for (uint32_t bit = 0; bit < kOther && lowest + bit < 256; ++bit)
        made->bins[0][lowest + bit] += slices.of_bit(bit);
      made->bins[0][0] += static_cast<uint32_t>(zero);
    }
    begin = end;
    zero = 0;
    slices = Slices();
  }
};

#else

template <typename T> struct Run {
  Tables* made;
  const T* end;
  Run(Tables* to, const T* at) : made(to), end(at) {}
  void add_tile(float, int64_t) {
    for (const T* at = end; end < at + kTile; ++end)
      ++made->bins[(end - at) & 3][exponent_of(load(end, Whole()))];
  }
  void finish(const T* next) { end = next; }
};

#endif

// ---- tiles ---------------------------------------------------------------------------------------

// Any numbers, one by one.
template <typename T, typename R>
void count_carefully(const T* numbers, R round, int64_t n, Tables* made) {
  float exact[kTile], rounded[kTile];
  each(0, n, [&](int64_t i, auto lanes) {
    const V v = load(numbers + i, lanes);
    store(exact + i, v, lanes);
    store(rounded + i, round(v, i, lanes), lanes);
  });
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t size = plain_bits(exact[i]) & 0x7fffffffu;
    const uint32_t after = plain_bits(rounded[i]) & 0x7fffffffu;
    const bool finite = size < 0x7f800000u, stays = after < 0x7f800000u;
    ++made->bins[i & 3][size >> 23];
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
template <typename T, typename R> bool count_tile(const T* numbers, R round, Run<T>* run) {
  Sums<4> sums = {};
  const V none = splat(0), one = splat(1);
  V top = none;
  int turn = 0;
  each(0, kTile, [&](int64_t i, auto lanes) {
    const V v = load(numbers + i, lanes);
    auto& part = sums.part[turn ^= 1];
    part[0] = plus_product(part[0], v, v);
    part[2] = part[2] + if_equal(v, none, one, none);
    top = larger(magnitude(v), top);
    if (!R::kChanges) return;
    const V r = round(v, i, lanes), e = v - r;
    part[1] = plus_product(part[1], e, e);
    part[3] = part[3] + if_equal(r, none, one, none);
  });
  const double squares = sums.pair(0, 0), errors = sums.pair(0, 1);
  const auto zero = static_cast<int64_t>(sums.pair(0, 2));
  const bool held = squares > 1e-25 && squares < 1e37 && errors < 1e37;
  if (!held && zero < kTile) return false;
  Tables* made = run->made;
  made->zero += zero;
  if (R::kChanges) made->flushed += static_cast<int64_t>(sums.pair(0, 3)) - zero;
  made->squares += squares;
  made->error_squares += errors;
  if (zero == kTile) {
    made->bins[0][0] += kTile;
    run->finish(numbers + kTile);
  } else {
    run->add_tile(highest(top), zero);
  }
  return true;
}

// `round(at)`: what the numbers from there on are rounded to.
template <typename T, typename F>
void count_part(const T* numbers, F round, int64_t begin, int64_t end, Tables* made) {
  Run<T> run(made, numbers + begin);
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t n = least(kTile, end - at);
    const auto rounded = round(at, n);
    if (n == kTile && count_tile(numbers + at, rounded, &run)) continue;
    run.finish(numbers + at + n);
    count_carefully(numbers + at, rounded, n, made);
  }
  run.finish(numbers + end);
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

// f(begin, end, tables) for parts of n numbers, over all threads.
template <typename F> void in_parts(int64_t n, Counts* counts, F f) {
#pragma omp parallel for schedule(static) if (n >= 2 * kPart)
  for (int64_t begin = 0; begin < n; begin += kPart) {
    Tables made;
    run(f, begin, least(begin + kPart, n), &made);
#pragma omp critical(gluon_amp_counts)
    add(made, counts);
  }
}

void count(const float* exact, int64_t n, const Grid* grid, bool half, Counts* counts) {
  in_parts(n, counts, [=](int64_t begin, int64_t end, Tables* made) {
    if (grid) {
      float rounded[kTile];
      count_part(exact, [&](int64_t at, int64_t some) {
        const float* from = exact + at;
        if (half) {
          each(0, some, [&](int64_t i, auto lanes) {
            store(rounded + i, half_grid(load(from + i, lanes)), lanes);
          });
          from = rounded;
        }
        round_some(*grid, from, rounded, some, at);
        return Rounded{rounded};
      }, begin, end, made);
    } else if (half) {
      count_part(exact, [](int64_t, int64_t) { return ToHalf(); }, begin, end, made);
    } else {
      count_part(exact, [](int64_t, int64_t) { return Unchanged(); }, begin, end, made);
    }
  });
}

void count_halves(const Half* numbers, int64_t n, Counts* counts) {
  in_parts(n, counts, [=](int64_t begin, int64_t end, Tables* made) {
    count_part(numbers, [](int64_t, int64_t) { return Unchanged(); }, begin, end, made);
  });
}

void count_updates(const float* weights, float* before, int64_t n, Updates* updates) {
  const V none = splat(0), one = splat(1);
  in_parts(n, &updates->counts, [=](int64_t begin, int64_t end, Tables* made) {
    Scratch<float> added(end - begin);
    double changed = 0, lost = 0;
    for (int64_t at = begin; at < end; at += kTile) {
      Sums<2, 2> sums = {};
      each(at, least(at + kTile, end), [&](int64_t i, auto lanes) {
        const V after = load(weights + i, lanes), was = load(before + i, lanes), v = after - was;
        const V half = half_grid(was), changes = if_equal(v, none, none, one);
        store(added.data + (i - begin), v, lanes);
        store(before + i, after, lanes);
        sums.part[0][0] = sums.part[0][0] + changes;
        sums.part[0][1] = sums.part[0][1] + if_equal(half_grid(half + v), half, changes, none);
      });
      changed += sums.pair(0, 0);
      lost += sums.pair(0, 1);
    }
    count_part(added.data, [](int64_t, int64_t) { return Unchanged(); }, 0, end - begin, made);
    const auto all_changed = static_cast<int64_t>(changed), all_lost = static_cast<int64_t>(lost);
#pragma omp atomic
    updates->changed += all_changed;
#pragma omp atomic
    updates->lost += all_lost;
  });
}

}  // namespace

void add_counts(Kernels* table) noexcept {
  table->count = count;
  table->count_halves = count_halves;
  table->count_updates = count_updates;
}

}  // namespace ISA
}  // namespace gluon_amp
