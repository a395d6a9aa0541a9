// Propagates the settings of a node to the nodes of its gradient.
#include "dispatch/gradients.h"

#include <algorithm>
#include <set>

#include "dispatch/watch.h"

namespace gluon_amp {

namespace {

bool same(const nnvm::NodeEntry& a, const nnvm::NodeEntry& b) {
  return a.node == b.node && a.index == b.index;
}

// Three settings select inputs and outputs, which differ in the nodes of a gradient. These round gradients of
// rounded outputs before they read them (MXNet may have summed them), read a product's inputs in the product's
// format, and round gradients of inputs in the low format.

bool is_of_products(const std::string& key) {
  for (const char* const each : {kReadsKey, kScalingKey, kAccumulateKey, kGradientGridKey, kBackReadsKey,
                                 kBackScalingKey, kBackAccumulateKey})
    if (key == each) return true;
  return false;
}

// For each output of a gradient's node, the index of the forward node's input of which it is the gradient.
std::string inputs_of_gradients(const nnvm::ObjectPtr& node, const Entries& made) {
  std::vector<int> inputs;
  for (size_t i = 0; i < made.size(); ++i)
    if (made[i].node == node) {
      inputs.resize(std::max(inputs.size(), size_t(made[i].index) + 1), -1);
      inputs[made[i].index] = static_cast<int>(i);
    }
  std::string list;
  for (int input : inputs) list += std::to_string(input) + ",";
  return list;
}

// The value of kBlockedKey for a gradient's node: a gradient has the layout of its tensor.
std::string blocked_arrays(const nnvm::ObjectPtr& node, const nnvm::ObjectPtr& forward, const Entries& above,
                           const Entries& made, const std::string& blocked) {
  const size_t comma = blocked.find(',');
  const auto input = [&](size_t i) { return i < comma ? blocked[i] : '0'; };
  const auto output = [&](size_t i) { return comma + 1 + i < blocked.size() ? blocked[comma + 1 + i] : '0'; };
  const auto& of_forward = inputs_of(forward.get());
  std::string in, out;
  for (auto& entry : inputs_of(node.get())) {
    char its = entry.node == forward ? output(entry.index) : '0';
    for (size_t i = 0; i < above.size(); ++i)
      if (same(entry, above[i])) its = output(i);
    for (size_t i = 0; i < of_forward.size(); ++i)
      if (same(entry, of_forward[i])) its = input(i);
    in += its;
  }
  for (size_t i = 0; i < made.size(); ++i)
    if (made[i].node == node) {
      if (out.size() <= made[i].index) out.resize(made[i].index + 1, '0');
      out[made[i].index] = input(i);
    }
  return in + "," + out;
}

// `high`: whether the node's products run in high precision, without settings of products.
// `number`: the number of the gradient's nodes described before.
void describe(const nnvm::ObjectPtr& node, const nnvm::ObjectPtr& forward, const Entries& above,
              const Entries& made, bool high, int number) {
  std::vector<std::string> keys, values;
  auto say = [&](const char* key, const std::string& value) {
    keys.push_back(key);
    values.push_back(value);
  };
  const std::string *inputs = nullptr, *outputs = nullptr, *reads = nullptr, *blocked = nullptr;
  bool scales = false;
  for (auto& item : forward->attrs.dict) {
    const std::string& key = item.first;
    if (!is_setting(key) || item.second.empty() || key == kOutputGridKey || key == kHighKey) continue;
    if (key == kBlockedKey) blocked = &item.second;
    else if (key == kInputsKey) inputs = &item.second;
    else if (key == kOutputsKey) outputs = &item.second;
    else if (key == kBackGridKey) {
      say(kOutputGridKey, item.second);
      if (high) say(kGradientGridKey, item.second);
    } else if (high && is_of_products(key)) {
      if (key != kGradientGridKey) say(key.c_str(), "");
    }
    else if (key == kReadsKey || key == kBackReadsKey) reads = &item.second;
    else if (key == kScalingKey || key == kBackScalingKey) {
      say(kScalingKey, item.second);
      scales = true;
    } else say(key == kBackAccumulateKey ? kAccumulateKey : key.c_str(), item.second);
  }
  // An input that the forward product has not scaled has a history of the backward pass only.
  const char* const history = find(forward->attrs, kBackScalingKey) ? "gx" : "";
  if (keys.empty() && !inputs && !outputs && !reads && !blocked) return;
  if (blocked) say(kBlockedKey, blocked_arrays(node, forward, above, made, *blocked));
  if (find(forward->attrs, kWatchKey)) say(kWatchedInputsKey, inputs_of_gradients(node, made));
  if (inputs || outputs || reads) {
    std::string back_reads, back_writes, scaled;
    const auto& of_forward = inputs_of(forward.get());
    for (auto& entry : inputs_of(node.get())) {
      char rounds = '0';
      std::string place = "-";
      for (size_t i = 0; i < above.size(); ++i)
        if (same(entry, above[i]) && (reads || Rounding::letter(outputs, i, '1') == '1'))
          rounds = 'g', place = "g" + std::to_string(i) + "." + std::to_string(number);
      for (size_t i = 0; reads && i < of_forward.size(); ++i)
        if (same(entry, of_forward[i]))
          rounds = Rounding::letter(reads, i, '0'), place = history + std::to_string(i);
      back_reads += rounds;
      scaled += place + " ";
    }
    for (size_t i = 0; i < made.size(); ++i)
      if (made[i].node == node) {
        if (back_writes.size() <= made[i].index) back_writes.resize(made[i].index + 1, '1');
        back_writes[made[i].index] = Rounding::letter(inputs, i, '1');
      }
    say(kReadsKey, back_reads);
    if (scales) say(kScaledKey, scaled);
    say(kOutputsKey, back_writes);
  }
  std::vector<const char*> k, v;
  for (auto& key : keys) k.push_back(key.c_str());
  for (auto& value : values) v.push_back(value.c_str());
  annotate(node, k, v);
}

// MXNet's gradient of the identity with a loss scale (kLossScaleKey) copies; this one multiplies by the scale.
void scale_copy(const nnvm::ObjectPtr& n, const Entries& made) {
  static const nnvm::Op *const copy = nnvm::Op::Get("_backward_copy"),
                        *const product = nnvm::Op::Get("broadcast_mul");
  nnvm::Node* const node = made[0].node.get();
  if (node->attrs.op != copy) return;  // the gradient is zero
  node->attrs.op = product;
  inputs_of(node).push_back(inputs_of(n.get())[1]);
}

}  // namespace

Entries gradient(const nnvm::FGradient& of_theirs, const nnvm::ObjectPtr& n,
                 const Entries& above) {
  Entries made = of_theirs(n, above);
  if (!has_setting(n->attrs)) return made;
  if (find(n->attrs, kLossScaleKey)) scale_copy(n, made);
  const std::string* const letters = find(n->attrs, kHighKey);
  const auto is_high = [&](size_t i) { return Rounding::letter(letters, i, '0') == '1'; };
  // A separate node computes the products in high precision, because MXNet's node also computes others. For
  // shape inference MXNet calls this function without gradients, and expects one node.
  if (letters && !above.empty() && above[0].node) {
    const Entries again = of_theirs(n, above);
    for (size_t i = 0; i < made.size(); ++i)
      if (is_high(i)) made[i] = again[i];
  }
  std::set<nnvm::Node*> seen{n.get()};
  for (auto& entry : above) seen.insert(entry.node.get());
  for (auto& entry : inputs_of(n.get())) seen.insert(entry.node.get());
  int described = 0;
  for (const bool high : {false, true}) {
    std::vector<nnvm::ObjectPtr> todo;
    for (size_t i = 0; i < made.size(); ++i)
      if (is_high(i) == high) todo.push_back(made[i].node);
    while (!todo.empty()) {
      nnvm::ObjectPtr node = todo.back();
      todo.pop_back();
      if (!node || !node->attrs.op || !seen.insert(node.get()).second) continue;
      if (node->attrs.op->name == "_backward_backward_FullyConnected" &&
          setting(n->attrs, kAccumulateKey))
        throw dmlc::Error("accumulate= has no code for a gradient of a dense layer's gradient. Valid: "
                          "keep the layer in float32 (keep=)");
      if (is_dispatched_here(node->attrs.op)) describe(node, n, above, made, high, described++);
      for (auto& entry : inputs_of(node.get())) todo.push_back(entry.node);
    }
  }
  return made;
}

}  // namespace gluon_amp
