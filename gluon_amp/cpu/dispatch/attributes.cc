// Reads attributes, and creates them through MXNet's C API, because NodeAttrs must not be copied here (native.h, 2).
// They are never changed in place: graphs and threads share them.
#include "dispatch/attributes.h"

#include <errno.h>
#include <locale.h>
#include <stdlib.h>

#include <cstdio>
#include <set>

namespace gluon_amp {
namespace {

std::set<std::string>& constants() {
  static auto* names = new std::set<std::string>;
  return *names;
}

locale_t c_locale() {
  static const locale_t c = newlocale(LC_ALL_MASK, "C", nullptr);
  return c;
}

bool is_constant(const Operator& op, const std::string& key) {
  return constants().count(key) ||
         ((key == "start" || key == "stop") && constants().count(op.name() + "." + key));
}

// A constant rounded to a 16-bit type, in decimal without an exponent, which MXNet parses with an error; empty
// if that changes nothing or the text is not a number.
std::string rounded(const std::string& text, int type) {
  char* end;
  const float number = parse_float(text.c_str(), &end);
  if (end == text.c_str() || *end) return "";
  Number16 bits;
  float value;
  kernels_of(type)->narrow(&number, &bits, 1, kStore);
  kernels_of(type)->widen(&bits, &value, 1);
  if (value == number || value != value) return "";
  char digits[200];
  const locale_t before = uselocale(c_locale());
  const int places = type == mshadow::kFloat16 ? 24 : 133;  // exact
  std::snprintf(digits, sizeof digits, "%.*f", places, value);
  uselocale(before);
  return digits;
}

// The default with which nan_to_num replaces an infinity: the type's largest number.
const char* limit(const Operator& op, const std::string& key, int type) {
  if (op.name() != "_npi_nan_to_num") return nullptr;
  const bool bfloat16 = type == mshadow::kBfloat16;
  return key == "posinf" ? (bfloat16 ? "338953138925153547590470800371487866880" : "65504")
         : key == "neginf" ? (bfloat16 ? "-338953138925153547590470800371487866880" : "-65504") : nullptr;
}

// The replacement of an attribute for a 16-bit type; empty if the attribute does not change.
std::string substitute(const Operator& op, const std::string& key, const std::string& text, int type) {
  if (limit(op, key, type) && text == "None") return limit(op, key, type);
  if (key == "dtype" && (text == "float16" || text == "bfloat16") && !op.is(kCasts)) return "float32";
  if (!is_constant(op, key)) return "";
  const std::string digits = rounded(text, type);
  const auto at = digits.find("inf");  // nan_to_num's parser refuses it: use a number beyond float32
  return op.name() == "_npi_nan_to_num" && at != std::string::npos ? digits.substr(0, at) + "1e39" : digits;
}

// Computes the attributes for a 16-bit type; returns whether any differs.
bool change(const Operator& op, const NodeAttrs& attrs, int type, Texts* texts) {
  bool changed = false;
  for (const auto& item : attrs.dict) {
    const std::string text = substitute(op, item.first, item.second, type);
    changed |= !text.empty();
    if (texts) texts->emplace_back(item.first, text.empty() ? item.second : text);
  }
  for (const char* key : {"posinf", "neginf"}) {
    if (!limit(op, key, type) || find(attrs, key)) continue;
    changed = true;
    if (texts) texts->emplace_back(key, limit(op, key, type));
  }
  return changed;
}

}  // namespace

float parse_float(const char* text, char** end) { return strtof_l(text, end, c_locale()); }

float number(const NodeAttrs& attrs, const char* key, float otherwise) {
  const std::string* text = find(attrs, key);
  return text ? parse_float(text->c_str()) : otherwise;
}

int64_t whole(const NodeAttrs& attrs, const char* key, int64_t otherwise) {
  const std::vector<int64_t> values = numbers(attrs, key);
  return values.empty() ? otherwise : values[0];
}

int axis_of(const NodeAttrs& attrs, const char* key, int otherwise, int dimensions) {
  const int axis = static_cast<int>(whole(attrs, key, otherwise));
  return axis < 0 ? axis + dimensions : axis;
}

bool flag(const NodeAttrs& attrs, const char* key, bool otherwise) {
  const std::string* text = find(attrs, key);
  return text ? *text == "True" || *text == "true" || *text == "1" : otherwise;
}

std::string word(const NodeAttrs& attrs, const char* key, const char* otherwise) {
  const std::string* text = find(attrs, key);
  return text ? *text : otherwise;
}

std::vector<int64_t> numbers(const NodeAttrs& attrs, const char* key) {
  std::vector<int64_t> values;
  const std::string* text = find(attrs, key);
  for (const char* at = text ? text->c_str() : ""; *at;) {
    char* end;
    const long long value = std::strtoll(at, &end, 10);
    if (end != at) values.push_back(value);
    at = end == at ? at + 1 : end;
  }
  return values;
}

nnvm::ObjectPtr make_node(const nnvm::Op* op, const Texts& texts) {
  std::vector<const char*> keys, values;
  for (const auto& text : texts) {
    keys.push_back(text.first.c_str());
    values.push_back(text.second.c_str());
  }
  void* symbol = nullptr;
  errno = 0;  // MXNet reads it without clearing it: after an overflow in libm it refuses "inf"
  if (MXSymbolCreateAtomicSymbol(const_cast<nnvm::Op*>(op), static_cast<uint32_t>(keys.size()),
                                 keys.data(), values.data(), &symbol))
    throw dmlc::Error(MXGetLastError());
  const nnvm::ObjectPtr node = static_cast<const std::vector<nnvm::NodeEntry>*>(symbol)->front().node;
  MXSymbolFree(symbol);
  return node;
}

nnvm::ObjectPtr copy_node(const Operator& op, const NodeAttrs& attrs, int type16) {
  Texts texts;
  if (type16 != kNoType16) change(op, attrs, type16, &texts);
  else texts.assign(attrs.dict.begin(), attrs.dict.end());
  return make_node(op.nnvm_op, texts);
}

nnvm::ObjectPtr node_for_type16(const Operator& op, const NodeAttrs& attrs, int type16) {
  if (!op.nnvm_op->attr_parser || !change(op, attrs, type16, nullptr)) return nullptr;
  static auto& lock = *new std::mutex;
  static auto& nodes = *new std::map<std::string, nnvm::ObjectPtr>;  // kept while referenced or while there are few
  constexpr size_t kMost = 1000;
  std::string key = op.name() + '\0' + std::to_string(type16);
  for (const auto& item : attrs.dict) key += '\0' + item.first + '\0' + item.second;
  const std::lock_guard<std::mutex> guard(lock);
  const auto entry = nodes.find(key);
  if (entry != nodes.end()) return entry->second;
  auto copy = copy_node(op, attrs, type16);
  if (nodes.size() >= kMost) nodes.clear();
  return nodes[key] = std::move(copy);
}

void add_constant(const std::string& name) { constants().insert(name); }

}  // namespace gluon_amp
