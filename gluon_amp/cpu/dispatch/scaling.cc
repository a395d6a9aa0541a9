// Scales of products' inputs: a power of two for each float8 tensor.
//
// A number is multiplied by the scale, rounded, and divided by the scale, which is the same as rounding to a
// grid of which all numbers are divided by the scale. So the sums of a product do not depend on the scale.
// Finite numbers beyond the largest become the largest. Infinities and NaNs are converted by the format, so
// that an overflow is detected.
//
// "current": the scale brings the largest number of the array into the format's last binade.
// "delayed": the same with the maximum of the last arrays in the history; for the first array, its own.
// Histories record passes in training only, and no tensors of zeros, with which a Trainer's first step checks
// for operators that start gradients. An input that a backward pass reads again has the scale of the last
// forward pass, in training or in a recorded prediction.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <set>

#include "engine.h"

namespace gluon_amp {
namespace {

struct Memory {
  std::deque<float> largest;  // of the last arrays, the newest at the end
  int exponent = 0;           // of the scale of the last forward pass in training
  int to_read_again = 0;      // the same, or that of a later prediction, which may have a backward pass
};

std::mutex lock;
std::map<long long, std::map<std::string, Memory>> memories;  // by id, then node and input
// Nodes with a forward pass in training and no backward pass yet. Predictions do not change the scale for their
// backward pass.
std::map<long long, std::set<std::string>> waiting;
std::deque<long long> gone;  // the ids of deleted networks, the newest at the end

// The exponent of the scale for arrays with this maximum.
int exponent_for(const Grid& grid, float largest, int margin) {
  if (!(largest > 0)) return 0;
  int of_grid, of_array;
  const float room = std::frexp(grid.largest, &of_grid), has = std::frexp(largest, &of_array);
  const int made = of_grid - of_array - (room < has) - margin;
  // so that both ends of the scaled grid are float32 numbers
  return std::max(of_grid - 128, std::min(made, 126 + std::ilogb(grid.normal)));
}

Grid divided(Grid grid, int exponent) {
  const float largest = std::ldexp(grid.largest, -exponent);
  if (grid.infinity == grid.largest) grid.infinity = largest;
  grid.normal = std::ldexp(grid.normal, -exponent);
  grid.largest = grid.above = largest;
  return grid;
}

// `again`: in a backward pass, an input of the forward pass. Each device has its own histories.
int exponent_of(const Grid& grid, const Call& call, const std::string& place, bool backward, bool again,
                const float* numbers, int64_t n) {
  const int margin = call.settings.margin;
  if (call.settings.products.scaling == Scaling::kCurrent)
    return exponent_for(grid, kernels->largest(numbers, n), margin);
  const std::string line = settings_line(call.attrs, kHistoryLine);  // the network's id, and the node's name
  const size_t blank = line.find(' ');
  const long long id = std::stoll(line);
  const std::string device = " cpu" + std::to_string(call.context.run_ctx.ctx.dev_id);
  const bool trains = backward || call.context.is_train;
  const std::string name = line.substr(blank + 1), node = name + device, key = name + " " + place + device;
  std::unique_lock<std::mutex> guard(lock);
  auto& waits = waiting[id];
  if (backward) waits.erase(node);
  else if (trains) waits.insert(node);
  const Memory& before = memories[id][key];
  if (again) return before.to_read_again;
  float most = 0;
  for (float one : before.largest) most = std::max(most, one);
  float here = 0;
  if (trains || most == 0) {
    guard.unlock();
    here = kernels->largest(numbers, n);
    guard.lock();
  }
  // Meanwhile others may have replaced or deleted the histories, so references to them may be invalid.
  Memory& memory = memories[id][key];
  const int exponent = exponent_for(grid, most > 0 ? most : here, margin);
  if (trains || !waiting[id].count(node)) memory.to_read_again = exponent;
  if (!trains) return exponent;
  memory.exponent = exponent;
  if (here > 0) memory.largest.push_back(here);
  while (memory.largest.size() > call.settings.history_length) memory.largest.pop_front();
  return exponent;
}

}  // namespace

Grid scaled(const Grid& grid, const Call& call, size_t i, const float* numbers, int64_t n) {
  if (call.settings.products.scaling == Scaling::kNone) return grid;
  const bool backward = call.settings.is_gradient;
  const std::string place = backward ? call.settings.history_names.at(i) : std::to_string(i);
  const bool again = backward && place[0] != 'g';
  return divided(grid, exponent_of(grid, call, place, backward, again, numbers, n));
}

Grid scaled(const Grid& grid, const Call& call, const std::string& place, bool backward, const float* numbers,
            int64_t n) {
  if (call.settings.products.scaling == Scaling::kNone) return grid;
  return divided(grid, exponent_of(grid, call, place, backward, false, numbers, n));
}

std::string scales(int64_t id) {
  std::lock_guard<std::mutex> guard(lock);
  std::ostringstream made;
  const auto found = memories.find(id);
  if (found == memories.end()) return "";
  for (auto& item : found->second) {
    made << item.second.exponent;
    for (float one : item.second.largest) {
      uint32_t bits;
      std::memcpy(&bits, &one, sizeof bits);
      made << " " << bits;
    }
    made << "\t" << item.first << "\n";
  }
  return made.str();
}

// A backward pass may still run after its network is deleted, so the last deleted ones stay.
void forget_scales(int64_t id) {
  constexpr size_t kLast = 64;
  std::lock_guard<std::mutex> guard(lock);
  gone.push_back(id);
  if (gone.size() <= kLast) return;
  memories.erase(gone.front());
  waiting.erase(gone.front());
  gone.pop_front();
}

void set_scales(int64_t id, const char* lines) {
  std::lock_guard<std::mutex> guard(lock);
  auto& mine = memories[id];
  mine.clear();
  waiting.erase(id);
  std::istringstream read(lines);
  std::string numbers, name;
  while (std::getline(read, numbers, '\t') && std::getline(read, name)) {
    std::istringstream words(numbers);
    Memory& memory = mine[name];
    words >> memory.exponent;
    memory.to_read_again = memory.exponent;
    for (uint32_t bits; words >> bits;) {
      memory.largest.push_back(0);
      std::memcpy(&memory.largest.back(), &bits, sizeof bits);
    }
  }
}

}  // namespace gluon_amp
