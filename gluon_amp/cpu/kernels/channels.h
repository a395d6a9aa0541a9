// Divides a tensor into vectors, pieces and threads for batch norm.
//
// over_channels(p, job) calls, for every channel c of p:
//
//   job.begin(c, coefficients)           sets the coefficients for job.sum_part, if J::kBegins
//   job.sum_part(walk, out)              for each piece of c, if job.sums(): its sums
//   job.finish(c, total, coefficients)   with the sums of all pieces, added in their order
//   job.map(at, lanes, coefficients)     for each vector of c, if job.maps()
//
// A walk calls f(at, lanes, turn) for all vectors of a piece; each turn has separate sums.
//
// The pieces depend on the shape only, so that results do not depend on the number of threads.
#pragma once
#include "transpose.h"

namespace gluon_amp::ISA {
namespace {

// The parameters of a channel for map and sum_part, as scalars and as vectors.
struct Coefficients {
  float mean, scale, beta, mean_g, slope;
};
struct Wide {
  V mean, scale, beta, mean_g, slope;
};

inline Wide splat(const Coefficients& c) {
  return {splat(c.mean), splat(c.scale), splat(c.beta), splat(c.mean_g), splat(c.slope)};
}

// ---- channels of wide planes -----------------------------------------------------

// A first part of a piece, at least an eighth.
template <typename Walk> Walk first_part(Walk piece) {
  if (piece.images >= 8) piece.images = parts_of(piece.images, 8);
  else piece.length = least(piece.length, parts_of(piece.length, 16 * W) * 2 * W);
  return piece;
}

// A piece of a channel, some positions of some images; or of up to `most` adjacent channels, image by image, so
// that contiguous reads are longer.
template <int most> struct PlaneWalk {
  static constexpr int kMost = most, kTurns = 2 * most;  // two for each channel
  int64_t first, images, distance, length;  // `distance` elements from image to image
  int64_t channels, plane;
  const Wide* of;  // the coefficients of each channel

  int64_t count() const { return most == 1 ? 1 : channels; }
  template <typename F> void operator()(F f) const {
    const Part part(length % W);
    for (int64_t n = 0; n < images; ++n)
      for (int c = 0; c < count(); ++c)
        each_in_turn(first + n * distance + c * plane, length, part,
                     [&](int64_t at, auto lanes, int turn) { f(at, lanes, 2 * c + turn); });
  }
  PlaneWalk some() const { return first_part(*this); }
  const Wide& wide(int turn) const { return of[turn / 2]; }

  struct Out {
    double count, center, sums[2];
  };
  void centers(const Sums<1, kTurns>& s, V (&center)[kTurns]) const {
    for (int c = 0; c < count(); ++c)
      center[2 * c] = center[2 * c + 1] =
          splat(static_cast<float>(s.pair(c, 0) / static_cast<double>(images * length)));
  }
  void put(Out* out, const V (&center)[kTurns], const Sums<2, kTurns>& s) const {
    for (int c = 0; c < count(); ++c)
      out[c] = {static_cast<double>(images * length), total(center[2 * c]) / W,
                {s.pair(c, 0), s.pair(c, 1)}};
  }

  using Wides = Wide[most];
  static void spread(const Coefficients* from, int64_t count, Wides& to) {
    for (int64_t c = 0; c < (most == 1 ? 1 : count); ++c) to[c] = splat(from[c]);
  }
};

#if defined(__AVX512F__)
// A piece of W adjacent channels in oneDNN's layout: a vector has a place of each. There is a turn for each lane of
// a PlaneWalk's two turns, so that the sums have the same bits.
struct LayoutWalk {
  static constexpr int kMost = W, kTurns = 2 * W;
  int64_t first, images, distance, length, channels, plane;  // `first`, `distance`: in memory
  const Wide* of;

