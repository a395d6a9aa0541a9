// Settings of nodes: what the engine does there beyond the operator. graph/build.py selects them.
//
// A node has one attribute, whose value names an entry of a table of settings. Equal settings share an entry.
// An entry is parsed once and never freed, so a node may run, or its gradient be built, at any time and on any
// thread. The table has an entry for each kind of node, not for each network: names of nodes are not in entries.
#pragma once
#include <optional>

#include "native.h"

namespace gluon_amp {

using nnvm::NodeAttrs;

// Between double underscores, so MXNet's parsers skip it. The value: the number of the entry; in a second line, the
// name under which watch.cc counts the node's values, if it does.
constexpr char kSettings[] = "__gluon_amp__";

// Which arrays are in oneDNN's layout (layout.h): for each 1, else 0. Missing ones are not.
struct Layouts {
  std::string inputs, outputs;

  bool any() const { return !inputs.empty() || !outputs.empty(); }
};

// What watch.cc takes of the outputs.
struct Counting {
  enum { kNothing, kSamples, kAll } what = kNothing;
  // of a gradient's node: for each output, the forward node's input of which it is the gradient, or -1
  std::optional<std::vector<int>> gradients_of;
};

struct Settings {
  bool in_engine = false;  // the engine runs it on float32 arrays, too
  bool float32_parameters = false;  // a convolution or a dense layer of bfloat16 data, which rounds parameters
  bool float32_sums = false;  // batch_dot of float16 arrays accumulates in float32 on a GPU (gpu.cc)
  bool plain_weight = false;  // a channels-last convolution on a GPU reads a weight in MXNet's order (gpu.cc)
  // _identity_with_attr_like_rhs(x, s) before a loss head returns x. Its gradient is multiplied by the loss
  // scale s, an array of one element.
  bool loss_scale = false;
  bool finite_averages = false;  // moving averages stay finite, of float32 arrays, too (moving_averages.h)
  Layouts layouts;
  Counting counts;

  // Whether the engine runs the node whatever the types of its arrays.
  bool needs_engine() const {
    return in_engine || float32_parameters || loss_scale || layouts.any() || counts.what != Counting::kNothing;
  }
};

// A character of a selection; '1' or '0' where it is too short.
inline char letter_at(const std::string& letters, size_t i, char otherwise) {
  return i < letters.size() ? letters[i] : otherwise;
}

// The settings of a node; those of `no_settings` if it has none.
const Settings& settings_of(const NodeAttrs& attrs);
extern const Settings no_settings;
inline bool has_settings(const Settings& settings) { return &settings != &no_settings; }

// The name under which a node's values are counted; empty if they are not.
std::string watched_name(const NodeAttrs& attrs);

// The number of the entry with this text: a line for each setting, its name and its value.
int64_t settings_number(const std::string& text);
// Gives a gradient's node settings, which the settings of the forward node and `key` determine.
void set_settings(const nnvm::ObjectPtr& node, const NodeAttrs& forward, const std::string& key,
                  const Settings& settings);
int64_t settings_count();

}  // namespace gluon_amp
