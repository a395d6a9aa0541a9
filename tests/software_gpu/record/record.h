// A recording GPU: the functions that libmxnet.so of mxnet-cu112 1.9.1 imports from CUDA 11.2, cuDNN 8, cuBLAS,
// cuRAND, cuFFT, cuSOLVER, NVRTC, NCCL and the driver, without a GPU. Kernels do not run: the functions check each
// launch and library call, and write it to a log.
//
//   RECORDING_GPU_LOG=file   one JSON object a line     RECORDING_GPU_COUNT=2   devices (1)
//   RECORDING_GPU_SM=80      compute capability (70), or of each: 86,90   RECORDING_GPU_GB=16   memory of each
//
// A call that a GPU would refuse is a violation: it is logged and counted, and returns an error if the real
// function would. Values are computed only with RECORDING_GPU_COMPUTES=1 (../compute).
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <functional>
#include <initializer_list>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
typedef long long ll;

// ---- record.cc: the log

extern std::mutex& g_mutex;
int number(const char* environment_variable, int otherwise);
std::string quoted(const std::string& text);
std::string demangled(const char* name);
void say(const char* call, const char* format, ...) __attribute__((format(printf, 2, 3)));
inline void say(const char* call) { say(call, "%s", ""); }
// A violation; returns the status, for `return bad(...)`.
int bad(const char* call, const std::string& why, int status = 0);
bool fails(const char* call);  // whether this call is to fail: see recording_gpu_fail

// ---- memory.cc: device memory

extern thread_local int t_device;  // the calling thread's device
int count_of_devices();
size_t bytes_of_device();
size_t free_bytes(int device);
// The device of an address, -1 for none; the remaining bytes of its allocation, -1 for none.
int device_of(const void* p, ll* left = nullptr);
void* real(const void* p);  // the host address of a device's address
// Whether `bytes` from p on are live device memory, aligned to `width`; null is valid for 0 bytes.
bool check(const char* call, const char* what, const void* p, size_t bytes, size_t width = 1);

// ---- devices.cc: devices, streams, events, CUDA graphs

int compute_capability(int device = t_device);  // 70 for 7.0
extern thread_local int t_last_error;  // what cudaGetLastError returns
bool outside_capture(const char* call);     // whether this thread captures no CUDA graph
enum { kFailed = 719 };                     // the status of a copy or a kernel that fails on the device
enum { kInCapture = 900 };                  // the status of a call that a capture forbids
bool live(const char* call, void* stream);  // whether a stream is the default one or not yet destroyed
void* made_handle();  // a library's handle: some memory

// ---- ../compute: executes a call that passed the checks, on a computing GPU

bool computes();
// Returns a nonzero `status`, or runs f and returns 0; if f throws, records a violation and returns `failed`.
int then_compute(const char* call, int status, int failed, const std::function<void()>& f);

// ---- blas.cc: type codes, common to cuBLAS and cuDNN

const char* type_name(int type);
size_t width(int type);
