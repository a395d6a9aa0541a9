// Devices, streams, events and CUDA graphs.
#include "record.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <set>
#include <stdexcept>

// The last of the listed capabilities is that of all further devices.
int compute_capability(int device) {
  const char* text = getenv("RECORDING_GPU_SM");
  if (!text || !*text) return 70;
  for (; device > 0; device--) {
    const char* comma = strchr(text, ',');
    if (!comma) break;
    text = comma + 1;
  }
  return atoi(text);
}

void* made_handle() { return calloc(1, 64); }

API int cudaGetDeviceCount(int* n) { *n = count_of_devices(); return 0; }
API int cudaGetDevice(int* i) { *i = t_device; return 0; }
API int cudaSetDevice(int i) {
  if (i < 0 || i >= count_of_devices()) return 101;
  t_device = i;
  return 0;
}
API int cudaDeviceGetAttribute(int* value, int which, int device) {
  static const auto& known = *new std::map<int, int>{  // of a V100
      {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152},
      {9, 65536}, {10, 32}, {11, 2147483647}, {12, 65536}, {13, 1380000}, {14, 512}, {16, 80}, {39, 2048},
      {81, 98304}, {82, 65536}, {95, 1}, {97, 98304}};
  int sm = compute_capability(device);
  auto found = known.find(which);
  *value = which == 75 ? sm / 10 : which == 76 ? sm % 10 : found == known.end() ? 0 : found->second;
  if (which != 75 && which != 76 && found == known.end())
    return bad("cudaDeviceGetAttribute", "unknown attribute " + std::to_string(which), 1);
  return 0;
}
struct Properties {  // the first members of CUDA 11's cudaDeviceProp
  char name[256], uuid[16], luid[8];
  unsigned luid_mask;
  size_t memory, shared;
  int registers, warp;
  size_t pitch;
  int threads, block[3], grid[3], clock;
  size_t constant;
  int major, minor;
  size_t alignment, pitch_alignment;
  int overlap, processors;
};
API int cudaGetDeviceProperties(Properties* p, int i) {
  if (i < 0 || i >= count_of_devices()) return 101;
  int sm = compute_capability(i);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "recording GPU sm_%d", sm);
  p->memory = bytes_of_device(); p->shared = 49152; p->registers = 65536; p->warp = 32; p->pitch = 2147483647;
  p->threads = 1024; p->block[0] = p->block[1] = 1024; p->block[2] = 64;
  p->grid[0] = 2147483647; p->grid[1] = p->grid[2] = 65535; p->clock = 1380000; p->constant = 65536;
  p->major = sm / 10; p->minor = sm % 10; p->alignment = 512; p->pitch_alignment = 32; p->overlap = 1;
  p->processors = 80;
  return 0;
}
API int cudaDeviceCanAccessPeer(int* can, int a, int b) { *can = a != b; return 0; }
API int cudaDeviceEnablePeerAccess(int, unsigned) { return 0; }
API int cudaDeviceGetP2PAttribute(int* value, int, int, int) { *value = 1; return 0; }
API int cudaDriverGetVersion(int* v) { *v = 11020; return 0; }
API int cudaDeviceSynchronize() {
  say("cudaDeviceSynchronize");
  return outside_capture("cudaDeviceSynchronize") ? 0 : kInCapture;
}

thread_local int t_last_error = 0;
API int cudaGetLastError() { int e = t_last_error; t_last_error = 0; return e; }
API int cudaPeekAtLastError() { return t_last_error; }
API const char* cudaGetErrorName(int e) { return e ? "cudaErrorOfRecordingGPU" : "cudaSuccess"; }
API const char* cudaGetErrorString(int e) {
  return e == 0 ? "no error" : e == 2 ? "out of memory" : e == 101 ? "invalid device ordinal"
      : e == 209 ? "no kernel image is available for execution on the device"
      : e == 400 ? "invalid resource handle" : e == 1 ? "invalid argument" : "an error of the recording GPU";
}

// ---- streams and events

static std::set<void*>& streams() { static auto* all = new std::set<void*>(); return *all; }
static std::set<void*>& events() { static auto* all = new std::set<void*>(); return *all; }

