// The table of settings.
#include "dispatch/settings.h"

#include <atomic>

#include "dispatch/attributes.h"

namespace gluon_amp {

const Settings no_settings;

namespace {

constexpr int64_t kMost = 1 << 20;
std::atomic<const Settings*> entries[kMost];  // read without a lock, at each call
std::mutex lock;                              // of what follows
int64_t count = 0;

std::map<std::string, int64_t>& numbers() {
  static auto* table = new std::map<std::string, int64_t>;  // never freed: threads may run at exit
  return *table;
}

// The number of the entry of this key, created by `make` if it is new.
int64_t number_of(const std::string& key, const std::function<Settings()>& make) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto entry = numbers().find(key);
  if (entry != numbers().end()) return entry->second;
  if (count == kMost) throw dmlc::Error("a process has at most 1048576 kinds of settings");
  entries[count].store(new Settings(make()), std::memory_order_release);
  numbers()[key] = count;
  return count++;
}

const std::string* value_in(const NodeAttrs& attrs) {
  for (const auto& item : attrs.dict)
    if (item.first.size() == sizeof kSettings - 1 && item.first == kSettings) return &item.second;
  return nullptr;
}

// Of a text with a line for each setting: its name and its value.
Settings parsed(const std::string& text) {
  std::map<std::string, std::string> values;
  std::istringstream lines(text);
  for (std::string name, value; lines >> name && std::getline(lines >> std::ws, value);) values[name] = value;
  const auto take = [&](const char* name) {
    const std::string value = values[name];
    values.erase(name);
    return value;
  };
  Settings settings;
  settings.in_engine = !take("in_engine").empty();
  settings.float32_parameters = !take("float32_parameters").empty();
  settings.float32_sums = !take("float32_sums").empty();
  settings.plain_weight = !take("plain_weight").empty();
  settings.loss_scale = !take("loss_scale").empty();
  settings.finite_averages = !take("finite_averages").empty();
  std::istringstream(take("layouts")) >> settings.layouts.inputs >> settings.layouts.outputs;
  const std::string counts = take("counts");
  if (!counts.empty()) settings.counts.what = counts == "samples" ? Counting::kSamples : Counting::kAll;
  if (!values.empty()) throw dmlc::Error("no setting has this name: " + values.begin()->first);
  return settings;
}

}  // namespace

const Settings& settings_of(const NodeAttrs& attrs) {
  const std::string* value = value_in(attrs);
  if (!value) return no_settings;
  const unsigned long long number = std::strtoull(value->c_str(), nullptr, 10);
  const Settings* settings = number < kMost ? entries[number].load(std::memory_order_acquire) : nullptr;
  if (!settings) throw dmlc::Error("this graph has settings of another process. Valid: the network's own symbol");
  return *settings;
}

std::string watched_name(const NodeAttrs& attrs) {
  const std::string* value = value_in(attrs);
  const size_t end = value ? value->find('\n') : std::string::npos;
  return end == std::string::npos ? "" : value->substr(end + 1);
}

int64_t settings_number(const std::string& text) {
  return number_of(text, [&] { return parsed(text); });
}

void set_settings(const nnvm::ObjectPtr& node, const NodeAttrs& forward, const std::string& key,
                  const Settings& settings) {
  const std::string inherited = *value_in(forward), number = inherited.substr(0, inherited.find('\n'));
  const int64_t entry = number_of(number + " " + key, [&] { return settings; });
  const std::string value = std::to_string(entry) + inherited.substr(number.size());
  annotate(node, {kSettings}, {value.c_str()});
}

int64_t settings_count() {
  const std::lock_guard<std::mutex> guard(lock);
  return count;
}

}  // namespace gluon_amp
