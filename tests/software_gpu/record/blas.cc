// cuBLAS: products of matrices; sizes of cuSOLVER's workspaces.
#include "../compute/libraries.h"

const char* type_name(int t) {
  static const char* names[] = {"float", "double", "half", "int8"};
  return t >= 0 && t < 4 ? names[t] : "other";
}
size_t width(int t) { return t == 0 ? 4 : t == 1 ? 8 : t == 2 ? 2 : t == 3 ? 1 : 4; }

namespace {

enum { FLOAT = 0, DOUBLE = 1, HALF = 2 };
enum { NOT_INITIALIZED = 1, INVALID = 7, NOT_SUPPORTED = 15, FAILED = 13 };

struct Blas { int math = 0, pointers = 0; void* stream = nullptr; };

const char* math_name(int m) {
  static const char* names[] = {"DEFAULT", "TENSOR_OP", "PEDANTIC", "TF32_TENSOR_OP"};
  return m >= 0 && m < 4 ? names[m] : "other";
}

struct Matrix { const void* data; int type, ld; ll stride = 0; };
struct Scalars { const void *alpha, *beta; };

// The type in which sums accumulate, by cudaDataType or cublasComputeType_t.
int sum_type(int compute) {
  return compute == 0 || compute == 68 ? FLOAT : compute == 2 || compute == 64 ? HALF
      : compute == 1 || compute == 70 ? DOUBLE : -1;
}

// The types that cuBLAS supports: one type, or halves with float sums.
bool supported(const Matrix& a, const Matrix& b, const Matrix& c, int sum) {
  if (a.type != b.type) return false;
  if (a.type == HALF && sum == FLOAT) return c.type == HALF || c.type == FLOAT;
  return a.type == c.type && a.type == sum;
}

int gemm(const char* call, Blas* h, int ta, int tb, int m, int n, int k, Scalars by, Matrix a, Matrix b, Matrix c,
         int compute, int algorithm, int batch = 1) {
  if (!h) return bad(call, "no handle", NOT_INITIALIZED);
  if (!live(call, h->stream)) return FAILED;
  int sum = sum_type(compute);
  if (!supported(a, b, c, sum))
    return bad(call, std::string("types: ") + type_name(a.type) + " * " + type_name(b.type) + " -> " + type_name(c.type) +
               ", summed as " + type_name(sum), NOT_SUPPORTED);
  if (m < 0 || n < 0 || k < 0 || batch < 0 || a.ld < (ta ? k : m) || b.ld < (tb ? n : k) || c.ld < m)
    return bad(call, "sizes or leading dimensions", INVALID);
  // column-major: the last column ends after its used rows
  auto fits = [&](const char* what, const Matrix& x, int rows, int columns) {
    size_t bytes = width(x.type) * ((size_t)x.stride * (batch - 1) + (size_t)x.ld * (columns - 1) + rows);
    return check(call, what, x.data, bytes, width(x.type));
  };
  if (m && n && k && batch && !(fits("A", a, ta ? k : m, ta ? m : k) & fits("B", b, tb ? n : k, tb ? k : n) & fits("C", c, m, n)))
    return FAILED;
  bool multiple = !(m % 8 || n % 8 || k % 8 || a.ld % 8 || b.ld % 8 || c.ld % 8);
  say(call, "\"trans\":\"%c%c\",\"mnk\":[%d,%d,%d],\"batch\":%d,\"A\":\"%s\",\"B\":\"%s\",\"C\":\"%s\","
      "\"compute\":\"%s\",\"algorithm\":%d,\"math\":\"%s\",\"multiplesOf8\":%d",
      ta ? 'T' : 'N', tb ? 'T' : 'N', m, n, k, batch, type_name(a.type), type_name(b.type), type_name(c.type),
      type_name(sum), algorithm, math_name(h->math), multiple);
  return then_compute(call, 0, FAILED, [&] {
    const auto factor = [](const Matrix& x, int t) { return Factor{x.data, of_cuda(x.type), t != 0, x.ld, x.stride}; };
    const auto number = [&](const void* p) { return Array{of_cuda(sum), (void*)p}[0]; };
    multiply(m, n, k, factor(a, ta), factor(b, tb), factor(c, 0), number(by.alpha), number(by.beta),
             sum == HALF ? Sums::kHalf : Sums::kFloat, batch);
  });
}

}  // namespace