  template <typename F> void operator()(F f) const {
    const int64_t whole = length / W * W;
    for (int64_t n = 0; n < images; ++n) {
      const int64_t at = first + n * distance;
      int64_t s = 0;
      for (; s + kTurns <= whole; s += kTurns)
        for (int turn = 0; turn < kTurns; ++turn) f(at + (s + turn) * W, Whole(), turn);
      for (int turn = 0; s < whole; ++s, ++turn) f(at + s * W, Whole(), turn);
      for (int turn = W; s < length; ++s, ++turn) f(at + s * W, Whole(), turn);
    }
  }
  LayoutWalk some() const { return first_part(*this); }
  const Wide& wide(int) const { return *of; }

  // The totals of each channel.
  template <int n> static void totals(const Sums<n, kTurns>& s, int i, double (&to)[W]) {
    V rows[W];
    for (int lane = 0; lane < W; ++lane) rows[lane] = s.part[lane][i] + s.part[W + lane][i];
    transpose(rows);
    for (int c = 0; c < W; ++c) to[c] = total(rows[c]);
  }
  using Out = PlaneWalk<1>::Out;
  void centers(const Sums<1, kTurns>& s, V (&center)[kTurns]) const {
    double sums[W];
    float means[W];
    totals(s, 0, sums);
    const auto count = static_cast<double>(images * length);
    for (int c = 0; c < W; ++c) means[c] = static_cast<float>(sums[c] / count);
    for (V& each : center) each = load(means, Whole());
  }
  void put(Out* out, const V (&center)[kTurns], const Sums<2, kTurns>& s) const {
    double first_sums[W], second_sums[W];
    float centers[W];
    totals(s, 0, first_sums);
    totals(s, 1, second_sums);
    store(centers, center[0], Whole());
    for (int c = 0; c < W; ++c)
      out[c] = {static_cast<double>(images * length), centers[c], {first_sums[c], second_sums[c]}};
  }

  using Wides = Wide[1];
  static void spread(const Coefficients* from, int64_t, Wides& to) {
    float each[5][W];
    for (int c = 0; c < W; ++c) {
      each[0][c] = from[c].mean;
      each[1][c] = from[c].scale;
      each[2][c] = from[c].beta;
      each[3][c] = from[c].mean_g;
      each[4][c] = from[c].slope;
    }
    const Whole all;
    to[0] = {load(each[0], all), load(each[1], all), load(each[2], all), load(each[3], all),
             load(each[4], all)};
  }
};
#endif

// The pieces of each channel, of up to about kPiece elements, which fit in the L1 and L2 caches; and the groups
// of channels that are processed together.
struct Planes {
  static constexpr int64_t kPiece = 4096, kRun = 1024, kMost = 16;
  const BatchNorm& p;
  int64_t across, places, images, pieces, group = 1, groups;

