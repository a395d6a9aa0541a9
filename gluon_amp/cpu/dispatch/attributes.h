// Copies of a node's attributes, also with constants rounded to a 16-bit type.
#pragma once
#include "engine.h"

namespace gluon_amp {

// Names and values of attributes.
using Texts = std::vector<std::pair<std::string, std::string>>;

// A new node without inputs, made by MXNet, which parses its attributes.
nnvm::ObjectPtr make_node(const nnvm::Op* op, const Texts& texts);

// A copy of a node's attributes, parsed by MXNet.
class Attributes {
 public:
  Attributes(const nnvm::Op* op, const Texts& texts) : node_(make_node(op, texts)) {}
  const NodeAttrs& get() const { return node_->attrs; }

 private:
  nnvm::ObjectPtr node_;
};

// A copy, which lives while it is referenced; `half`: kNoHalf, or the 16-bit type of constants, as below.
std::shared_ptr<const Attributes> keep(const Operator& of, const NodeAttrs& attrs, int half);

// The attributes of an operator on arrays of a 16-bit type: constants are rounded to that type, as on a GPU,
// and `dtype` is float32, because MXNet's float32 code runs. Null if nothing differs.
std::shared_ptr<const Attributes> in_halves(const Operator& of, const NodeAttrs& attrs, int half);

// Sets the names of attributes with constants; "_arange.start" is for that operator only.
void set_constants(int count, const char** names);

}  // namespace gluon_amp
