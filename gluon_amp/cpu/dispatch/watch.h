// Counts of watched nodes' outputs, for gluon_amp.xray.
//
// graph/build.py marks watched nodes (Settings::counts); their attribute has a name, and so have the nodes of their
// gradients. While such a node runs, its thread has a Watch. Kernels that round pass it float32 results
// before rounding; other results are counted as they are written. At the end the counts are added to one
// table, which Python reads and clears.
#pragma once
#include <algorithm>

#include "engine.h"

namespace gluon_amp {

class Watch {
 public:
  // `inputs`: in a backward pass, for each output the forward node's input of which it is the gradient.
  Watch(const Call& call, const std::vector<int>* inputs);
  explicit Watch(const Call& call)
      : Watch(call, call.settings.counts.gradients_of ? &*call.settings.counts.gradients_of : nullptr) {}
  ~Watch();
  Watch(const Watch&) = delete;

  // Adds the counts to the table, at the end of the call.
  void record();

  // Whether it counts.
  explicit operator bool() const { return call_.settings.counts.what == Counting::kAll; }

 private:
  friend void count_exact(const float*, int64_t, int64_t, const void*, int);
  const Call& call_;
  const std::vector<int>* const inputs_;
  std::vector<std::unique_ptr<Counts>> counted_;  // of each output with results before rounding
};

// Passes `n` float32 results before rounding to this thread's Watch, if any. `padding` of them are zeros of no
// tensor. They will be rounded to the memory at `to`, of this type.
void count_exact(const float* exact, int64_t n, int64_t padding, const void* to, int type);

// Whether this thread has a Watch that counts.
bool watching();

// The number of values that all threads count and round at a time, so that they stay in the L1 caches.
int64_t counted_at_a_time();

// Counts floats, and rounds them to an array of 16-bit numbers or floats.
inline void narrow(const float* exact, const TBlob& to, Write write) {
  if (write == kNothing) return;
  const int64_t all = size(to), some = watching() ? counted_at_a_time() : all;
  for (int64_t first = 0; first < all; first += some) {
    const int64_t n = std::min(some, all - first);
    if (is_16bit(to)) count_exact(exact + first, n, 0, at(to, first), to.type_flag_);
    kernels_of(to)->narrow(exact + first, at(to, first), n, write);
  }
}

// Whether hand-written kernels of 16-bit numbers run on floats: in an X-ray's float32 step, and in count_hand_written.
bool kernels_take_floats();

// Runs a watched operator's hand-written kernel on floats (kFloats), whose results equal those of 16-bit numbers
// before rounding, and counts them; for elementwise kernels (kNumbers) in pieces. Returns false if the kernel
// does not support the case.
bool count_hand_written(const Call& call, const HandWritten& kernel);

// A row of the table for Python: one for each output.
constexpr int kSamples = 1024;
struct WatchedRow {  // WATCHED_ROW in library.py
  int64_t index;     // forward: the output; backward: the input of which it is the gradient, or -1
  int64_t backward;  // 0 or 1
  Counts counts;
  int64_t samples;
  float sample[kSamples];  // of the last call's tensor, one value of each part, after rounding
};

int64_t watched();  // removes all rows from the table; returns their number
const WatchedRow* watched_rows();  // the rows removed last, contiguous
const void* watched_names(int64_t* length);  // the names of their forward nodes, 0-terminated

}  // namespace gluon_amp
