// NVML: what `import gluon_amp` reads of the GPUs. RECORDING_GPU_CUDA: the CUDA version of the driver (13000).
#include "record.h"

#include <stdio.h>
#include <string.h>

namespace {

const int kInvalid = 2, kNotFound = 6;  // NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_FOUND

// A handle: 1 + the index of a GPU, or that of a MIG instance on it.
const uintptr_t kInstance = 1 << 16;
int index_of(void* handle) { return (int)((uintptr_t)handle % kInstance) - 1; }

int copy(const std::string& text, char* to, unsigned size) {
  return snprintf(to, size, "%s", text.c_str()) < (int)size ? 0 : kInvalid;
}

}  // namespace

API int nvmlInit_v2() { return 0; }
API int nvmlShutdown() { return 0; }
API int nvmlSystemGetDriverVersion(char* to, unsigned size) { return copy("580.65.06", to, size); }
API int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = number("RECORDING_GPU_CUDA", 13000);
  return 0;
}
API int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = number("RECORDING_GPU_COUNT", 1);
  return 0;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  *handle = (void*)(uintptr_t)(index + 1);
  return index < (unsigned)number("RECORDING_GPU_COUNT", 1) ? 0 : kInvalid;
}
API int nvmlDeviceGetName(void* handle, char* to, unsigned size) {
  return copy("recording GPU sm_" + std::to_string(compute_capability(index_of(handle))), to, size);
}
API int nvmlDeviceGetUUID(void* handle, char* to, unsigned size) {
  return copy("GPU-" + std::to_string(index_of(handle)) + "0000000-recording", to, size);
}
API int nvmlDeviceGetCudaComputeCapability(void* handle, int* major, int* minor) {
  int sm = compute_capability(index_of(handle));
  *major = sm / 10;
  *minor = sm % 10;
  return 0;
}
// A MIG instance is MIG- and the digit of its GPU.
API int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  int index = uuid[4] - '0';
  bool instance = !strncmp(uuid, "MIG-", 4);
  *handle = (void*)(uintptr_t)(index + 1 + (instance ? kInstance : 0));
  return index < number("RECORDING_GPU_COUNT", 1) ? 0 : kNotFound;
}
API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void* instance, void** handle) {
  *handle = (void*)((uintptr_t)instance % kInstance);
  return (uintptr_t)instance >= kInstance ? 0 : kInvalid;
}
