// The nodes of gradients.
#pragma once
#include "engine.h"

namespace gluon_amp {

using Entries = std::vector<nnvm::NodeEntry>;

extern std::map<const nnvm::Op*, nnvm::Op*> ours;          // by MXNet's operator
extern std::map<const nnvm::Op*, const nnvm::Op*> theirs;  // by ours

Entries gradient(const nnvm::FGradient& of_theirs, const nnvm::ObjectPtr& n,
                 const Entries& above);

}  // namespace gluon_amp
