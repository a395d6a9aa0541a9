// The log of a recording GPU.
#include "record.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <stdexcept>
#include <unordered_map>

// These objects are never destroyed: MXNet makes calls while the process ends.
std::mutex& g_mutex = *new std::mutex();
static FILE* g_log;
static int g_on = -1;
static ll g_count, g_violations;

int number(const char* name, int otherwise) {
  const char* s = getenv(name);
  return s && *s ? atoi(s) : otherwise;
}

static bool recording() {
  if (g_on < 0) {
    const char* path = getenv("RECORDING_GPU_LOG");
    g_log = path && *path ? fopen(path, "w") : nullptr;
    g_on = g_log != nullptr;
  }
  return g_on;
}

std::string demangled(const char* name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string out = text ? text : name;
  free(text);
  return out;
}

std::string quoted(const std::string& s) {
  std::string out = "\"";
  for (char c : s)
    if (c == '"' || c == '\\') (out += '\\') += c;
    else if (c == '\n') out += "\\n";
    else if ((unsigned char)c >= 32) out += c;
  return out + '"';
}

// The name of the function around an address, without its arguments.
static const std::string& frame_name(void* address) {
  static auto& names = *new std::unordered_map<void*, std::string>();
  static std::mutex& mutex = *new std::mutex();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = names.find(address);
  if (found != names.end()) return found->second;
  Dl_info info;
  std::string name;
  if (dladdr(address, &info) && info.dli_sname) {
    name = demangled(info.dli_sname);
    size_t cut = name.find('(');
    if (cut != std::string::npos && cut > 0) name.resize(cut);
  }
  return names[address] = name;
}

// The outermost mxnet::op function on the stack; without one, the outermost function of MXNet.
static std::string operator_on_stack() {
  void* frames[64];
  int n = backtrace(frames, 64);
  for (int i = n - 1; i >= 0; i--) {
    const std::string& name = frame_name(frames[i]);
    size_t at = name.find("mxnet::op::");
    if (at != std::string::npos && at < 12) return name;
  }
  for (int i = n - 1; i >= 0; i--) {
    const std::string& name = frame_name(frames[i]);
    for (const char* word : {"mxnet::ndarray::", "mxnet::kvstore", "mxnet::CopyFromTo", "mxnet::resource",
                             "mxnet::storage", "mxnet::FusedOp", "mxnet::imperative", "mxnet::exec", "mxnet::"})
      if (name.find(word) != std::string::npos && name.find("std::") != 0 &&
          name.find("mxnet::engine::") == std::string::npos)
        return name;
  }
  return "";
}

void say(const char* call, const char* format, ...) {
  if (!recording()) return;
  char more[8192];
  va_list list;
  va_start(list, format);
  vsnprintf(more, sizeof more, format, list);
  va_end(list);
  std::string op = quoted(operator_on_stack());
  std::lock_guard<std::mutex> lock(g_mutex);
  fprintf(g_log, "{\"i\":%lld,\"thread\":%d,\"device\":%d,\"call\":\"%s\",\"op\":%s%s%s}\n", g_count++, gettid(),
          t_device, call, op.c_str(), *more ? "," : "", more);
}

int bad(const char* call, const std::string& why, int status) {
  { std::lock_guard<std::mutex> lock(g_mutex); g_violations++; }
  say("VIOLATION", "\"of\":%s,\"why\":%s", quoted(call).substr(0, 2000).c_str(), quoted(why).substr(0, 4000).c_str());
  return status;
}

// ---- failures

static std::string& g_failing = *new std::string();  // what the names of the calls begin with
static ll g_failing_calls, g_fails_at;
static int g_stack;  // a file
static bool g_broken;  // a copy or a kernel has failed: so does all after it, as in CUDA

bool fails(const char* call) {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (g_broken) return true;
  if (g_failing.empty() || strncmp(call, g_failing.c_str(), g_failing.size()) || ++g_failing_calls != g_fails_at)
    return false;
  void* frames[64];
  backtrace_symbols_fd(frames, backtrace(frames, 64), g_stack);
  g_broken = !strncmp(call, "cudaMemcpy", 10) || !strcmp(call, "cudaLaunchKernel");
  return true;
}

// Counts the calls of functions with this beginning from now on, and lets call n fail; 0: none. Returns the number of
// calls that were counted before.
API ll recording_gpu_fail(const char* beginning, ll n, int stack) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const ll calls = g_failing_calls;
  g_failing = beginning, g_fails_at = n, g_stack = stack, g_failing_calls = 0;
  return calls;
}

int then_compute(const char* call, int status, int failed, const std::function<void()>& f) {
  if (!status && fails(call)) return failed;
  if (status || !computes()) return status;
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    fprintf(stderr, "computing GPU: %s in %s\n", e.what(), call);
    return bad(call, e.what(), failed);
  }
}

// Functions without an implementation. A computing GPU refuses those that compute.
API int recording_gpu_default(const char* name) {
  say(name, "\"default\":1");
  const std::string text(name);
  const auto has = [&](const char* word) { return text.find(word) != std::string::npos; };
  const bool sets_up = has("Create") || has("Destroy") || has("Set") || has("Get") || has("Finalize") || has("nvtx");
  return then_compute(name, 0, 1, [&] { if (!sets_up) throw std::runtime_error("unknown: function"); });
}
API void recording_gpu_mark(const char* text) {
  say("MARK", "\"text\":%s", quoted(text).c_str());
  if (g_log) fflush(g_log);
}
API ll recording_gpu_violations() { return g_violations; }
