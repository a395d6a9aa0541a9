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

// The settings of a gradient's node. It rounds gradients of rounded outputs before it reads them (MXNet may have
// summed them), reads a product's inputs in the product's format, and rounds gradients of rounded inputs. A gradient
// has the layout of its tensor.
// `high`: whether the node's products run in high precision. `number`: the number of the gradient's nodes before.
Settings gradient_settings(const nnvm::ObjectPtr& node, const nnvm::ObjectPtr& forward, const Entries& above,
                           const Entries& made, bool high, int number) {
  const Settings& from = settings_of(forward->attrs);
  const ProductSettings products = high ? ProductSettings() : from.gradient_products;
  const bool is_product = !products.input_grids.empty();
  // An input that the forward product has not scaled has a history of the backward pass only.
  const char* const history = from.products.scaling == Scaling::kNone ? "gx" : "";
  Settings to = from;
  to.is_gradient = true;
  to.output_grid = from.input_gradient_grid;
  if (high) to.head_gradient_grid = from.input_gradient_grid;
  to.products = products;
  for (auto* letters : {&to.products.input_grids, &to.rounded_outputs, &to.blocked_inputs, &to.blocked_outputs})
    letters->clear();
  to.gradients_of.clear();
  to.history_names.clear();
  const auto& forward_inputs = inputs_of(forward.get());
  for (auto& entry : inputs_of(node.get())) {
    char grid = '0', blocked = entry.node == forward ? letter_at(from.blocked_outputs, entry.index, '0') : '0';
    std::string name = "-";
    for (size_t i = 0; i < above.size(); ++i) {
      if (!same(entry, above[i])) continue;
      blocked = letter_at(from.blocked_outputs, i, '0');
      if (is_product || letter_at(from.rounded_outputs, i, '1') == '1')
        grid = 'g', name = "g" + std::to_string(i) + "." + std::to_string(number);
    }
    for (size_t i = 0; i < forward_inputs.size(); ++i) {
      if (!same(entry, forward_inputs[i])) continue;
      blocked = letter_at(from.blocked_inputs, i, '0');
      if (is_product) grid = letter_at(products.input_grids, i, '0'), name = history + std::to_string(i);
    }
    to.products.input_grids += grid;
    to.blocked_inputs += blocked;
    to.history_names.push_back(name);
  }
  for (size_t i = 0; i < made.size(); ++i) {
    if (made[i].node != node) continue;
    const size_t at = made[i].index, count = std::max(to.gradients_of.size(), at + 1);
    to.rounded_outputs.resize(count, '1');
    to.blocked_outputs.resize(count, '0');
    to.gradients_of.resize(count, -1);
    to.rounded_outputs[at] = letter_at(from.rounded_inputs, i, '1');
    to.blocked_outputs[at] = letter_at(from.blocked_inputs, i, '0');
    to.gradients_of[at] = static_cast<int>(i);
  }
  if (from.rounded_inputs.empty() && from.rounded_outputs.empty() && !is_product) {
    to.products.input_grids.clear();
    to.rounded_outputs.clear();
  }
  if (from.blocked_inputs.empty()) {
    to.blocked_inputs.clear();
    to.blocked_outputs.clear();
  }
  to.gradient_products = to.products;
  return to;
}

// All of a gradient's settings that the graph determines, besides those of the forward node.
std::string key_of(const Settings& settings, bool high) {
  std::ostringstream key;
  key << high << ' ' << settings.products.input_grids << ' ' << settings.rounded_outputs << ' '
      << settings.blocked_inputs << ' ' << settings.blocked_outputs;
  for (int i : settings.gradients_of) key << ' ' << i;
  for (const std::string& each : settings.history_names) key << ' ' << each;
  return key.str();
}

// MXNet's gradient of the identity with a loss scale copies; this one multiplies by the scale.
void scale_copy(const nnvm::ObjectPtr& n, const Entries& made) {
  static const nnvm::Op *const copy = nnvm::Op::Get("_backward_copy"),
                        *const product = nnvm::Op::Get("broadcast_mul");
  nnvm::Node* const node = made[0].node.get();
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
  const auto or_zero = [](const Entries& found, const nnvm::NodeEntry& like) {
    return found.empty() ? output_of("zeros_like", {like}) : found[0];
  };
  return {layers.size() == 2 ? output_of("elemwise_add", layers) : or_zero(layers, head),
          or_zero(of_data, data), or_zero(of_weight, weight)};
}

Entries gradient(const nnvm::FGradient& original, const nnvm::ObjectPtr& n,
                 const Entries& above) {
  Entries made = original(n, above);
  const Settings& settings = settings_of(n->attrs);
  if (!has_settings(settings)) return made;
  if (settings.products.emulates() && n->attrs.op->name == "_backward_FullyConnected")
    throw dmlc::Error("accumulate= has no code for a gradient of a dense layer's gradient. Valid: "
                      "keep the layer in float32 (keep=)");
  if (settings.loss_scale) scale_copy(n, made);
  const auto is_high = [&](size_t i) { return letter_at(settings.high_precision_gradients, i, '0') == '1'; };
  // A separate node computes the products in high precision, because MXNet's node also computes others. For
  // shape inference MXNet calls this function without gradients, and expects one node.
  if (!settings.high_precision_gradients.empty() && !above.empty() && above[0].node) {
    const Entries again = original(n, above);
    for (size_t i = 0; i < made.size(); ++i)
      if (is_high(i)) made[i] = again[i];
  }
  std::set<nnvm::Node*> seen{n.get()};
  for (auto& entry : above) seen.insert(entry.node.get());
  for (auto& entry : inputs_of(n.get())) seen.insert(entry.node.get());
  int number = 0;
  for (const bool high : {false, true}) {
    std::vector<nnvm::ObjectPtr> todo;
    for (size_t i = 0; i < made.size(); ++i)
      if (is_high(i) == high) todo.push_back(made[i].node);
    while (!todo.empty()) {
      nnvm::ObjectPtr node = todo.back();
      todo.pop_back();
      if (!node || !node->attrs.op || !seen.insert(node.get()).second) continue;
      if (is_dispatched(node->attrs.op)) {
        const Settings found = gradient_settings(node, n, above, made, high, number++);
        set_settings(node, n->attrs, key_of(found, high), found);
      }
      for (auto& entry : inputs_of(node.get())) todo.push_back(entry.node);
    }
  }
  return made;
}

}  // namespace gluon_amp
