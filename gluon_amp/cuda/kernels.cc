// Kernels from packs for libmxnet.so, which registers a fat binary for each of its source files, and its kernels, when
// it is loaded. This library precedes libcudart.so.11.0 in the search order and passes cudart other fat binaries: those
// of the packs and, if older GPUs are visible, also the wheel's own code. It has no symbol versions, so it also matches
// references with a version.
//
// The host function of a template's kernel is one for all source files. libmxnet.so registers it for each of them, and
// the last registration counts. So a kernel is registered for those files alone whose pack has its code.
#include "dl.h"

#include <cxxabi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

// ---- what Python passes; cuda/kernels.py has the same structures

struct Part {  // of a pack
  uint64_t wrapper;   // the address in libmxnet.so of the wrapper that it replaces
  const char* code;   // a fat binary
  const char* names;  // of its kernels, a zero byte after each
  uint64_t count;
};

// ---- CUDA's structures

struct Wrapper { int magic, version; const char* data; void* more; };  // the argument of __cudaRegisterFatBinary
struct Header { uint32_t magic; uint16_t version, size; uint64_t bytes; };
struct Entry { uint16_t kind, version; uint32_t size; uint64_t bytes; uint32_t unused[3], arch; };
struct dim3 { unsigned x, y, z; };

// ---- the parts, and what libmxnet.so has registered

struct Registered { uint64_t wrapper; bool replaced; };

struct State {
  std::vector<Part> parts;
  std::vector<uint32_t> kept;  // the wheel's architectures that remain
  std::string advice;          // for a kernel without code
  std::unordered_multimap<std::string_view, uint64_t> wrappers;  // of parts that have a kernel
  std::unordered_map<void**, Registered> binaries;               // by cudart's handle
  std::unordered_map<const void*, const char*> names;            // of kernels by host function
};
State& g = *new State();  // never destroyed: MXNet launches kernels while the process ends

template <typename F>
F cudart(const char* name) {
  static void* library = dlopen("libcudart.so.11.0", RTLD_NOW);
  return (F)dlsym(library, name);
}
#define NEXT(name) static const auto next = cudart<decltype(&name)>(#name)

void append(std::string* to, const char* fat_binary, const std::vector<uint32_t>* only) {
  Header header;
  memcpy(&header, fat_binary, sizeof header);
  const char *p = fat_binary + header.size, *end = p + header.bytes;
  while (p < end) {
    Entry entry;
    memcpy(&entry, p, sizeof entry);
    bool wanted = !only;
    if (only)
      for (uint32_t arch : *only) wanted |= arch == entry.arch;
    if (wanted) to->append(p, entry.size + entry.bytes);
    p += entry.size + entry.bytes;
  }
}

// A fat binary of the wheel's kept code and that of the parts; kept in memory for the life of the process.
const char* composed(const char* of_wheel, const std::vector<const Part*>& parts) {
  if (g.kept.empty() && parts.size() == 1) return parts[0]->code;
  auto& binary = *new std::string(sizeof(Header), '\0');
  append(&binary, of_wheel, &g.kept);
  for (const Part* part : parts) append(&binary, part->code, nullptr);
  Header header;
  memcpy(&header, of_wheel, sizeof header);
  header.size = sizeof header;
  header.bytes = binary.size() - sizeof header;
  memcpy(binary.data(), &header, sizeof header);
  return binary.data();
}

bool is_registered(const Registered& binary, const char* name) {
  if (g.parts.empty()) return true;
  auto range = g.wrappers.equal_range(name);
  for (auto entry = range.first; entry != range.second; ++entry)
    if (entry->second == binary.wrapper) return true;
  return range.first == range.second && !g.kept.empty();  // only the wheel has its code
}

// ---- errors of kernels without code

thread_local int t_error;
thread_local std::string t_message;

// Passes an error on; if it is "invalid device function" or "no kernel image", keeps a message.
int with_message(int error, const void* host) {
  if (error != 98 && error != 209) return error;
  auto symbol = g.names.find(host);
  if (symbol == g.names.end()) return error;
  char* text = abi::__cxa_demangle(symbol->second, nullptr, nullptr, nullptr);
  t_message = std::string("no kernel image is available for execution on the device: ") +
              (text ? text : symbol->second) + ". " + g.advice;
  free(text);
  t_error = error;
  return error;
}

}  // namespace

// Call it before libmxnet.so is loaded. What it points to must remain.
API void gluon_amp_set_kernels(const Part* parts, int count, const uint32_t* kept, int count_kept, const char* advice) {
  g.parts.assign(parts, parts + count);
  g.kept.assign(kept, kept + count_kept);
  g.advice = advice;
  for (const Part& part : g.parts) {
    const char* name = part.names;
    for (uint64_t i = 0; i < part.count; i++, name += strlen(name) + 1) g.wrappers.emplace(name, part.wrapper);
  }
}

// The number of fat binaries that libmxnet.so has registered, and of those that were replaced.
API int gluon_amp_registered(int replaced) {
  int count = 0;
  for (auto& binary : g.binaries) count += !replaced || binary.second.replaced;
  return count;
}

// ---- the functions of libcudart.so.11.0 that libmxnet.so calls

API void** __cudaRegisterFatBinary(void* argument) {
  NEXT(__cudaRegisterFatBinary);
  Dl_info info;
  if (!dladdr(argument, &info) || !info.dli_fname || !strstr(info.dli_fname, "libmxnet.so")) return next(argument);
  const auto* wrapper = (const Wrapper*)argument;
  uint64_t address = (uint64_t)argument - (uint64_t)info.dli_fbase;
  std::vector<const Part*> parts;
  for (const Part& part : g.parts)
    if (part.wrapper == address) parts.push_back(&part);
  if (!parts.empty())
    argument = new Wrapper{wrapper->magic, wrapper->version, composed(wrapper->data, parts), wrapper->more};
  void** handle = next(argument);
  g.binaries[handle] = {address, !parts.empty()};
  return handle;
}

API void __cudaRegisterFunction(void** handle, const char* host, char* function, const char* name, int limit, void* a,
                                void* b, void* c, void* d, int* e) {
  NEXT(__cudaRegisterFunction);
  auto binary = g.binaries.find(handle);
  if (binary != g.binaries.end()) {
    g.names[host] = name;
    if (!is_registered(binary->second, name)) return;
  }
  next(handle, host, function, name, limit, a, b, c, d, e);
}

// libmxnet.so accesses no variable of device code, and a pack may lack some.
API void __cudaRegisterVar(void** handle, char* host, char* address, const char* name, int external, size_t bytes,
                           int constant, int global) {
  NEXT(__cudaRegisterVar);
  auto binary = g.binaries.find(handle);
  if (binary == g.binaries.end() || !binary->second.replaced)
    next(handle, host, address, name, external, bytes, constant, global);
}

API int cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared, void* stream) {
  NEXT(cudaLaunchKernel);
  return with_message(next(host, grid, block, arguments, shared, stream), host);
}

API int cudaFuncGetAttributes(void* attributes, const void* host) {
  NEXT(cudaFuncGetAttributes);
  return with_message(next(attributes, host), host);
}

API const char* cudaGetErrorString(int error) {
  NEXT(cudaGetErrorString);
  return error && error == t_error ? t_message.c_str() : next(error);
}
