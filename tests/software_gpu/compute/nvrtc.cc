// NVRTC: compiles CUDA C++ that MXNet generates at run time with g++ and a header; caches by source.
//
//   RECORDING_GPU_CACHE=folder   for compiled kernels; CXX=compiler (g++)
//
// Threads of a launch run sequentially, so kernels with __syncthreads are refused.
#include "nvrtc.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

namespace {

const char kHeader[] = R"code(
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <tuple>
#include <utility>
#define __host__
#define __device__
#define __global__ static
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __align__(n) alignas(n)
#define __restrict__
struct Dim3 { unsigned x, y, z; };
#define GLUON_AMP_VECTORS(type) struct type##2 { type x, y; }; struct type##4 { type x, y, z, w; };
GLUON_AMP_VECTORS(float) GLUON_AMP_VECTORS(double) GLUON_AMP_VECTORS(int) GLUON_AMP_VECTORS(char)
static thread_local Dim3 blockIdx, threadIdx, blockDim, gridDim;
using std::isnan; using std::isinf; using std::isfinite;
template <class T> static inline T __ldg(const T* p) { return *p; }
static inline float rsqrtf(float a) { return 1 / sqrtf(a); }
static inline double rsqrt(double a) { return 1 / sqrt(a); }
static inline float rcbrtf(float a) { return 1 / cbrtf(a); }
static inline double rcbrt(double a) { return 1 / cbrt(a); }
template <class A, class B> static inline auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }
template <class A, class B> static inline auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
unsigned short (*gluon_amp_narrow)(float);
const float* gluon_amp_halves;
)code";

const char kFooter[] = R"code(
template <class... A, size_t... I>
static void gluon_amp_call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*(std::remove_reference_t<A>*)args[I]...);
}
template <class... A> static void gluon_amp_call(void (*kernel)(A...), void** args) {
  gluon_amp_call(kernel, args, std::index_sequence_for<A...>());
}
extern "C" void gluon_amp_launch(void** args, const unsigned* grid, const unsigned* block,
                                 unsigned short (*narrow)(float), const float* halves) {
  gluon_amp_narrow = narrow;
  gluon_amp_halves = halves;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  for (unsigned bz = 0; bz < grid[2]; bz++) for (unsigned by = 0; by < grid[1]; by++)
    for (unsigned bx = 0; bx < grid[0]; bx++) for (unsigned tz = 0; tz < block[2]; tz++)
      for (unsigned ty = 0; ty < block[1]; ty++) for (unsigned tx = 0; tx < block[0]; tx++) {
        blockIdx = {bx, by, bz};
        threadIdx = {tx, ty, tz};
        gluon_amp_call(GLUON_AMP_KERNEL, args);
      }
}
)code";

// Replaces the two PTX instructions in MXNet's source, and the rest of their lines, by calls.
std::string without_ptx(std::string source) {
  const std::pair<const char*, const char*> calls[] = {
      {"asm(\"{  cvt.rn.f16.f32", "val.__x = gluon_amp_narrow(f);//"},
      {"asm(\"{  cvt.f32.f16", "val = gluon_amp_halves[h.__x];//"}};
  for (auto& [from, to] : calls) {
    const size_t at = source.find(from);
    if (at != std::string::npos) source.replace(at, std::string(from).size(), to);
  }
  if (source.find("asm(") != std::string::npos) unknown("PTX in a kernel's source");
  if (source.find("__syncthreads") != std::string::npos) unknown("__syncthreads in a kernel's source");
  return source;
}

std::string cache() {
  const char* folder = getenv("RECORDING_GPU_CACHE");
  return folder && *folder ? folder : "/tmp";
}

}  // namespace

std::string compile(const std::string& source, const std::string& kernel) {
  const std::string all = std::string(kHeader) + without_ptx(source) + "\n#define GLUON_AMP_KERNEL " + kernel + "\n" + kFooter;
  std::ostringstream name;
  name << cache() << "/nvrtc-" << std::hex << std::hash<std::string>()(all);
  const std::string library = name.str() + ".so", own = name.str() + "." + std::to_string(getpid());
  if (access(library.c_str(), R_OK) == 0) return library;
  { std::ofstream(own + ".cc") << all; }
  const char* compiler = getenv("CXX");
  const std::string command = std::string(compiler && *compiler ? compiler : "g++") + " -std=c++17 -O2 -fPIC -shared -w -o " +
      own + ".so " + own + ".cc 2> " + own + ".log";
  const bool failed = system(command.c_str()) != 0;
  std::ostringstream said;
  said << std::ifstream(own + ".log").rdbuf();
  if (!failed) rename((own + ".so").c_str(), library.c_str());
  for (const char* end : {".cc", ".log", ".so"})
    if (!failed || end[1] != 'c') unlink((own + end).c_str());
  if (failed) throw std::runtime_error("g++ does not compile " + own + ".cc: " + said.str().substr(0, 2000));
  return library;
}

void* loaded(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* made = handle ? dlsym(handle, "gluon_amp_launch") : nullptr;
  if (!made) throw std::runtime_error("cannot load " + library);
  return made;
}

void run(void* kernel, void** args, const unsigned grid[3], const unsigned block[3]) {
  using Function = void (*)(void**, const unsigned*, const unsigned*, uint16_t (*)(float), const float*);
  ((Function)kernel)(args, grid, block, to_half, g_halves);
}

// The NVRTC of CUDA 11.8, or of CUDA 12.9 beside cuDNN 9; the architectures of the latter.
static const int kArchitectures[] = {50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121};

API int nvrtcGetNumSupportedArchs(int* count) {
  *count = std::size(kArchitectures);
  return 0;
}

API int nvrtcGetSupportedArchs(int* to) {
  std::copy(std::begin(kArchitectures), std::end(kArchitectures), to);
  return 0;
}

API int nvrtcVersion(int* major, int* minor) {
  const bool newer = number("RECORDING_GPU_CUDNN", 0) >= 90000;
  *major = newer ? 12 : 11;
  *minor = newer ? 9 : 8;
  return 0;
}
