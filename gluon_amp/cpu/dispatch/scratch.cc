// The pool of float32 arrays for one call at a time.
#include <malloc.h>

#include <algorithm>
#include <atomic>

#include "engine.h"

namespace gluon_amp {
namespace {

constexpr size_t kSlack = 1024;             // oneDNN may need more than the shape's size
constexpr size_t kMostDropped = size_t(128) << 18;
// The floats that the pool keeps: as many as were ever lent at once, within 24 MB to 128 MB. Otherwise a large
// call would allocate arrays each time, and the system would clear their pages.
constexpr size_t kLeast = size_t(24) << 18, kMost = size_t(128) << 18;

struct Pool {
  std::mutex lock;
  std::vector<NDArray> free;  // the one returned last at the end
  size_t kept = 0, lent = 0;  // floats of free arrays, and of arrays in use
  size_t limit = kLeast;

  // Takes the smallest array that fits, of any size, because its memory is mapped already.
  NDArray take(size_t count) {
    const size_t need = count + kSlack;
    std::vector<NDArray> gone;
    {
      std::lock_guard<std::mutex> guard(lock);
      size_t best = free.size();
      for (size_t i = free.size(); i-- > 0;) {
        const size_t has = free[i].shape()[0];
        if (has >= need && (best == free.size() || has < size_t(free[best].shape()[0]))) best = i;
      }
      if (best < free.size()) {
        NDArray array = free[best];
        free.erase(free.begin() + best);
        kept -= array.shape()[0];
        lent += array.shape()[0];
        array.InvalidateMKLDNNData();
        return array;
      }
      lent += need;
      limit = std::min(std::max(limit, lent), kMost);
      gone = shrink();
    }
    drop(&gone);
    return NDArray(mxnet::TShape({dim_t(need)}), mxnet::Context::CPU(), false,
                   mshadow::kFloat32);
  }

  void put_back(const NDArray& array) {
    std::vector<NDArray> gone;
    {
      std::lock_guard<std::mutex> guard(lock);
      free.push_back(array);
      kept += array.shape()[0];
      lent -= array.shape()[0];
      gone = shrink();
    }
    drop(&gone);
  }

 private:
  // Frees arrays, outside of the lock. glibc has a heap for each of MXNet's workers and keeps free memory
  // between arrays, which is trimmed from time to time.
  void drop(std::vector<NDArray>* gone) {
    size_t floats = 0;
    for (const NDArray& array : *gone) floats += array.shape()[0];
    gone->clear();
    if ((dropped += floats) < kMostDropped) return;
    dropped = 0;
    malloc_trim(0);
  }

  std::atomic<size_t> dropped{0};  // floats since the last trim

  // Removes excess arrays, the least recently used first. Half of kLeast always stays for other calls, because
  // an RNN holds its scratch until its backward pass.
  std::vector<NDArray> shrink() {
    const size_t most = limit - std::min(lent, limit - kLeast / 2);
    size_t many = 0;
    for (; many < free.size() && kept > most; ++many) kept -= free[many].shape()[0];
    const std::vector<NDArray> gone(free.begin(), free.begin() + many);
    free.erase(free.begin(), free.begin() + many);
    return gone;
  }
};

Pool& pool() {
  static Pool* instance = new Pool;  // never deleted: MXNet's engine may be destroyed first at exit
  return *instance;
}

}  // namespace

Scratch::~Scratch() {
  for (auto& array : held_) pool().put_back(array);
}

NDArray Scratch::array(const mxnet::TShape& shape) {
  held_.push_back(pool().take(shape.Size()));
  return held_.back().AsArray(shape, mshadow::kFloat32);
}

float* Scratch::memory(int64_t count) {
  held_.push_back(pool().take(count));
  return floats(held_.back().data());
}

TBlob Scratch::like(const TBlob& array) {
  const int64_t bytes = size(array) * bytes_of(array.type_flag_);
  return TBlob(memory((bytes + 3) / 4), array.shape_, mshadow::cpu::kDevMask, array.type_flag_, 0);
}

std::mutex& scratch_lock() {
  static std::mutex* lock = new std::mutex;
  return *lock;
}

}  // namespace gluon_amp
