// Kernels, the GPUs that they support, and their launches.
#include "../compute/nvrtc.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <set>
#include <unordered_map>

namespace {

struct dim3 { unsigned x, y, z; };

// ---- fat binaries: native code for compute capabilities, and PTX

struct Binary {
  const void* wrapper;
  std::set<int> native, ptx;
  std::vector<const char*> kernels;  // the mangled names of those that are registered with it
};
std::vector<Binary*>& binaries() {
  static auto* all = new std::vector<Binary*>();
  return *all;
}

struct Wrapper { int magic, version; const char* data; void* more; };  // the argument of __cudaRegisterFatBinary
struct Header { uint32_t magic; uint16_t version, size; uint64_t bytes; };
struct Entry { uint16_t kind, version; uint32_t size; uint64_t bytes; uint32_t compressed, options; uint16_t minor, major; uint32_t arch; };

Binary* read(const Wrapper* wrapper) {
  auto* found = new Binary{wrapper, {}, {}, {}};
  binaries().push_back(found);
  const char* p = wrapper->data;
  Header header;
  memcpy(&header, p, sizeof header);
  if (wrapper->magic != 0x466243b1 || header.magic != 0xba55ed50) return found;
  const char* end = p + header.size + header.bytes;
  for (p += header.size; p + sizeof(Entry) <= end;) {
    Entry entry;
    memcpy(&entry, p, sizeof entry);
    if (!entry.size) break;
    (entry.kind == 1 ? found->ptx : found->native).insert(entry.arch);
    p += entry.size + entry.bytes;
  }
  return found;
}

// Whether its code runs on the current device: native code on its major version, from its minor version on; PTX on its
// version and later ones.
bool runs(const Binary* binary) {
  int sm = compute_capability();
  for (int arch : binary->native)
    if (arch / 10 == sm / 10 && arch % 10 <= sm % 10) return true;
  return !binary->ptx.empty() && *binary->ptx.begin() <= sm;
}

// ---- kernels

struct Registered { const char* mangled; const Binary* binary; };
std::unordered_map<const void*, Registered>& registered() {
  static auto* all = new std::unordered_map<const void*, Registered>();
  return *all;
}

struct Kernel {
  std::string name;
  std::vector<int> pointers;  // for each argument: 0, or the size of the type that it points to
  const Binary* binary = nullptr;

  bool has_code() const { return binary && runs(binary); }
};
auto& g_kernels = *new std::unordered_map<const void*, Kernel>();  // the launched kernels

int width_behind(const std::string& type) {
  auto has = [&](const char* word) { return type.find(word) != std::string::npos; };
  if (type.empty() || type.back() != '*') return 0;
  if (has("double") || has("long")) return 8;
  if (has("half")) return 2;
  if (has("float") || (has("int") && !has("int8") && !has("uint8"))) return 4;
  return 1;
}

// The arguments of a demangled function: its last parentheses, split at commas.
std::vector<int> pointers(const std::string& name) {
  std::vector<int> out;
  if (name.empty() || name.back() != ')') return out;
  int depth = 0;
  size_t begin = name.size() - 1;
  for (;; begin--) {
    if (name[begin] == ')') depth++;
    if (name[begin] == '(' && --depth == 0) break;
    if (!begin) return out;
  }
  depth = 0;
  size_t last = begin + 1;
  for (size_t i = begin + 1; i < name.size(); i++) {
    char c = name[i];
    if (c == '<' || c == '(' || c == '{') depth++;
    if ((c == '>' || c == ')' || c == '}') && i + 1 < name.size()) depth--;
    if ((c == ',' && !depth) || i + 1 == name.size()) {
      if (i > last) out.push_back(width_behind(name.substr(last, i - last)));
      last = i + 1;
    }
  }
  return out;
}

Kernel* kernel_of(const void* host) {
  std::lock_guard<std::mutex> lock(g_mutex);
  Kernel* k = &g_kernels[host];
  if (k->name.empty()) {
    auto found = registered().find(host);
    k->name = found == registered().end() ? "?" : demangled(found->second.mangled);
    k->pointers = pointers(k->name);
    if (found != registered().end()) k->binary = found->second.binary;
  }
  return k;
}

// ---- values that launches write in place of kernels

struct Poke { std::string name; int argument; float value; int count; };
auto& g_pokes = *new std::vector<Poke>();

void poke(const Kernel& k, void** args, unsigned blocks) {
  std::lock_guard<std::mutex> lock(g_mutex);
  for (auto& p : g_pokes)
    if (p.count && k.name.find(p.name) != std::string::npos) {
      float* to = (float*)real(*(void**)args[p.argument]);
      int n = p.count < 0 ? (int)blocks : p.count;
      for (int i = 0; i < n; i++) to[i] = p.value;
    }
}

struct Configuration { dim3 grid, block; size_t shared; void* stream; };
thread_local std::vector<Configuration>& t_launches = *new std::vector<Configuration>();

}  // namespace

