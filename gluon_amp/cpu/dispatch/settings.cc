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

// Reads a text: a line for each setting, its name and its value.
class Reader {
 public:
  explicit Reader(const std::string& text) {
    std::istringstream lines(text);
    for (std::string name, value; lines >> name && std::getline(lines >> std::ws, value);) values_[name] = value;
  }

  std::string text(const char* name) {
    const auto entry = values_.find(name);
    if (entry == values_.end()) return "";
    const std::string value = entry->second;
    values_.erase(entry);
    return value;
  }
  bool flag(const char* name) { return !text(name).empty(); }
  std::istringstream words(const char* name) { return std::istringstream(text(name)); }

  void check_all_read() const {
    if (!values_.empty()) throw dmlc::Error("no setting has this name: " + values_.begin()->first);
  }

 private:
  std::map<std::string, std::string> values_;
};

Settings parsed(const std::string& text) {
  Reader read(text);
  Settings settings;
  settings.in_engine = read.flag("in_engine");
  settings.float32_parameters = read.flag("float32_parameters");
  settings.float32_sums = read.flag("float32_sums");
  settings.plain_weight = read.flag("plain_weight");
  settings.loss_scale = read.flag("loss_scale");
  settings.finite_averages = read.flag("finite_averages");
  read.words("layouts") >> settings.layouts.inputs >> settings.layouts.outputs;
  const std::string counts = read.text("counts");
  if (!counts.empty()) settings.counts.what = counts == "samples" ? Counting::kSamples : Counting::kAll;
  read.check_all_read();
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
  const std::string its = *value_in(forward), number = its.substr(0, its.find('\n'));
  const int64_t entry = number_of(number + " " + key, [&] { return settings; });
  const std::string value = std::to_string(entry) + its.substr(number.size());
  annotate(node, {kSettings}, {value.c_str()});
}

int64_t settings_count() {
  const std::lock_guard<std::mutex> guard(lock);
  return count;
}

}  // namespace gluon_amp
