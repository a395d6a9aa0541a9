// Numbers in texts, and copies of a node's attributes, also with constants rounded to a 16-bit type.
#pragma once
#include "engine.h"

namespace gluon_amp {

// Names and values of attributes.
using Texts = std::vector<std::pair<std::string, std::string>>;

// A number in the C locale, as strtof.
float parse_float(const char* text, char** end = nullptr);

// A new node without inputs, created by MXNet, which parses its attributes.
nnvm::ObjectPtr make_node(const nnvm::Op* op, const Texts& texts);

// A node with a copy of the attributes. `type16`: kNoType16, or the 16-bit type of constants, as below.
nnvm::ObjectPtr copy_node(const Operator& op, const NodeAttrs& attrs, int type16);

// A node with an operator's attributes on arrays of a 16-bit type: constants are rounded to that type, as on a GPU,
// and `dtype` is float32, because MXNet's float32 code runs. Null if nothing differs.
nnvm::ObjectPtr node_for_type16(const Operator& op, const NodeAttrs& attrs, int type16);

// Sets the names of attributes with constants; "_arange.start" is for that operator only.
void add_constant(const std::string& name);

}  // namespace gluon_amp
