// A vector of floats, V, for each instruction set, and vectorized loops over memory.
//
// Tensors have numbers of one type: float16; bfloat16, the upper half of a float, if BFLOAT16 is defined; or
// float32, if FLOAT32 is.
//
// Everything here is in an unnamed namespace, so that each object file has its own copy. The linker would merge
// an inline function of all instruction sets into one copy, which may have AVX-512 instructions.
#pragma once
#include <omp.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__F16C__)
#ifdef __clang__
#include <immintrin.h>
#else  // GCC 12 warns about its own header
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
#endif

#include "kernels.h"

namespace gluon_amp::ISA {

// Each file of kernels sets its part of the table.
void add_passes(Kernels* table) noexcept;
void add_elementwise(Kernels* table) noexcept;
void add_batch_norm(Kernels* table) noexcept;
void add_rows(Kernels* table) noexcept;
void add_rnn(Kernels* table) noexcept;
void add_training(Kernels* table) noexcept;
void add_updates(Kernels* table) noexcept;
void add_counts(Kernels* table) noexcept;

namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t parts_of(int64_t n, int64_t part) { return (n + part - 1) / part; }  // rounded up

// ---- vectors -----------------------------------------------------------------
//
// The last argument of loads and stores selects lanes: Whole() is W elements, Part(n) the first n < W; a load sets
// the other lanes to 0.

struct Whole {};

#if defined(__AVX512F__)

using V = __m512;
constexpr int64_t W = 16;
struct Part {
  __mmask16 mask;
  explicit Part(int64_t n) : mask(static_cast<__mmask16>((1u << n) - 1)) {}
};
inline V load(const float* p, Part part) { return _mm512_maskz_loadu_ps(part.mask, p); }
using Half = __m256i;  // W 16-bit numbers
#ifdef BFLOAT16
inline V widened(Half h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
inline Half narrowed(V v) {
  const __m512i u = _mm512_castps_si512(v), upper = _mm512_srli_epi32(u, 16);
  const __m512i last = _mm512_and_si512(upper, _mm512_set1_epi32(1));  // of ties, the even one
  const __m512i near = _mm512_srli_epi32(
      _mm512_add_epi32(u, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff))), 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(near, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q),
                                                    upper, _mm512_set1_epi32(0x40)));
}
#else
inline V widened(Half h) { return _mm512_cvtph_ps(h); }
inline Half narrowed(V v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
#endif
inline V load(const Number16* p, Part part) { return widened(_mm256_maskz_loadu_epi16(part.mask, p)); }
// Not by memcpy, for which GCC selects a conversion to memory, which takes longer.
inline void store(Number16* p, V v, Whole) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(v)); }
inline void store(float* p, V v, Part part) { _mm512_mask_storeu_ps(p, part.mask, v); }
inline void store(Number16* p, V v, Part part) { _mm256_mask_storeu_epi16(p, part.mask, narrowed(v)); }
inline V splat(float s) { return _mm512_set1_ps(s); }
// v in the selected lanes, else `otherwise`
inline V only(V v, Part part, V otherwise = splat(0)) {
  return _mm512_mask_mov_ps(otherwise, part.mask, v);
}
inline V larger(V a, V b) { return _mm512_max_ps(a, b); }   // b if either is NaN, or both are 0
inline V smaller(V a, V b) { return _mm512_min_ps(a, b); }  // b if either is NaN, or both are 0
inline float highest(V v) { return _mm512_reduce_max_ps(v); }  // the largest lane
inline int zeros_in(V v) {                                     // the number of zero lanes
  return __builtin_popcount(_mm512_cmp_ps_mask(v, splat(0), _CMP_EQ_OQ));
}
using Doubles = __m512d;                                       // of half of the lanes
inline Doubles low(V v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
inline Doubles high(V v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
inline V joined(Doubles low, Doubles high) {                   // rounded
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
}
inline V root(V v) { return _mm512_sqrt_ps(v); }
inline Doubles root(Doubles v) { return _mm512_sqrt_pd(v); }
inline double total(V v) { return _mm512_reduce_add_pd(low(v) + high(v)); }  // the sum of lanes, in double

#elif defined(__AVX2__) && defined(__F16C__)

using V = __m256;
constexpr int64_t W = 8;
struct Part {
  int64_t count;
  explicit Part(int64_t n) : count(n) {}
};
// -1 in the first n of 8 (or of 4) lanes
inline __m256i first_of_8(int64_t n) {
  static const int32_t lanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes + 8 - n));
}
inline __m128i first_of_4(int64_t n) { return _mm256_castsi256_si128(first_of_8(n)); }
using Half = __m128i;
#ifdef BFLOAT16
inline V widened(Half h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline Half narrowed(V v) {
  const __m256i u = _mm256_castps_si256(v), upper = _mm256_srli_epi32(u, 16);
  const __m256i last = _mm256_and_si256(upper, _mm256_set1_epi32(1));  // of ties, the even one
  const __m256i near = _mm256_srli_epi32(
      _mm256_add_epi32(u, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i all = _mm256_blendv_epi8(near, _mm256_or_si256(upper, _mm256_set1_epi32(0x40)), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
#else
inline V widened(Half h) { return _mm256_cvtph_ps(h); }
inline Half narrowed(V v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
#endif
inline V load(const float* p, Part part) {
  return _mm256_maskload_ps(p, first_of_8(part.count));
}
// Loads two 16-bit numbers at a time, as integers; then the last one, if their number is odd.
inline V load(const Number16* p, Part part) {
  __m128i v = _mm_maskload_epi32(reinterpret_cast<const int*>(p), first_of_4(part.count / 2));
  if (part.count & 1) {
    static const Number16 lane[15] = {0, 0, 0, 0, 0, 0, 0, 0xffff};  // of the last one
    const __m128i here = _mm_loadu_si128(reinterpret_cast<const __m128i*>(lane + 8 - part.count));
    const __m128i last = _mm_set1_epi16(static_cast<int16_t>(p[part.count - 1]));
    v = _mm_or_si128(v, _mm_and_si128(here, last));
  }
  return widened(v);
}
inline void store(Number16* p, V v, Whole) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrowed(v)); }
inline void store(float* p, V v, Part part) {
  _mm256_maskstore_ps(p, first_of_8(part.count), v);
}
inline void store(Number16* p, V v, Part part) {
  const __m128i h = narrowed(v);
  _mm_maskstore_epi32(reinterpret_cast<int*>(p), first_of_4(part.count / 2), h);
  if (part.count & 1) {
    Number16 lanes[W];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes), h);
    p[part.count - 1] = lanes[part.count - 1];
  }
}
inline V splat(float s) { return _mm256_set1_ps(s); }
inline V only(V v, Part part, V otherwise = splat(0)) {
  return _mm256_blendv_ps(otherwise, v, _mm256_castsi256_ps(first_of_8(part.count)));
}
inline V larger(V a, V b) { return _mm256_max_ps(a, b); }
inline V smaller(V a, V b) { return _mm256_min_ps(a, b); }
inline float highest(V v) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline int zeros_in(V v) {
  return __builtin_popcount(_mm256_movemask_ps(_mm256_cmp_ps(v, splat(0), _CMP_EQ_OQ)));
}
using Doubles = __m256d;
inline Doubles low(V v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
inline Doubles high(V v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
inline V joined(Doubles low, Doubles high) { return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low)); }
inline V root(V v) { return _mm256_sqrt_ps(v); }
inline Doubles root(Doubles v) { return _mm256_sqrt_pd(v); }
inline double total(V v) {
  const Doubles four = low(v) + high(v);
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

#else

using V = float;
constexpr int64_t W = 1;
struct Part {  // unused: a vector of one element has no parts
  explicit Part(int64_t) {}
};
inline uint32_t bits_of(float f);
inline float float_of(uint32_t u);
using Half = Number16;
#ifdef BFLOAT16
inline Half narrowed(float f) {
  const uint32_t u = bits_of(f), near = (u + 0x7fff + (u >> 16 & 1)) >> 16;  // ties to even
  return static_cast<Half>((u & 0x7fffffffu) > 0x7f800000u ? u >> 16 | 0x40 : near);
}
inline float widened(Half h) { return float_of(static_cast<uint32_t>(h) << 16); }
#else
// Both conversions compute all cases and then select, without branches, so that the compiler can vectorize them.
// The comparisons are of positive signed integers, as SSE2 requires.
inline Half narrowed(float f) {
  const int32_t u = static_cast<int32_t>(bits_of(f) & 0x7fffffffu);
  const int32_t normal = (u + 0xfff + (u >> 13 & 1) - 0x38000000) >> 13;  // ties to even
  const int32_t subnormal =  // adding 0.5 rounds at 2^-24
      static_cast<int32_t>(bits_of(float_of(static_cast<uint32_t>(u)) + 0.5f) - bits_of(0.5f));
  const int32_t nan = 0x7e00 | (u >> 13 & 0x1ff);  // quiet, with its upper bits
  const int32_t small = u < 0x38800000 ? subnormal : normal;     // below 2^-14
  const int32_t finite = u >= 0x47800000 ? 0x7c00 : small;       // 2^16 and up: infinity
  const int32_t all = u > 0x7f800000 ? nan : finite;
  return static_cast<Half>(all | static_cast<int32_t>(bits_of(f) >> 16 & 0x8000u));
}
inline float widened(Half h) {
  const int32_t u = (h & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const int32_t normal = u + 0x38000000;  // another exponent
  const int32_t subnormal = static_cast<int32_t>(
      bits_of(float_of(static_cast<uint32_t>(u + 0x38800000)) - 0x1p-14f));
  const int32_t endless = (u + 0x70000000) | (u > 0x0f800000 ? 0x400000 : 0);  // NaNs made quiet
  const int32_t finite = u < 0x00800000 ? subnormal : normal;
  return float_of(sign | static_cast<uint32_t>(u >= 0x0f800000 ? endless : finite));
}
#endif
inline void store(Number16* p, V v, Whole) { *p = narrowed(v); }
inline V splat(float s) { return s; }
inline V larger(V a, V b) { return a > b ? a : b; }
inline V smaller(V a, V b) { return a < b ? a : b; }
inline V load(const float* p, Part) { return *p; }
inline V load(const Number16* p, Part) { return widened(*p); }
inline void store(float*, V, Part) {}
inline void store(Number16*, V, Part) {}
inline V only(V v, Part, V = 0) { return v; }
inline float highest(V v) { return v; }
inline int zeros_in(V v) { return v == 0; }
using Doubles = double;  // of the one lane; `high` is not part of a vector
inline Doubles low(V v) { return v; }
inline Doubles high(V) { return 0; }
inline V joined(Doubles low, Doubles) { return static_cast<float>(low); }
inline V root(V v) { return sqrtf(v); }
inline Doubles root(Doubles v) { return sqrt(v); }

#endif

// The same for all of them. GCC and clang extend operators to vectors, and compile copies to loads and stores.

#if defined(__AVX512F__) || defined(__F16C__)
using U = uint32_t __attribute__((vector_size(4 * W)));
#else
using U = uint32_t;
#endif
inline U bits_of(V v) { U u; std::memcpy(&u, &v, sizeof u); return u; }
inline V float_of(U u) { V v; std::memcpy(&v, &u, sizeof v); return v; }
inline V load(const float* p, Whole) { V v; std::memcpy(&v, p, sizeof v); return v; }
inline V load(const Number16* p, Whole) { Half h; std::memcpy(&h, p, sizeof h); return widened(h); }
inline void store(float* p, V v, Whole) { std::memcpy(p, &v, sizeof v); }
inline V only(V v, Whole, V = splat(0)) { return v; }
inline V rounded16(V v) { return widened(narrowed(v)); }
inline V magnitude(V v) { return float_of(bits_of(v) & 0x7fffffffu); }
inline V if_less(V a, V b, V yes, V no) { return a < b ? yes : no; }  // in each lane
inline V if_equal(V a, V b, V yes, V no) { return a == b ? yes : no; }
// g where lo <= z <= hi or z is NaN, else 0
inline V between(V g, V z, V lo, V hi) { return ((z < lo) | (z > hi)) ? splat(0) : g; }
// g where z > lo or z is NaN, else 0
inline V above(V g, V z, V lo) { return z <= lo ? splat(0) : g; }

// ---- sums --------------------------------------------------------------------
//
// Sum accumulates up to some thousand values: in the lanes of V or, if V is one float, in a double.

#if defined(__AVX512F__)
using Sum = V;
inline Sum plus_product(Sum sum, V a, V b) { return _mm512_fmadd_ps(a, b, sum); }
#elif defined(__AVX2__) && defined(__F16C__)
using Sum = V;
inline Sum plus_product(Sum sum, V a, V b) { return _mm256_fmadd_ps(a, b, sum); }
#else
using Sum = double;
inline double total(Sum sum) { return sum; }
inline Sum plus_product(Sum sum, V a, V b) { return sum + static_cast<double>(a) * b; }
#endif

// n sums, each in parts that take turns, so that additions are independent
template <int n, int turns = 2> struct Sums {
  Sum part[turns][n];
  void add(int turn, V a) { part[turn][0] = part[turn][0] + a; }
  void add_product(int turn, int i, V a, V b) {
    part[turn][i] = plus_product(part[turn][i], a, b);
  }
  // the total of the turns 2 * k and 2 * k + 1
  double pair(int k, int i) const { return total(part[2 * k][i] + part[2 * k + 1][i]); }
};

// ---- numbers of the table's type ---------------------------------------------

#if defined(FLOAT32)
using Number = float;
constexpr float kTiny = 0;  // the largest that is rounded to 0
inline V rounded(V v) { return v; }
#else
using Number = Number16;
#ifdef BFLOAT16
constexpr float kTiny = 0x1p-134f;
#else
constexpr float kTiny = 0x1p-25f;
#endif
inline V rounded(V v) { return rounded16(v); }
#endif
constexpr bool k16Bit = sizeof(Number) == sizeof(Number16);
constexpr bool kOverflows = k16Bit && kTiny == 0x1p-25f;  // float16: the others have float32's range

inline const Number* numbers(const void* p) { return static_cast<const Number*>(p); }
inline Number* numbers(void* p) { return static_cast<Number*>(p); }
template <typename L> inline V load(const void* p, int64_t i, L lanes) { return load(numbers(p) + i, lanes); }

// Yes or No for `add` below, if a separate loop for each is worth its code size.
struct Yes { constexpr operator bool() const { return true; } };
struct No { constexpr operator bool() const { return false; } };
template <typename F> inline void with_add(Write write, F f) {
  if (write == kAdd) f(Yes());
  else if (write == kStore) f(No());
}

// Rounds v and writes or adds it to number i. Returns the number before the last rounding.
template <typename A, typename L> inline V put(void* p, int64_t i, V v, A add, L lanes) {
  Number* const to = numbers(p) + i;
  if (add) v = load(to, lanes) + rounded(v);
  store(to, v, lanes);
  return v;
}

// A weight is its rounded master weight. If it differs, the weight was written since, and the master weight
// becomes the weight.
inline V followed(V master, V weight) { return if_equal(rounded(master), weight, master, weight); }

inline void put(float* to, double v, Write write) {
  if (write == kStore) *to = static_cast<float>(v);
  if (write == kAdd) *to += static_cast<float>(v);
}

// The larger of `most` and of the selected lanes of v, where numbers of the table's type may overflow.
template <typename L> inline V most_of(V most, V v, L lanes) {
  return kOverflows ? larger(only(v, lanes), most) : most;  // `most` if v is NaN
}

// Sets `overflowed` if a lane's largest number is finite, and infinite once rounded. A lane with infinity hides others.
inline void note_overflow(V most) {
  constexpr float kFirst = 65520, kLast = __FLT_MAX__;  // 65520 is rounded up
  if (kOverflows && zeros_in(between(splat(1), most, splat(kFirst), splat(kLast))) < W)
    __atomic_store_n(&overflowed, 1, __ATOMIC_RELAXED);
}

// ---- loops -------------------------------------------------------------------

constexpr int64_t kChunk = 4096;          // elements per task

// Calls f(i, Whole()) for each vector of [begin, end), and f(i, Part(n)) for the rest. Notes the overflow of numbers that
// f returns.
template <typename F> inline void each(int64_t begin, int64_t end, F f) {
  int64_t i = begin;
  if constexpr (std::is_void<decltype(f(i, Whole()))>::value) {
    for (; i + W <= end; i += W) f(i, Whole());
    if (W > 1 && i < end) f(i, Part(end - i));
  } else {
    V most = splat(0);
    for (; i + W <= end; i += W) most = most_of(most, f(i, Whole()), Whole());
    if (W > 1 && i < end) most = most_of(most, f(i, Part(end - i)), Part(end - i));
    note_overflow(most);
  }
}

// The same; the third argument of f is 0 or 1 in turn: the index of one of two sums.
template <typename F> inline void each_in_turn(int64_t begin, int64_t length, Part part, F f) {
  int64_t i = begin;
  const int64_t whole = length / W * W, end = begin + whole;
  for (; i + 2 * W <= end; i += 2 * W) {
    f(i, Whole(), 0);
    f(i + W, Whole(), 1);
  }
  if (i < end) f(i, Whole(), 0);
  if (W > 1 && whole < length) f(end, part, 1);
}

// Calls f(arguments...) in the bodies of parallel loops. With nothrow, the compiler leaves out exception handling,
// and with it a symbol that the linker would merge.
template <typename F, typename... A>
__attribute__((nothrow)) inline void run(const F& f, A... arguments) {
  f(arguments...);
}

// calls f(begin, end) for the chunks of n elements, over all threads
template <typename F> inline void chunks(int64_t n, F f) {
  if (n < kWorthThreads) {
    if (n > 0) f(int64_t{0}, n);
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; i += kChunk) run(f, i, least(i + kChunk, n));
}

// calls f(i, lanes) for the vectors of n elements, over all threads
template <typename F> inline void vectors(int64_t n, F f) {
  chunks(n, [=](int64_t begin, int64_t end) { each(begin, end, f); });
}

// Scratch memory for one call.
template <typename T> struct Scratch {
  T* data;
  explicit Scratch(int64_t n) : data(static_cast<T*>(::operator new(n * sizeof(T)))) {}
  ~Scratch() { ::operator delete(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

}  // namespace
}  // namespace gluon_amp::ISA