static bool holds(std::set<void*>& all, void* one) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return all.count(one);
}
static void* added(std::set<void*>& all) {
  void* made = made_handle();
  std::lock_guard<std::mutex> lock(g_mutex);
  all.insert(made);
  return made;
}
static int removed(const char* call, std::set<void*>& all, void* one) {
  bool was;
  { std::lock_guard<std::mutex> lock(g_mutex); was = all.erase(one); }  // not freed: no other object gets its address
  return was ? 0 : bad(call, "it was destroyed before, or never made", 400);
}

bool live(const char* call, void* stream) {  // the first three are CUDA's default streams
  if ((uintptr_t)stream <= 2 || holds(streams(), stream)) return true;
  bad(call, "a stream that was destroyed, or never made");
  return false;
}
static bool live_event(const char* call, void* event) {
  if (holds(events(), event)) return true;
  bad(call, "an event that was destroyed, or never made");
  return false;
}

API int cudaStreamCreate(void** s) { *s = added(streams()); return 0; }
API int cudaStreamCreateWithFlags(void** s, unsigned) { *s = added(streams()); return 0; }
API int cudaStreamDestroy(void* s) { return removed("cudaStreamDestroy", streams(), s); }
API int cudaStreamSynchronize(void* s) {
  say("cudaStreamSynchronize");
  if (!outside_capture("cudaStreamSynchronize")) return kInCapture;
  return live("cudaStreamSynchronize", s) ? 0 : 400;
}
API int cudaStreamWaitEvent(void* s, void* e, unsigned) {
  say("cudaStreamWaitEvent");
  return live("cudaStreamWaitEvent", s) && live_event("cudaStreamWaitEvent", e) ? 0 : 400;
}
API int cudaEventCreateWithFlags(void** e, unsigned) { *e = added(events()); return 0; }
API int cudaEventDestroy(void* e) { return removed("cudaEventDestroy", events(), e); }
API int cudaEventRecord(void* e, void* s) {
  say("cudaEventRecord");
  return live("cudaEventRecord", s) && live_event("cudaEventRecord", e) ? 0 : 400;
}

// ---- CUDA graphs: a thread's calls between begin and end of a capture, here of their log only

static thread_local bool t_captures = false;

bool outside_capture(const char* call) {
  if (t_captures) bad(call, "a capture for a CUDA graph forbids it");
  return !t_captures;
}

API int cudaStreamBeginCapture(void* s, int) {
  say("cudaStreamBeginCapture");
  if (!outside_capture("cudaStreamBeginCapture")) return kInCapture;
  t_captures = live("cudaStreamBeginCapture", s);
  return t_captures ? 0 : 400;
}
API int cudaStreamEndCapture(void*, void** graph) {
  say("cudaStreamEndCapture");
  if (!t_captures) return bad("cudaStreamEndCapture", "there is no capture", 1);
  t_captures = false;
  *graph = made_handle();
  return 0;
}
API int cudaGraphGetNodes(void*, void**, size_t* count) { *count = 0; return 0; }
API int cudaGraphInstantiate(void** made, void*, void**, char*, size_t) { *made = made_handle(); return 0; }
API int cudaGraphExecUpdate(void*, void*, void**, int* result) { *result = 0; return 0; }
API int cudaGraphDestroy(void*) { return 0; }
API int cudaGraphExecDestroy(void*) { return 0; }
API int cudaGraphLaunch(void*, void* s) {
  say("cudaGraphLaunch");
  if (!live("cudaGraphLaunch", s)) return 400;
  return then_compute("cudaGraphLaunch", 0, 1, [] { throw std::runtime_error("unknown: CUDA graphs"); });
}

// ---- the driver functions of `gluon-amp doctor`

API int cuInit(unsigned) { return 0; }
API int cuDriverGetVersion(int* v) { *v = 11020; return 0; }
API int cuDeviceGetCount(int* n) { *n = count_of_devices(); return 0; }
API int cuDeviceGet(int* d, int i) { *d = i; return 0; }
API int cuDeviceGetName(char* to, int n, int) { snprintf(to, n, "recording GPU"); return 0; }
API int cuDeviceGetAttribute(int* value, int which, int i) { return cudaDeviceGetAttribute(value, which, i); }
API int cuDeviceTotalMem_v2(size_t* n, int) { *n = bytes_of_device(); return 0; }
API int cuDevicePrimaryCtxRetain(void** c, int) { *c = made_handle(); return 0; }
API int cuGetErrorString(int, const char** s) { *s = "an error of the driver"; return 0; }
