// cuRAND, with numbers from the host; NCCL.
#include "../compute/libraries.h"

#include <string.h>

#include <algorithm>
#include <random>

struct Random { std::mt19937 bits{1}; };
API int curandCreateGenerator(Random** g, int) { *g = new Random(); return 0; }
API int curandDestroyGenerator(Random* g) { delete g; return 0; }
API int curandSetStream(Random*, void*) { return 0; }
API int curandSetPseudoRandomGeneratorSeed(Random* g, unsigned long long s) { g->bits.seed(s); return 0; }
API int curandSetGeneratorOffset(Random*, unsigned long long) { return 0; }
API int curandGenerate(Random* g, unsigned* to, size_t n) {
  if (!check("curandGenerate", "target", to, n * sizeof *to, sizeof *to)) return 201;
  std::generate_n((unsigned*)real(to), n, std::ref(g->bits));
  say("curandGenerate", "\"n\":%zu", n);
  return 0;
}

// ---- NCCL

static int collective(const char* call, const void* from, const void* to, size_t count, int type, void* stream) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8};  // sizes of ncclDataType_t
  if (type < 0 || type > 8) return bad(call, "type", 4);
  size_t n = count * bytes[type];
  if (!live(call, stream) || (from && !check(call, "source", from, n, bytes[type])) ||
      (to && !check(call, "target", to, n, bytes[type])))
    return 4;
  say(call, "\"bytes\":%zu,\"type\":%d", n, type);
  return 0;
}
struct Communicator { int rank; };
struct Collective { bool reduces; const void* from; void* to; size_t n; int type, root, rank; };
static thread_local std::vector<Collective>& t_group = *new std::vector<Collective>();

API int ncclCommInitAll(void** made, int n, const int*) {
  for (int i = 0; i < n; i++) made[i] = new Communicator{i};
  return 0;
}
API int ncclCommDestroy(void*) { return 0; }
API int ncclGroupStart() { t_group.clear(); return 0; }
// One call of each rank, with the same root and kind, forms a collective.
API int ncclGroupEnd() {
  return then_compute("ncclGroupEnd", 0, 4, [] {
    static const Type types[] = {Type::kInt8, Type::kUint8, Type::kInt32, Type::kInt32, Type::kInt64, Type::kInt64,
                                 Type::kHalf, Type::kFloat, Type::kDouble};
    for (const Collective& root : t_group) {
      if (root.rank != root.root) continue;
      std::vector<const void*> sources;
      for (const Collective& one : t_group) {
        if (one.root != root.root || one.reduces != root.reduces || one.n != root.n) continue;
        sources.push_back(one.from);
        if (!root.reduces && one.to != root.from) memcpy(one.to, root.from, root.n * width(types[root.type]));
      }
      if (root.reduces) add_up(sources, root.to, root.n, types[root.type]);
    }
    t_group.clear();
  });
}
API int ncclReduce(const void* from, void* to, size_t n, int type, int, int root, Communicator* c, void* stream) {
  t_group.push_back({true, from, to, n, type, root, c->rank});
  return collective("ncclReduce", from, to, n, type, stream);
}
API int ncclBcast(void* p, size_t n, int type, int root, Communicator* c, void* stream) {
  t_group.push_back({false, p, p, n, type, root, c->rank});
  return collective("ncclBcast", p, p, n, type, stream);
}
