// Settings of nodes: what the engine does there beyond the operator. graph/build.py selects them.
//
// A node has one attribute, whose value names an entry of a table of settings. Equal settings share an entry.
// An entry is parsed once and never freed, so a node may run, or its gradient be built, at any time and on any
// thread. The table has an entry for each kind of node, not for each network: names of nodes are not in entries.
#pragma once
#include "native.h"

#include "kernels/kernels.h"

namespace gluon_amp {

using nnvm::NodeAttrs;

// Between double underscores, so MXNet's parsers skip it. The value's lines: the number of the entry; the name
// under which watch.cc counts the node's values; the name of its histories (scaling.cc).
constexpr char kSettings[] = "__gluon_amp__";

enum class Scaling { kNone, kCurrent, kDelayed };

// How a product differs from one that accumulates in float32.
struct ProductSettings {
  // For each input p or g: it is rounded to `product_grid` or `head_gradient_grid` before it is read; else 0.
  std::string input_grids;
  Scaling scaling = Scaling::kNone;  // of rounded inputs (scaling.cc)
  // It accumulates as a GPU's Tensor Cores (tensor_core/rule.h), if the block is not 0.
  int block = 0, fraction = 0;
  int64_t split = 0;

  bool emulates() const { return block > 0; }
};

struct Settings {
  bool own_kernel = false;  // a hand-written kernel may run on float32 arrays; on a GPU see gpu.cc

  // Emulated formats. Their tensors are float32 arrays, so strings with a character for each input or output
  // select which are rounded.
  std::string rounded_inputs, rounded_outputs;  // 1: its numbers are rounded
  Grid output_grid;
  Grid product_grid;         // of a product's inputs
  Grid head_gradient_grid;   // of the gradient that the product's backward pass reads
  Grid input_gradient_grid;  // of the outputs of the node's gradients
  ProductSettings products;
  ProductSettings gradient_products;     // those of the gradient's nodes
  std::string high_precision_gradients;  // for each input 1: the product of its gradient runs in high precision
  size_t history_length = 0;  // of scaled inputs: how many maxima are kept
  int margin = 0;             // and the number of powers of two below the largest
  std::vector<std::string> history_names;  // in a gradient's node: the history of each input
  // It rounds stochastically, or scales. MXNet runs such nodes in the order of their calls.
  bool ordered = false;

  bool float32_parameters = false;  // a convolution or a dense layer of bfloat16 data, which rounds parameters
  bool rnn_loop = false;  // an RNN whose products have another format than its other tensors (rnn.cc)
  // _identity_with_attr_like_rhs(x, s) before a loss head returns x. Its gradient is multiplied by the loss
  // scale s, an array of one element.
  bool loss_scale = false;
  std::string blocked_inputs, blocked_outputs;  // 1: an array with its channels in blocks (blocks.h)

  enum { kNothing, kSamples, kAll } counts = kNothing;  // what watch.cc takes of the outputs
  bool is_gradient = false;
  std::vector<int> gradients_of;  // for each output, the forward node's input of which it is the gradient, or -1

  bool rounds() const { return !(rounded_inputs.empty() && rounded_outputs.empty() && products.input_grids.empty()); }
};

// A character of a selection; '1' or '0' where it is too short.
inline char letter_at(const std::string& letters, size_t i, char otherwise) {
  return i < letters.size() ? letters[i] : otherwise;
}

// The settings of a node; those of `no_settings` if it has none.
const Settings& settings_of(const NodeAttrs& attrs);
extern const Settings no_settings;
inline bool has_settings(const Settings& settings) { return &settings != &no_settings; }

// A line of a node's attribute; the first is line 0.
std::string settings_line(const NodeAttrs& attrs, int line);
constexpr int kWatchLine = 1, kHistoryLine = 2;

// The number of the entry with this text: a line for each setting, its name and its value.
int64_t settings_number(const std::string& text);
// Gives a gradient's node settings, which the settings of the forward node and `key` determine.
void set_settings(const nnvm::ObjectPtr& node, const NodeAttrs& forward, const std::string& key,
                  const Settings& settings);
int64_t settings_count();

// Reads "fraction normal largest above infinity rounding".
Grid grid_of(const char* text);

}  // namespace gluon_amp
