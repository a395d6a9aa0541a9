// cuRAND, whose numbers are made on the host; NCCL, whose sums are not made.
#include "record.h"

#include <random>

struct Random { std::mt19937 bits{1}; };
API int curandCreateGenerator(Random** g, int) { *g = new Random(); return 0; }
API int curandDestroyGenerator(Random* g) { delete g; return 0; }
API int curandSetStream(Random*, void*) { return 0; }
API int curandSetPseudoRandomGeneratorSeed(Random* g, unsigned long long s) { g->bits.seed(s); return 0; }
API int curandSetGeneratorOffset(Random*, unsigned long long) { return 0; }
template <class T, class D> static int draw(const char* call, Random* g, T* to, size_t n, D distribution) {
  if (!check(call, "target", to, n * sizeof(T), sizeof(T))) return 201;
  T* p = (T*)real(to);
  for (size_t i = 0; i < n; i++) p[i] = distribution(g->bits);
  say(call, "\"n\":%zu", n);
  return 0;
}
API int curandGenerate(Random* g, unsigned* to, size_t n) {
  return draw("curandGenerate", g, to, n, std::uniform_int_distribution<unsigned>());
}
API int curandGenerateUniform(Random* g, float* to, size_t n) {
  return draw("curandGenerateUniform", g, to, n, std::uniform_real_distribution<float>(1e-7f, 1));
}
API int curandGenerateUniformDouble(Random* g, double* to, size_t n) {
  return draw("curandGenerateUniformDouble", g, to, n, std::uniform_real_distribution<double>(1e-9, 1));
}
API int curandGenerateNormal(Random* g, float* to, size_t n, float mean, float deviation) {
  return draw("curandGenerateNormal", g, to, n, std::normal_distribution<float>(mean, deviation));
}
API int curandGenerateNormalDouble(Random* g, double* to, size_t n, double mean, double deviation) {
  return draw("curandGenerateNormalDouble", g, to, n, std::normal_distribution<double>(mean, deviation));
}

// ---- NCCL

static int collective(const char* call, const void* from, const void* to, size_t count, int type, void* stream) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8};  // of ncclDataType_t
  if (type < 0 || type > 8) return bad(call, "type", 4);
  size_t n = count * bytes[type];
  if (!live(call, stream) || (from && !check(call, "source", from, n, bytes[type])) ||
      (to && !check(call, "target", to, n, bytes[type])))
    return 4;
  say(call, "\"bytes\":%zu,\"type\":%d", n, type);
  return 0;
}
API int ncclCommInitAll(void** made, int n, const int*) {
  for (int i = 0; i < n; i++) made[i] = made_handle();
  return 0;
}
API int ncclCommDestroy(void*) { return 0; }
API int ncclGroupStart() { return 0; }
API int ncclGroupEnd() { return 0; }
API int ncclReduce(const void* from, void* to, size_t n, int type, int, int, void*, void* stream) {
  return collective("ncclReduce", from, to, n, type, stream);
}
API int ncclBcast(void* p, size_t n, int type, int, void*, void* stream) {
  return collective("ncclBcast", p, p, n, type, stream);
}
