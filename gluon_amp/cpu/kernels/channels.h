// How batch norm divides a tensor among vectors, pieces and threads.
//
// over_channels(p, job) calls, for every channel c of p:
//
//   job.begin(c, coefficients)           fills what job.sum_part reads of them
//   job.sum_part(walk, out)              for each piece of c, if job.sums(): its sums
//   job.finish(c, total, coefficients)   with the sums of all pieces, added in their order
//   job.map(at, lanes, coefficients)     for each vector of c, if job.maps()
//
// A walk calls f(at, lanes, turn) for all vectors of a piece; a turn's sums are kept apart.
//
// The pieces depend on the shape alone, so that the number of threads changes no bit.
#pragma once
#include "vector.h"

namespace gluon_amp {
namespace ISA {
namespace {

// What map and sum_part need to know of a channel, and as vectors.
struct Coefficients {
  float mean, scale, beta, mean_g, slope;
};
struct Wide {
  V mean, scale, beta, mean_g, slope;
};
constexpr int64_t kCoefficients = 5;

inline Wide splat(const Coefficients& c) {
  return {splat(c.mean), splat(c.scale), splat(c.beta), splat(c.mean_g), splat(c.slope)};
}

// ---- channels of wide planes -----------------------------------------------------

// A piece of a channel: some places of some images.
struct PlaneWalk {
  static constexpr int kTurns = 2;
  int64_t first, images, distance, length;  // `distance` elements from image to image
  Wide of;

  template <typename F> void operator()(F f) const {
    rectangle(first, images, distance, length, f);
  }
  // a first part, at least an eighth
  PlaneWalk some() const {
    if (images >= 8) return {first, parts_of(images, 8), distance, length, of};
    return {first, images, distance, least(length, parts_of(length, 16 * W) * 2 * W), of};
  }
  const Wide& wide(int) const { return of; }

  struct Out {
    double count, center, sums[2];
  };
  void centers(const Sums<1>& s, V (&center)[kTurns]) const {
    center[0] = center[1] = splat(static_cast<float>(s.both(0) / (images * length)));
  }
  void put(Out* out, const V (&center)[kTurns], const Sums<2>& s) const {
    *out = {static_cast<double>(images * length), total(center[0]) / W, {s.both(0), s.both(1)}};
  }
};

// The pieces of one channel: of up to about kPiece elements, which the nearest cache holds.
struct Planes {
  static constexpr int64_t kPiece = 4096;
  const BatchNorm& p;
  int64_t across, places, images, pieces;

