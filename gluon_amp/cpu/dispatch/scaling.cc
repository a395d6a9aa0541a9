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

struct Scaling {
  long long id = 0;
  bool delayed = false;
  size_t history = 1;
  int margin = 0;
  std::string node;

  explicit Scaling(const std::string& said) {
    std::istringstream read(said);
    std::string mode;
    read >> mode >> id >> history >> margin;
    delayed = mode == "delayed";
    std::getline(read >> std::ws, node);
  }
};

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

// The i-th word of "0 g0.1 -".
std::string word_at(const std::string& list, size_t i) {
  std::istringstream read(list);
  std::string word;
  for (size_t k = 0; k <= i; ++k) read >> word;
  return word;
}

// `again`: in a backward pass, an input of the forward pass. Each device has its own histories.
int exponent_of(const Grid& grid, const Scaling& scaling, const OpContext& context,
                const std::string& place, bool backward, bool again, const float* numbers,
                int64_t n) {
  if (!scaling.delayed) return exponent_for(grid, kernels->largest(numbers, n), scaling.margin);
  const std::string device = " cpu" + std::to_string(context.run_ctx.ctx.dev_id);
  const bool trains = backward || context.is_train;
  const std::string node = scaling.node + device, key = scaling.node + " " + place + device;
  std::unique_lock<std::mutex> guard(lock);
  auto& waits = waiting[scaling.id];
  if (backward) waits.erase(node);
  else if (trains) waits.insert(node);
  const Memory& before = memories[scaling.id][key];
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
  Memory& memory = memories[scaling.id][key];
  const int exponent = exponent_for(grid, most > 0 ? most : here, scaling.margin);
  if (trains || !waiting[scaling.id].count(node)) memory.to_read_again = exponent;
  if (!trains) return exponent;
  memory.exponent = exponent;
  if (here > 0) memory.largest.push_back(here);
  while (memory.largest.size() > scaling.history) memory.largest.pop_front();
  return exponent;
}

}  // namespace

Grid scaled(const Grid& grid, const Rounding& rounding, const OpContext& context, size_t i,
            const float* numbers, int64_t n) {
  if (!rounding.scaling) return grid;
  const Scaling scaling(*rounding.scaling);
  const bool backward = rounding.scaled != nullptr;
  std::string place = backward ? word_at(*rounding.scaled, i) : std::to_string(i);
  const bool again = backward && place[0] != 'g';
  return divided(grid, exponent_of(grid, scaling, context, place, backward, again, numbers, n));
}

Grid scaled(const Grid& grid, const std::string& said, const OpContext& context,
            const std::string& place, bool backward, const float* numbers, int64_t n) {
  return divided(grid, exponent_of(grid, Scaling(said), context, place, backward, false, numbers,
                                   n));
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
