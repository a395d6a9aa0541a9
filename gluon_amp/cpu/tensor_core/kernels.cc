// Products of float16 matrices with float32 sums by the rule of rule.h, bit by bit.
//
// A lane is one element of the result. a * b is exact in float32; a power of two scales it so that a conversion to
// an integer truncates it. The integers of an instruction sum in 32 bits, or in two sums of 32 bits (`wide`) for
// GPUs that keep as many bits as H100.
#include <utility>

#include "kernels/vector.h"
#include "tensor_core/kernels.h"

#define NOTHING_THROWN __attribute__((nothrow))  // see `run` in vector.h

namespace gluon_amp {
namespace ISA {
namespace {

// ---- vectors of floats, integers, and bytes for as many lanes ----------------------------

constexpr int kLanes = W > 1 ? W : 4;
constexpr int kVectors = 4;                   // of floats, to a panel
constexpr int kPanel = kVectors * kLanes;     // adjacent columns of b
constexpr int kRows = kLanes == 16 ? 2 : 1;   // rows of a at a time, limited by registers
constexpr int64_t kDepth = 256;               // depth that is packed at a time
constexpr int64_t kMostRows = 1024, kMostColumns = 2048;  // of a block of the result

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Bytes = uint8_t __attribute__((vector_size(kPanel)));

template <typename T, typename S> inline T at(const S* p) {
  T made;
  std::memcpy(&made, p, sizeof made);
  return made;
}
template <typename T, typename S> inline void put_at(S* p, T v) { std::memcpy(p, &v, sizeof v); }

// Bytes, one for each lane. (Compilers do not vectorize this.)
inline Ints widened(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return Ints{p[0], p[1], p[2], p[3]};
#endif
}

// ---- packing ---------------------------------------------------------------------------
//
// Factors become floats, with their exponents in separate bytes: 64 for float16's smallest, -14, up to 93; 30 for
// a zero. So the sum of two is the product's exponent + 156 or, if one factor is zero, at most 123, which is less
// than that of any other product.

constexpr uint8_t kZero = 30;
constexpr int kToFloat = -29;           // from such a sum to the exponent in a float's bits
constexpr int kNone = 123 + kToFloat;   // the largest with a zero

inline uint8_t exponent_of(Number16 h) {
  const uint8_t field = h >> 10 & 31;
  const uint8_t least = field ? field : 1;
  return (h & 0x7fff) ? least + 63 : kZero;
}

inline bool endless(Number16 h) { return (h & 0x7c00) == 0x7c00; }  // an infinity or a NaN

// Packs columns [first, first + kPanel) and `depth` rows of b; zeros beyond the last column.
NOTHING_THROWN bool pack_panel(Matrix16 b, int64_t first, int64_t columns, int64_t depth,
                               float* values, uint8_t* exponents) {
  const int64_t here = least(kPanel, columns - first);
  bool special = false;
  for (int64_t k = 0; k < depth; ++k, values += kPanel, exponents += kPanel) {
    Number16 row[kPanel] = {};
    const Number16* from = b.data + k * b.row + first * b.column;
    if (b.column == 1) std::memcpy(row, from, here * sizeof(Number16));
    else for (int64_t j = 0; j < here; ++j) row[j] = from[j * b.column];
    uint8_t any = 0;
    for (int j = 0; j < kPanel; ++j) {
      exponents[j] = exponent_of(row[j]);
      any |= endless(row[j]);
    }
    special |= any;
    for (int j = 0; j < kPanel; j += W) store(values + j, load(row + j, Whole()), Whole());
  }
  return special;
}

// Packs kRows rows of a from `first` on; each exponent is repeated four times for a lane.
NOTHING_THROWN bool pack_rows(Matrix16 a, int64_t first, int64_t rows, int64_t depth,
                              float* values, uint8_t* exponents) {
  bool special = false;
  for (int r = 0; r < kRows; ++r)
    for (int64_t k = 0; k < depth; ++k) {
      const Number16 h = first + r < rows ? a.data[(first + r) * a.row + k * a.column] : Number16(0);
      const int64_t i = k * kRows + r;
#if defined(__F16C__)
      values[i] = _cvtsh_ss(h);
#else
      values[i] = load(&h, Whole());
#endif
      std::memset(exponents + 4 * i, exponent_of(h), 4);
      special |= endless(h);
    }
  return special;
}

// ---- chains of instructions ----------------------------------------------------------------

inline Floats with_exponent(Ints biased) { return (Floats)(biased << 23); }
inline Words cut(Floats v) { return (Words)__builtin_convertvector(v, Ints); }  // toward zero

// Converts an integer of one or two sums to a float, truncated toward zero.
template <bool wide> inline Floats cut_to_float(Words sum, Words half) {
  Words sign = sum;
  if (wide) sign ^= (half ^ sum) & ((sum - half) ^ sum);  // the sum may have overflowed
  const Words negative = (Words)((Ints)sign >> 31);
  Words size = (sum ^ negative) - negative;
  size &= ~(size >> 24);  // clears the first bit beyond 24, so that rounding truncates
  const Floats made = wide ? __builtin_convertvector(size, Floats)
                           : __builtin_convertvector((Ints)size, Floats);
  return (Floats)((Words)made | (negative & 0x80000000u));
}

// The packed data of kRows rows of a and of a panel of b.
struct Factors {
  const float* a;
  const uint8_t* ea;
  const float* b;
  const uint8_t* eb;
};

// Adds their products to `state`: kRows rows of a panel's width.
template <bool wide>
NOTHING_THROWN void chain(const TensorCore& gpu, int64_t depth, const Factors& factors,
                          float* state) {
  const auto [a, ea, b, eb] = factors;
  for (int64_t begin = 0; begin < depth; begin += gpu.block) {
    const int64_t end = least(begin + gpu.block, depth), middle = (begin + end) / 2;
    Bytes largest[kRows] = {};
    for (int64_t k = begin; k < end; ++k) {
      const Bytes e = at<Bytes>(eb + k * kPanel);
      for (int r = 0; r < kRows; ++r) {
        const Bytes sum = e + (Bytes)(Words{} + at<uint32_t>(ea + 4 * (k * kRows + r)));
        largest[r] = sum > largest[r] ? sum : largest[r];
      }
    }
    Words sum[kRows][kVectors], half[kRows][kVectors];
    Floats scale[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      uint8_t top[kPanel];
      put_at(top, largest[r]);
      for (int v = 0; v < kVectors; ++v) {
        const Floats c = at<Floats>(state + r * kPanel + v * kLanes);
        const Ints of_c = (Ints)c >> 23 & 255;
        const Ints of_products = widened(top + v * kLanes) + kToFloat;
        const Ints most_of_all = of_products > of_c ? of_products : of_c;
        scale[r][v] = with_exponent(gpu.fraction + 254 - most_of_all);
        sum[r][v] = cut(c * scale[r][v]);
      }
    }
    auto add = [&, left = a, right = b](int64_t from, int64_t to) {
      for (int64_t k = from; k < to; ++k)
        for (int v = 0; v < kVectors; ++v) {
          const Floats values = at<Floats>(right + k * kPanel + v * kLanes);
          for (int r = 0; r < kRows; ++r)
            sum[r][v] += cut(values * left[k * kRows + r] * scale[r][v]);
        }
    };
    add(begin, wide ? middle : end);
    if (wide) {
      std::memcpy(half, sum, sizeof half);
      add(middle, end);
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) {
        float* to = state + r * kPanel + v * kLanes;
        const Ints field = (Ints)scale[r][v] >> 23;  // of 1 / unit
        const Floats unit = with_exponent(254 - field);
        const Floats made = cut_to_float<wide>(sum[r][v], half[r][v]) * unit;
        // If all products are zeros and c is tiny, its unit may be below float32's range: c stays.
        put_at(to, field < gpu.fraction + 254 - kNone ? made : at<Floats>(to));
      }
  }
}

constexpr uint32_t kNan = 0x7fffffff;
inline bool is_endless(float f) { return !(f - f == 0); }

// The same with infinities or NaNs, which replace the chain's result.
NOTHING_THROWN void chain_of_any(const TensorCore& gpu, bool wide, int64_t depth,
                                 const Factors& factors, float* state) {
  float special[kRows * kPanel];
  for (int i = 0; i < kRows * kPanel; ++i) special[i] = is_endless(state[i]) ? state[i] : 0;
  for (int64_t k = 0; k < depth; ++k)
    for (int r = 0; r < kRows; ++r)
      for (int j = 0; j < kPanel; ++j) {
        const float product = factors.a[k * kRows + r] * factors.b[k * kPanel + j];
        special[r * kPanel + j] += is_endless(product) ? product : 0;
      }
  if (wide) chain<true>(gpu, depth, factors, state);
  else chain<false>(gpu, depth, factors, state);
  for (int i = 0; i < kRows * kPanel; ++i)
    if (is_endless(special[i])) state[i] = special[i];
}

NOTHING_THROWN bool any_endless(const float* state) {
  bool found = false;
  for (int i = 0; i < kRows * kPanel; ++i) found |= is_endless(state[i]);
  return found;
}

// Whether an instruction's sum needs more than 32 bits: products are below 4, c below 2.
bool is_wide(const TensorCore& gpu) {
  return (int64_t{4} * gpu.block + 2) << gpu.fraction > int64_t{1} << 31;
}

// ---- a product of matrices ------------------------------------------------------------------

struct Tiles {  // a block of the result: panels of groups of rows
  int64_t rows, columns, groups, panels;
  Tiles(int64_t r, int64_t c)
      : rows(r), columns(c), groups(parts_of(r, kRows)), panels(parts_of(c, kPanel)) {}
  int64_t count() const { return groups * panels; }
  int64_t floats() const { return count() * kRows * kPanel; }
  // f(element of the tiles, row, column) for each element that is there
  template <typename F> void each_element(F f) const {
#pragma omp parallel for schedule(static) if (rows * columns > kWorthThreads)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j)
        run(f, ((i / kRows * panels + j / kPanel) * kRows + i % kRows) * kPanel + j % kPanel, i, j);
  }
};

// The packed data of one factor: `parts` panels or groups of rows.
struct Packed {
  int64_t floats, bytes;  // per part
  Scratch<float> values;
  Scratch<uint8_t> exponents;
  Scratch<uint8_t> special;  // whether a part has infinities or NaNs

