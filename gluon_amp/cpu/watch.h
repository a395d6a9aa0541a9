// What watched nodes have computed: counts of each output, for gluon_amp.xray.
//
// A node is watched where graph/build.py has given it the attribute kWatchKey: its name, which the
// nodes of its gradient get, too. While such a node runs, a Watch stands on its thread. The code
// that rounds shows it float32 results before they are rounded; what nobody has shown is counted as
// it was written. At the end the counts go into one table, which Python reads and clears.
#pragma once
#include <algorithm>

#include "engine.h"

namespace gluon_amp {

constexpr char kWatchKey[] = "__gluon_amp_watch__";
constexpr char kSamplesOnly = '?';  // before the name: nothing is counted, only samples are taken
// Of a gradient's node: for each of its outputs the forward node's input whose gradient it is.
constexpr char kWatchedInputsKey[] = "__gluon_amp_watched_inputs__";

class Watch {
 public:
  // `name`: null where the node is not watched. `inputs`: of a gradient's node, else null.
  Watch(const Call& call, const std::string* name, const std::string* inputs);
  Watch(const Call& call) : Watch(call, find(call.attrs, kWatchKey),
                                  find(call.attrs, kWatchedInputsKey)) {}
  ~Watch();
  Watch(const Watch&) = delete;

  // Whether it counts.
  explicit operator bool() const { return name_ != nullptr && !samples_; }

 private:
  friend Counts* counts_of(const void*);
  const Call& call_;
  const std::string *name_, *inputs_;
  const bool samples_;
  std::vector<std::unique_ptr<Counts>> counted_;  // of each output, where something was shown
};

// What the Watch of this thread, if there is one, has counted of the output whose memory `to` lies in:
// for code that counts what it rounds. Else null.
Counts* counts_of(const void* to);

// Shows the Watch of this thread, if there is one, `n` exact results, `padding` of which are zeros
// that belong to no tensor, and which are to be rounded into the memory at `to`, of this type.
void show(const float* exact, int64_t n, int64_t padding, const void* to, const Grid* grid,
          int type);

// Whether results are counted that are shown on this thread now.
bool watching();

// How many numbers all threads show and round, so that the nearest caches hold them meanwhile.
int64_t shown_at_a_time();

// Shows floats, and rounds them to halves.
inline void narrow(const float* exact, const TBlob& to, Write write) {
  const int64_t all = size(to), some = watching() ? shown_at_a_time() : all;
  for (int64_t first = 0; first < all; first += some) {
    const int64_t n = std::min(some, all - first);
    show(exact + first, n, 0, halves(to) + first, nullptr, to.type_flag_);
    kernels_of(to)->narrow(exact + first, halves(to) + first, n, write);
  }
}

// Whether code of its own for halves is to take floats: in an X-ray's step in float32, and in
// show_own_code.
bool takes_floats();

// Runs a watched operator's code of its own on floats (kFloats): it makes the same numbers from them
// as from halves, and they are shown before they are rounded; where it makes each number by itself
// (kNumbers), some at a time. False where it does not know the case.
bool show_own_code(const Call& call, const OwnCode& own);

// What Python reads: one row for each output.
constexpr int kSamples = 1024;
struct WatchedRow {
  int64_t index;     // forward: of an output; backward: of the input whose gradient it is, or -1
  int64_t backward;  // 0 or 1
  Counts counts;
  int64_t samples;
  float sample[kSamples];  // of the last call's tensor, one of each part, as it was written
};

int64_t watched();  // takes all rows out of the table; returns how many
const WatchedRow* watched_rows();  // those taken out last, beside each other
const char* watched_names(int64_t* length);  // of their forward nodes, each with a 0 behind it

}  // namespace gluon_amp
