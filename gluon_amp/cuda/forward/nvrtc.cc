// NVRTC 11.2 by a newer one. MXNet compiles fused kernels as C++11 for the GPU's architecture.
#include "forward.h"

#include <stdlib.h>

#include <string>
#include <vector>

// The newest architecture up to `wanted` that this NVRTC supports; `wanted` if there is none.
static int supported(int wanted) {
  int count = 0, best = wanted;
  using Read = int (*)(int*);
  if (((Read)forward_symbol("nvrtcGetNumSupportedArchs"))(&count) || count <= 0) return wanted;
  std::vector<int> known(count);
  if (((Read)forward_symbol("nvrtcGetSupportedArchs"))(known.data())) return wanted;
  bool found = false;
  for (int arch : known)
    if (arch <= wanted && (!found || arch > best)) best = arch, found = true;
  return best;
}

API int nvrtcCompileProgram(void* program, int count, const char* const* options) {
  static const std::string kArch = "--gpu-architecture=compute_", kOldest = "--std=c++11";
  std::vector<std::string> texts(options, options + count);
  for (std::string& text : texts) {
    if (text == kOldest) text = "--std=c++17";  // NVRTC 13 has no older one
    if (text.compare(0, kArch.size(), kArch) == 0)
      text = kArch + std::to_string(supported(atoi(text.c_str() + kArch.size())));
  }
  std::vector<const char*> pointers;
  for (const std::string& text : texts) pointers.push_back(text.c_str());
  using Compile = int (*)(void*, int, const char* const*);
  return ((Compile)forward_symbol("nvrtcCompileProgram"))(program, count, pointers.data());
}
