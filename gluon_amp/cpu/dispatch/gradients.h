// Propagation of settings to nodes of gradients.
#pragma once
#include "engine.h"

namespace gluon_amp {

using Entries = std::vector<nnvm::NodeEntry>;

// Returns MXNet's gradient of a node; its nodes inherit the node's settings.
Entries gradient(const nnvm::FGradient& of_theirs, const nnvm::ObjectPtr& n,
                 const Entries& above);

}  // namespace gluon_amp
