// cuDNN 8 by cuDNN 9, which numbers status codes differently.
#include "forward.h"

#include <stddef.h>

#include <string>

static const int kNotSupported = 9;
static thread_local int t_status;  // of cuDNN 8, and why
static thread_local std::string t_reason;

// cuDNN 9 has a thousand for each kind of error.
static int status_of_8(int status) {
  switch (status) {
    case 1001: return 1;              // NOT_INITIALIZED
    case 1002: case 1003: return 14;  // SUBLIBRARY_VERSION_MISMATCH, SERIALIZATION_...: VERSION_MISMATCH
    case 1004: return kNotSupported;  // DEPRECATED
    case 1005: return 10;             // LICENSE_ERROR
    case 1006: return 12;             // RUNTIME_IN_PROGRESS
    case 1007: return 13;             // RUNTIME_FP_OVERFLOW
    case 1008: case 3008: return 11;  // SUBLIBRARY_LOADING_FAILED, RUNTIME_PREREQUISITE_MISSING
    case 2001: return 5;              // INVALID_VALUE
    case 3007: return 6;              // ARCH_MISMATCH
    case 4003: case 4004: return 2;   // HOST_ and DEVICE_ALLOCATION_FAILED: ALLOC_FAILED
    case 4006: return 7;              // TEXTURE_CREATION_FAILED: MAPPING_ERROR
  }
  switch (status / 1000) {
    case 2: return 3;  // BAD_PARAM
    case 3: return kNotSupported;
    case 4: return 4;  // INTERNAL_ERROR
    case 5: return 8;  // EXECUTION_FAILED
  }
  return status;
}

extern "C" unsigned long long forward_result(unsigned long long result) {
  int status = (int)result;
  if (status < 1000) return result;
  t_reason = ((const char* (*)(int))forward_symbol("cudnnGetErrorString"))(status);
  return t_status = status_of_8(status);
}

int forward_error(int status, const char* reason) {
  t_reason = reason;
  return t_status = status;
}

API const char* cudnnGetErrorString(int status) {
  static const char* const names[] = {
      "CUDNN_STATUS_SUCCESS", "CUDNN_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_BAD_PARAM",
      "CUDNN_STATUS_INTERNAL_ERROR", "CUDNN_STATUS_INVALID_VALUE", "CUDNN_STATUS_ARCH_MISMATCH",
      "CUDNN_STATUS_MAPPING_ERROR", "CUDNN_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_NOT_SUPPORTED",
      "CUDNN_STATUS_LICENSE_ERROR", "CUDNN_STATUS_RUNTIME_PREREQUISITE_MISSING", "CUDNN_STATUS_RUNTIME_IN_PROGRESS",
      "CUDNN_STATUS_RUNTIME_FP_OVERFLOW", "CUDNN_STATUS_VERSION_MISMATCH"};
  if (status && status == t_status) return t_reason.c_str();
  return status >= 0 && status < 15 ? names[status] : "an unknown status of cuDNN";
}

API size_t cudnnGetVersion() { return ((size_t (*)())forward_symbol("cudnnGetVersion"))(); }
