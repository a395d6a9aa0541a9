// TBlobs and NDArrays alike: MXNet passes the arrays of a call as either.
#pragma once
#include <algorithm>

#include "engine.h"

namespace gluon_amp {

inline int type_of(const TBlob& array) { return array.type_flag_; }
inline int type_of(const NDArray& array) { return array.dtype(); }
inline const mxnet::TShape& shape_of(const TBlob& array) { return array.shape_; }
inline const mxnet::TShape& shape_of(const NDArray& array) { return array.shape(); }

// The 16-bit type of any array, or kNoType16.
template <class T>
int type16_of(const std::vector<T>& in, const std::vector<T>& out) {
  int type16 = kNoType16;
  for (auto* arrays : {&in, &out})
    for (const T& array : *arrays)
      if (is_16bit(type_of(array))) type16 = std::max(type16, type_of(array));
  return type16;
}

inline bool all_dense(const std::vector<TBlob>&) { return true; }
inline bool all_dense(const std::vector<NDArray>& arrays) {
  return std::all_of(arrays.begin(), arrays.end(), [](const NDArray& array) {
    return array.storage_type() == mxnet::kDefaultStorage;
  });
}

// Arrays in the plain layout. Inputs in oneDNN's layout are copied, and so are outputs with kAddTo, whose data the copy
// replaces.
inline const std::vector<TBlob>& plain(const std::vector<TBlob>& in, std::vector<NDArray>*) { return in; }
std::vector<TBlob> plain(const std::vector<NDArray>& in, std::vector<NDArray>* copies);
inline const std::vector<TBlob>& plain_outputs(const std::vector<TBlob>& out, const std::vector<OpReqType>&) {
  return out;
}
std::vector<TBlob> plain_outputs(const std::vector<NDArray>& out, const std::vector<OpReqType>& req);

// Whether all results of a call are empty, so that no code has to run; hidden ones are zeros. Throws if MXNet's code
// does not support the empty inputs (empty.cc). `attrs`: null for operators with state, which do not depend on them.
template <class T>
bool is_empty_call(const Operator& op, const NodeAttrs* attrs, const std::vector<T>& in,
                   const std::vector<OpReqType>& req, const std::vector<T>& out);

}  // namespace gluon_amp