// Makes launches of kernels whose names contain `name` write `count` floats to the array of an argument: as many as
// the grid has blocks along x if count is -1, none if it is 0.
API void recording_gpu_poke(const char* name, int argument, float value, int count) {
  std::lock_guard<std::mutex> lock(g_mutex);
  for (auto& p : g_pokes)
    if (p.name == name && p.argument == argument) { p.value = value; p.count = count; return; }
  g_pokes.push_back({name, argument, value, count});
}
API ll recording_gpu_kernels() { return registered().size(); }
API ll recording_gpu_kernels_with_code() {
  ll count = 0;
  for (auto& one : registered()) count += runs(one.second.binary);
  return count;
}

// Writes the registered kernels: a line with the address of a fat binary's wrapper in its library, and a mangled name.
API int recording_gpu_write_kernels(const char* path) {
  FILE* file = fopen(path, "w");
  if (!file) return 1;
  Dl_info info;
  for (const Binary* binary : binaries())
    if (dladdr(binary->wrapper, &info))
      for (const char* name : binary->kernels)
        fprintf(file, "%zu %s\n", (size_t)((const char*)binary->wrapper - (const char*)info.dli_fbase), name);
  return fclose(file);
}

API void** __cudaRegisterFatBinary(void* wrapper) { return (void**)read((const Wrapper*)wrapper); }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 0; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void** binary, const char* host, char*, const char* name, int, void*, void*, void*,
                                void*, int*) {
  registered()[host] = {name, (const Binary*)binary};
  ((Binary*)binary)->kernels.push_back(name);
}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  t_launches.push_back({grid, block, shared, stream});
  return 0;
}
API int __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void** stream) {
  if (t_launches.empty()) return 1;
  Configuration l = t_launches.back();
  t_launches.pop_back();
  *grid = l.grid; *block = l.block; *shared = l.shared; *stream = l.stream;
  return 0;
}

static int launch(const void* host, dim3 grid, dim3 block, void** args, size_t shared, void* stream) {
  Kernel* k = kernel_of(host);
  const char* name = k->name.c_str();
  if (k->name == "?") return bad("cudaLaunchKernel", "an unregistered kernel", 98);
  if (!k->has_code()) return bad(name, "no code for compute capability " + std::to_string(compute_capability()), 209);
  if (!live(name, stream)) return 400;
  if (!grid.x || !grid.y || !grid.z || !block.x || (ll)block.x * block.y * block.z > 1024 || block.z > 64 ||
      grid.x > 2147483647 || grid.y > 65535 || grid.z > 65535 || shared > 98304)
    return bad(name, "grid, block or shared memory out of range", 9);
  for (size_t i = 0; args && i < k->pointers.size(); i++) {
    void* p = k->pointers[i] ? *(void**)args[i] : nullptr;
    // an array without elements may start at the end of an allocation
    if (p && !check(name, ("argument " + std::to_string(i)).c_str(), p, 0, k->pointers[i])) return 700;
  }
  if (!computes()) poke(*k, args, grid.x);
  say("kernel", "\"name\":%s,\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"shared\":%zu",
      quoted(k->name.substr(0, 4000)).c_str(), grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
  const unsigned blocks[] = {grid.x, grid.y, grid.z}, threads[] = {block.x, block.y, block.z};
  return then_compute(name, 0, 98, [&] { compute(k->name, blocks, threads, args); });
}

API int cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** args, size_t shared, void* stream) {
  int status = fails("cudaLaunchKernel") ? kFailed : launch(host, grid, block, args, shared, stream);
  // a computing GPU resets the error: later launches succeed, unless the kernel has failed
  if (status || (computes() && t_last_error != kFailed)) t_last_error = status;
  return status;
}