API int cublasCreate_v2(Blas** h) { *h = new Blas(); return 0; }
API int cublasDestroy_v2(Blas*) { return 0; }
API int cublasSetMathMode(Blas* h, int m) { h->math = m; return 0; }
API int cublasGetMathMode(Blas* h, int* m) { *m = h->math; return 0; }
API int cublasSetPointerMode_v2(Blas* h, int m) { h->pointers = m; return 0; }
API int cublasGetStream_v2(Blas* h, void** s) { *s = h->stream; return 0; }
API int cublasSetStream_v2(Blas* h, void* s) { h->stream = s; return live("cublasSetStream", s) ? 0 : INVALID; }

API int cublasGemmEx(Blas* h, int ta, int tb, int m, int n, int k, const void* al, const void* a, int at,
                     int lda, const void* b, int bt, int ldb, const void* be, void* c, int ct, int ldc, int compute, int how) {
  return gemm("cublasGemmEx", h, ta, tb, m, n, k, {al, be}, {a, at, lda}, {b, bt, ldb}, {c, ct, ldc}, compute, how);
}
API int cublasSgemmEx(Blas* h, int ta, int tb, int m, int n, int k, const void* al, const void* a, int at,
                      int lda, const void* b, int bt, int ldb, const void* be, void* c, int ct, int ldc) {
  return gemm("cublasSgemmEx", h, ta, tb, m, n, k, {al, be}, {a, at, lda}, {b, bt, ldb}, {c, ct, ldc}, FLOAT, -1);
}
API int cublasGemmStridedBatchedEx(Blas* h, int ta, int tb, int m, int n, int k, const void* al, const void* a,
                                   int at, int lda, ll sa, const void* b, int bt, int ldb, ll sb, const void* be,
                                   void* c, int ct, int ldc, ll sc, int batch, int compute, int how) {
  return gemm("cublasGemmStridedBatchedEx", h, ta, tb, m, n, k, {al, be}, {a, at, lda, sa}, {b, bt, ldb, sb},
              {c, ct, ldc, sc}, compute, how, batch);
}
#define GEMM_BATCHED(letter, t)                                                                                    \
  API int cublas##letter##gemmStridedBatched(Blas* h, int ta, int tb, int m, int n, int k, const void* al,         \
                                             const void* a, int lda, ll sa, const void* b, int ldb, ll sb,         \
                                             const void* be, void* c, int ldc, ll sc, int batch) {                 \
    return gemm("cublas" #letter "gemmStridedBatched", h, ta, tb, m, n, k, {al, be}, {a, t, lda, sa},              \
                {b, t, ldb, sb}, {c, t, ldc, sc}, t, -1, batch);                                                   \
  }
#define GEMM(letter, t)                                                                                            \
  API int cublas##letter##gemm_v2(Blas* h, int ta, int tb, int m, int n, int k, const void* al, const void* a,     \
                                  int lda, const void* b, int ldb, const void* be, void* c, int ldc) {             \
    return gemm("cublas" #letter "gemm", h, ta, tb, m, n, k, {al, be}, {a, t, lda}, {b, t, ldb}, {c, t, ldc}, t, -1); \
  }
GEMM(S, FLOAT) GEMM(D, DOUBLE)
GEMM_BATCHED(S, FLOAT) GEMM_BATCHED(D, DOUBLE) GEMM_BATCHED(H, HALF)

// ---- cuSOLVER

#define SOLVER(letter)                                                                                            \
  API int cusolverDn##letter##gesvd_bufferSize(void*, int, int, int* n) { *n = 1024; return 0; }                  \
  API int cusolverDn##letter##geqrf_bufferSize(void*, int, int, void*, int, int* n) { *n = 1024; return 0; }      \
  API int cusolverDn##letter##getrf_bufferSize(void*, int, int, void*, int, int* n) { *n = 1024; return 0; }      \
  API int cusolverDn##letter##orgqr_bufferSize(void*, int, int, int, void*, int, void*, int* n) { *n = 1024; return 0; } \
  API int cusolverDn##letter##potrf_bufferSize(void*, int, int, void*, int, int* n) { *n = 1024; return 0; }      \
  API int cusolverDn##letter##syevd_bufferSize(void*, int, int, int, void*, int, void*, int* n) { *n = 1024; return 0; }
SOLVER(S) SOLVER(D)
API int cusolverDnCreate(void** h) { *h = made_handle(); return 0; }
