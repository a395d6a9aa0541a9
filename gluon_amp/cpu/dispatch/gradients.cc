// Propagates the settings of a node to the nodes of its gradient.
#include "dispatch/gradients.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "dispatch/attributes.h"

namespace gluon_amp {

namespace {

bool same(const nnvm::NodeEntry& a, const nnvm::NodeEntry& b) {
  return a.node == b.node && a.index == b.index;
}

// The settings of a gradient's node. A gradient has the layout of its tensor.
Settings gradient_settings(const nnvm::ObjectPtr& node, const nnvm::ObjectPtr& forward, const Entries& above,
                           const Entries& gradients) {
  const Settings& settings = settings_of(forward->attrs);
  const Layouts& from = settings.layouts;
  const auto& forward_inputs = inputs_of(forward.get());
  Layouts to;
  for (auto& entry : inputs_of(node.get())) {
    char layout = entry.node == forward ? letter_at(from.outputs, entry.index, '0') : '0';
    for (size_t i = 0; i < above.size(); ++i)
      if (same(entry, above[i])) layout = letter_at(from.outputs, i, '0');
    for (size_t i = 0; i < forward_inputs.size(); ++i)
      if (same(entry, forward_inputs[i])) layout = letter_at(from.inputs, i, '0');
    to.inputs += layout;
  }
  std::vector<int> gradients_of;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].node != node) continue;
    const size_t at = gradients[i].index, count = std::max(gradients_of.size(), at + 1);
    to.outputs.resize(count, '0');
    gradients_of.resize(count, -1);
    to.outputs[at] = letter_at(from.inputs, i, '0');
    gradients_of[at] = static_cast<int>(i);
  }
  Settings result = settings;
  result.layouts = from.any() ? to : Layouts();
  result.counts.gradients_of = gradients_of;
  return result;
}

// All of a gradient's settings that the graph determines, besides those of the forward node.
std::string key_of(const Settings& settings) {
  std::ostringstream key;
  key << settings.layouts.inputs << ' ' << settings.layouts.outputs;
  for (int i : *settings.counts.gradients_of) key << ' ' << i;
  return key.str();
}

// MXNet's gradient of the identity with a loss scale copies; this one multiplies by the scale.
void scale_copy(const nnvm::ObjectPtr& n, const Entries& gradients) {
  static const nnvm::Op *const copy = nnvm::Op::Get("_backward_copy"),
                        *const product = nnvm::Op::Get("broadcast_mul");
  nnvm::Node* const node = gradients[0].node.get();
  if (node->attrs.op != copy) return;  // the gradient is zero
  node->attrs.op = product;
  inputs_of(node).push_back(inputs_of(n.get())[1]);
}

bool is_zero(const nnvm::NodeEntry& gradient) {
  const nnvm::Op* const op = gradient.node ? gradient.node->attrs.op : nullptr;
  return op && (op->name == "_zeros" || op->name == "_zeros_without_dtype" || op->name == "zeros_like");
}

nnvm::NodeEntry output_of(const char* op, Entries inputs, const Texts& texts = {}) {
  const nnvm::ObjectPtr node = make_node(nnvm::Op::Get(op), texts);
  inputs_of(node.get()) = std::move(inputs);
  return {node, 0, 0};
}

// A dense layer with the attributes of `n`, which has two inputs, or with a bias three.
nnvm::NodeEntry dense_layer(const nnvm::ObjectPtr& n, Entries inputs) {
  Texts texts;
  for (const auto& item : n->attrs.dict)
    if (item.first != "no_bias") texts.push_back(item);
  texts.emplace_back("no_bias", inputs.size() == 2 ? "1" : "0");
  return output_of("FullyConnected", std::move(inputs), texts);
}

}  // namespace

Entries gradient_of_dense_gradient(const nnvm::ObjectPtr& n, const Entries& above) {
  const auto& inputs = inputs_of(n.get());
  const nnvm::NodeEntry &head = inputs[0], &data = inputs[1], &weight = inputs[2];
  const bool of_bias = above.size() == 3 && !is_zero(above[2]);
  Entries layers, of_data, of_weight;
  const auto add = [&](Entries reads) {
    layers.push_back(dense_layer(n, std::move(reads)));
    const nnvm::ObjectPtr& layer = layers.back().node;
    return (*get<nnvm::FGradient>(layer->attrs.op, "FGradient"))(layer, {head});
  };
  if (!is_zero(above[0])) of_weight.push_back(add({above[0], weight})[1]);
  if (of_bias) of_data.push_back(add({data, above[1], above[2]})[0]);
  else if (!is_zero(above[1])) of_data.push_back(add({data, above[1]})[0]);
  const auto or_zero = [](const Entries& entries, const nnvm::NodeEntry& like) {
    return entries.empty() ? output_of("zeros_like", {like}) : entries[0];
  };
  return {layers.size() == 2 ? output_of("elemwise_add", layers) : or_zero(layers, head),
          or_zero(of_data, data), or_zero(of_weight, weight)};
}

Entries gradient(const nnvm::FGradient& original, const nnvm::ObjectPtr& n,
                 const Entries& above) {
  Entries gradients = original(n, above);
  const Settings& settings = settings_of(n->attrs);
  if (!has_settings(settings)) return gradients;
  if (settings.loss_scale) scale_copy(n, gradients);
  std::set<nnvm::Node*> seen{n.get()};
  for (auto& entry : above) seen.insert(entry.node.get());
  for (auto& entry : inputs_of(n.get())) seen.insert(entry.node.get());
  std::vector<nnvm::ObjectPtr> todo;
  for (auto& entry : gradients) todo.push_back(entry.node);
  while (!todo.empty()) {
    nnvm::ObjectPtr node = todo.back();
    todo.pop_back();
    if (!node || !node->attrs.op || !seen.insert(node.get()).second) continue;
    if (is_dispatched(node->attrs.op)) {
      const Settings to = gradient_settings(node, n, above, gradients);
      set_settings(node, n->attrs, key_of(to), to);
    }
    for (auto& entry : inputs_of(node.get())) todo.push_back(entry.node);
  }
  return gradients;
}

}  // namespace gluon_amp
