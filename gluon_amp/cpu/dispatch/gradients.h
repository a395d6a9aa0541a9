// Propagation of settings to nodes of gradients.
#pragma once
#include "engine.h"

namespace gluon_amp {

using Entries = std::vector<nnvm::NodeEntry>;

// Returns MXNet's gradient of a node; its nodes inherit the node's settings.
Entries gradient(const nnvm::FGradient& original, const nnvm::ObjectPtr& n,
                 const Entries& above);

// The gradient of the gradient node of a dense layer. MXNet's lacks the part of the layer's head gradient. The sum of
// products of `above` and the layer's gradients equals the product of the head gradient and the sum of two dense
// layers: of the data's `above` with the layer's weight, and of the layer's data with `above` as its parameters.
Entries gradient_of_dense_gradient(const nnvm::ObjectPtr& n, const Entries& above);

}  // namespace gluon_amp