  explicit Planes(const BatchNorm& norm) : p(norm) {
    across = parts_of(p.plane, kPiece);
    places = parts_of(parts_of(p.plane, across), 16) * 16;
    across = parts_of(p.plane, places);
    images = most(1, kPiece / p.plane);
    pieces = parts_of(p.batch, images) * across;
  }
  PlaneWalk piece(int64_t c, int64_t i, const Wide& of) const {
    const int64_t n = i / across * images, s = i % across * places;
    return {(n * p.channels + c) * p.plane + s, least(images, p.batch - n),
            p.channels * p.plane, least(places, p.plane - s), of};
  }
};

template <typename J> void map_piece(const J& job, const PlaneWalk& walk) {
  const J own = job;  // a copy that no store can be thought to change
  const Wide of = walk.of;
  walk([=](int64_t at, auto lanes, int) { own.map(at, lanes, of); });
}

// Each thread does whole channels: what it read for the sums lies in its cache for the map.
template <typename J> void by_channels(const Planes& planes, const J& job, bool threads) {
  auto work = [&](int64_t c) {
    Coefficients of = {};
    typename J::Total total;
    job.begin(c, &of);
    if (job.sums()) {
      const Wide wide = splat(of);
      for (int64_t i = 0; i < planes.pieces; ++i) {
        PlaneWalk::Out out;
        job.sum_part(planes.piece(c, i, wide), &out);
        total.add(out.count, out.center, out.sums[0], out.sums[1]);
      }
    }
    job.finish(c, total, &of);
    if (!job.maps()) return;
    const Wide wide = splat(of);
    for (int64_t i = 0; i < planes.pieces; ++i) map_piece(job, planes.piece(c, i, wide));
  };
#pragma omp parallel for schedule(static) if (threads)
  for (int64_t c = 0; c < planes.p.channels; ++c) run(work, c);
}

// Too few channels for that: all threads sum pieces, then channels, then map pieces.
template <typename J> void by_pieces(const Planes& planes, const J& job) {
  const int64_t channels = planes.p.channels, tasks = channels * planes.pieces;
  const int64_t across = planes.across;
  Scratch<PlaneWalk::Out> sums(tasks);
  Scratch<Coefficients> of(channels);
  // tasks in the order of memory
  auto channel = [=](int64_t task) { return task / across % channels; };
  auto piece = [=](int64_t task) { return task / across / channels * across + task % across; };
  auto sum = [&](int64_t t) {
    const int64_t c = channel(t), i = piece(t);
    job.sum_part(planes.piece(c, i, splat(of.data[c])), &sums.data[c * planes.pieces + i]);
  };
  auto finish = [&](int64_t c) {
    typename J::Total total;
    const PlaneWalk::Out* out = sums.data + c * planes.pieces;
    for (int64_t i = 0; job.sums() && i < planes.pieces; ++i)
      total.add(out[i].count, out[i].center, out[i].sums[0], out[i].sums[1]);
    job.finish(c, total, &of.data[c]);
  };
  auto map = [&](int64_t t) {
    const int64_t c = channel(t);
    map_piece(job, planes.piece(c, piece(t), splat(of.data[c])));
  };
  for (int64_t c = 0; c < channels; ++c) {
    of.data[c] = {};
    job.begin(c, &of.data[c]);
  }
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
// Planes of one place (dense data, channels last), or a few, are taken as a matrix: a row for
// each image, a column for each place of each channel. V holds neighbouring columns. Where the
// rows are short, some of them (`fold`) make one row.

// A piece of `vectors` neighbouring vectors of columns: some rows, and perhaps the `rest` of
// elements that the last, partial row of the matrix has there.
template <int vectors, typename L> struct ColumnWalk {
  static constexpr int kTurns = vectors;  // here each has a column of its own
  int64_t column, begin, end, width, rest;
  L lanes;
  const float* table;  // of coefficients

  template <typename F> void operator()(F f) const {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * width + column;
      f(at, lanes, 0);
      if constexpr (vectors >= 4) f(at + W, lanes, 1), f(at + 2 * W, lanes, 2), f(at + 3 * W, lanes, 3);
      if constexpr (vectors == 8) {
        f(at + 4 * W, lanes, 4), f(at + 5 * W, lanes, 5);
        f(at + 6 * W, lanes, 6), f(at + 7 * W, lanes, 7);
      }
    }
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
  Scratch<float> table(kCoefficients * width);      // the coefficients of each column
  Scratch<float> sums(job.sums() ? 3 * pieces * width : 0);

  auto spread = [&](int64_t c) {  // a channel's coefficients to its columns
    const Coefficients& from = of.data[c];
    const float values[] = {from.mean, from.scale, from.beta, from.mean_g, from.slope};
    for (int64_t k = 0; k < kCoefficients; ++k)
      for (int64_t f = 0; f < m.fold; ++f)
        for (int64_t s = 0; s < m.p.plane; ++s)
          table.data[k * width + f * m.columns + c * m.p.plane + s] = values[k];
  };
  auto begin = [&](int64_t c) {
    of.data[c] = {};
    job.begin(c, &of.data[c]);
    spread(c);
  };

  // Strips of vectors: as many as the registers hold sums of.
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
    const J own = job;
    for (int64_t r = row; r < least(row + kMapRows, m.rows + 1); ++r) {
      const int64_t end = least(first + kMapWidth, r < m.rows ? width : m.rest);
      each(first, end, [=](int64_t column, auto lanes) {
        const ColumnWalk<1, decltype(lanes)> walk{column, 0, 0, width, 0, lanes, coefficients};
        own.map(r * width + column, lanes, walk.wide(0));
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
  constexpr int64_t kNarrow = 16;  // places
  const bool threads = p.batch * p.channels * p.plane >= kWorthThreads;
  if (p.plane < kNarrow) return by_columns(Columns(p), job, threads);
  // Whole channels, if that leaves threads idle for less than a sixth of the time.
  const int64_t available = threads && !omp_in_parallel() ? omp_get_max_threads() : 1;
  const int64_t room = parts_of(p.channels, available) * available;
  if (6 * p.channels >= 5 * room) by_channels(Planes(p), job, threads);
  else by_pieces(Planes(p), job);
}

}  // namespace
}  // namespace ISA
}  // namespace gluon_amp
