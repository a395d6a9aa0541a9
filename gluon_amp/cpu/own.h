// Operators that have code of their own, since they compute little for each byte that they read.
//
// Each function reads an operator's attributes and calls a kernel. Where it returns false, the
// generic operator runs: it is right for every case, and the tests hold each row against it. A file
// for each kind of operator adds its rows.
#pragma once
#include <algorithm>

#include "watch.h"

namespace gluon_amp {

using Rows = std::map<std::string, OwnCode>;

void add_broadcast(Rows& rows);
void add_convolution(Rows& rows);
void add_copies(Rows& rows);
void add_dense(Rows& rows);
void add_dropout(Rows& rows);
void add_elementwise(Rows& rows);
void add_embedding(Rows& rows);
void add_images(Rows& rows);
void add_norms(Rows& rows);
void add_pad(Rows& rows);
void add_pooling(Rows& rows);
void add_products(Rows& rows);
void add_updates(Rows& rows);

// Whether all arrays are of one 16-bit type.
inline bool all_half(const Call& call) {
  const int type = call.out.empty() ? kNoHalf : call.out[0].type_flag_;
  const auto same = [type](const TBlob& array) { return array.type_flag_ == type; };
  return is_half(type) && std::all_of(call.in.begin(), call.in.end(), same) &&
         std::all_of(call.out.begin(), call.out.end(), same);
}

// Code for halves that runs on floats, too. In an X-ray's step in float32, which compares numbers, it
// needs not have the bits of MXNet's code.
inline bool all_float(const Call& call) {
  return takes_floats() && std::all_of(call.in.begin(), call.in.end(), is_float) &&
         std::all_of(call.out.begin(), call.out.end(), is_float);
}

// Floats that are made to a float32 output, rounded if the node says so.
inline void round_to(const Call& call, size_t i, const float* made) {
  const Grid* grid = call.rounding.written(i);
  kernels->round(grid ? *grid : Grid(), made, floats(call.out[i]), size(call.out[i]),
                 call.write(i));
}

// Halves that make(to) writes to output 0, or adds to what is there.
template <class F>
void made_in_halves(const Call& call, F make) {
  const TBlob& to = call.out[0];
  if (call.write(0) == kStore) return make(halves(to));
  Lease lease;
  Half* const made = reinterpret_cast<Half*>(lease.memory((size(to) + 1) / 2));
  make(made);
  const Half* const added = made;
  kernels_of(to)->sum(&added, 1, halves(to), size(to), call.write(0));
}

}  // namespace gluon_amp
