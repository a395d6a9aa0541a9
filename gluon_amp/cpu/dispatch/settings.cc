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
  static auto* made = new std::map<std::string, int64_t>;  // never freed: threads may run at exit
  return *made;
}

// The number of the entry of this key, made by `make` if it is new.
int64_t number_of(const std::string& key, const std::function<Settings()>& make) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto found = numbers().find(key);
  if (found != numbers().end()) return found->second;
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
    for (std::string name, value; lines >> name && std::getline(lines >> std::ws, value);) said_[name] = value;
  }

  std::string text(const char* name) {
    const auto found = said_.find(name);
    if (found == said_.end()) return "";
    const std::string value = found->second;
    said_.erase(found);
    return value;
  }
  bool flag(const char* name) { return !text(name).empty(); }
  std::istringstream words(const char* name) { return std::istringstream(text(name)); }

  void check_all_read() const {
    if (!said_.empty()) throw dmlc::Error("no setting has this name: " + said_.begin()->first);
  }

 private:
  std::map<std::string, std::string> said_;
};

Settings parsed(const std::string& text) {
  Reader read(text);
  Settings made;
  made.in_engine = read.flag("in_engine");
  made.float32_parameters = read.flag("float32_parameters");
  made.float32_sums = read.flag("float32_sums");
  made.plain_weight = read.flag("plain_weight");
  made.loss_scale = read.flag("loss_scale");
  made.finite_averages = read.flag("finite_averages");
  read.words("layouts") >> made.layouts.inputs >> made.layouts.outputs;
  const std::string counts = read.text("counts");
  if (!counts.empty()) made.counts.what = counts == "samples" ? Counting::kSamples : Counting::kAll;
  read.check_all_read();
  return made;
}

}  // namespace

const Settings& settings_of(const NodeAttrs& attrs) {
  const std::string* value = value_in(attrs);
  if (!value) return no_settings;
  const unsigned long long number = std::strtoull(value->c_str(), nullptr, 10);
  const Settings* found = number < kMost ? entries[number].load(std::memory_order_acquire) : nullptr;
  if (!found) throw dmlc::Error("this graph has settings of another process. Valid: the network's own symbol");
  return *found;
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
  const int64_t made = number_of(number + " " + key, [&] { return settings; });
  const std::string value = std::to_string(made) + its.substr(number.size());
  annotate(node, {kSettings}, {value.c_str()});
}

int64_t settings_count() {
  const std::lock_guard<std::mutex> guard(lock);
  return count;
}

}  // namespace gluon_amp
