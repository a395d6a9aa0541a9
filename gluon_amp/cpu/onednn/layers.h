// Layers with weights, by oneDNN's primitives for each pass.
#pragma once
#include "onednn/product.h"

namespace gluon_amp {

struct Layer {
  const char* name;                 // of its primitives
  Sizes x, w, y;
  const Sizes* bias = nullptr;      // its size, or null
  int parameters = dnnl_bf16;       // the type of the arrays of parameters and of their gradients
  int result = dnnl_bf16;           // the type of y, or of the gradient of x
  int64_t images = 0;               // of which x and y are rows (see Operand), or 0

  explicit Layer(const char* its_name) : name(its_name) {}
  virtual ~Layer() = default;
  virtual onednn::Description describe(int pass, const onednn::Description* hint, bool with_bias) const = 0;
  virtual Sizes more() const { return {}; }              // what else differs between layers
  virtual bool supports(int) const { return true; }  // of a pass

  const Sizes& sizes(int argument) const;  // of an argument of its primitives, DNNL_ARG_*
  // `in_layout`: whether the array is in oneDNN's layout.
  Operand operand(int argument, const TBlob& array, bool in_layout = false, Write write = kNothing) const;

  // The primitive of a pass; null where there is none.
  std::shared_ptr<Product> product(int pass, bool with_bias = true) const;

 protected:
  // What the descriptions of all layers have in common.
  template <class T>
  T description(dnnl_primitive_kind_t kind, int pass, bool with_bias) const;
};

struct Convolution : Layer {
  Sizes stride, dilate, pad;

  // The convolution of a call, from x to y; of a deconvolution from its result to its data.
  Convolution(const Call& call, const TBlob& of_x, const TBlob& of_w, const TBlob& of_y, const Sizes* of_bias);
  onednn::Description describe(int pass, const onednn::Description* hint, bool with_bias) const override;
  Sizes more() const override;
  bool supports(int pass) const override;
};

// Rows of x, of w, and of y.
struct Dense : Layer {
  Dense(int64_t rows, int64_t inputs, int64_t outputs, const Sizes* of_bias);
  onednn::Description describe(int pass, const onednn::Description* hint, bool with_bias) const override;
};

// A convolution's pass as a dense layer, from rows.
struct ByRows {
  Dense layer;
  TBlob x;
};

// Runs a layer's passes: forward from x, weight and bias; backward from the gradient of y, x, weight and
// bias to those of x, weight and bias. `rows`: null, or for the forward pass, or for the weight's gradient.
bool run_layer(const Call& call, bool backward, const Layer& layer, const ByRows* rows = nullptr);

// Whether all arrays of a layer's call are bfloat16; parameters and their gradients may be float32.
bool multiplies_layer(const Call& call, const TBlob& weight);
bool multiplies_images(const Call& call, const TBlob& x, const TBlob& w, const TBlob& y);

}  // namespace gluon_amp