  Planes(const BatchNorm& norm, int64_t threads, bool sums) : p(norm) {
    across = parts_of(p.plane, kPiece);
    places = parts_of(parts_of(p.plane, across), 16) * 16;
    across = parts_of(p.plane, places);
    images = sums ? most(1, kPiece / p.plane) : 1;
    pieces = parts_of(p.batch, images) * across;
    if (p.in_layout) group = 16;
    else if (2 * p.plane <= kRun)
      group = most(1, least(least(kMost, kRun / p.plane), p.channels / (4 * threads)));
    groups = parts_of(p.channels, group);
  }
  int64_t channels_of(int64_t k) const { return least(group, p.channels - k * group); }
  template <typename Walk> Walk piece(int64_t k, int64_t i, const Wide* of) const {
    const int64_t n = i / across * images, s = i % across * places;
    return {(n * p.channels + k * group) * p.plane + s * (p.in_layout ? group : 1),
            least(images, p.batch - n), p.channels * p.plane, least(places, p.plane - s),
            channels_of(k), p.plane, of};
  }
};

// The job's calls for one group of channels.
template <typename Walk, typename J> struct Group {
  const Planes& planes;
  const J& job;
  int64_t k, channels;
  typename Walk::Wides wide;

  Group(const Planes& all, const J& j, int64_t index, const Coefficients* of)
      : planes(all), job(j), k(index), channels(all.channels_of(index)) {
    spread(of);
  }
  void spread(const Coefficients* of) { Walk::spread(of, channels, wide); }
  void sum(int64_t i, typename Walk::Out* out) const {
    job.sum_part(planes.piece<Walk>(k, i, wide), out);
  }
  void map(int64_t i) const {
    const Walk walk = planes.piece<Walk>(k, i, wide);
    const J copy = job;  // without aliasing
    walk([&](int64_t at, auto lanes, int turn) { copy.map(at, lanes, walk.wide(turn)); });
  }
};

// Each thread processes whole channels, so that the map reads from its cache what the sums have read.
template <typename Walk, typename J>
void by_channels(const Planes& planes, const J& job, bool threads) {
  auto work = [&](int64_t k) {
    Coefficients of[Walk::kMost] = {};
    typename J::Total totals[Walk::kMost];
    const int64_t first = k * planes.group, channels = planes.channels_of(k);
    for (int64_t c = 0; J::kBegins && c < channels; ++c) job.begin(first + c, &of[c]);
    Group<Walk, J> group(planes, job, k, of);
    for (int64_t i = 0; job.sums() && i < planes.pieces; ++i) {
      typename Walk::Out out[Walk::kMost];
      group.sum(i, out);
      for (int64_t c = 0; c < channels; ++c)
        totals[c].add(out[c].count, out[c].center, out[c].sums[0], out[c].sums[1]);
    }
    for (int64_t c = 0; c < channels; ++c) job.finish(first + c, totals[c], &of[c]);
    group.spread(of);
    // in reverse, because the last pieces are in the cache even if the whole channel is not
    for (int64_t i = planes.pieces; job.maps() && i-- > 0;) group.map(i);
  };
#pragma omp parallel for schedule(static) if (threads)
  for (int64_t k = 0; k < planes.groups; ++k) run(work, k);
}

// For few channels: all threads sum pieces, then channels, then map pieces.
template <typename Walk, typename J> void by_pieces(const Planes& planes, const J& job) {
  using Out = typename Walk::Out;
  const int64_t channels = planes.p.channels, tasks = planes.groups * planes.pieces;
  const int64_t across = planes.across, groups = planes.groups, group = planes.group;
  Scratch<Out> sums(channels * planes.pieces);  // a group's channels are adjacent
  Scratch<Coefficients> of(channels);
  for (int64_t c = 0; c < channels; ++c) {
    of.data[c] = {};
    if (J::kBegins) job.begin(c, &of.data[c]);
  }
  auto out = [&](int64_t k, int64_t piece) {
    return sums.data + k * group * planes.pieces + piece * planes.channels_of(k);
  };
  // tasks in memory order
  auto task_group = [=](int64_t task) { return task / across % groups; };
  auto task_piece = [=](int64_t task) { return task / across / groups * across + task % across; };
  auto sum = [&](int64_t task) {
    const int64_t k = task_group(task), i = task_piece(task);
    Group<Walk, J>(planes, job, k, of.data + k * group).sum(i, out(k, i));
  };
  auto finish = [&](int64_t c) {
    typename J::Total total;
    for (int64_t i = 0; job.sums() && i < planes.pieces; ++i) {
      const Out& part = out(c / group, i)[c % group];
      total.add(part.count, part.center, part.sums[0], part.sums[1]);
    }
    job.finish(c, total, &of.data[c]);
  };
  auto map = [&](int64_t task) {
    const int64_t k = task_group(task);
    Group<Walk, J>(planes, job, k, of.data + k * group).map(task_piece(task));
  };
#pragma omp parallel
  {
    if (job.sums()) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tasks; ++t) run(sum, t);
    }
#pragma omp for schedule(static)
    for (int64_t c = 0; c < channels; ++c) run(finish, c);
    if (job.maps()) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tasks; ++t) run(map, t);
    }
  }
}

// ---- channels of narrow planes ---------------------------------------------------
//
// Planes of one or a few positions (dense data, channels-last) form a matrix: a row for each image, a column for
// each position of each channel. V holds adjacent columns. Short rows are joined (`fold`).

