// Counts of arrays.
#include "counts.h"

namespace gluon_amp::ISA {
namespace {

constexpr int64_t kPart = 65536;  // numbers per task

// A tile of n numbers, padded with zeros.
template <bool rounds, typename T> bool count_padded(const T* numbers, int64_t n, Run* run) {
  T tile[kTile] = {};
  std::memcpy(tile, numbers, n * sizeof(T));
  if (!count_tile<rounds>(tile, run)) return false;
  run->tables->zero -= kTile - n;
  run->tables->bins[0][0] -= static_cast<uint32_t>(kTile - n);
  return true;
}

template <bool rounds, typename T>
void count_part(const T* numbers, int64_t begin, int64_t end, Tables* tables) {
  Run run(tables);
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t n = least(kTile, end - at);
    if (n == kTile ? count_tile<rounds>(numbers + at, &run)
                   : n > kTile / 8 && count_padded<rounds>(numbers + at, n, &run)) continue;
    count_carefully<rounds>(numbers + at, n, tables);
  }
  run.finish();
}

// f(begin, end, tables) for parts of n numbers, over all threads.
template <typename F> void in_parts(int64_t n, Counts* counts, F f) {
#pragma omp parallel for schedule(static) if (n >= 2 * kPart)
  for (int64_t begin = 0; begin < n; begin += kPart) {
    Tables tables;
    run(f, begin, least(begin + kPart, n), &tables);
#pragma omp critical(gluon_amp_counts)
    add(tables, counts);
  }
}

void count(const float* exact, int64_t n, Counts* counts) {
  in_parts(n, counts, [=](int64_t begin, int64_t end, Tables* tables) {
    count_part<true>(exact, begin, end, tables);
  });
}

void count_rounded(const void* from, int64_t n, Counts* counts) {
  in_parts(n, counts, [=](int64_t begin, int64_t end, Tables* tables) {
    count_part<false>(numbers(from), begin, end, tables);
  });
}

}  // namespace

void add_counts(Kernels* table) noexcept {
  table->count = count;
  table->count_rounded = count_rounded;
}

}  // namespace gluon_amp::ISA
