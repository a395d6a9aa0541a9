// Float32 master weights of 16-bit weights.
#pragma once
#include "vector.h"

namespace gluon_amp {
namespace ISA {
namespace {

// A weight is its rounded master weight. If it differs, the weight was written since, and the master weight
// becomes the weight.
inline V followed(V master, V weight) {
  return if_equal(rounded(master), weight, master, weight);
}

}  // namespace
}  // namespace ISA
}  // namespace gluon_amp
