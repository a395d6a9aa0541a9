// cuDNN: convolutions.
#include "../compute/libraries.h"

API int cudnnSetConvolution2dDescriptor(D d, int ph, int pw, int u, int v, int dh, int dw, int mode, int compute) {
  d->pad = {ph, pw}; d->stride = {u, v}; d->dilate = {dh, dw}; d->mode = mode; d->compute = compute;
  return 0;
}
API int cudnnSetConvolutionNdDescriptor(D d, int n, const int* p, const int* s, const int* di, int mode, int compute) {
  d->pad.assign(p, p + n); d->stride.assign(s, s + n); d->dilate.assign(di, di + n); d->mode = mode;
  d->compute = compute;
  return 0;
}
API int cudnnSetConvolutionMathType(D d, int m) { d->math = m; return 0; }
API int cudnnSetConvolutionGroupCount(D d, int n) { d->groups = n; return 0; }

struct Found { int algorithm, status; float time; size_t memory; int determinism, math, reserved[3]; };

static std::string conv_text(D x, D w, D c, D y) {
  return tensor("x", x) + "," + tensor("w", w) + "," + tensor("y", y) + ",\"compute\":\"" + type_name(c->compute) +
      "\",\"math\":\"" + math_name(c->math) + "\",\"groups\":" + std::to_string(c->groups) + ",\"pad\":" +
      list(c->pad) + ",\"stride\":" + list(c->stride) + ",\"layout\":\"" + (w->format ? "NHWC" : "NCHW") + "\"";
}

// The checks of cuDNN: types, the type of sums, dimensions.
static int conv_check(const char* call, D x, D w, D c, D y) {
  auto refuse = [&](const char* why, int status) { return bad(call, std::string(why) + ": " + conv_text(x, w, c, y), status); };
  if (x->type != w->type || x->type != y->type) return refuse("types differ", BAD_PARAM);
  if (c->compute != x->type && !(x->type == 2 && c->compute == 0)) return refuse("type of the sums", NOT_SUPPORTED);
  bool last = w->format == 1;
  if (x->dims.size() != w->dims.size() || c->pad.size() + 2 != x->dims.size()) return refuse("dimensions", BAD_PARAM);
  if (last) return 0;
  for (size_t i = 0; i < c->pad.size(); i++) {
    int window = (w->dims[i + 2] - 1) * c->dilate[i] + 1;
    int out = (x->dims[i + 2] + 2 * c->pad[i] - window) / c->stride[i] + 1;
    if (out != y->dims[i + 2]) return refuse("size of the output", BAD_PARAM);
  }
  if (x->dims[1] != w->dims[1] * c->groups || w->dims[0] != y->dims[1] || x->dims[0] != y->dims[0])
    return refuse("channels", BAD_PARAM);
  return 0;
}

// Algorithm 1 needs a workspace, 0 needs none.
static const size_t kWorkspace = 1 << 16;
static size_t need(int algorithm) { return algorithm == 0 ? 0 : kWorkspace; }

