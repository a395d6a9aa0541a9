// Device memory: two mappings of one size. Programs get addresses of the first, which is not readable: host code that
// reads it has a segmentation fault, as with a GPU. Copies use the second. A computing GPU has one mapping, because
// structs of kernels contain addresses. Allocated memory is zero; copies, memsets and `recording_gpu_poke` write it.
#include "record.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <map>

namespace {

struct Device {
  char *seen, *real;               // the program's addresses, and the readable mapping
  size_t size, used = 0, peak = 0;
  std::map<size_t, size_t> taken;  // offset -> bytes
};

std::vector<Device>& devices() {
  static std::vector<Device>* all = [] {
    auto* made = new std::vector<Device>(number("RECORDING_GPU_COUNT", 1));
    for (Device& d : *made) {
      d.size = (size_t)number("RECORDING_GPU_GB", 16) << 30;
      int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      d.real = (char*)mmap(nullptr, d.size, PROT_READ | PROT_WRITE, how, -1, 0);
      d.seen = computes() ? d.real : (char*)mmap(nullptr, d.size, PROT_NONE, how, -1, 0);
    }
    return made;
  }();
  return *all;
}

size_t rounded(size_t bytes) { return bytes ? (bytes + 511) & ~(size_t)511 : 512; }

// Zeroes memory, and frees its whole pages.
void clear(char* a, size_t bytes) {
  char* b = a + bytes;
  char* page = (char*)(((uintptr_t)a + 4095) & ~(uintptr_t)4095);
  char* last = (char*)((uintptr_t)b & ~(uintptr_t)4095);
  if (last <= page) {
    memset(a, 0, bytes);
    return;
  }
  memset(a, 0, page - a);
  madvise(page, last - page, MADV_DONTNEED);
  memset(last, 0, b - last);
}

}  // namespace

thread_local int t_device = 0;

int count_of_devices() { return devices().size(); }
size_t bytes_of_device() { return devices()[0].size; }
size_t free_bytes(int device) { return devices()[device].size - devices()[device].used; }

int device_of(const void* p, ll* left) {
  for (size_t i = 0; i < devices().size(); i++) {
    Device& d = devices()[i];
    if ((char*)p < d.seen || (char*)p >= d.seen + d.size) continue;
    if (left) {
      std::lock_guard<std::mutex> lock(g_mutex);
      size_t at = (char*)p - d.seen;
      auto after = d.taken.upper_bound(at);
      *left = -1;
      if (after != d.taken.begin()) {
        --after;
        if (at <= after->first + after->second) *left = after->first + after->second - at;
      }
    }
    return i;
  }
  return -1;
}

void* real(const void* p) {
  int i = device_of(p);
  return i < 0 ? (void*)p : devices()[i].real + ((char*)p - devices()[i].seen);
}

bool check(const char* call, const char* what, const void* p, size_t bytes, size_t width) {
  if (!p && !bytes) return true;
  ll left = -1;
  int i = device_of(p, &left);
  char text[200];
  if (i < 0) snprintf(text, sizeof text, "%s is %s", what, p ? "no device memory" : "null");
  else if (left < 0 || (!left && bytes)) snprintf(text, sizeof text, "%s is memory that was freed or never allocated", what);
  else if (left < (ll)bytes) snprintf(text, sizeof text, "%s: %zu bytes needed, %lld there", what, bytes, left);
  else if ((uintptr_t)p % width) snprintf(text, sizeof text, "%s is not aligned to %zu bytes", what, width);
  else return true;
  bad(call, text);
  return false;
}

API int cudaMalloc(void** p, size_t bytes) {
  if (!outside_capture("cudaMalloc")) return kInCapture;
  if (fails("cudaMalloc")) return 2;
  Device& d = devices()[t_device];
  size_t need = rounded(bytes);
  bool there = false;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    size_t at = 0;
    for (auto& piece : d.taken) {  // first fit
      if (piece.first - at >= need) break;
      at = piece.first + rounded(piece.second);
    }
    if (at + need <= d.size) {
      d.taken[at] = bytes;
      d.used += need;
      d.peak = d.used > d.peak ? d.used : d.peak;
      *p = d.seen + at;
      there = true;
    }
  }
  say("cudaMalloc", "\"bytes\":%zu", bytes);
  return there ? 0 : 2;
}

