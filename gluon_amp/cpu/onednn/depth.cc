// Repairs weight gradients of convolutions.
//
// For three axes oneDNN 2.4 walks along the outputs' depth with AVX-512, and shifts the kernel's planes by the stride. If
// outputs reach into the padding at both ends, and none lies between, it shifts wrongly: it adds products to other
// planes, and leaves planes uninitialized. Without padding in depth it is right, so here zeros surround the images.
#include "onednn/depth.h"

#include "dispatch/attributes.h"

namespace gluon_amp {

bool Depth::is_wrong() const {
  if (stride == 1 || dilate != 1) return false;
  bool before = false, after = false;
  for (int64_t i = 0; i < out; ++i) {
    const int64_t first = i * stride - pad, last = first + kernel - 1;
    if (first >= 0 && last < in) return false;
    before |= first < 0;
    after |= last >= in;
  }
  return before && after;
}

namespace {

Depth depth_of(const NodeAttrs& attrs, const NDArray& images, const NDArray& outputs) {
  return {images.shape()[2], outputs.shape()[2], whole(attrs, "kernel", 1), whole(attrs, "stride", 1),
          whole(attrs, "dilate", 1), whole(attrs, "pad", 0)};
}

// The images between planes of zeros, all that the outputs read.
NDArray surrounded(const NDArray& images, const Depth& depth, Scratch* scratch) {
  const NDArray plain = images.IsMKLDNNData() ? images.Reorder2Default() : images;
  mxnet::TShape shape = plain.shape();
  const int64_t plane = shape[3] * shape[4], count = shape[0] * shape[1], from = depth.in * plane;
  shape[2] = (depth.out - 1) * depth.stride + depth.kernel;
  const int64_t to = shape[2] * plane, before = depth.pad * plane;
  const NDArray padded = scratch->array(shape);
  const float* const read = floats(plain.data());
  float* const written = floats(padded.data());
  for_all(count, count * to, [&](int64_t i) {
    float* const at = written + i * to;
    std::fill_n(at, before, 0.0f);
    std::copy_n(read + i * from, from, at + before);
    std::fill_n(at + before + from, to - before - from, 0.0f);
  });
  return padded;
}

// A node with these attributes, for images that have their padding in depth.
nnvm::ObjectPtr without_padding(const NodeAttrs& attrs) {
  const std::vector<int64_t> pad = numbers(attrs, "pad");
  Texts texts;
  for (const auto& item : attrs.dict)
    if (item.first != "pad" && item.first != "target_shape") texts.push_back(item);  // oneDNN's code reads `pad`
  texts.emplace_back("pad", "(0, " + std::to_string(pad[1]) + ", " + std::to_string(pad[2]) + ")");
  return make_node(attrs.op, texts);
}

// The same requests, with kNullOp in the memory behind them. A convolution without a bias reads the bias's request
// there, and a value other than zero makes it write a weight gradient that was not requested.
std::vector<OpReqType> before_null(std::vector<OpReqType> req) {
  req.push_back(mxnet::kNullOp);
  req.pop_back();
  return req;
}

}  // namespace

mxnet::FComputeEx with_right_depth(mxnet::FComputeEx original, bool deconvolution) {
  return [original = std::move(original), padded = deconvolution ? 0 : 1](
             const NodeAttrs& attrs, const OpContext& context, const std::vector<NDArray>& in,
             const std::vector<OpReqType>& requests, const std::vector<NDArray>& out) {
    const std::vector<OpReqType> req = before_null(requests);
    const NDArray &images = in[padded], &outputs = in[1 - padded];  // a deconvolution's images are its result
    const bool wants_weight = std::any_of(req.begin() + 1, req.end(), [](OpReqType r) { return r != mxnet::kNullOp; });
    if (images.shape().ndim() != 5 || images.dtype() != mshadow::kFloat32 || !wants_weight)
      return original(attrs, context, in, req, out);
    const Depth depth = depth_of(attrs, images, outputs);
    if (!depth.is_wrong()) return original(attrs, context, in, req, out);

    Scratch scratch;
    std::vector<NDArray> read(in);
    read[padded] = surrounded(images, depth, &scratch);
    std::vector<OpReqType> of_weight(req), of_data(req.size(), mxnet::kNullOp);
    of_data[0] = req[0];
    of_weight[0] = mxnet::kNullOp;
    // the weight first, because the gradient of the data may share memory with that of the result
    original(without_padding(attrs)->attrs, context, read, of_weight, out);
    if (req[0] != mxnet::kNullOp) original(attrs, context, in, before_null(of_data), out);
  };
}

}  // namespace gluon_amp
