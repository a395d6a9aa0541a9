// The table of watched nodes' counts.
#include "dispatch/watch.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "operators/pieces.h"

namespace gluon_amp {
namespace {

thread_local Watch* current = nullptr;
thread_local bool floats_too = false;

using Key = std::tuple<std::string, int64_t, int64_t>;  // name, backward, index
std::mutex lock;
std::map<Key, size_t> places;  // indices of rows
std::vector<WatchedRow> rows, read_rows;  // both keep their memory
std::string names, read_names;       // of the rows' nodes, 0-terminated

void add(const Counts& from, Counts* to) {
  for (int i = 0; i < 256; ++i) to->bins[i] += from.bins[i];
  to->zero += from.zero;
  to->infinite += from.infinite;
  to->overflowed += from.overflowed;
  to->flushed += from.flushed;
  to->squares += from.squares;
  to->error_squares += from.error_squares;
}

// Samples one number of each part of an array. Its index differs from part to part, because parts as long as
// rows would sample one column. Arrays of the same size have the same indices.
void take_sample(const TBlob& from, WatchedRow* row) {
  const int64_t n = size(from), step = (n + kSamples - 1) / kSamples;
  row->samples = 0;
  for (int64_t begin = 0; begin < n; begin += step) {
    const int64_t mixed = static_cast<uint32_t>(row->samples) * 2654435761u >> 8;  // 24 bits
    const int64_t i = begin + (mixed * std::min(step, n - begin) >> 24);
    kernels_of(from)->widen(at(from, i), &row->sample[row->samples++], 1);
  }
}

}  // namespace

Watch::Watch(const Call& call, const std::vector<int>* inputs)
    : call_(call), inputs_(inputs),
      counted_(call.settings.counts.what == Counting::kNothing ? 0 : call.out.size()) {
  if (*this) current = this;
  floats_too = call.settings.counts.what == Counting::kSamples;
}

Watch::~Watch() {
  current = nullptr;
  floats_too = false;
}

void Watch::record() {
  if (call_.settings.counts.what == Counting::kNothing) return;
  const std::string name = watched_name(call_.attrs);
  for (size_t i = 0; i < call_.out.size(); ++i) {
    const TBlob& out = call_.out[i];
    if (call_.write(i) == kNothing || !(is_16bit(out) || is_float(out)) || size(out) == 0) continue;
    if (!counted_[i] && *this) {
      counted_[i] = std::make_unique<Counts>();
      kernels_of(out)->count_rounded(out.dptr_, size(out), counted_[i].get());
    }
    const int64_t index = !inputs_ ? i : i < inputs_->size() ? (*inputs_)[i] : -1;
    std::lock_guard<std::mutex> guard(lock);
    const auto place = places.emplace(Key(name, inputs_ != nullptr, index),
                                      rows.size());
    if (place.second) {
      names.append(std::get<0>(place.first->first)).push_back('\0');
      rows.emplace_back();
      rows.back().index = index;
      rows.back().backward = inputs_ != nullptr;
    }
    WatchedRow& row = rows[place.first->second];
    if (counted_[i]) add(*counted_[i], &row.counts);
    take_sample(out, &row);
  }
}

void count_exact(const float* exact, int64_t n, int64_t padding, const void* to, int type) {
  if (!current) return;
  const auto& out = current->call_.out;
  for (size_t i = 0; i < out.size(); ++i) {
    const char *begin = static_cast<const char*>(out[i].dptr_), *at = static_cast<const char*>(to);
    if (at < begin || at >= begin + size(out[i]) * bytes_of(out[i].type_flag_)) continue;
    auto& counts = current->counted_[i];
    if (!counts) counts = std::make_unique<Counts>();
    kernels_of(type)->count(exact, n, counts.get());
    counts->bins[0] -= padding;
    counts->zero -= padding;
    return;
  }
}

bool watching() { return current != nullptr; }

int64_t counted_at_a_time() { return omp_get_max_threads() * int64_t(1) << 16; }

bool kernels_take_floats() { return floats_too; }

bool count_hand_written(const Call& call, const HandWritten& kernel) {
  if (word(call.attrs, "act_type", "") == "relu" ||  // relu is exact
      std::none_of(call.out.begin(), call.out.end(), [](const TBlob& to) { return is_16bit(to); }))
    return false;
  if ((kernel.supports & kNumbers) == kNumbers &&
      some_numbers_at_a_time(call, counted_at_a_time(),
                             [&](const Call& piece) { return count_hand_written(piece, kernel); }))
    return true;
  Scratch scratch;
  auto wide = [&](const TBlob& array) {
    return is_16bit(array) ? scratch.array(array.shape_).data() : array;
  };
  std::vector<TBlob> in, out;
  std::vector<OpReqType> req = call.req;
  for (auto& from : call.in) {
    in.push_back(wide(from));
    if (is_16bit(from)) widen(from, floats(in.back()));
  }
  for (size_t i = 0; i < call.out.size(); ++i) {
    out.push_back(wide(call.out[i]));
    if (is_16bit(call.out[i]) && call.write(i) == kAdd) req[i] = mxnet::kWriteTo;
  }
  floats_too = true;
  const bool ran = kernel.run(call.on(in, req, out));
  floats_too = false;
  for (size_t i = 0; ran && i < out.size(); ++i) {
    const TBlob& to = call.out[i];
    if (is_16bit(to) && call.write(i) != kNothing) narrow(floats(out[i]), to, call.write(i));
  }
  return ran;
}

int64_t watched() {
  std::lock_guard<std::mutex> guard(lock);
  read_rows.swap(rows);
  read_names.swap(names);
  rows.clear();
  names.clear();
  places.clear();
  return static_cast<int64_t>(read_rows.size());
}

const WatchedRow* watched_rows() { return read_rows.data(); }

const void* watched_names(int64_t* length) {
  *length = static_cast<int64_t>(read_names.size());
  return read_names.data();
}

}  // namespace gluon_amp
