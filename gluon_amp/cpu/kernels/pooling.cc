// Max pooling.
#include "vector.h"

namespace gluon_amp {
namespace ISA {
namespace {

constexpr float kLowest = -0x1.fffffep127f;  // padding, and MXNet's initial maximum

// The numbers of a and b at even indices, and those at odd ones.
#if defined(__AVX512F__)
inline void divide(V a, V b, V* even, V* odd) {
  const __m512i places =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  *even = _mm512_permutex2var_ps(a, places, b);
  *odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(places, _mm512_set1_epi32(1)), b);
}
#elif defined(__AVX2__) && defined(__F16C__)
inline V in_order(V v) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
}
inline void divide(V a, V b, V* even, V* odd) {
  *even = in_order(_mm256_shuffle_ps(a, b, 0x88));
  *odd = in_order(_mm256_shuffle_ps(a, b, 0xdd));
}
#else
inline void divide(V a, V b, V* even, V* odd) {
  *even = a;
  *odd = b;
}
#endif

// The first of equal numbers (0 and -0), and never a NaN, as in MXNet's code.
inline V larger_one(V first, V second) { return larger(second, first); }

// One image of one channel. Each row is widened and split by index modulo the stride into as many rows, with
// room for padding. So the numbers that adjacent windows read from one row are adjacent, and so are the maxima,
// which are kept while windows need them. Several rows are widened before one is read, because an unaligned
// load of just stored numbers stalls.
struct Image {
  static constexpr int64_t kRows = 8;
  const MaxPool& p;
  const int64_t wide, length, kept;  // lengths of rows of results and of numbers; the number of kept results
  Scratch<float> memory;
  float *const rows, *const results;

  explicit Image(const MaxPool& pool)
      : p(pool), wide(parts_of(p.out_width, W) * W),
        length(wide + p.width + p.pad_width + p.kernel_width + 2 * W),
        kept(p.kernel_height + kRows), memory(2 * kRows * length + kept * wide),
        rows(memory.data), results(rows + 2 * kRows * length) {
    for (int64_t i = 0; i < 2 * kRows * length; ++i) rows[i] = kLowest;
  }

  void widen(const Number* from, float* to) const {
    const V lowest = splat(kLowest);
    auto numbers = [=](int64_t i) {
      const int64_t n = p.width - i;
      if (n >= W) return load(from + i, Whole());
      return n > 0 ? only(load(from + i, Part(n)), Part(n), lowest) : lowest;
    };
    if (p.stride_width == 1) {
      for (int64_t i = 0; i < p.width; i += W) store(to + p.pad_width + i, numbers(i), Whole());
      return;
    }
    float* const even = to + p.pad_width % 2 * length + p.pad_width / 2;
    float* const odd = to + (p.pad_width + 1) % 2 * length + (p.pad_width + 1) / 2;
    for (int64_t i = 0; i < p.width; i += 2 * W) {
      V a, b;
      divide(numbers(i), numbers(i + W), &a, &b);
      store(even + i / 2, a, Whole());
      store(odd + i / 2, b, Whole());
    }
  }

  void pool_row(const float* from, float* to) const {
    for (int64_t i = 0; i < wide; i += W) {
      V largest = splat(kLowest);
      for (int64_t k = 0; k < p.kernel_width; ++k) {
        const int64_t at = p.stride_width == 1 ? k : (k & 1) * length + (k >> 1);
        largest = larger_one(largest, load(from + at + i, Whole()));
      }
      store(to + i, largest, Whole());
    }
  }

  template <typename A> void pool(const Number* x, Number* y, A add) const {
    int64_t row = 0;  // of y
    for (int64_t first = 0; first < p.height; first += kRows) {
      const int64_t done = least(first + kRows, p.height);
      for (int64_t k = first; k < done; ++k)
        widen(x + k * p.width, rows + (k - first) * 2 * length);
      for (int64_t k = first; k < done; ++k)
        pool_row(rows + (k - first) * 2 * length, results + k % kept * wide);
      for (; row < p.out_height; ++row) {
        const int64_t top = row * p.stride_height - p.pad_height;
        const int64_t end = least(top + p.kernel_height, p.height);
        if (end > done) break;
        put_row(most(top, 0), end, y + row * p.out_width, add);
      }
    }
  }

  template <typename A> void put_row(int64_t begin, int64_t end, Number* to, A add) const {
    each(0, p.out_width, [&](int64_t i, auto lanes) {
      V largest = splat(kLowest);
      for (int64_t k = begin, at = begin % kept; k < end; ++k) {
        largest = larger_one(largest, load(results + at * wide + i, lanes));
        if (++at == kept) at = 0;
      }
      put(to, i, largest, add, lanes);
    });
  }
};

void max_pool(const MaxPool& p, const void* x, void* y, Write write) {
  constexpr int64_t kSome = 16;  // images that share scratch
  const int64_t size = p.height * p.width, out_size = p.out_height * p.out_width;
  with_add(write, [=, &p](auto add) {
    auto work = [=, &p](int64_t first) {
      const Image image(p);
      for (int64_t k = first; k < least(first + kSome, p.images); ++k)
        image.pool(numbers(x) + k * size, numbers(y) + k * out_size, add);
    };
#pragma omp parallel for schedule(static) if (p.images * size >= kWorthThreads)
    for (int64_t first = 0; first < p.images; first += kSome) run(work, first);
  });
}

}  // namespace

void add_pooling(Kernels* table) noexcept { table->max_pool = max_pool; }

}  // namespace ISA
}  // namespace gluon_amp