// A piece of `vectors` adjacent vectors of columns: some rows, and possibly `rest` elements of the last, partial
// row of the matrix.
template <int vectors, typename L> struct ColumnWalk {
  static constexpr int kTurns = vectors;  // each has its own columns
  int64_t column, begin, end, width, rest;
  L lanes;
  const float* table;  // of coefficients

  template <typename F> void operator()(F f) const {
    for (int64_t row = begin; row < end; ++row)
      for (int k = 0; k < vectors; ++k) f(row * width + column + k * W, lanes, k);
    for (int64_t i = 0; i < vectors * W && i < rest; i += W) {
      const int64_t at = end * width + column + i;
      if (rest - i >= W) f(at, lanes, static_cast<int>(i / W));
      else f(at, Part(rest - i), static_cast<int>(i / W));
    }
  }
  ColumnWalk some() const {
    return {column, begin, begin + parts_of(end - begin, 8), width, 0, lanes, table};
  }
  Wide wide(int k) const {
    const float* at = table + column + k * W;
    return {load(at, lanes), load(at + width, lanes), load(at + 2 * width, lanes),
            load(at + 3 * width, lanes), load(at + 4 * width, lanes)};
  }

  struct Out {
    float *center, *sums[2];
  };
  void centers(const Sums<1, vectors>& s, V (&center)[vectors]) const {
    const V share = splat(1 / static_cast<float>(end - begin));
    for (int k = 0; k < vectors; ++k) center[k] = V(s.part[k][0]) * share;
  }
  void put(Out* out, const V (&center)[vectors], const Sums<2, vectors>& s) const {
    for (int k = 0; k < vectors; ++k) {
      store(out->center + column + k * W, center[k], lanes);
      for (int i = 0; i < 2; ++i) store(out->sums[i] + column + k * W, V(s.part[k][i]), lanes);
    }
  }
};

struct Columns {
  static constexpr int64_t kRows = 128;  // of a piece
  const BatchNorm& p;
  int64_t columns, fold, width, rows, rest, pieces;

  explicit Columns(const BatchNorm& norm) : p(norm) {
    columns = p.channels * p.plane;
    fold = least(p.batch, columns < 16 ? 128 : columns < 256 ? 16 : 1);
    width = columns * fold;
    rows = p.batch / fold;
    rest = p.batch % fold * columns;
    pieces = parts_of(rows, kRows);
  }
};