  Packed(int64_t parts, int64_t part, int64_t bytes_of_each)
      : floats(part), bytes(part * bytes_of_each), values(parts * part),
        exponents(parts * bytes), special(parts) {}
  float* values_of(int64_t part) { return values.data + part * floats; }
  uint8_t* exponents_of(int64_t part) { return exponents.data + part * bytes; }
};

// One block of the result during its computation.
class Block {
 public:
  Block(const TensorCore& g, const Tiles& t, int64_t depth)
      : gpu(g), tiles(t), wide(is_wide(g)), threads(t.rows * t.columns * depth > kWorthThreads),
        step(least(most(kDepth / g.block, 1) * g.block, depth)),
        left(t.groups, kRows * step, 4), right(t.panels, kPanel * step, 1), state(t.floats()) {}

  void begin() { std::memset(state.data, 0, tiles.floats() * sizeof(float)); }
  void begin(const float* c, const FloatMatrix& layout) {
    begin();
    float* to = state.data;
    tiles.each_element([=](int64_t e, int64_t i, int64_t j) {
      to[e] = c[i * layout.row + j * layout.column] + 0.0f;  // -0 becomes +0
    });
  }

  // Continues with the products [first, last) of all chains.
  void go_on(Matrix16 a, Matrix16 b, int64_t first, int64_t last) {
    for (int64_t k = first; k < last; k += step)
      go_on({a.data + k * a.column, a.row, a.column}, {b.data + k * b.row, b.row, b.column},
            least(step, last - k));
  }

