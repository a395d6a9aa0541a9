// A library of CUDA 11 or cuDNN 8, as libmxnet.so loads it, whose functions call those of a newer library. setup.py
// compiles one for each name. FUNCTIONS is a generated file: a line FUNCTION(name) for each function of functions.txt.
#pragma once
#include "../dl.h"

#include <stddef.h>
#include <stdlib.h>
#include <strings.h>

#include <map>
#include <mutex>
#include <utility>

struct Function {
  void* target;  // the newer library's function; null if it lacks it
  const char* name;
};

#define FUNCTION(name) extern "C" __attribute__((visibility("hidden"))) Function forward_##name;
#include FUNCTIONS
#undef FUNCTION

#define API extern "C" __attribute__((visibility("default")))

// The address of a function in the newer library, or null.
extern "C" void* forward_symbol(const char* name);

// Translates what a function returns. forward.cc has a default, which a library may replace.
extern "C" unsigned long long forward_result(unsigned long long result);
inline int translated(int status) { return (int)forward_result((unsigned)status); }

// The newer library's function of this name, which this library defines, too.
template <class F> F newer(F, const Function& function) { return (F)function.target; }
#define NEWER(name) newer(&name, forward_##name)

// For cuDNN: an error of this library; returns the status, and cudnnGetErrorString the reason.
int forward_error(int status, const char* reason);

// For cuDNN: memory of a handle's GPU, which its later calls share; null for 0 bytes, or if there is none.
void* workspace(void* handle, size_t bytes);

// For cuDNN: ends what belongs to a handle that is destroyed.
void forget_workspaces(void* handle);
void forget_plans(void* handle);
void forget_products(void* handle);

// A setting of MXNet, with 1 for "true"; `otherwise` if it is unset or empty.
inline int setting(const char* name, int otherwise) {
  const char* set = getenv(name);
  if (!set || !*set) return otherwise;
  return strcasecmp(set, "true") ? atoi(set) : 1;
}

// For cuDNN: what belongs to its handles. MXNet destroys all handles when it forks, and later handles may have their
// addresses, also on other GPUs.
template <class T> class OfHandles {
 public:
  std::mutex mutex;

  // That of a handle, which one thread uses at a time; the caller holds the mutex.
  T& operator[](void* handle) { return kept_[handle]; }

  // Ends that of a handle, unless CUDA graphs may use it.
  void forget(void* handle) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto entry = kept_.find(handle);
    if (entry == kept_.end()) return;
    if (setting("MXNET_ENABLE_CUDA_GRAPHS", 0)) new T(std::move(entry->second));
    kept_.erase(entry);
  }

 private:
  std::map<void*, T> kept_;
};

// A function of the CUDA runtime that libmxnet.so calls, or null.
template <class F> F runtime(const char* name) {
  static void* const library = dlopen("libcudart.so.11.0", RTLD_NOW | RTLD_NOLOAD);
  return library ? (F)dlsym(library, name) : nullptr;
}
