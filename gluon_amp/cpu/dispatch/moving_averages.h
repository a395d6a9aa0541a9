// Moving averages stay finite.
#pragma once
#include <cmath>

#include "engine.h"

namespace gluon_amp {

// The moving averages among an operator's inputs, during its call. An average that the call makes infinite or NaN
// gets back its former value.
class FiniteAverages {
 public:
  template <class T>
  FiniteAverages(const Operator& op, const std::vector<T>& in) {
    for (size_t i : op.row->moving_averages) {
      const TBlob array = blob(in[i]);
      if (is_float(array)) held_.push_back({array, {floats(array), floats(array) + size(array)}});
    }
  }
  FiniteAverages(const FiniteAverages&) = delete;
  ~FiniteAverages() {
    for (const Held& held : held_)
      for (size_t i = 0; i < held.before.size(); ++i)
        if (!std::isfinite(floats(held.array)[i])) floats(held.array)[i] = held.before[i];
  }

 private:
  struct Held {
    TBlob array;
    std::vector<float> before;
  };
  static const TBlob& blob(const TBlob& array) { return array; }
  static TBlob blob(const NDArray& array) { return array.data(); }

  std::vector<Held> held_;
};

}  // namespace gluon_amp
