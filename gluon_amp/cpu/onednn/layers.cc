// Descriptions of layers, and their passes.
#include "onednn/layers.h"

#include <cstring>

#include "onednn/depth.h"

namespace gluon_amp {

std::shared_ptr<Product> Layer::product(int pass, bool with_bias) const {
  if (!supports(pass)) return nullptr;
  with_bias = with_bias && bias;
  const Sizes none, types{images, parameters, result}, others = more();
  return Product::find(key_of(name, pass, {&x, &w, &y, with_bias ? bias : &none, &types, &others}), [&] {
    onednn::Description hint = describe(kForward, nullptr, with_bias);
    return pass == kForward || !hint.get() ? hint : describe(pass, &hint, with_bias);
  });
}

template <class T>
T Layer::description(dnnl_primitive_kind_t kind, int pass, bool with_bias) const {
  T descriptor;
  std::memset(&descriptor, 0, sizeof descriptor);
  descriptor.primitive_kind = kind;
  descriptor.prop_kind = static_cast<dnnl_prop_kind_t>(pass);
  descriptor.accum_data_type = dnnl_f32;
  const auto data = [&](const Sizes& dims, bool is_result) {
    const int type = is_result ? result : int(dnnl_bf16);
    return images ? plain_layout(dims, type) : any_layout(dims, type);
  };
  (pass == kBackwardData ? descriptor.diff_src_desc : descriptor.src_desc) = data(x, pass == kBackwardData);
  (pass == kForward ? descriptor.dst_desc : descriptor.diff_dst_desc) = data(y, pass == kForward);
  if (pass == kBackwardWeights) descriptor.diff_weights_desc = any_layout(w, parameters);
  else descriptor.weights_desc = any_layout(w);
  if (with_bias && pass != kBackwardData)
    (pass == kBackwardWeights ? descriptor.diff_bias_desc : descriptor.bias_desc) = plain_layout(*bias, parameters);
  return descriptor;
}

// ---- convolutions ----------------------------------------------------------------

Convolution::Convolution(const Call& call, const TBlob& of_x, const TBlob& of_w, const TBlob& of_y,
                         const Sizes* of_bias)
    : Layer("convolution") {
  const size_t spatial = of_x.ndim() - 2;
  const auto by_axis = [&](const char* key, int64_t otherwise) {
    const Sizes given = numbers(call.attrs, key);
    return given.size() == spatial ? given : Sizes(spatial, otherwise);
  };
  x = sizes_of(of_x), w = sizes_of(of_w), y = sizes_of(of_y);
  const auto groups = static_cast<int64_t>(number(call.attrs, "num_group", 1));
  if (groups > 1) {
    w[0] /= groups;
    w.insert(w.begin(), groups);
  }
  stride = by_axis("stride", 1), dilate = by_axis("dilate", 1), pad = by_axis("pad", 0);
  bias = of_bias;
  parameters = type_in_memory(of_w);
}

onednn::Description Convolution::describe(int pass, const onednn::Description* hint, bool with_bias) const {
  auto descriptor = description<dnnl_convolution_desc_t>(dnnl_convolution, pass, with_bias);
  descriptor.alg_kind = dnnl_convolution_direct;
  const size_t spatial = x.size() - 2;
  for (size_t i = 0; i < spatial; ++i) {
    const int64_t reach = (w[w.size() - spatial + i] - 1) * dilate[i] + 1;
    descriptor.strides[i] = stride[i];
    descriptor.dilates[i] = dilate[i] - 1;
    descriptor.padding[0][i] = pad[i];
    descriptor.padding[1][i] = (y[2 + i] - 1) * stride[i] + reach - x[2 + i] - pad[i];
  }
  return gluon_amp::describe(&descriptor, hint);
}

Sizes Convolution::more() const {
  Sizes all(stride);
  all.insert(all.end(), dilate.begin(), dilate.end());
  all.insert(all.end(), pad.begin(), pad.end());
  return all;
}

// oneDNN's gradient of the weight is wrong in a depth (depth.cc), and uninitialized where an element of the weight
// reads padding alone, for example of a 3x3 weight on images of 1x1 with a stride of 2.
bool Convolution::supports(int pass) const {
  if (pass != kBackwardWeights) return true;
  const size_t spatial = x.size() - 2;
  const int64_t* const kernel = &w[w.size() - spatial];
  for (size_t i = 0; i < spatial; ++i)
    for (int64_t k = 0; k < kernel[i]; ++k) {
      bool reads = false;
      for (int64_t to = 0; to < y[2 + i] && !reads; ++to) {
        const int64_t at = to * stride[i] - pad[i] + k * dilate[i];
        reads = at >= 0 && at < x[2 + i];
      }
      if (!reads) return false;
    }
  return spatial != 3 || !Depth{x[2], y[2], kernel[0], stride[0], dilate[0], pad[0]}.is_wrong();
}

// ---- dense layers ----------------------------------------------------------------

Dense::Dense(int64_t rows, int64_t inputs, int64_t outputs, const Sizes* of_bias) : Layer("dense") {
  x = {rows, inputs}, w = {outputs, inputs}, y = {rows, outputs};
  bias = of_bias;
}

onednn::Description Dense::describe(int pass, const onednn::Description* hint, bool with_bias) const {
  const auto descriptor = description<dnnl_inner_product_desc_t>(dnnl_inner_product, pass, with_bias);
  return gluon_amp::describe(&descriptor, hint);
}

// ---- calls -----------------------------------------------------------------------

const Sizes& Layer::sizes(int argument) const {
  switch (argument) {
    case DNNL_ARG_SRC: case DNNL_ARG_DIFF_SRC: return x;
    case DNNL_ARG_WEIGHTS: case DNNL_ARG_DIFF_WEIGHTS: return w;
    case DNNL_ARG_DST: case DNNL_ARG_DIFF_DST: return y;
    default: return *bias;
  }
}

Operand Layer::operand(int argument, const TBlob& array, bool in_layout, Write write) const {
  constexpr dnnl_format_tag_t kOneDnnTags[] = {dnnl_format_tag_undef, dnnl_format_tag_undef, dnnl_format_tag_undef,
                                             dnnl_aBc16b, dnnl_aBcd16b, dnnl_aBcde16b};
  const Sizes& dims = sizes(argument);
  const int type = type_in_memory(array);
  return {argument, array, in_layout ? layout(dims, kOneDnnTags[dims.size()], type) : plain_layout(dims, type), write,
          &dims == &x || &dims == &y ? images : 0};
}

namespace {

bool run_forward(const Call& call, const Layer& layer, const TBlob& x) {
  const auto product = layer.product(kForward);
  if (!product) return false;
  std::vector<Operand> all{
      layer.operand(DNNL_ARG_SRC, x, call.in_layout.input(0)), layer.operand(DNNL_ARG_WEIGHTS, call.in[1]),
      layer.operand(DNNL_ARG_DST, call.out[0], call.in_layout.output(0), call.write(0))};
  if (layer.bias) all.push_back(layer.operand(DNNL_ARG_BIAS, call.in[2]));
  product->run(all);
  return true;
}

bool run_weight(const Call& call, const Layer& layer, const TBlob& x, bool wants_bias, Product::Inside* read) {
  const auto product = layer.product(kBackwardWeights, wants_bias);
  if (!product) return false;
  Scratch scratch;
  TBlob dw = call.out[1];
  const bool unread = call.write(1) == kNothing;
  if (unread) dw.dptr_ = scratch.memory(size(dw));
  std::vector<Operand> all{
      layer.operand(DNNL_ARG_SRC, x, call.in_layout.input(1)),
      layer.operand(DNNL_ARG_DIFF_DST, call.in[0], call.in_layout.input(0)),
      layer.operand(DNNL_ARG_DIFF_WEIGHTS, dw, false, unread ? kStore : call.write(1))};
  if (wants_bias) all.push_back(layer.operand(DNNL_ARG_DIFF_BIAS, call.out[2], false, call.write(2)));
  product->run(all, read);
  return true;
}

}  // namespace

bool run_layer(const Call& call, bool backward, const Layer& layer, const ByRows* rows) {
  if (!backward)
    return call.write(0) == kNothing || (rows && run_forward(call, rows->layer, rows->x)) ||
           run_forward(call, layer, call.in[0]);
  const bool wants_bias = layer.bias && call.write(2) != kNothing;
  const bool wants_weight = call.write(1) != kNothing || wants_bias;
  const auto data = call.write(0) != kNothing ? layer.product(kBackwardData) : nullptr;
  if (call.write(0) != kNothing && !data) return false;
  Product::Inside read;
  // the weight first, because the gradient of x may share memory with that of y
  if (wants_weight && !(rows && run_weight(call, rows->layer, rows->x, wants_bias, &read)) &&
      !run_weight(call, layer, call.in[1], wants_bias, &read))
    return false;
  if (data)
    data->run({layer.operand(DNNL_ARG_WEIGHTS, call.in[2]),
               layer.operand(DNNL_ARG_DIFF_DST, call.in[0], call.in_layout.input(0)),
               layer.operand(DNNL_ARG_DIFF_SRC, call.out[0], call.in_layout.output(0), call.write(0))}, &read);
  return true;
}

bool multiplies_layer(const Call& call, const TBlob& weight) {
  return multiplies(call.out[0].type_flag_) && call.in[0].type_flag_ == mshadow::kBfloat16 &&
         (is_float(weight) || all_16bit(call));
}

bool multiplies_images(const Call& call, const TBlob& x, const TBlob& w, const TBlob& y) {
  return multiplies_layer(call, w) && x.ndim() >= 3 && x.ndim() <= 5 && size(x) > 0 && size(y) > 0;
}

}  // namespace gluon_amp
