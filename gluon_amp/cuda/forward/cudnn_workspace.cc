// Memory for cuDNN's functions where MXNet gives them none, or too little.
#include "../dl.h"
#include "forward.h"

#include <stddef.h>

#include <memory>
#include <mutex>
#include <vector>

namespace {

// Memory of the GPU for each handle, which one thread uses at a time and whose calls run in order. Smaller memory stays,
// because a CUDA graph may have its address; each size is 8 times the one before.
struct Free {
  void operator()(void* data) const { runtime<int (*)(void*)>("cudaFree")(data); }
};
struct Workspace {
  std::vector<std::unique_ptr<void, Free>> data;
  size_t bytes = 0;  // of the last
};
OfHandles<Workspace>& g_workspaces = *new OfHandles<Workspace>;

}  // namespace

void* workspace(void* handle, size_t bytes) {
  static const auto allocate = runtime<int (*)(void**, size_t)>("cudaMalloc");
  static const auto clear_error = runtime<int (*)()>("cudaGetLastError");
  if (!bytes || !allocate || !clear_error) return nullptr;
  std::lock_guard<std::mutex> lock(g_workspaces.mutex);
  Workspace& kept = g_workspaces[handle];
  if (kept.bytes >= bytes) return kept.data.back().get();
  size_t large = 16 << 20;
  while (large < bytes) large *= 8;
  for (const size_t size : {large, bytes}) {
    void* memory = nullptr;
    if (!allocate(&memory, size)) {
      kept.data.emplace_back(memory);
      kept.bytes = size;
      return memory;
    }
    clear_error();
  }
  return nullptr;
}

void forget_workspaces(void* handle) { g_workspaces.forget(handle); }

API int cudnnDestroy(void* handle) {
  forget_plans(handle);
  forget_products(handle);
  forget_workspaces(handle);
  return translated(NEWER(cudnnDestroy)(handle));
}
