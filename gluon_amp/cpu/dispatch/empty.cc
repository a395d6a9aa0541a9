// Calls with empty arrays, and the plain layout of arrays.
//
// Much of MXNet's code, in float32 too, divides by the size of an axis, or reads an array that has no elements. If that
// size is 0, the process ends, or a result depends on other memory.
#include <cstring>
#include <sstream>

#include "dispatch/arrays.h"

namespace gluon_amp {
namespace {

template <class T>
bool is_empty(const T& array) {
  return shape_of(array).Size() == 0;
}

// Whether MXNet's code does not support empty inputs where a result is not empty. `attrs`: null for operators with state,
// which do not depend on them.
bool refuses_empty(const Operator& op, const NodeAttrs* attrs, int type_of_result) {
  const bool is_integer = type_of_result != mshadow::kFloat32 && type_of_result != mshadow::kFloat64 &&
                          !is_16bit(type_of_result);
  const auto& attributes = op.row->refuses_empty_with;
  return op.is(kRefusesEmpty) || (is_integer && op.is(kRefusesEmptyForIntegers)) ||
         std::any_of(attributes.begin(), attributes.end(),
                     [&](const std::string& key) { return flag(*attrs, key.c_str(), false); });
}

template <class T>
[[noreturn]] void refuse_empty(const Operator& op, const std::vector<T>& in, const T& result) {
  std::ostringstream message;
  message << op.name() << " takes no empty arrays, unless its results are empty, too. Received: inputs of the shapes";
  for (const T& array : in) message << " " << shape_of(array);
  message << ", which give a result of the shape " << shape_of(result);
  throw dmlc::Error(message.str());
}

}  // namespace

template <class T>
bool is_empty_call(const Operator& op, const NodeAttrs* attrs, const std::vector<T>& in,
                   const std::vector<OpReqType>& req, const std::vector<T>& out) {
  const bool any_input = std::any_of(in.begin(), in.end(), is_empty<T>);
  if (!any_input && std::none_of(out.begin(), out.end(), is_empty<T>)) return false;
  const size_t visible = op.visible && attrs ? op.visible(*attrs) : out.size();
  bool requested = false;
  for (size_t i = 0; i < visible; ++i) {
    if (req[i] == mxnet::kNullOp) continue;
    requested = true;
    if (is_empty(out[i])) continue;
    if (any_input && refuses_empty(op, attrs, type_of(out[i]))) refuse_empty(op, in, out[i]);
    return false;
  }
  if (!requested || !all_dense(out)) return false;
  if (op.is(kChecksIndices) && word(*attrs, "mode", "clip") == "raise") return false;  // which checks its indices
  const auto& arrays = plain_outputs(out, req);
  for (size_t i = visible; i < arrays.size(); ++i)
    if (req[i] != mxnet::kNullOp && !is_empty(arrays[i]))
      std::memset(arrays[i].dptr_, 0, size(arrays[i]) * bytes_of(arrays[i].type_flag_));
  return true;
}

template bool is_empty_call(const Operator&, const NodeAttrs*, const std::vector<TBlob>&,
                            const std::vector<OpReqType>&, const std::vector<TBlob>&);
template bool is_empty_call(const Operator&, const NodeAttrs*, const std::vector<NDArray>&,
                            const std::vector<OpReqType>&, const std::vector<NDArray>&);

std::vector<TBlob> plain(const std::vector<NDArray>& in, std::vector<NDArray>* copies) {
  std::vector<TBlob> blobs;
  copies->reserve(in.size());
  for (const NDArray& array : in) {
    if (array.IsMKLDNNData()) copies->push_back(array.Reorder2Default());
    blobs.push_back(array.IsMKLDNNData() ? copies->back().data() : array.data());
  }
  return blobs;
}

std::vector<TBlob> plain_outputs(const std::vector<NDArray>& out, const std::vector<OpReqType>& req) {
  std::vector<TBlob> blobs;
  for (size_t i = 0; i < out.size(); ++i) {
    auto& array = const_cast<NDArray&>(out[i]);
    if (array.IsMKLDNNData()) {
      const NDArray held = array.Reorder2Default();
      array.InvalidateMKLDNNData();
      if (req[i] == mxnet::kAddTo)
        kernels->copy(held.data().dptr_, array.data().dptr_, size(held.data()) * sizeof(float));
    }
    blobs.push_back(array.data());
  }
  return blobs;
}

}  // namespace gluon_amp
