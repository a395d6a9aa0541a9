// The pool of float32 arrays for one call at a time.
#include "engine.h"

namespace gluon_amp {
namespace {

constexpr size_t kSlack = 1024;               // oneDNN may want more than the shape says
constexpr size_t kMost = size_t(40) << 18;  // floats that the pool keeps: 40 MB

struct Pool {
  std::mutex lock;
  std::vector<NDArray> free;  // the one given back last at the end
  size_t total = 0;

  NDArray take(size_t count) {
    const size_t need = count + kSlack;
    {
      std::lock_guard<std::mutex> guard(lock);
      size_t best = free.size();
      for (size_t i = free.size(); i-- > 0;) {
        const size_t has = free[i].shape()[0];
        if (has >= need && has <= 2 * need + 65536 &&
            (best == free.size() || has < size_t(free[best].shape()[0])))
          best = i;
      }
      if (best < free.size()) {
        NDArray found = free[best];
        free.erase(free.begin() + best);
        total -= found.shape()[0];
        found.InvalidateMKLDNNData();
        return found;
      }
    }
    return NDArray(mxnet::TShape({dim_t(need)}), mxnet::Context::CPU(), false,
                   mshadow::kFloat32);
  }

  void give(const NDArray& array) {
    std::vector<NDArray> gone;  // freed outside of the lock
    std::lock_guard<std::mutex> guard(lock);
    free.push_back(array);
    total += array.shape()[0];
    while (total > kMost) {
      total -= free.front().shape()[0];
      gone.push_back(free.front());
      free.erase(free.begin());
    }
  }
};

Pool& pool() {
  static Pool* made = new Pool;  // never deleted: MXNet's engine may be gone at the exit
  return *made;
}

}  // namespace

Lease::~Lease() {
  for (auto& array : held_) pool().give(array);
}

NDArray Lease::array(const mxnet::TShape& shape) {
  held_.push_back(pool().take(shape.Size()));
  return held_.back().AsArray(shape, mshadow::kFloat32);
}

float* Lease::memory(int64_t count) {
  held_.push_back(pool().take(count));
  return floats(held_.back().data());
}

}  // namespace gluon_amp