// The results of cuDNN: algorithms on Tensor Cores first, if allowed, then those without.
static int find(const char* call, D x, D w, D c, D y, int asked, int* count, Found* out) {
  if (int e = conv_check(call, x, w, c, y)) return e;
  int n = 0;
  bool tensor_cores = compute_capability() >= 70 && (c->math == 1 || c->math == 2) && (x->type == 2 || c->math == 2);
  if (tensor_cores && n < asked) out[n++] = Found{1, 0, 0.1f, need(1), 1, c->math, {}};
  if (n < asked) out[n++] = Found{1, 0, 0.2f, need(1), 1, 0, {}};
  if (n < asked) out[n++] = Found{0, 0, 0.3f, need(0), 0, 0, {}};
  *count = n;
  return 0;
}
#define FIND(name, ...)                                                                                            \
  API int name(void*, D a, D b, D c, D d, int asked, int* count, Found* out) { return find(#name, __VA_ARGS__, asked, count, out); }
FIND(cudnnFindConvolutionForwardAlgorithm, a, b, c, d)
FIND(cudnnFindConvolutionBackwardDataAlgorithm, d, a, c, b)
FIND(cudnnFindConvolutionBackwardFilterAlgorithm, a, d, c, b)
FIND(cudnnGetConvolutionForwardAlgorithm_v7, a, b, c, d)
FIND(cudnnGetConvolutionBackwardDataAlgorithm_v7, d, a, c, b)
FIND(cudnnGetConvolutionBackwardFilterAlgorithm_v7, a, d, c, b)
#define COUNT(name) API int name(void*, int* n) { *n = 8; return 0; }
COUNT(cudnnGetConvolutionForwardAlgorithmMaxCount)
COUNT(cudnnGetConvolutionBackwardDataAlgorithmMaxCount)
COUNT(cudnnGetConvolutionBackwardFilterAlgorithmMaxCount)
#define SIZE(name) API int name(void*, D, D, D, D, int algorithm, size_t* n) { *n = need(algorithm); return 0; }
SIZE(cudnnGetConvolutionForwardWorkspaceSize)
SIZE(cudnnGetConvolutionBackwardDataWorkspaceSize)
SIZE(cudnnGetConvolutionBackwardFilterWorkspaceSize)

template <class F> static int convolve(const char* call, D xd, V x, D wd, V w, D c, D yd, V y, int algorithm, V space,
                                       size_t size, V beta, F f) {
  if (int e = conv_check(call, xd, wd, c, yd)) return e;
  bool all = fits(call, {"x", xd, x}) & fits(call, {"w", wd, w}) & fits(call, {"y", yd, y});
  if (size < need(algorithm))
    return bad(call, "workspace: " + std::to_string(need(algorithm)) + " bytes needed, " + std::to_string(size) +
               " given", BAD_PARAM);
  if (!all || !check(call, "workspace", space, size)) return EXECUTION_FAILED;
  say(call, "%s,\"algorithm\":%d,\"beta\":%g", conv_text(xd, wd, c, yd).c_str(), algorithm, *(float*)beta);
  return then_compute(call, 0, EXECUTION_FAILED, f);
}
API int cudnnConvolutionForward(void*, V alpha, D xd, V x, D wd, V w, D c, int al, V s, size_t n, V beta, D yd, V y) {
  return convolve(__func__, xd, x, wd, w, c, yd, y, al, s, n, beta,
                  [&] { convolution_forward(alpha, xd, x, wd, w, c, beta, yd, y); });
}
API int cudnnConvolutionBackwardData(void*, V alpha, D wd, V w, D yd, V y, D c, int al, V s, size_t n, V beta, D xd,
                                     V x) {
  return convolve(__func__, xd, x, wd, w, c, yd, y, al, s, n, beta,
                  [&] { convolution_data(alpha, wd, w, yd, y, c, beta, xd, x); });
}
API int cudnnConvolutionBackwardFilter(void*, V alpha, D xd, V x, D yd, V y, D c, int al, V s, size_t n, V beta, D wd,
                                       V w) {
  return convolve(__func__, xd, x, wd, w, c, yd, y, al, s, n, beta,
                  [&] { convolution_weight(alpha, xd, x, yd, y, c, beta, wd, w); });
}

API int cudnnConvolutionBackwardBias(void*, V alpha, D yd, V y, V beta, D bd, V b) {
  return computed(__func__, {{"dy", yd, y}, {"db", bd, b}}, [&] { bias_gradient(alpha, yd, y, beta, bd, b); });
}
API int cudnnAddTensor(void*, V alpha, D ad, V a, V beta, D cd, V c) {
  return computed(__func__, {{"A", ad, a}, {"C", cd, c}}, [&] { add_tensor(alpha, ad, a, beta, cd, c); });
}
