// Memory-bound operators with hand-written kernels.
//
// Each function reads an operator's attributes and calls a kernel. If it returns false, the generic operator
// runs, which supports every case and is the reference in tests. One file for each kind of operator adds its
// rows.
#pragma once
#include <algorithm>

#include "dispatch/watch.h"

namespace gluon_amp {

using Rows = std::map<std::string, HandWritten>;

// Adds rows to the table, when the library is loaded.
struct AddRows {
  explicit AddRows(const Rows& rows);
};

// Whether all arrays are of one 16-bit type.
inline bool all_16bit(const Call& call) {
  const int type = call.out.empty() ? kNoType16 : call.out[0].type_flag_;
  const auto same = [type](const TBlob& array) { return array.type_flag_ == type; };
  return is_16bit(type) && std::all_of(call.in.begin(), call.in.end(), same) &&
         std::all_of(call.out.begin(), call.out.end(), same);
}

// For kernels that also run on floats. In an X-ray's float32 step their bits may differ from those of MXNet's code.
inline bool all_float(const Call& call) {
  return kernels_take_floats() && std::all_of(call.in.begin(), call.in.end(), is_float) &&
         std::all_of(call.out.begin(), call.out.end(), is_float);
}
inline bool has_kernels(const Call& call) { return all_16bit(call) || all_float(call); }

// Writes or adds to output 0 the 16-bit numbers or floats that make(to) computes.
template <class T, class F>
void make_numbers(const Call& call, F make) {
  const TBlob& to = call.out[0];
  if (call.write(0) == kStore) return make(static_cast<T*>(to.dptr_));
  Scratch scratch;
  T* const numbers = reinterpret_cast<T*>(scratch.memory(size(to) * sizeof(T) / sizeof(float) + 1));
  make(numbers);
  put(numbers, to, call.write(0));
}

}  // namespace gluon_amp