struct Attributes { size_t shared, constant, local; int threads, registers, ptx, binary, cache, dynamic, carveout; };
API int cudaFuncGetAttributes(Attributes* a, const void* host) {
  int sm = compute_capability();
  if (!kernel_of(host)->has_code()) return 209;
  *a = Attributes{0, 0, 0, 1024, 32, sm, sm, 0, 49152, -1};
  return 0;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int threads, size_t, unsigned) {
  *n = 2048 / (threads > 0 ? threads : 1);
  return 0;
}

// ---- kernels that MXNet generates at run time: NVRTC and the driver

struct Program {
  std::string source, name;
  std::vector<std::string> expressions;
  std::string code = "//none";  // in place of PTX: a comment, or the path of a library
};
API int nvrtcCreateProgram(void** p, const char* source, const char* name, int, const char* const*,
                           const char* const*) {
  *p = new Program{source ? source : "", name ? name : "", {}};
  return 0;
}
API int nvrtcAddNameExpression(Program* p, const char* e) { p->expressions.push_back(e); return 0; }
API int nvrtcCompileProgram(Program* p, int n, const char* const* options) {
  std::string all;
  for (int i = 0; i < n; i++) (all += options[i]) += ' ';
  size_t body = p->source.rfind("__global__");  // after MXNet's long preamble
  std::string kernel = body == std::string::npos ? p->source : p->source.substr(body);
  say("nvrtcCompileProgram", "\"name\":%s,\"options\":%s,\"length\":%zu,\"kernel\":%s", quoted(p->name).c_str(),
      quoted(all).c_str(), p->source.size(), quoted(kernel.substr(0, 3000)).c_str());
  return then_compute("nvrtcCompileProgram", 0, 6, [&] { p->code = compile(p->source, p->expressions.at(0)); });
}
API int nvrtcDestroyProgram(Program** p) { delete *p; *p = nullptr; return 0; }
API const char* nvrtcGetErrorString(int) { return "an error"; }
API int nvrtcGetLoweredName(Program* p, const char* e, const char** name) {
  for (auto& known : p->expressions)
    if (known == e) { *name = known.c_str(); return 0; }
  return bad("nvrtcGetLoweredName", "an expression that was not added", 9);
}
API int nvrtcGetPTXSize(Program* p, size_t* n) { *n = p->code.size() + 1; return 0; }
API int nvrtcGetPTX(Program* p, char* to) {
  memcpy(to, p->code.c_str(), p->code.size() + 1);
  return 0;
}
API int nvrtcGetProgramLogSize(Program*, size_t* n) { *n = 1; return 0; }
API int nvrtcGetProgramLog(Program*, char* to) { *to = 0; return 0; }

struct Function { std::string name; void* code; };
static int load(void** m, const void* ptx) {
  *m = nullptr;
  return then_compute("cuModuleLoadData", 0, 200, [&] { *m = loaded((const char*)ptx); });
}
API int cuModuleLoadData(void** m, const void* ptx) { return load(m, ptx); }
API int cuModuleLoadDataEx(void** m, const void* ptx, unsigned, void*, void*) { return load(m, ptx); }
API int cuModuleUnload(void*) { return 0; }
API int cuModuleGetFunction(Function** f, void* module, const char* name) { *f = new Function{name, module}; return 0; }
API int cuLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, void* stream, void** args, void**) {
  if (!live("cuLaunchKernel", stream)) return 400;
  if (!gx || !gy || !gz || !bx || (ll)bx * by * bz > 1024) return bad("cuLaunchKernel", "grid or block out of range", 1);
  say("kernel", "\"name\":%s,\"nvrtc\":1,\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"shared\":%u",
      quoted(f->name).c_str(), gx, gy, gz, bx, by, bz, shared);
  const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
  return then_compute("cuLaunchKernel", 0, 98, [&] { run(f->code, args, grid, block); });
}
