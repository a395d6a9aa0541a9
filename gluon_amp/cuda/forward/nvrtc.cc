// NVRTC 11.2 by a newer one. MXNet compiles fused kernels as C++11 for the GPU's architecture.
#include "forward.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

// The newest architecture up to `wanted` that this NVRTC supports; `wanted` if there is none.
static int supported(int wanted) {
  int count = 0, best = wanted;
  using Read = int (*)(int*);
  if (((Read)forward_symbol("nvrtcGetNumSupportedArchs"))(&count) || count <= 0) return wanted;
  std::vector<int> archs(count);
  if (((Read)forward_symbol("nvrtcGetSupportedArchs"))(archs.data())) return wanted;
  bool is_supported = false;
  for (int arch : archs)
    if (arch <= wanted && (!is_supported || arch > best)) best = arch, is_supported = true;
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

// The PTX version of a CUDA version such as 12080, times 10.
static int ptx_version(int cuda) {
  const int major = cuda / 1000, minor = cuda % 1000 / 10;
  return 10 * (major - 4) + minor - (major == 12 && minor > 5);
}

// Lowers the PTX version to the driver's, which compiles no newer one. It refuses instructions that its own lacks.
API int nvrtcGetPTX(void* program, char* text) {
  if (int status = NEWER(nvrtcGetPTX)(program, text)) return status;
  static const auto driver_version = runtime<int (*)(int*)>("cudaDriverGetVersion");
  int cuda = 0, major, minor, length = 0;
  char* const line = strstr(text, "\n.version ");
  if (!line || !driver_version || driver_version(&cuda) || !cuda) return 0;
  char* const version = line + strlen("\n.version ");
  const int newest = ptx_version(cuda);
  if (sscanf(version, "%d.%d%n", &major, &minor, &length) < 2 || 10 * major + minor <= newest) return 0;
  const std::string lower = std::to_string(newest / 10) + "." + std::to_string(newest % 10);
  memset(version, ' ', length);
  memcpy(version, lower.data(), lower.size());
  return 0;
}
