// Attributes of a node outside of its graph, and with constants as float16 code has them.
#pragma once
#include "engine.h"

namespace gluon_amp {

// A copy of a node's attributes, parsed by MXNet.
class Attributes {
 public:
  using Texts = std::vector<std::pair<std::string, std::string>>;
  Attributes(const nnvm::Op* op, const Texts& texts);
  ~Attributes();
  Attributes(const Attributes&) = delete;
  const NodeAttrs& get() const;

 private:
  void* symbol_ = nullptr;
};

// A copy for as long as it is held; `half`: kNoHalf, or the type that constants and `dtype` are for, as below.
std::shared_ptr<const Attributes> keep(const Operator& of, const NodeAttrs& attrs, int half);

// What an operator on arrays of a 16-bit type runs with: its constants rounded to that type, as a GPU's
// code has them, and `dtype` float32, since MXNet's float32 code runs. Null where nothing differs.
std::shared_ptr<const Attributes> in_halves(const Operator& of, const NodeAttrs& attrs, int half);

// The attributes that hold constants; "_arange.start": of that operator only.
void set_constants(int count, const char** names);

}  // namespace gluon_amp