API ll recording_gpu_used(int i) { return devices()[i].used; }
API ll recording_gpu_peak(int i) { return devices()[i].peak; }  // peak usage
API void recording_gpu_begin_peak(int i) { devices()[i].peak = devices()[i].used; }

API int cudaFree(void* p) {
  if (!outside_capture("cudaFree")) return kInCapture;
  int i = device_of(p);
  bool found = !p;
  if (i >= 0) {
    Device& d = devices()[i];
    std::lock_guard<std::mutex> lock(g_mutex);
    auto piece = d.taken.find((char*)p - d.seen);
    if (piece != d.taken.end()) {
      size_t need = rounded(piece->second);
      d.used -= need;
      clear(d.real + piece->first, need);
      d.taken.erase(piece);
      found = true;
    }
  }
  say("cudaFree", "\"found\":%d", found);
  return found ? 0 : bad("cudaFree", "memory that was freed or never allocated", 1);
}

API int cudaMallocPitch(void** p, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 511) & ~(size_t)511;
  return cudaMalloc(p, *pitch * height);
}

API int cudaHostAlloc(void** p, size_t bytes, unsigned) {
  *p = calloc(1, bytes ? bytes : 1);
  say("cudaHostAlloc", "\"bytes\":%zu", bytes);
  return 0;
}
API int cudaFreeHost(void* p) { free(p); return 0; }

API int cudaMemGetInfo(size_t* left, size_t* total) {
  *left = free_bytes(t_device);
  *total = devices()[t_device].size;
  return 0;
}

static int copy(const char* call, void* to, const void* from, size_t bytes, void* stream) {
  if (!live(call, stream)) return 400;
  if (fails(call)) return kFailed;
  bool a = device_of(from) >= 0, b = device_of(to) >= 0;
  if (bytes && ((a && !check(call, "source", from, bytes)) || (b && !check(call, "target", to, bytes)))) return 1;
  memmove(real(to), real(from), bytes);
  say(call, "\"way\":\"%c2%c\",\"bytes\":%zu", a ? 'D' : 'H', b ? 'D' : 'H', bytes);
  return 0;
}
API int cudaMemcpy(void* to, const void* from, size_t n, int) {
  return outside_capture("cudaMemcpy") ? copy("cudaMemcpy", to, from, n, nullptr) : kInCapture;
}
API int cudaMemcpyAsync(void* to, const void* from, size_t n, int, void* stream) {
  return copy("cudaMemcpyAsync", to, from, n, stream);
}
API int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, void* stream) {
  return copy("cudaMemcpyPeerAsync", to, from, n, stream);
}
API int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                          size_t height, int, void* stream) {
  const char* call = "cudaMemcpy2DAsync";
  if (!live(call, stream)) return 400;
  if (fails(call)) return kFailed;
  bool a = device_of(from) >= 0, b = device_of(to) >= 0;
  if (height && ((a && !check(call, "source", from, (height - 1) * from_pitch + width)) ||
                 (b && !check(call, "target", to, (height - 1) * to_pitch + width))))
    return 1;
  for (size_t i = 0; i < height; i++)
    memmove((char*)real(to) + i * to_pitch, (char*)real(from) + i * from_pitch, width);
  say(call, "\"way\":\"%c2%c\",\"bytes\":%zu", a ? 'D' : 'H', b ? 'D' : 'H', width * height);
  return 0;
}
API int cudaMemsetAsync(void* p, int value, size_t n, void* stream) {
  if (!live("cudaMemsetAsync", stream) || !check("cudaMemsetAsync", "target", p, n)) return 1;
  memset(real(p), value, n);
  say("cudaMemsetAsync", "\"bytes\":%zu,\"value\":%d", n, value);
  return 0;
}