  const float* results() const { return state.data; }

 private:
  void go_on(Matrix16 a, Matrix16 b, int64_t depth) {
#pragma omp parallel if (threads)
    {
#pragma omp for schedule(static) nowait
      for (int64_t g = 0; g < tiles.groups; ++g)
        left.special.data[g] = pack_rows(a, g * kRows, tiles.rows, depth, left.values_of(g),
                                         left.exponents_of(g));
#pragma omp for schedule(static)
      for (int64_t p = 0; p < tiles.panels; ++p)
        right.special.data[p] = pack_panel(b, p * kPanel, tiles.columns, depth,
                                           right.values_of(p), right.exponents_of(p));
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tiles.count(); ++t) {
        const int64_t p = t / tiles.groups, g = t % tiles.groups;
        float* to = state.data + (g * tiles.panels + p) * kRows * kPanel;
        const Factors factors{left.values_of(g), left.exponents_of(g), right.values_of(p),
                              right.exponents_of(p)};
        if (left.special.data[g] || right.special.data[p] || any_endless(to))
          chain_of_any(gpu, wide, depth, factors, to);
        else if (wide)
          chain<true>(gpu, depth, factors, to);
        else
          chain<false>(gpu, depth, factors, to);
      }
    }
  }

  const TensorCore& gpu;
  const Tiles& tiles;
  const bool wide, threads;
  const int64_t step;
  Packed left, right;
  Scratch<float> state;
};

void one_block(const TensorCore& gpu, const Tiles& tiles, int64_t depth, Matrix16 a,
               Matrix16 b, const float* c, FloatMatrix y) {
  const int64_t split = most(gpu.split > 0 ? least(gpu.split, depth) : depth, 1);
  Block block(gpu, tiles, split);
  Scratch<float> total(tiles.floats());
  if (c) block.begin(c, y);
  else block.begin();
  for (int64_t first = 0; first == 0 || first < depth; first += split) {
    if (first > 0) block.begin();
    block.go_on(a, b, first, least(first + split, depth));
    const float* piece = block.results();
    for (int64_t i = 0; i < tiles.floats(); ++i)
      total.data[i] = first > 0 ? total.data[i] + piece[i] : piece[i];
  }
  const float nan = at<float>(&kNan), *made = total.data;
  tiles.each_element([=](int64_t e, int64_t i, int64_t j) {
    y.data[i * y.row + j * y.column] = made[e] == made[e] ? made[e] : nan;
  });
}

}  // namespace

// Lanes are columns, of a or of b, whichever needs less padding to whole panels.
void tensor_core_product(const TensorCore& gpu, int64_t rows, int64_t columns, int64_t depth,
                         Matrix16 a, Matrix16 b, const float* c, FloatMatrix y) {
  if (Tiles(columns, rows).floats() < Tiles(rows, columns).floats()) {
    std::swap(rows, columns);
    std::swap(a, b);
    a = a.transposed();
    b = b.transposed();
    std::swap(y.row, y.column);
  }
  for (int64_t i = 0; i < rows; i += kMostRows)
    for (int64_t j = 0; j < columns; j += kMostColumns) {
      const int64_t at = i * y.row + j * y.column;
      one_block(gpu, Tiles(least(kMostRows, rows - i), least(kMostColumns, columns - j)), depth,
                {a.data + i * a.row, a.row, a.column}, {b.data + j * b.column, b.row, b.column},
                c ? c + at : nullptr, {y.data + at, y.row, y.column});
    }
}

}  // namespace ISA
}  // namespace gluon_amp