template <typename J> void by_columns(const Columns& m, const J& job, bool threads) {
  const int64_t width = m.width, pieces = m.pieces, channels = m.p.channels;
  Scratch<Coefficients> of(channels);
  Scratch<float> table(5 * width);  // the coefficients of each column
  Scratch<float> sums(job.sums() ? 3 * pieces * width : 0);

  auto spread = [&](int64_t c) {  // copies a channel's coefficients to its columns
    const Coefficients from = of.data[c];
    float* const to = table.data + c * m.p.plane;
    for (int64_t f = 0; f < m.fold; ++f)
      for (int64_t s = 0; s < m.p.plane; ++s) {
        float* const at = to + f * m.columns + s;
        at[0] = from.mean;
        at[width] = from.scale;
        at[2 * width] = from.beta;
        at[3 * width] = from.mean_g;
        at[4 * width] = from.slope;
      }
  };
  auto begin = [&](int64_t c) {
    of.data[c] = {};
    if (!J::kBegins) return;
    job.begin(c, &of.data[c]);
    spread(c);
  };

  // The vectors of a strip, whose sums fit in registers.
  constexpr int kVectors = W == 16 ? 8 : 4;
  constexpr int64_t kStrip = kVectors * W;
  const int64_t strips = parts_of(width, kStrip), sum_tasks = strips * pieces;
  auto sum = [&](int64_t task) {
    const int64_t piece = task / strips, first = task % strips * kStrip;
    const int64_t row = piece * m.kRows, end = least(row + m.kRows, m.rows);
    const int64_t rest = end == m.rows ? m.rest : 0;
    float* const to = sums.data + 3 * piece * width;
    if (first + kStrip <= width) {
      using Walk = ColumnWalk<kVectors, Whole>;
      typename Walk::Out out = {to, {to + width, to + 2 * width}};
      job.sum_part(Walk{first, row, end, width, rest - first, Whole(), table.data}, &out);
      return;
    }
    each(first, width, [&](int64_t column, auto lanes) {
      using Walk = ColumnWalk<1, decltype(lanes)>;
      typename Walk::Out out = {to, {to + width, to + 2 * width}};
      job.sum_part(Walk{column, row, end, width, rest - column, lanes, table.data}, &out);
    });
  };

  auto finish = [&](int64_t c) {
    typename J::Total total;
    for (int64_t i = 0; job.sums() && i < pieces; ++i) {
      const int64_t count = least(m.kRows, m.rows - i * m.kRows);
      for (int64_t f = 0; f < m.fold; ++f)
        for (int64_t s = 0; s < m.p.plane; ++s) {
          const int64_t column = f * m.columns + c * m.p.plane + s;
          const float* at = sums.data + 3 * i * width + column;
          total.add(count + (i + 1 == pieces && column < m.rest), at[0], at[width],
                    at[2 * width]);
        }
    }
    job.finish(c, total, &of.data[c]);
    spread(c);
  };

  constexpr int64_t kMapRows = 16, kMapWidth = 1024;
  const int64_t map_blocks = parts_of(width, kMapWidth);
  const int64_t map_tasks = parts_of(m.rows + 1, kMapRows) * map_blocks;  // with the partial row
  auto map = [&](int64_t task) {
    const int64_t row = task / map_blocks * kMapRows, first = task % map_blocks * kMapWidth;
    const float* const coefficients = table.data;
    const J copy = job;
    for (int64_t r = row; r < least(row + kMapRows, m.rows + 1); ++r) {
      const int64_t end = least(first + kMapWidth, r < m.rows ? width : m.rest);
      each(first, end, [&, r](int64_t column, auto lanes) {
        const ColumnWalk<1, decltype(lanes)> walk{column, 0, 0, width, 0, lanes, coefficients};
        copy.map(r * width + column, lanes, walk.wide(0));
      });
    }
  };

#pragma omp parallel if (threads)
  {
#pragma omp for schedule(static)
    for (int64_t c = 0; c < channels; ++c) run(begin, c);
    if (job.sums()) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < sum_tasks; ++t) run(sum, t);
    }
#pragma omp for schedule(static)
    for (int64_t c = 0; c < channels; ++c) run(finish, c);
    if (job.maps()) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < map_tasks; ++t) run(map, t);
    }
  }
}

// ---- the choice ------------------------------------------------------------------

template <typename J> void over_channels(const BatchNorm& p, const J& job) {
  if (p.channels == 0) return;
  constexpr int64_t kNarrow = 16;  // positions
  const bool threads = p.batch * p.channels * p.plane >= kWorthThreads;
  if (p.plane < kNarrow) return by_columns(Columns(p), job, threads);
  const int64_t available = threads && !omp_in_parallel() ? omp_get_max_threads() : 1;
  const Planes planes(p, available, job.sums());
  // Whole channels for sums, if threads idle for less than a sixth of the time. Otherwise in memory order, like
  // other operators, so that each thread reads what it has written.
  const bool idle = 6 * planes.groups < 5 * parts_of(planes.groups, available) * available;
  const bool whole = available == 1 || (job.sums() && !idle);
  const auto run_with = [&](auto walk) {
    using Walk = decltype(walk);
    whole ? by_channels<Walk>(planes, job, threads) : by_pieces<Walk>(planes, job);
  };
#if defined(__AVX512F__)
  if (p.in_layout) return run_with(LayoutWalk());
#endif
  if (planes.group == 1) run_with(PlaneWalk<1>());
  else run_with(PlaneWalk<Planes::kMost>());
}

}  // namespace
}  // namespace gluon_amp::ISA
