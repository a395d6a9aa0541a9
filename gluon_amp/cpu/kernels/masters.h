// Float32 masters of float16 weights.
#pragma once
#include "vector.h"

namespace gluon_amp {
namespace ISA {
namespace {

// A weight is its master, rounded. Where it is not, somebody has written the weight since, and
// the master follows.
inline V followed(V master, V weight) {
  return if_equal(half_grid(master), weight, master, weight);
}

}  // namespace
}  // namespace ISA
}  // namespace gluon_amp
